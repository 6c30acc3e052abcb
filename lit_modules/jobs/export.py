"""`job=export`: write a model of job=pretrain as a Hugging Face folder, in a chosen form."""

from pathlib import Path

from omegaconf import DictConfig
from transformers import logging as transformers_logging
from transformers.models.llama import LlamaForCausalLM

from common.setting_types import check_type
from common.settings import SettingError, check_choice
from data_pipeline.tokens.tokenizer import set_special_tokens
from lit_modules.generation import job
from lit_modules.networks import PalimpsestForCausalLM, export_pretrained
from lit_modules.networks.export import FORMS


def run(cfg: DictConfig) -> None:
    """Write the export and say how it is loaded.

    Raises:
        ValueError: there is no such model, it cannot have the form, or the output cannot be written.
    """
    for key in ("checkpoint", "output"):
        check_type(key, cfg[key], str)
    check_choice("form", cfg.form, FORMS)
    output = Path(cfg.output)
    check_is_new(output)
    transformers_logging.disable_progress_bar()
    model, tokenizer = job.load(cfg.checkpoint)
    check_class(cfg.checkpoint, model)
    set_special_tokens(model, tokenizer)  # a checkpoint has no generation settings
    try:
        export_pretrained(model, output, tokenizer, cfg.form)
    except OSError as error:
        raise cannot_be_written(output, error) from error
    print(summary(output), flush=True)


def check_is_new(output: Path) -> None:
    """Raise a SettingError if the output would replace something."""
    try:
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    except OSError as error:
        raise cannot_be_written(output, error) from error
    if taken:
        raise SettingError("output", output, "give a new folder", "exists")


def check_class(checkpoint: str, model: object) -> None:
    """Raise a SettingError if the model is not of job=pretrain, or has no other form."""
    if type(model) is LlamaForCausalLM:
        fix = "its folder with config.json is what to serve, as it is"
        raise SettingError("checkpoint", checkpoint, fix, "is a stock Llama, which has no other form")
    if not isinstance(model, PalimpsestForCausalLM):
        raise SettingError("checkpoint", checkpoint, "give a model of job=pretrain", f"is a {type(model).__name__}")


def cannot_be_written(output: Path, error: OSError) -> SettingError:
    return SettingError("output", output, "give another folder", f"cannot be written ({error.strerror or error})")


def summary(output: Path) -> str:
    """Return lines on what was written and how to serve it."""
    stock = not any(output.glob("*.py"))
    lines = [
        f"model:  {output}/ ({'a stock Llama' if stock else 'an architecture of this project'}, Hugging Face format)",
        f"serve:  transformers serve {output}{'' if stock else ' --trust-remote-code'}",
    ]
    if (output / "README.md").is_file():
        lines.append(f"README: {output}/README.md says what equal heads cost")
    return "\n".join(lines)
