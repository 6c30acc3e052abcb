"""The teacher's likeliest next tokens for every training sequence, computed once and stored on disk."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from data_pipeline.fingerprint import prepared_folder
from data_pipeline.identity import EARLIER, WHOLE, file_identity
from data_pipeline.progress import Stage
from data_pipeline.tokens.token_data import TokenData
from lit_modules.launching.run_folder import RunFailed
from lit_modules.networks.linear_kl_divergence import top_k_log_probabilities
from lit_modules.networks.linearized import LinearizedForCausalLM
from lit_modules.networks.linearized.adapters import base_values
from lit_modules.networks.linearized.fingerprints import fingerprint

FORMAT = 1  # part of every fingerprint; increase it when the code writes different data from the same inputs
INDICES, LOG_PROBABILITIES = "indices.int32", "log_probabilities.float16"


class TeacherStore:
    """The k likeliest next tokens at each position of a run's training sequences, and their log-probabilities.

    Args:
        data: prepared, without a trainer.
        sequences: number that the run reads, including repeats.
        k: tokens per position.
    """

    def __init__(self, data: TokenData, sequences: int, k: int) -> None:
        loader: Any = data.train_dataloader()
        self.loader, self.data, self.k, self.length = loader, data, k, data.sequence_length
        one_pass = itertools.chain.from_iterable(self.loader.batch_sampler)
        total = len(self.loader.dataset)
        first = np.fromiter(itertools.islice(one_pass, sequences), np.int64)
        self.read = np.arange(total) if len(first) < sequences else np.sort(first)  # a pass leaves out its last few
        self._stored: tuple[np.memmap, np.memmap] | None = None

    def prepare(self, model: LinearizedForCausalLM, base: str, precision: str, device: torch.device) -> None:
        """Open the store; if it is missing, run the teacher first and write it under `data_dir`, atomically.

        Args:
            model: provides the teacher.
            base: the folder or name that it was loaded from.
            precision: of the training; "bf16-mixed" also runs the teacher under autocast.
            device: where the teacher runs; the model stays there.

        Raises:
            ValueError: the disk is full.
        """
        made_of = {
            "format": FORMAT,
            "data": self.data.fingerprint,
            "sequences": hashlib.sha256(self.read.tobytes()).hexdigest(),
            "length": self.length,
            "k": self.k,
            "base": teacher_files(base),
            "config": base_values(model.config),
            "teacher": [fingerprint(model), str(model.dtype), precision],
        }

        def build(folder: Path) -> dict[str, Any]:
            model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides that the method is bound
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
                self._write(model, folder)
            return {"sequences": len(self.read), "base": base}

        earlier = {**made_of, "base": teacher_files(base, EARLIER)}
        folder = prepared_folder(self.data.data_dir, "teacher", made_of, build, earlier)
        shape = (len(self.read), self.length, self.k)
        self._stored = (
            np.memmap(folder / LOG_PROBABILITIES, np.float16, mode="r", shape=shape),
            np.memmap(folder / INDICES, np.int32, mode="r", shape=shape),
        )

    @torch.no_grad()
    def _write(self, model: LinearizedForCausalLM, folder: Path) -> None:
        tokens = len(self.read) * self.length
        name = f"the teacher's {self.k} likeliest tokens, {tokens * self.k * 6 / 1e9:.2f} GB"
        with (
            open(folder / LOG_PROBABILITIES, "wb") as probable,
            open(folder / INDICES, "wb") as indices,
            Stage(name, "tokens", tokens) as stage,
        ):
            for start in range(0, len(self.read), self.data.micro_batch_size):
                rows = self.read[start : start + self.data.micro_batch_size].tolist()
                batch = self.loader.collate_fn([self.loader.dataset[row] for row in rows])
                ids, cu_seqlens = (batch[key].to(model.device) for key in ("input_ids", "cu_seqlens"))
                hidden = model.features(ids, cu_seqlens=cu_seqlens, mode="teacher")
                found = top_k_log_probabilities(hidden, model.lm_head.weight, self.k)
                for handle, tensor in zip((probable, indices), found, strict=True):
                    handle.write(tensor.cpu().numpy().tobytes())
                stage.advance(ids.numel())

    def of(self, sequences: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities `[1, N, k]` float16, tokens `[1, N, k]` int32) of a micro-batch's positions.

        Args:
            sequences: their indices in the train split, in the order of the data.

        Raises:
            RunFailed: one of them is not in the store.
        """
        assert self._stored is not None  # prepare has opened it
        rows = np.searchsorted(self.read, sequences).clip(max=len(self.read) - 1)
        missing = np.asarray(sequences)[self.read[rows] != sequences]
        if len(missing):
            raise RunFailed(
                f"the run reads sequence {missing[0]} of the train text, and the teacher's tokens are stored for "
                f"{len(self.read)} others: set teacher_top_k=null"
            )
        log_probabilities, indices = (torch.from_numpy(part[rows]).flatten(0, 1)[None] for part in self._stored)
        return log_probabilities.to(device), indices.to(device)


def teacher_files(base: str, by: str = WHOLE) -> list[str]:
    """Identify the weights of a base model, a folder or a name on the Hub.

    Args:
        by: how files of a folder are identified, see `data_pipeline.identity.file_identity`.
    """
    if Path(base).is_dir():
        files = sorted(path.resolve() for kind in ("*.safetensors", "*.bin") for path in Path(base).glob(kind))
        return [file_identity(files, by)]
    config = try_to_load_from_cache(base, "config.json")  # in a folder named after the commit
    return [base, Path(config).parent.name] if isinstance(config, str) else [base]
