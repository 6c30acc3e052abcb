"""Order of a mixture: which component a position reads, and which of its sequences; pure functions without state.

Components are the leaves of a Huffman tree of their counts. Each node splits its T positions into t strata, with t the
count of the child with fewer sequences: that child's m-th position is drawn from m*T/t to (m+1)*T/t. Both children's
counts therefore follow their shares within one, in an order that does not repeat. Towards a leaf these errors shrink
with the nodes: an uncle weighs at least as much as either nephew, so the ancestors of a leaf grow like the
Fibonacci numbers, and the errors add up to less than 1 + 1 + 1/2 + 1/3 + 1/5 + ... < 3.4 for any number of components.
"""

import heapq
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

ROUNDS = 4  # of the Feistel network


class Node(NamedTuple):
    """A node of `count` sequences: a leaf, with its component's number, or two nodes, the one with fewer first."""

    count: int  # type: ignore[assignment]  # in place of the tuple's own method, which nothing calls
    number: int
    children: "tuple[Node, Node] | None" = None


class Interleaving:
    """One order of sum(counts) sequences, counts[c] of component c.

    After n of them, component c has had n * counts[c] / sum(counts), within less than 3.4 (less than 1 with two
    components); at the end, exactly counts[c]. `key` selects one of these orders.
    """

    def __init__(self, counts: Sequence[int], key: str) -> None:
        self.key = key.encode()
        self.total = sum(counts)
        heap = [Node(count, number) for number, count in enumerate(counts) if count]
        heapq.heapify(heap)
        number = len(counts)
        while len(heap) > 1:
            fewer, others = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, Node(fewer.count + others.count, number, (fewer, others)))
            number += 1
        self._root = heap[0] if heap else None

    def locate(self, position: int) -> tuple[int, int]:
        """Return the component read at `position`, and how many of its sequences come before."""
        node = self._root
        if node is None or not 0 <= position < self.total:
            raise IndexError(f"position {position} of {self.total}")
        while node.children is not None:
            fewer, others = node.children
            stratum, place = self._place(node, fewer.count, position)
            if position == place:
                node, position = fewer, stratum
            else:
                node, position = others, position - stratum - (place < position)
        return node.number, position

    def _place(self, node: Node, fewer: int, position: int) -> tuple[int, int]:
        """Return the stratum of a node that holds `position`, and there the position of the child with `fewer`."""
        stratum = position * fewer // node.count
        first, end = -(-stratum * node.count // fewer), -(-(stratum + 1) * node.count // fewer)
        return stratum, first + drawn(self.key, node.number, stratum) % (end - first)


def walk(position: int, total: int, key: str) -> int:
    """Return which of a component's `total` sequences is read at its `position`; each epoch is a permutation.

    A Feistel network computes each position independently, so no permutation of billions of sequences is held in
    memory.
    """
    epoch, index = divmod(position, total)
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    mask, encoded = (1 << half) - 1, key.encode()
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (drawn(encoded, epoch, number, right) & mask)
        index = left << half | right
        if index < total:  # else outside the range (up to the next power of four): cycle-walk until inside
            return index


def drawn(key: bytes, *numbers: int) -> int:
    """Return 64 pseudorandom bits that depend only on key and numbers, on every machine."""
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(blake2b(key + packed, digest_size=8).digest(), "little")
