"""`job=generate`: write on from a prompt, or from each line of a file, with a trained model."""

import contextlib
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import DictConfig
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from data_pipeline.files import write_whole
from data_pipeline.hub import is_path, use_cache_where_unreachable
from data_pipeline.tokenizer import document_start
from lit_modules import checkpoints, decoding, runs
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.loading import load_whole

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> None:
    """Print what follows a prompt as it is written, or the continuations of a file of prompts.

    Raises:
        ValueError: no prompt or two kinds of prompt, no such checkpoint, a setting out of range.
    """
    transformers.logging.disable_progress_bar()
    prompts = read_prompts(cfg)
    settings = sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    for key in ("max_new_tokens", "batch_size"):
        check_number(key, cfg[key], whole=True)
        if cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]} is too small: give 1 or more")
    if cfg.output is not None:
        check_output(Path(str(cfg.output)))
    model, tokenizer = load(str(cfg.checkpoint))
    model.to(choose_device(cfg.device)).eval()
    torch.manual_seed(cfg.seed)
    if cfg.prompts_file is None:
        print(prompts[0], end="", flush=True)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        write_on(model, tokenizer, prompts, cfg.max_new_tokens, settings, streamer=streamer)
        return
    records = []
    for start in range(0, len(prompts), cfg.batch_size):
        batch = prompts[start : start + cfg.batch_size]
        texts = write_on(model, tokenizer, batch, cfg.max_new_tokens, settings)
        records += [{"prompt": prompt, "text": text} for prompt, text in zip(batch, texts, strict=True)]
        log.info(f"{len(records)} of {len(prompts)} prompts")
        if cfg.output is None:
            for record in records[start:]:
                print(json.dumps(record, ensure_ascii=False), flush=True)
    if cfg.output is not None:
        write_whole(Path(str(cfg.output)), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def read_prompts(cfg: DictConfig) -> list[str]:
    """The prompt, or the lines of the prompts' file.

    Raises:
        ValueError: there is neither, or both, or the file cannot be read.
    """
    if (cfg.prompt is None) == (cfg.prompts_file is None):
        raise ValueError('give one of prompt="..." and prompts_file=FILE (a prompt on each line)')
    if cfg.prompt is not None:
        return [str(cfg.prompt)]
    try:
        lines = Path(str(cfg.prompts_file)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts_file={cfg.prompts_file} cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"prompts_file={cfg.prompts_file} has no prompt: give one on each line")
    return prompts


def check_output(path: Path) -> None:
    """Raise ValueError, before anything is generated, if no file can be at `path`. One that is there stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output={path} cannot be written: {error.strerror}") from error
    if path.is_dir():
        raise ValueError(f"output={path} is a folder: give a .jsonl file")


def sampling(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Arguments of `generate` for a temperature (0: greedy), the k likeliest tokens, and the nucleus of mass p.

    Raises:
        ValueError: a value out of range.
    """
    check_number("temperature", temperature)
    if top_k is not None:
        check_number("top_k", top_k, whole=True)
    if top_p is not None:
        check_number("top_p", top_p)
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative: give 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no token: give 1 or more, or null")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not a part of the probability: give a number above 0, at most 1, or null")
    if temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }


