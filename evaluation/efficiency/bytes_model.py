"""The bytes that each module of an attention layer's step must move: every weight once, and cached keys and values.

At a copy's rate these give the least time of each module. Hidden states are left out: they are few.
"""

from dataclasses import dataclass

from lit_modules.networks import PalimpsestConfig

MODULES = ("queries", "cache", "attention")
"""The modules whose times the paper adds up. `total` is their sum, `layer` has the other projections too."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer.

    Attributes:
        queries: weights of all query projections, as the layer is defined.
        folded: the same as decoding reads them, with W_q folded into the two matrices after it.
        others: weights of the key, value and output projections.
        per_token: keys and values of one token.
    """

    queries: int
    folded: int
    others: int
    per_token: int

    @classmethod
    def of(cls, config: PalimpsestConfig, itemsize: int = 2) -> "LayerBytes":
        """Return the bytes of a model's layer, of numbers with `itemsize` bytes."""
        width, inner = config.hidden_size, config.augmented_query_dim
        _, key_heads, value_heads = config.head_counts
        cached = key_heads * config.cached_key_dim + value_heads * config.head_dim
        augmented = 0 if inner is None else 3 * inner * width
        return cls(
            queries=itemsize * (width**2 + augmented),
            folded=itemsize * (augmented or width**2),
            others=itemsize * (width * cached + width**2),
            per_token=itemsize * cached,
        )

    def of_output(self, batch: int, prefix: int, output: int, *, folded: bool) -> dict[str, float]:
        """Return the bytes by module, and their sums `total` and `layer`, of decoding `output` tokens after `prefix`.

        Args:
            batch: rows, which share the weights.
            prefix: tokens in each row's cache before.
            output: tokens decoded; token t of 1 to `output` reads the keys and values of prefix + t.
            folded: count the query projections as decoding reads them, not as the layer is defined.
        """
        found = {
            "queries": float(output * (self.folded if folded else self.queries)),
            "cache": float(output * batch * self.per_token),
            "attention": batch * self.per_token * output * (prefix + (output + 1) / 2),
        }
        found["total"] = sum(found[module] for module in MODULES)
        return found | {"layer": found["total"] + output * self.others}


def saving(model: float, against: float) -> float:
    """Return the share that a model saves against another: below 0 where it takes more."""
    return 1 - model / against


def limit(model: LayerBytes, against: LayerBytes) -> float:
    """Return what the smaller cache alone saves: no decoding step saves more by it."""
    return saving(model.per_token, against.per_token)
