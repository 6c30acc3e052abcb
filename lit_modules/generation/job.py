"""`job=generate`: continue a prompt, or each line of a file, with a trained model."""

import contextlib
import difflib
import json
import logging
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from transformers import TextStreamer
from transformers.models.auto import AutoModelForCausalLM, AutoTokenizer

from common.atomic_files import write_atomic
from common.hub import is_path, use_cache_where_unreachable
from common.setting_nodes import plain_dict
from common.setting_types import check_type
from common.settings import SettingError, check_number, check_whole
from data_pipeline.tokens.tokenizer import add_document_start, document_start, end_tokens
from lit_modules import checkpoints
from lit_modules.generation import cuda_graphs
from lit_modules.launching import run_folder
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, load_adapted
from lit_modules.networks.caches import CacheSettings, CompressedCache
from lit_modules.networks.loading import load_whole
from lit_modules.planning import out_of_memory

log = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt", "prompt_file", "prompts_file")
FILE_KEYS = ("output", "batch_size")  # settings for prompts_file only
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
SETTINGS = ("checkpoint", *PROMPT_KEYS, *FILE_KEYS, *SAMPLING, "device", "cache")
SHARED_KEYS = ("job", "debug", "local", "hydra")


def run(cfg: DictConfig) -> None:
    """Print the continuation of a prompt as it is generated, or the continuations of a file of prompts.

    Raises:
        ValueError: no prompt or several kinds of prompt, an unknown checkpoint, or a setting out of range or without
            effect.
    """
    refuse_other_settings(cfg)
    transformers.logging.disable_progress_bar()
    prompts = read_prompts(cfg)
    settings = sampling_arguments(cfg.temperature, cfg.top_k, cfg.top_p)
    cache = CacheSettings.of(plain_dict(cfg.cache))
    for key in ("max_new_tokens", "batch_size"):
        check_whole(key, cfg[key], 1)
    check_whole("seed", cfg.seed, 0, 2**32 - 1)
    check_type("device", cfg.device, str)
    check_type("output", cfg.output, str | None)
    if cfg.output is not None:
        check_output(Path(str(cfg.output)))
    smaller = "max_new_tokens" if cfg.prompts_file is None else "batch_size or max_new_tokens"
    with out_of_memory.explain_out_of_memory(cfg, f"give a smaller {smaller}, or device=cpu"):
        generate(cfg, prompts, settings, None if cache.is_full else cache)