def check_number(key: str, value: Any, *, whole: bool = False) -> None:
    """Raise ValueError, naming the key, for a value that is no number (no whole one)."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{key}={value} is not a {'whole ' if whole else ''}number")


def load(checkpoint: str) -> tuple[Any, Any]:
    """Model and tokenizer of a run's folder (its export, or its newest checkpoint), of one of its checkpoints (or
    `checkpoints/best`), of an export, of the adapter of a linearized model (folded in), or of any Hugging Face folder
    or name.

    Raises:
        ValueError: there is nothing to load, or a file of it is missing.
    """
    from lit_modules.networks.linearized import adapters  # peft takes its time, and runs that sample need none

    folder = Path(checkpoint)
    try:
        if checkpoints.is_checkpoint(folder):
            wrong = checkpoints.damage(folder)
            if wrong is not None:
                raise ValueError(f"checkpoint={checkpoint} cannot be loaded: {wrong}")
            return from_checkpoint(folder), AutoTokenizer.from_pretrained(folder.parent.parent / "tokenizer")
        check_there(checkpoint)
        if not folder.is_dir():
            use_cache_where_unreachable()
        if (folder / adapters.RECORD).is_file():
            beside = folder.resolve().parent / "tokenizer"
            source = beside if beside.is_dir() else adapters.read_record(folder)["base"]
            return adapters.load_adapted(folder, merge=True), AutoTokenizer.from_pretrained(source)
        if not (folder / runs.CONFIG).is_file():
            return load_whole(AutoModelForCausalLM, checkpoint), AutoTokenizer.from_pretrained(checkpoint)
        tokenizer_folder = folder / "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        if (folder / "export").is_dir():
            return load_whole(AutoModelForCausalLM, str(folder / "export")), tokenizer
        path = checkpoints.newest_whole(folder / "checkpoints")
        if path is None:
            raise ValueError(f"checkpoint={checkpoint} has no checkpoint yet: its run has not come so far")
        return from_checkpoint(path), tokenizer
    except (OSError, KeyError, ValueError, SafetensorError, pickle.UnpicklingError, RuntimeError) as error:
        if str(error).startswith("checkpoint="):
            raise
        raise ValueError(f"checkpoint={checkpoint} cannot be loaded: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def damage_told() -> Iterator[None]:
    """Raise ValueError where tokens cannot be drawn, since probabilities are not numbers."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ValueError("checkpoint: its probabilities are not numbers, so weights are damaged") from error


def check_there(checkpoint: str) -> None:
    """Raise ValueError for what can only be a folder, and is none."""
    if not Path(checkpoint).is_dir() and is_path(checkpoint):
        raise ValueError(
            f"checkpoint={checkpoint} is no folder: give a run's, an export's, an adapter's, or a name on the Hub"
        )


def from_checkpoint(path: Path) -> Any:
    """The network of a training checkpoint, with the weights it had then.

    Raises:
        ValueError: the checkpoint is one of job=linearize, which holds what is trained and not the network.
    """
    state = checkpoints.read_trainer(path)
    config = state["palimpsest"]["model_config"]
    if config.get("model_type", PalimpsestConfig.model_type) != PalimpsestConfig.model_type:
        raise ValueError(f"{path} is there to go on linearizing from: its run has a model to load, export/, at its end")
    model = PalimpsestForCausalLM(PalimpsestConfig(**config))
    weights = checkpoints.consolidated(path)
    model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")})
    return model


def choose_device(device: str) -> torch.device:
    """The device named, or with "auto" the GPU where there is one.

    Raises:
        ValueError: the device is unknown or not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device} cannot be used: {str(error).splitlines()[0]}") from error


def write_on(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    max_new_tokens: int,
    settings: dict[str, Any],
    streamer: TextStreamer | None = None,
) -> list[str]:
    """The texts that follow `prompts`, generated as one left-padded batch.

    A model of ours sees each prompt begin as documents do in training, and stops where the next document would begin.
    Others get the special tokens that their tokenizer adds, or where that is no token at all, the one that begins a
    document. Random numbers come from torch's global generator. A linearized model on a GPU decodes by replays of a
    captured step.
    """
    ends = {tokenizer.eos_token_id}
    if isinstance(model.config, PalimpsestConfig):
        first = document_start(tokenizer)
        ends.add(first)
        rows = [[first, *tokenizer(prompt, add_special_tokens=False)["input_ids"]] for prompt in prompts]
    else:
        rows = [tokenizer(prompt)["input_ids"] or [document_start(tokenizer)] for prompt in prompts]
        if [None] in rows:
            raise ValueError(
                "prompt is empty, and checkpoint's tokenizer has no token that begins a text: give a prompt"
            )
    ends.discard(None)
    longest = max(map(len, rows))
    pad = next((t for t in (tokenizer.pad_token_id, *sorted(ends)) if t is not None), 0)
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    if decoding.can_be_captured(model):
        out = decoding.generate_captured(
            model,
            ids,
            mask,
            max_new_tokens=max_new_tokens,
            temperature=settings.get("temperature", 0.0),
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p"),
            eos_token_ids=sorted(ends),
            pad_token_id=pad,
            streamer=streamer,
        )
    else:
        with torch.no_grad(), damage_told():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(ends) or None,
                pad_token_id=pad,
                streamer=streamer,
                **settings,
            )
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
