"""Pairs of tokens within chunks, with the decay between them: exp(sum of log_decay from after the column to the row).

No factor is computed as a quotient of two others, which would overflow. For s = 1, 2, 4, ..., half a chunk: a row in
an odd block of s tokens and a column in the even block just before it are joined by

    exp(from the row's block's start to the row) * exp(from after the column to the column's block's end)

and each pair of a chunk occurs at exactly one s. Sums cover only tokens of one block and never subtract: a closed gate,
-inf, gives factors of 0 and never NaN. A token's pair with itself does not decay.

Shapes: N chunks (times heads) of C tokens; rows x [N, C, G, D], G rows per token; columns y [N, C, D]; their weights
[N, C * G, C]. Logarithms have base 2: on CPUs exp2 is several times faster than exp.
"""

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class ChannelGates:
    """Gates per channel of rows and columns; log_decay [N, C, D], or [N, C, 1]: the same for all channels.

    from_start [N, C, D]: decay from the chunk's start to each row; to_end [N, C, D]: decay from each column to the
    chunk's end; total [N, D]: decay of the whole chunk.
    """

    def __init__(self, log_decay: Tensor):
        self.num_chunks, self.size, self.channels = log_decay.shape
        from_start, to_end = log_decay * LOG2_E, torch.zeros_like(log_decay)
        self.factors = []
        size = 1
        while size < self.size:
            rows, columns = (x.view(self.num_chunks, -1, 2, size, self.channels) for x in (from_start, to_end))
            self.factors.append((rows[:, :, 1].exp2(), columns[:, :, 0].exp2()))
            columns[:, :, 0] += rows[:, :, 1, -1:]
            rows[:, :, 1] += rows[:, :, 0, -1:]
            size *= 2
        self.from_start, self.to_end = from_start.exp2_(), to_end.exp2_()
        self.total = self.from_start[:, -1]

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x_i . y_j with the decay between them, [N, C * G, C], 0 above the diagonal."""
        products = x.new_zeros(self.num_chunks, x[0, ..., 0].numel(), self.size)
        for size, (row_factors, column_factors) in self._levels():
            rows, columns = _odd(x, size) * row_factors[..., None, :], _even(y, size) * column_factors
            _blocks(products, size).copy_(_product(rows, columns))
        _diagonal(products, x.shape[2]).copy_(self_products(x, y))
        return products

    def spread(self, weights: Tensor, y: Tensor) -> Tensor:
        """Return sum_{j < i} weights_ij y_j with the decay between them, [N, C, G, D]."""
        spread = y.new_zeros(self.num_chunks, self.size, weights.shape[1] // self.size, y.shape[2])
        for size, (row_factors, column_factors) in self._levels():
            columns = _even(y, size) * column_factors
            _odd(spread, size).addcmul_(
                _weighted(_blocks(weights, size), columns, spread.shape[2]), row_factors[..., None, :]
            )
        return spread

    def products_and_gradients(self, x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `products(x, y)` and gradients of x, y and gates; `weights`: gradients of products below the diagonal.

        A gate's gradient sums only the pairs around it. All rows from the gate on, minus all columns, would give the
        same sum except for rounding, which would swamp the small gradient of a nearly closed gate.
        """
        products = x.new_zeros(weights.shape)
        grad_x, grad_y, grad_gates = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(y)
        for size, (row_factors, column_factors) in self._levels():
            row_factors = row_factors[..., None, :]
            rows, columns = _odd(x, size) * row_factors, _even(y, size) * column_factors
            joining = _blocks(weights, size)
            _blocks(products, size).copy_(_product(rows, columns))
            of_rows = _weighted(joining, columns, x.shape[2])
            _odd(grad_x, size).addcmul_(of_rows, row_factors)
            of_columns = _weighted(joining.mT, rows.flatten(2, 3), 1).squeeze(3)
            _even(grad_y, size).addcmul_(of_columns, column_factors)
            _odd(grad_gates, size).add_(sums_from((rows * of_rows).sum(3)))
            _even(grad_gates, size)[:, :, 1:] += (columns * of_columns)[:, :, :-1].cumsum(2)
        _diagonal(products, x.shape[2]).copy_(self_products(x, y))
        return products, grad_x, grad_y, grad_gates

    def _levels(self):
        return ((2**level, factors) for level, factors in enumerate(self.factors))


