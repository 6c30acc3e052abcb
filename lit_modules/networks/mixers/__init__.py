"""Token mixers: what lets a token see those before it.

A mixer is a module built as `Mixer(config)`. Its `forward(hidden, positions, cache)` maps `hidden`
`[B, T, hidden_size]` to the same shape; `positions` is a `lit_modules.networks.positions.Positions`; `cache` is what
its own `new_cache()` returned (a transformers `CacheLayerMixin`), or None. To add one, write its file here and name it
in `MIXERS`: a configuration's `mixers` then takes that name, for any of its layers.
"""

from lit_modules.networks.mixers.attention import Attention

MIXERS = {"attention": Attention}
