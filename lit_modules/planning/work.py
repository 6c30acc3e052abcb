"""The work of a part of a training step: arithmetic, traffic and kept bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


@dataclass(frozen=True)
class Product:
    """`batch` matrix products `[rows, inner] x [inner, columns]`.

    Attributes:
        item: bytes of an element.
        aligned: the rows of all three matrices are aligned to 16 bytes, which fast kernels need.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    item: int
    aligned: bool

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns

    @property
    def bytes(self) -> int:
        sides = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.batch * self.item * sides


@dataclass(frozen=True)
class Mixing:
    """A call of one of our operations over time: attention or a recurrence.

    Attributes:
        tokens, heads, width: sizes of the queries.
        gated: True if it reads gates.
        per_head: True if there is one gate per head and token.
        bytes: bytes of queries, keys, values, gates and outputs.
    """

    attention: bool
    backward: bool
    tokens: int
    heads: int
    width: int
    gated: bool
    per_head: bool
    bytes: int


@dataclass
class Work:
    """Arithmetic and traffic of a pass.

    Attributes:
        traffic: bytes of everything except products and mixing.
        kernels: number of kernel launches.
    """

    products: Counter[Product] = field(default_factory=Counter)
    mixing: Counter[Mixing] = field(default_factory=Counter)
    traffic: int = 0
    kernels: int = 0

    def add(self, function: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Count `function` as a product or a mixing; return False if it is neither."""
        name = function._schema.name
        if name.startswith("palimpsest::"):
            self.mixing[mixing_of(name, inputs, outputs)] += 1
        elif name.partition("::")[2] in PRODUCTS:
            self.products[product_of(inputs, outputs[0])] += 1
        else:
            return False
        self.kernels += 1
        return True


@dataclass
class Pass:
    """A forward or backward pass: its work, and its peak of bytes above the start."""

    work: Work
    transient: int


@dataclass
class Traced:
    """A part of the network, forward and backward.

    Attributes:
        kept: bytes that the forward pass keeps for the backward pass, its input included.
        casts: bytes among them of weights cast to a lower precision.
    """

    forward: Pass
    backward: Pass
    kept: int
    casts: int


def size(tensor: Any) -> int:
    """Return the bytes of a tensor; 0 for anything else."""
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def product_of(inputs: Sequence[Tensor], out: Tensor) -> Product:
    """Return the product behind an operation of PRODUCTS."""
    left, item = inputs[-2], out.element_size()
    rows, inner = left.shape[-2:]
    apart = [max(x.stride()[-2:]) * item for x in (*inputs[-2:], out)]
    aligned = not any(distance % 16 for distance in apart)
    return Product(left.shape[0] if left.ndim == 3 else 1, rows, inner, out.shape[-1], item, aligned)


def mixing_of(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Mixing:
    """Return the call behind one of our operations; a backward operation takes the output's gradient first."""
    backward, attention = name.endswith("_backward"), "attention" in name
    q, k, v, *others = inputs[1:] if backward else inputs
    out = inputs[0] if backward else outputs[0]
    gates = others[0] if others and others[0].shape[:2] == k.shape[:2] and others[0].ndim < 5 else None
    if gates is not None and gates.dtype != torch.float32:
        gates = None
    return Mixing(
        attention,
        backward,
        tokens=q.shape[0] * q.shape[1],
        heads=q.shape[2],
        width=q.shape[3],
        gated=gates is not None,
        per_head=gates is not None and gates.ndim == 3,
        bytes=sum(map(size, (q, k, v, out, gates))),
    )


def workspace(function: Any, inputs: Sequence[Tensor]) -> int:
    """Return the bytes that one of our operations allocates while it runs, without inputs and outputs.

    Attention accumulates the queries' gradient in float32; a recurrence stores the gradient of its chunks' states.
    """
    name = function._schema.name
    if not name.startswith("palimpsest::") or not name.endswith("_backward"):
        return 0
    q = next(x for x in inputs[1:] if x.ndim == 4)
    if "attention" in name:
        return q.numel() * 4
    return max((size(x) for x in inputs if x.ndim == 4 and x.shape[1] != q.shape[1]), default=0)
