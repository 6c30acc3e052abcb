"""The settings of a linearization: one dataclass, stored in the model's `config.json`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from common.settings import SettingError, check_choice, check_number, check_switch, check_whole, is_whole

TEMPERATURES = {
    "gla": 16.0,
    "hgrn2": 1.0,
    "rwkv6": 1.0,
    "slots": 16.0,
    "mamba2": 1.0,
    "mlstm": 1.0,
    "gated_retention": 1.0,
    "fixed": 1.0,
    "none": 1.0,
}
"""Divisor of the log gates of each form (arXiv 2503.01496, table 1, and its code)."""

CHOICES = {
    "mixer": ("liger", "lolcats", "joint"),
    "gate": tuple(TEMPERATURES),
    "gate_source": ("keys", "random"),
    "feature_map": ("softmax", "learned", "relu", "clusters", "none"),
    "learned_weights": (None, "layer", "head"),
}


@dataclass(frozen=True)
class Linearization:
    """Settings that turn attention layers of a pretrained model into recurrences on the same weights.

    The defaults are Liger-GLA (arXiv 2503.01496): `o = state_weight GRM + window_weight SWA` on the layer's
    projections, with gates pooled from its keys and no new parameters.

    Args:
        mixer: "liger", or "lolcats" (arXiv 2410.10254): softmax in the window and a linear recurrence before it, under
            one normalization; "joint": the same, but the recurrence approximates exp(q . k) itself, not relative to the
            window's largest.
        gate: form of the gate (table 1). "fixed": a constant per head (SUPRA, arXiv 2405.06640); "none": no decay.
        gate_source: "keys", pooled from the key projection; "random", a separate projection, randomly initialized and
            trained (an ablation).
        temperature: divisor of the log gates; None means the form's default.
        num_slots: number of slots of "slots" and of clusters of "clusters".
        feature_map: map of queries and keys in the recurrence: "softmax" over a head's channels; "learned", the softmax
            of a learned map and of its negative; "relu", a learned map and a rectifier; "clusters", only for mixer
            "joint": keys become cluster shares, queries the weights of the cluster centers; "none". HGRN2 maps only
            queries, slots map nothing.
        state_weight, window_weight: alpha and beta. A constant alpha of 0 leaves only the window: no state is computed
            or cached. Under one normalization only their ratio matters, and the window's, between 0 and 1, is always
            learned per head.
        learned_weights: learn alpha and beta, starting from these values, per "layer" or per "head"; None means
            constant.
        learned_gate_shift: learn a shift of the gate logits per head, starting from 0.
        window: width of the sliding window in tokens, the token itself included; 0 means no window.
        sinks: first tokens of a document that are always visible to the window attention.
        delayed: the state holds only tokens that have left the window; always so under one normalization.
        rotate_state: rotate queries and keys in the recurrence too: after the map in Liger, before it in the others.
        output_norm: normalize each head of the recurrence's output, with learned scales (SUPRA's GroupNorm).
        softmax_layers: indices of the layers that stay softmax attention.

    Raises:
        ValueError: if a value is unknown, or two contradict each other; the line names the key.
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
            check_choice(f"linearization.{name}", getattr(self, name), known)
        for name in ("window", "sinks", "num_slots"):
            check_whole(f"linearization.{name}", getattr(self, name), int(name == "num_slots"))
        for name in ("learned_gate_shift", "delayed", "rotate_state", "output_norm"):
            check_switch(f"linearization.{name}", getattr(self, name))
        for name in ("state_weight", "window_weight"):
            check_number(f"linearization.{name}", getattr(self, name))
        check_number("linearization.temperature", self.temperature, above=0, null=True)
        self._check_softmax_layers()
        self._check_combinations()

    def _check_softmax_layers(self) -> None:
        layers = self.softmax_layers
        if not isinstance(layers, list | tuple) or not all(map(is_whole, layers)):
            raise SettingError("linearization.softmax_layers", layers, "give a list of indices, as [7,15]")
        object.__setattr__(self, "softmax_layers", tuple(sorted(set(layers))))

    def _check_combinations(self) -> None:
        if self.sinks and not self.window:
            problem = "with linearization.window=0"
            raise SettingError("linearization.sinks", self.sinks, "sinks belong to a window", problem)
        if self.delayed and not self.window:
            problem = "with linearization.window=0"
            raise SettingError("linearization.delayed", True, "there is no window to come after", problem)
        if not (self.state_weight or (self.window and self.window_weight) or self.learned_weights):
            problem = f"with linearization.window={self.window} and linearization.window_weight={self.window_weight}"
            fix = "nothing would be attended to, give one of the weights"
            raise SettingError("linearization.state_weight", 0, fix, problem)
        if self.gate in ("fixed", "none") and (self.gate_source == "random" or self.learned_gate_shift):
            fix = "leave out linearization.gate_source=random and linearization.learned_gate_shift=true"
            raise SettingError("linearization.gate", self.gate, fix, "has no logits")
        if self.mixer == "liger" and not self.has_state:
            self._check_window_alone()
        if self.feature_map == "clusters" and (self.mixer != "joint" or self.gate in ("gla", "hgrn2", "rwkv6")):
            problem = f"with linearization.mixer={self.mixer} and linearization.gate={self.gate}"
            fix = "give linearization.mixer=joint, and gate none, fixed, mamba2, mlstm or gated_retention"
            raise SettingError("linearization.feature_map", "clusters", fix, problem)
        if self.mixer != "liger":
            self._check_one_normalization()

    def _check_window_alone(self) -> None:
        """Refuse parameters of a state that is never computed."""
        for name, unused in {
            "gate_source": self.gate_source == "random",
            "learned_gate_shift": self.learned_gate_shift,
            "feature_map": self.feature_map in ("learned", "relu"),
            "output_norm": self.output_norm,
        }.items():
            if unused:
                problem = f"belongs to a state, and linearization.state_weight={self.state_weight} has none"
                fix = "leave it out, or give linearization.learned_weights=head"
                raise SettingError(f"linearization.{name}", getattr(self, name), fix, problem)

    def _check_one_normalization(self) -> None:
        mixer = f"linearization.mixer={self.mixer}"
        if not self.window:
            raise SettingError("linearization.window", 0, "give a window of 1 or more", f"with {mixer}")
        if self.feature_map == "none":
            raise SettingError("linearization.feature_map", "none", "give learned, softmax or relu", f"with {mixer}")
        if self.gate == "slots":
            raise SettingError("linearization.gate", "slots", "give none, or another gate", f"with {mixer}")
        if self.output_norm:
            raise SettingError(
                "linearization.output_norm", True, "give false, it is normalized already", f"with {mixer}"
            )
        if not 0 < self.window_weight < 1:
            raise SettingError(
                "linearization.window_weight", self.window_weight, "give more than 0, less than 1", f"with {mixer}"
            )
        if not self.state_weight > 0:
            raise SettingError("linearization.state_weight", self.state_weight, "give more than 0", f"with {mixer}")

    @property
    def has_state(self) -> bool:
        """True if there is a recurrence: its weight is not a constant 0."""
        return bool(self.state_weight or self.learned_weights)

    @property
    def gate_temperature(self) -> float:
        """Divisor of the log gates."""
        return TEMPERATURES[self.gate] if self.temperature is None else float(self.temperature)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `config.json`."""
        return {**dataclasses.asdict(self), "softmax_layers": list(self.softmax_layers)}
