"""The forget gates of a trained model, for the other benchmarks: `python -m benchmarks.attention.trained_gates RUN`.

Reads the longest held-out document of a `job=pretrain` run, and stores its attention layers' gates and logit bounds.
"""

import argparse
import itertools
import sys
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.attention.attention_peers import largest_logits
from data_pipeline.tokens.token_data import TokenData
from lit_modules.callbacks.forget_gates import projections
from lit_modules.generation.job import load


def longest_document(data: TokenData, length: int) -> torch.Tensor:
    """Return up to `length` first tokens of the longest held-out document, [1, T] int64."""
    longest = torch.empty(1, 0, dtype=torch.int64)
    for batch in data.val_dataloader():
        for start, end in itertools.pairwise(batch["cu_seqlens"].tolist()):
            document = batch["input_ids"][:, start:end][:, :length]
            longest = max(longest, document, key=lambda tokens: tokens.shape[1])
        if longest.shape[1] == length:
            break
    return longest


@torch.no_grad()
def gates_and_bounds(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return log_forget [layers, T, heads] float16 and the bounds on the logits [layers, heads] float32."""
    gates, bounds = [], []
    with torch.autocast(tokens.device.type, torch.bfloat16):
        found = projections(model, tokens)
    for number, q, k, _, log_forget in found:
        bound = model.model.layers[number].self_attn._logit_bound()
        gates.append(log_forget[0].half().cpu().numpy())
        bounds.append((largest_logits(q, k) if bound is None else bound).float().cpu().numpy())
    return np.stack(gates), np.stack(bounds)


def main() -> int:
    """Store the gates and print their statistics; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run of job=pretrain whose model has forget gates")
    parser.add_argument("--length", type=int, default=16384, help="tokens, at most")
    parser.add_argument("--output", type=Path, default=Path("trained_gates.npz"))
    arguments = parser.parse_args()
    config = OmegaConf.load(arguments.run / "config.yaml")
    if config.data.validation_length < arguments.length:
        print(
            f"data.validation_length={config.data.validation_length} of the run cuts documents: give --length "
            f"{config.data.validation_length} or less",
            file=sys.stderr,
        )
        return 2
    data = hydra.utils.instantiate(config.data)
    tokens = longest_document(data, arguments.length)
    model, _ = load(str(arguments.run))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gates, bounds = gates_and_bounds(model.to(device).eval(), tokens.to(device))
    np.savez_compressed(arguments.output, log_forget=gates, logit_bound=bounds)
    memory = np.sort(-1 / np.minimum(gates.astype(np.float64).mean(1), -1e-12).ravel())
    print(
        f"{arguments.output}: {gates.shape[0]} layers, {gates.shape[1]} tokens, {gates.shape[2]} heads; logits are "
        f"bounded by {bounds.min():.1f} to {bounds.max():.1f}"
    )
    shares = (0, 10, 25, 50, 75, 90, 100)
    print(
        "memory in tokens, -1 / mean(log f), at "
        + ", ".join(
            f"{share}%: {value:.3g}" for share, value in zip(shares, np.percentile(memory, shares), strict=True)
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
