"""Fingerprints of base model weights, independent of LoRA and of the linearization."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from lit_modules.networks.linearized.models import LinearizedForCausalLM
from lit_modules.networks.weight_sample import rounded, sampled_fingerprint

WHOLE = "whole:"
"""Prefix of fingerprints of all numbers; earlier versions hashed some rows of each weight."""

NUMBERS_AT_ONCE = 2**24


def fingerprint(model: LinearizedForCausalLM) -> str:
    """Return a hash of every weight of the base model, rounded to bfloat16.

    It is the same in float32 and bfloat16, and in float16 if the weights are stored in 16 bits.
    """
    weights = _weights(model)
    with ThreadPoolExecutor() as pool:  # numpy and hashlib release the GIL
        digests = pool.map(_digest, weights.values())
        lines = [f"{name} {digest}\n" for name, digest in zip(weights, digests, strict=True)]
    return WHOLE + hashlib.sha256("".join(lines).encode()).hexdigest()


def has_fingerprint(model: LinearizedForCausalLM, recorded: str) -> bool:
    """Return whether a model's base weights match a recorded fingerprint, of this version or an earlier one."""
    return recorded == (fingerprint(model) if recorded.startswith(WHOLE) else _sampled(model))


def _weights(model: LinearizedForCausalLM) -> dict[str, Tensor]:
    """Return the base model's weights, sorted by their names without LoRA."""
    new = model.new_parameters()
    found = {
        name.replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name and name not in new
    }
    return dict(sorted(found.items()))


def _digest(weight: Tensor) -> str:
    found = hashlib.sha256()
    rows = max(1, NUMBERS_AT_ONCE // max(1, weight[0].numel()))
    for part in weight.split(rows):
        found.update(rounded(part).data)
    return found.hexdigest()


def _sampled(model: LinearizedForCausalLM) -> str:
    """Return the fingerprint of earlier versions."""
    return sampled_fingerprint(_weights(model).values())