def generate(cfg: DictConfig, prompts: list[str], settings: dict[str, Any], cache: CacheSettings | None) -> None:
    """Load the model, and print or write the continuations of the prompts; `cache` None is the model's own."""
    model, tokenizer = load(str(cfg.checkpoint))
    model.to(choose_device(cfg.device)).eval()
    if cache is not None:
        CompressedCache(model.config, cache)  # what does not fit is said before a prompt is printed
    torch.manual_seed(cfg.seed)
    if cfg.prompts_file is None:
        print(prompts[0], end="", flush=True)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        continue_prompts(model, tokenizer, prompts, cfg.max_new_tokens, settings, streamer=streamer, cache=cache)
        return
    records = []
    for start in range(0, len(prompts), cfg.batch_size):
        batch = prompts[start : start + cfg.batch_size]
        texts = continue_prompts(model, tokenizer, batch, cfg.max_new_tokens, settings, cache=cache)
        records += [{"prompt": prompt, "text": text} for prompt, text in zip(batch, texts, strict=True)]
        log.info("%s of %s prompts", len(records), len(prompts))
        if cfg.output is None:
            for record in records[start:]:
                print(json.dumps(record, ensure_ascii=False), flush=True)
    if cfg.output is not None:
        write_atomic(Path(str(cfg.output)), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def read_prompts(cfg: DictConfig) -> list[str]:
    """Return the prompt, or the lines of the prompts' file.

    Raises:
        ValueError: there is none or more than one kind, or the file cannot be read.
    """
    if sum(cfg[key] is not None for key in PROMPT_KEYS) != 1:
        raise ValueError(
            'give one of prompt="...", prompt_file=FILE (the whole file is the prompt) and prompts_file=FILE (a prompt '
            "on each line); FILE may be - for standard input"
        )
    if cfg.prompt is not None:
        return [str(cfg.prompt)]
    if cfg.prompt_file is not None:
        return [read_text("prompt_file", str(cfg.prompt_file)).removesuffix("\n").removesuffix("\r")]
    prompts = [line for line in read_text("prompts_file", str(cfg.prompts_file)).splitlines() if line.strip()]
    if not prompts:
        raise SettingError("prompts_file", cfg.prompts_file, "give one on each line", "has no prompt")
    return prompts


def read_text(key: str, path: str) -> str:
    """Return the text of a file, or of standard input for "-".

    Raises:
        ValueError: it cannot be read; the line names the key.
    """
    try:
        return (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(key, path, str(error), "cannot be read") from error


def refuse_other_settings(cfg: DictConfig) -> None:
    """Raise ValueError for a setting on the command line that has no effect here."""
    if cfg.prompts_file is None and cfg.output is not None:
        problem = "is for prompts_file=FILE"
        raise SettingError("output", cfg.output, "leave it out, or redirect what is printed", problem)
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    for override in given:
        key = override.lstrip("+~").partition("=")[0]
        group = re.split(r"[.@/]", key)[0]
        if cfg.prompts_file is None and key in FILE_KEYS:
            raise ValueError(f"{override} is for prompts_file=FILE: leave it out")
        if group not in SETTINGS + SHARED_KEYS:
            near = difflib.get_close_matches(key, SETTINGS, 1)
            meant = f"did you mean {near[0]}?" if near else f"it reads {', '.join(SETTINGS)}"
            raise ValueError(f"{override} changes nothing with job=generate: leave it out; {meant}")


def check_output(path: Path) -> None:
    """Raise ValueError, before generating, if no file can be written at `path`. An existing file remains."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError("output", path, "give another", f"cannot be written ({error.strerror})") from error
    if path.is_dir():
        raise SettingError("output", path, "give a .jsonl file", "is a folder")


def sampling_arguments(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Return the sampling arguments of `generate`.

    Args:
        temperature: 0 for greedy decoding.
        top_k: sample from the k likeliest tokens.
        top_p: sample from the likeliest tokens of this total probability.

    Raises:
        ValueError: a value is out of range.
    """
    check_number("temperature", temperature, least=0)
    check_whole("top_k", top_k, 1, null=True)
    check_number("top_p", top_p, above=0, most=1, null=True)
    if temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }


def load(checkpoint: str) -> tuple[Any, Any]:
    """Load the model and tokenizer of a checkpoint.

    The tokenizer starts a text as training documents started, also if an earlier version saved it without.

    Args:
        checkpoint: a run's folder (its export, else its newest checkpoint), one of its checkpoints (or
            `checkpoints/best`), an export, the adapter of a linearized model (which is merged), or any Hugging Face
            folder or name.

    Raises:
        ValueError: there is nothing to load, or a file is missing.
    """
    model, tokenizer = load_unchanged(checkpoint)
    if isinstance(model.config, PalimpsestConfig) or is_pretraining_run(Path(checkpoint)):
        add_document_start(tokenizer)
    return model, tokenizer


def is_pretraining_run(folder: Path) -> bool:
    """Return whether the folder is a run of job=pretrain on documents (not on instructions)."""
    config = folder / run_folder.CONFIG
    if not config.is_file():
        return False
    began = OmegaConf.load(config)
    data = OmegaConf.select(began, "data._target_")
    return data is not None and "base" not in began and not data.endswith(".InstructionData")


def load_unchanged(checkpoint: str) -> tuple[Any, Any]:
    """Load as `load` does, but with the tokenizer as it was saved."""
    from lit_modules.networks.linearized import adapters  # peft is slow to import; sampling runs need none

    folder = Path(checkpoint)
    try:
        if checkpoints.is_checkpoint(folder):
            wrong = checkpoints.find_damage(folder)
            if wrong is not None:
                raise SettingError("checkpoint", checkpoint, wrong, "cannot be loaded")
            return load_training_checkpoint(folder), AutoTokenizer.from_pretrained(folder.parent.parent / "tokenizer")
        check_is_folder(checkpoint)
        if not folder.is_dir():
            use_cache_where_unreachable()
        if (folder / adapters.RECORD).is_file():
            beside = folder.resolve().parent / "tokenizer"
            source = beside if beside.is_dir() else adapters.read_record(folder)["base"]
            return load_adapted(folder, merge=True), AutoTokenizer.from_pretrained(source)
        if not (folder / run_folder.CONFIG).is_file():
            return load_whole(AutoModelForCausalLM, checkpoint), AutoTokenizer.from_pretrained(checkpoint)
        tokenizer_folder = folder / "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        if (folder / "export").is_dir():
            return load_whole(AutoModelForCausalLM, str(folder / "export")), tokenizer
        path = checkpoints.newest_intact(folder / "checkpoints")
        if path is None:
            raise SettingError("checkpoint", checkpoint, "wait until its run has one", "has no checkpoint yet")
        return load_training_checkpoint(path), tokenizer
    except (OSError, KeyError, ValueError, SafetensorError, pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, SettingError) and error.key == "checkpoint":
            raise
        reason = str(error).splitlines()[0]
        raise SettingError("checkpoint", checkpoint, reason, "cannot be loaded") from error


@contextlib.contextmanager
def refuse_invalid_probabilities() -> Iterator[None]:
    """Raise ValueError if tokens cannot be sampled because probabilities are not numbers."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):  # torch has no class for it
            raise
        raise ValueError("checkpoint: its probabilities are not numbers, so weights are damaged") from error


def check_is_folder(checkpoint: str) -> None:
    """Raise ValueError for a path that is not a folder."""
    if not Path(checkpoint).is_dir() and is_path(checkpoint):
        fix = "give a run's, an export's, an adapter's, or a name on the Hub"
        raise SettingError("checkpoint", checkpoint, fix, "is not a folder")


def load_training_checkpoint(path: Path) -> Any:
    """Return the network of a training checkpoint, with its weights.

    Raises:
        ValueError: the checkpoint is from job=linearize, which holds the trained weights only.
    """
    state = checkpoints.read_trainer_state(path)
    config = state["palimpsest"]["model_config"]
    if config.get("model_type", PalimpsestConfig.model_type) != PalimpsestConfig.model_type:
        raise ValueError(f"{path} is there to go on linearizing from: its run has a model to load, export/, at its end")
    model = PalimpsestForCausalLM(PalimpsestConfig(**config))
    weights = checkpoints.read_unsharded_weights(path)
    model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")})
    return model


def choose_device(device: str) -> torch.device:
    """Return the named device, or for "auto" a GPU if there is one.

    Raises:
        ValueError: the device is unknown or not available.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise SettingError("device", device, str(error).splitlines()[0], "cannot be used") from error


def fixed_cache(config: Any, settings: CacheSettings, capacity: int) -> CompressedCache | None:
    """Return a compressed cache in storage at fixed addresses, or None where the settings or the model have none."""
    if isinstance(config, PalimpsestConfig):
        return None  # its own layers read compressed caches that grow
    try:
        return CompressedCache(config, settings, capacity=capacity)
    except SettingError as error:
        if error.key != "capacity":
            raise
        return None


def text_ends(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a generated text: the model's and the tokenizer's, and our models' document start."""
    ends = end_tokens(model, tokenizer)
    start = document_start(tokenizer)
    return ends if start is None or not isinstance(model.config, PalimpsestConfig) else ends | {start}


def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    max_new_tokens: int,
    settings: dict[str, Any],
    streamer: TextStreamer | None = None,
    cache: CacheSettings | None = None,
    trains: bool = False,
) -> list[str]:
    """Return the continuations of `prompts`, generated as one left-padded batch.

    Each prompt gets the special tokens that the tokenizer adds or, if it has no tokens at all, the start token. A text
    ends at the tokenizer's eos, at the end tokens of the model's generation settings, and for our own models at the
    start of the next document. Random numbers come from torch's global generator. With `cache`, keys and
    values are compressed; without, the model has its own cache. On a GPU linearized models, with `cache` the stock
    models that could be linearized, and without one our own Transformers decode by CUDA graph replays. The last do not
    while the model `trains`: replays move weights in memory.

    Raises:
        ValueError: a prompt is empty and the tokenizer has no start token.
    """
    rows = [tokenizer(prompt)["input_ids"] or [document_start(tokenizer)] for prompt in prompts]
    if [None] in rows:
        raise ValueError("prompt is empty, and checkpoint's tokenizer has no token that begins a text: give a prompt")
    ends = text_ends(model, tokenizer)
    longest = max(map(len, rows))
    pad = next((t for t in (tokenizer.pad_token_id, *sorted(ends)) if t is not None), 0)
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    own = model if cache is None or model.device.type != "cuda" else cuda_graphs.with_own_attention(model)
    fixed = None if cache is None else fixed_cache(own.config, cache, longest + max_new_tokens)
    stays = trains and isinstance(own, PalimpsestForCausalLM)
    if cuda_graphs.can_be_captured(own) and (cache is None or fixed is not None) and not stays:
        out = cuda_graphs.generate_captured(
            own,
            ids,
            mask,
            max_new_tokens=max_new_tokens,
            temperature=settings.get("temperature", 0.0),
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p"),
            eos_token_ids=sorted(ends),
            pad_token_id=pad,
            streamer=streamer,
            cache=fixed,
        )
    else:
        with torch.no_grad(), refuse_invalid_probabilities():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(ends) or None,
                pad_token_id=pad,
                streamer=streamer,
                past_key_values=None if cache is None else CompressedCache(model.config, cache),
                **settings,
            )
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
