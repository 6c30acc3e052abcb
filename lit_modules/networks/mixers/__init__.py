"""Token mixers: the layers through which a token reads earlier tokens.

A mixer is a module built as `Mixer(config)`. Its `forward(hidden, positions, cache)` maps `hidden`
`[B, T, hidden_size]` to the same shape. `positions` is a `lit_modules.networks.positions.Positions`. `cache` is a
transformers `CacheLayerMixin` from the mixer's `new_cache()`, or another that `takes(cache)` accepts, or None.
`mixing_flops(length)` returns the forward operations per token besides those of the parameters' matrices.

All long-range mixing is in one method, `operation(inputs, positions, ...)`: it maps a tuple of `[B, T, heads, ...]` to
`[B, T, heads, width]` and treats each head independently. `look_back` is the number of preceding tokens that the inputs
of the operation depend on. Context parallelism (`lit_modules.parallel.context`) relies on these two.

To add a mixer, write its file here and name it in `MIXERS`. The configuration's `mixers` then accepts that name for any
layer. Mixers with a state of constant size derive from `RecurrentMixer`. `initial_values()` returns the values of a
mixer's own parameters that are neither matrices, norms nor biases; `no_weight_decay` names those that the optimizer
does not shrink. A sharded model is built without memory and then initialized by these alone: values that the
constructor writes are lost, those of buffers too. The mixers here are for pretraining; `job=linearize` has its own.
"""

from common.settings import SettingError
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.mixers.gla import GLA
from lit_modules.networks.mixers.gsa import GSA
from lit_modules.networks.mixers.hgrn2 import HGRN2
from lit_modules.networks.mixers.mamba2 import Mamba2
from lit_modules.networks.mixers.recurrent import RecurrentMixer

MIXERS: dict[str, type[Attention] | type[RecurrentMixer]] = {
    "attention": Attention,
    "hgrn2": HGRN2,
    "gla": GLA,
    "mamba2": Mamba2,
    "gsa": GSA,
}


def check_mixers(config: PalimpsestConfig) -> None:
    """Check that every mixer of a configuration is registered and that its sizes fit.

    Raises:
        ValueError: if a name is unknown, or the state heads do not divide the value channels.
    """
    for name in dict.fromkeys(config.layer_mixers):
        if name not in MIXERS:
            raise SettingError("mixers", name, f"give one of {', '.join(MIXERS)}", "is unknown")
        mixer = MIXERS[name]
        if issubclass(mixer, RecurrentMixer):
            mixer.state_shape(config)
