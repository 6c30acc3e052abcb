"""Token mixers: what lets a token see those before it.

A mixer is a module built as `Mixer(config)`. Its `forward(hidden, positions, cache)` maps `hidden`
`[B, T, hidden_size]` to the same shape; `positions` is a `lit_modules.networks.positions.Positions`; `cache` is what
its own `new_cache()` returned (a transformers `CacheLayerMixin`), or None. `mixing_flops(length)` says what it computes
beside its parameters.

What looks far over time is one method, `operation(inputs, positions, ...)`, from a tuple of `[B, T, heads, ...]` to
`[B, T, heads, width]`, each head for itself; `look_back` says how many tokens before a token the inputs of the
operation depend on. By these two, sequences can be dealt out to many devices (`lit_modules.parallel.context`).

To add a mixer, write its file here and name it in `MIXERS`: a configuration's `mixers` then takes that name, for any of
its layers. Those with a state of constant size are built on `RecurrentMixer`.
"""

from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.mixers.gla import GLA
from lit_modules.networks.mixers.gsa import GSA
from lit_modules.networks.mixers.hgrn2 import HGRN2
from lit_modules.networks.mixers.mamba2 import Mamba2
from lit_modules.networks.mixers.recurrent import RecurrentMixer

MIXERS = {"attention": Attention, "hgrn2": HGRN2, "gla": GLA, "mamba2": Mamba2, "gsa": GSA}


def check_mixers(config: PalimpsestConfig) -> None:
    """Check that every mixer of a configuration is registered and that its sizes fit.

    Raises:
        ValueError: a name is unknown, or a state's value channels cannot be dealt out to its heads.
    """
    for name in dict.fromkeys(config.mixers):
        if name not in MIXERS:
            raise ValueError(f"mixers names {name!r}, which is not registered: give one of {', '.join(MIXERS)}")
        if issubclass(MIXERS[name], RecurrentMixer):
            MIXERS[name].state_shape(config)