class HeadGates(ChannelGates):
    """One gate for all channels, log_decay [N, C, 1]: pairs are a matrix product times a matrix of decays."""

    def __init__(self, log_decay: Tensor):
        super().__init__(log_decay)
        self.decay = log_decay.new_zeros(self.num_chunks, self.size, self.size)
        self.decay.diagonal(dim1=1, dim2=2).fill_(1.0)
        for size, (row_factors, column_factors) in self._levels():
            _blocks(self.decay, size).copy_(row_factors * column_factors.mT)

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        return self._decayed(torch.bmm(x.flatten(1, 2), y.mT))

    def products_and_gradients(self, x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        products, of_pairs = self.products(x, y), weights.clone()
        _diagonal(of_pairs, x.shape[2]).zero_()
        around = sums_from((of_pairs * products).unflatten(1, x.shape[1:3]).sum(2))
        of_pairs = self._decayed(of_pairs)
        grad_x, grad_y = torch.bmm(of_pairs, y).view(x.shape), torch.bmm(of_pairs.mT, x.flatten(1, 2))
        return products, grad_x, grad_y, around.tril_(-1).sum(2, keepdim=True)

    def _decayed(self, products: Tensor) -> Tensor:
        products.view(self.num_chunks, self.size, -1, self.size).mul_(self.decay[:, :, None])
        return products


def sums_from(x: Tensor) -> Tensor:
    """Return the sums from each row to the last, for x [..., C, D]."""
    return x.flip(-2).cumsum(-2).flip(-2)


def plain_products(x: Tensor, y: Tensor) -> Tensor:
    """Return x_i . y_j without decay, [N, C * G, C]; 0 above the diagonal."""
    products = torch.bmm(x.flatten(1, 2), y.mT)
    size = y.shape[1]
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu_(1)
    products.view(x.shape[0], size, -1, size).masked_fill_(future[:, None], 0.0)
    return products


def self_products(x: Tensor, y: Tensor) -> Tensor:
    """Return x_i . y_i, [N, C, G]."""
    return (x * y[:, :, None]).sum(-1)


def self_weights(weights: Tensor, groups: int) -> Tensor:
    """Return the weight of each row with its own token, [N, C, G, 1], a view."""
    return _diagonal(weights, groups)[..., None]


def _diagonal(joining: Tensor, groups: int) -> Tensor:
    return joining.view(joining.shape[0], -1, groups, joining.shape[2]).diagonal(dim1=1, dim2=3).mT


def _odd(x: Tensor, size: int) -> Tensor:
    """Return the odd blocks of `size` tokens of x [N, C, ...] as [N, C / 2 size, size, ...]."""
    return x.view(x.shape[0], -1, 2, size, *x.shape[2:])[:, :, 1]


def _even(x: Tensor, size: int) -> Tensor:
    return x.view(x.shape[0], -1, 2, size, *x.shape[2:])[:, :, 0]


def _blocks(joining: Tensor, size: int) -> Tensor:
    """View [N, C * G, C] as [N, C / 2 size, size * G, size]: weights of odd blocks with the even block before."""
    num_chunks, num_rows, num_columns = joining.shape
    pairs = num_columns // (2 * size)
    blocks = joining.view(num_chunks, pairs, 2, num_rows // (2 * pairs), pairs, 2, size)[:, :, 1, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply [N, n, size, G, D] with [N, n, size, D] to [N, n, size * G, size]."""
    products = torch.bmm(rows.flatten(2, 3).flatten(0, 1), columns.flatten(0, 1).mT)
    return products.unflatten(0, rows.shape[:2])


def _weighted(weights: Tensor, y: Tensor, groups: int) -> Tensor:
    """Multiply weights [N, n, rows * G, size] with y [N, n, size, D] to [N, n, rows, G, D]."""
    if weights.shape[2] * weights.shape[3] <= 4:
        # For such small products, BLAS calls take longer.
        product = sum(weights[..., j, None] * y[:, :, None, j] for j in range(weights.shape[3]))
    else:
        product = torch.bmm(weights.flatten(0, 1), y.flatten(0, 1)).unflatten(0, y.shape[:2])
    return product.unflatten(2, (-1, groups))
