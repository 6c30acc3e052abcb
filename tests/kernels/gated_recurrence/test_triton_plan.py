"""The tables of chunks and segments that the recurrence's kernels read, against a loop over the documents."""

from itertools import pairwise

import pytest
import torch

from kernels.gated_recurrence.triton.decays import CHUNK
from kernels.gated_recurrence.triton.plan import FIRST, LAST, make_plan

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_documents", [1, 2, 5, 300, 700])
def test_tables_hold_every_token_of_every_document_once(num_documents):
    length, segment = 1000, 4 * CHUNK
    inner = torch.randint(0, length + 1, (num_documents - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    bounds = [0, *inner.tolist(), length]
    plan = make_plan(1, length, torch.tensor(bounds, dtype=torch.int32, device=DEVICE), segment, DEVICE)
    chunks, segments = [], []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        first = len(chunks)
        chunks += [[number, 0, t, min(CHUNK, end - t)] for t in range(begin, end, CHUNK)]
        for t in range(begin, max(end, begin + 1), segment):
            flags = FIRST * (t == begin) + LAST * (t + segment >= end)
            segments.append([number, 0, t, min(segment, end - t), first + (t - begin) // CHUNK, flags])
    tables = plan.chunks.cpu(), plan.segments.cpu()
    for table, lines in zip(tables, (chunks, segments), strict=True):
        assert table[: len(lines), : len(lines[0])].tolist() == lines
        assert (table[len(lines) :, 3] == -1).all()
