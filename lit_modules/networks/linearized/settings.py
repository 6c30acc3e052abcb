"""What a linearization changes in a pretrained model: one dataclass, kept in the model's `config.json`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

TEMPERATURES = {
    "gla": 16.0,
    "hgrn2": 1.0,
    "rwkv6": 1.0,
    "slots": 16.0,
    "mamba2": 1.0,
    "mlstm": 1.0,
    "gated_retention": 1.0,
    "fixed": 1.0,
}
"""What the log gates of each form are divided by (arXiv 2503.01496, table 1, and its code)."""

CHOICES = {
    "mixer": ("liger", "lolcats"),
    "gate": tuple(TEMPERATURES),
    "gate_source": ("keys", "random"),
    "feature_map": ("softmax", "learned", "relu", "none"),
    "learned_weights": (None, "layer", "head"),
}


@dataclass(frozen=True)
class Linearization:
    """How attention layers of a pretrained model become recurrences on the same weights.

    The defaults are Liger-GLA (arXiv 2503.01496): `o = state_weight GRM + window_weight SWA` from the layer's own
    projections, gates pooled from its keys, and no new parameter.

    Args:
        mixer: "liger", or "lolcats" (arXiv 2410.10254): softmax in the window and linear attention before it, under one
            normalization, without a gate.
        gate: the form of the gate (table 1). "fixed": a constant for each head, as in RetNet (SUPRA, arXiv 2405.06640).
        gate_source: "keys", pooled from the key projection; "random", a projection of its own that is drawn and trained
            (an ablation).
        temperature: what log gates are divided by; None: the form's own.
        num_slots: of "slots".
        feature_map: of queries and keys in the recurrence: "softmax" over a head's channels; "learned", the softmax of
            a learned map and of its negative; "relu", a learned map and a rectifier; "none". HGRN2 maps queries only,
            slots map nothing.
        state_weight, window_weight: alpha and beta.
        learned_weights: learn alpha and beta, from these values, for each "layer" or each "head"; None: constant.
        learned_gate_shift: learn what is added to the gate's logits, from 0, for each head.
        window: tokens that the sliding window sees, the token itself included; 0: no window.
        sinks: first tokens of a document that the window always sees, too.
        delayed: the state holds only what the window no longer sees.
        rotate_state: rotate queries and keys in the recurrence, too.
        output_norm: normalize each head of the recurrence's output, with learned scales (SUPRA's GroupNorm).
        softmax_layers: indices of the layers that stay as they are.

    Raises:
        ValueError: a value that is not known, or two that contradict each other; the line names the key.
    """

    mixer: str = "liger"
    gate: str = "gla"
    gate_source: str = "keys"
    temperature: float | None = None
    num_slots: int = 128
    feature_map: str = "softmax"
    state_weight: float = 0.5
    window_weight: float = 0.5
    learned_weights: str | None = None
    learned_gate_shift: bool = False
    window: int = 64
    sinks: int = 0
    delayed: bool = False
    rotate_state: bool = False
    output_norm: bool = False
    softmax_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                choices = ", ".join("null" if choice is None else choice for choice in known)
                raise ValueError(f"linearization.{name}={getattr(self, name)} is not known: give one of {choices}")
        for name in ("window", "sinks", "num_slots"):
            value, least = getattr(self, name), int(name == "num_slots")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"linearization.{name}={value} is not a count: give a whole number, {least} or more")
        for name in ("state_weight", "window_weight"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ValueError(f"linearization.{name}={getattr(self, name)} is not a number")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"linearization.temperature={self.temperature}: give a number above 0, or null")
        object.__setattr__(self, "softmax_layers", tuple(sorted(set(self.softmax_layers))))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.sinks and not self.window:
            raise ValueError(f"linearization.sinks={self.sinks} with linearization.window=0: sinks belong to a window")
        if self.delayed and not self.window:
            raise ValueError("linearization.delayed=true with linearization.window=0: there is no window to come after")
        if self.gate == "fixed" and (self.gate_source == "random" or self.learned_gate_shift):
            raise ValueError(
                "linearization.gate=fixed has no logits: leave out linearization.gate_source=random and "
                "linearization.learned_gate_shift=true"
            )
        if self.mixer == "lolcats" and (not self.window or self.sinks):
            raise ValueError("linearization.mixer=lolcats needs linearization.window above 0 and linearization.sinks=0")
        if self.mixer == "lolcats" and self.feature_map == "none":
            raise ValueError("linearization.feature_map=none with linearization.mixer=lolcats: give learned or softmax")

    @property
    def gate_temperature(self) -> float:
        """What log gates are divided by."""
        return TEMPERATURES[self.gate] if self.temperature is None else float(self.temperature)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `config.json` keeps them."""
        return {**dataclasses.asdict(self), "softmax_layers": list(self.softmax_layers)}
