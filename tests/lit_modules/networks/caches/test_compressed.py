"""A layer of a compressed cache against a simulation that dequantizes everything, over thousands of tokens."""

import itertools
import math

import pytest
import torch

from common.settings import SettingError
from kernels.packed_kv import dequantize, quantize
from lit_modules.networks.caches import CacheSettings, log_sparse_positions
from lit_modules.networks.caches.books import Books
from lit_modules.networks.caches.compressed_layer import CompressedCacheLayer, Transforms
from lit_modules.networks.caches.rotations import Transform, hadamard
from lit_modules.networks.caches.selection import Schedule, kept_positions
from lit_modules.networks.caches.settings import BLOCK

HEADS, KEY_HEADS, VALUE_HEADS, WIDTH = 4, 2, 1, 16
TOKENS = {"groups_along": "tokens", "group": 16}
CHANNELS = {"group": 16}

POLICIES = {
    "logquant_2": {"keys": TOKENS, "values": CHANNELS, "window": 10},
    "logquant_4": {"keys": TOKENS | {"bits": 4}, "values": CHANNELS | {"bits": 4}, "window": 33},
    "kivi": {"keys": TOKENS | {"keep": "recent"}, "values": CHANNELS | {"keep": "recent"}, "window": 30},
    "kivi_sink": {
        "keys": TOKENS | {"keep": "first_and_recent"},
        "values": CHANNELS | {"keep": "first_and_recent"},
        "window": 30,
        "first": 2,
    },
    "both_along_channels": {"keys": CHANNELS, "values": CHANNELS, "window": 7},
    "rotated": {
        "keys": CHANNELS | {"transform": "hadamard", "clip": 0.9},
        "values": CHANNELS | {"transform": "hadamard"},
        "window": 7,
    },
    "balanced": {
        "keys": CHANNELS | {"transform": "balanced", "clip": 0.9, "keep": "first_and_recent"},
        "values": CHANNELS | {"transform": "balanced", "keep": "first_and_recent"},
        "window": 7,
        "first": 2,
        "rotations": "a file",
    },
    "ordered": {
        "keys": TOKENS | {"transform": "ordered", "high_channels": 8, "keep": "first_and_recent"},
        "values": CHANNELS | {"transform": "balanced", "keep": "first_and_recent"},
        "window": 7,
        "first": 2,
        "rotations": "a file",
    },
    "balanced_keys_apart": {
        "keys": CHANNELS | {"transform": "balanced"},
        "values": CHANNELS | {"transform": "balanced", "keep": "recent", "window": 30},
        "window": 7,
        "rotations": "a file",
    },
    "mixed_bits": {"keys": TOKENS | {"high_channels": 8}, "values": {"group": None, "bits": 4}, "window": 10},
    "partial_logquant": {"keys": TOKENS, "values": CHANNELS | {"keep": "recent", "window": 30}, "window": 10},
    "keys_alone": {"keys": TOKENS, "values": {"bits": 16}, "window": 10},
    "streaming_llm": {
        "keys": {"keep": "first_and_recent", "bits": 0},
        "values": {"keep": "first_and_recent", "bits": 0},
        "window": 30,
        "first": 4,
    },
    "logquant_evict": {"keys": {"bits": 0}, "values": {"bits": 0}, "window": 10},
    "full": {"keys": {"bits": 16}, "values": {"bits": 16}},
}


def transform_of(name: str, settings: CacheSettings) -> Transform | None:
    """What is done to the keys or values of these settings: a matrix that is far from orthogonal, and a mean."""
    way, heads = settings.tensors[name].transform, {"keys": KEY_HEADS, "values": VALUE_HEADS}[name]
    if way == "hadamard":
        return Transform.rotation(hadamard(WIDTH, torch.float64))
    if way == "none":
        return None
    generator = torch.Generator().manual_seed(heads)
    matrix, mean = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (WIDTH, heads))
    matrix = matrix + 2 * torch.eye(WIDTH)
    return Transform(matrix, torch.linalg.inv(matrix).mT, 3 * mean)


def new_layer(settings: dict, capacity: int | None = None) -> CompressedCacheLayer:
    settings = CacheSettings(**settings)
    ways = {name: transform_of(name, settings) for name in settings.tensors}
    given = {name: None if way is None else lambda width, way=way: way for name, way in ways.items()}
    return CompressedCacheLayer(Books(settings, capacity), Transforms(**given))


def draw(tokens: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of so many tokens; some channels of the keys are large, as in models."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, KEY_HEADS, VALUE_HEADS)
    q, k, v = (torch.randn(batch, n, tokens, WIDTH, generator=generator, dtype=torch.float64) for n in sizes)
    return q, k * (1 + 3 * (torch.arange(WIDTH) % 5 == 0)), v


def both(**settings) -> dict:
    """The same settings for keys and values."""
    return {"keys": settings, "values": settings}


class Simulation:
    """What a row's tokens are after each has come: as they were, rounded once with their block, or gone."""

    def __init__(self, settings: dict, k: torch.Tensor, v: torch.Tensor):
        self.settings = CacheSettings(**settings)
        self.held = {"keys": k.clone(), "values": v.clone()}
        self.there = torch.zeros(k.shape[2], dtype=torch.bool)
        self.schedules = {}
        for name, tensor in self.settings.tensors.items():
            keep, window, first, block = self.settings.partition(tensor)
            self.schedules[name] = None if keep == "all" else Schedule(keep, window, first, block)
        self.length = 0

    def attend(self, q: torch.Tensor, is_checked: bool = True) -> torch.Tensor | None:
        """Attention of the next token's queries `[1, Hq, 1, D]`, before it makes others leave; None if unchecked."""
        self.there[self.length] = True
        self.length += 1
        if not is_checked:
            return None
        visible = self.there[: self.length]
        k, v = (
            self.held[name][:, :, : self.length].repeat_interleave(HEADS // heads, 1)
            for name, heads in (("keys", KEY_HEADS), ("values", VALUE_HEADS))
        )
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1) @ v

    def release(self) -> None:
        for name, schedule in self.schedules.items():
            leaving = torch.from_numpy(schedule.advance(1).packed) if schedule else torch.zeros(0)
            tensor = self.settings.tensors[name]
            if not len(leaving):
                continue
            if tensor.bits == 0:
                self.there[leaving] = False
                continue
            eye = torch.eye(WIDTH, dtype=torch.float64)
            matrix, inverse, mean = transform_of(name, self.settings) or Transform(eye, eye)
            mean = 0.0 if mean is None else mean[:, None]
            rounded = quantize((self.held[name][:, :, leaving] - mean) @ matrix, tensor.format_of(WIDTH))
            rounded = dequantize(*rounded, tensor.format_of(WIDTH), torch.float64) @ inverse.mT + mean
            self.held[name][:, :, leaving] = rounded


def check_decoding(policy: str, length: int, every: int) -> None:
    q, k, v = draw(length)
    layer, simulation = new_layer(POLICIES[policy]), Simulation(POLICIES[policy], k, v)
    for t in range(length):
        out = layer.attend(*(x[:, :, t : t + 1] for x in (q, k, v)))
        expected = simulation.attend(q[:, :, t : t + 1], is_checked=t % every == 0 or t > length - 10)
        simulation.release()
        if expected is not None:
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert layer.get_seq_length() == length


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_steps_equal_dequantizing_everything(policy):
    check_decoding(policy, length=330, every=3)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["logquant_2", "partial_logquant"])
def test_thousands_of_decoding_steps_equal_dequantizing_everything(policy):
    check_decoding(policy, length=2200, every=7)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", [[300], [1, 2, 7, 90, 200], [64] * 4 + [44]], ids=["one", "uneven", "64"])
def test_a_prompt_leaves_the_same_cache_however_it_is_divided(policy, chunks):
    q, k, v = draw(301)
    whole, divided = new_layer(POLICIES[policy]), new_layer(POLICIES[policy])
    for t in range(300):
        whole.attend(*(x[:, :, t : t + 1] for x in (q, k, v)))
    start = 0
    for tokens in chunks:
        divided.attend(*(x[:, :, start : start + tokens] for x in (q, k, v)))
        start += tokens
    assert divided.positions() == whole.positions()
    last = [x[:, :, 300:] for x in (q, k, v)]
    torch.testing.assert_close(divided.attend(*last), whole.attend(*last))


def test_within_a_chunk_every_token_is_seen_as_it_is():
    q, k, v = draw(300)
    out = new_layer(POLICIES["logquant_2"]).attend(q, k, v)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(4, 1)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True))


def test_the_positions_are_the_papers_after_every_token():
    q, k, v = draw(120)
    layer = new_layer({"keys": CHANNELS, "values": CHANNELS, "window": 4})
    for t in range(120):
        layer.attend(*(x[:, :, t : t + 1] for x in (q, k, v)))
        assert layer.positions() == [log_sparse_positions(t + 1, 4)]


def test_the_papers_worked_example():
    q, k, v = draw(16)
    layer = new_layer({"keys": CHANNELS, "values": CHANNELS, "window": 4})
    layer.attend(*(x[:, :, :12] for x in (q, k, v)))
    assert [p + 1 for p in layer.positions()[0]] == [1, 3, 5, 7, 9, 10, 11, 12]
    layer.attend(*(x[:, :, 12:] for x in (q, k, v)))
    assert [p + 1 for p in layer.positions()[0]] == [1, 5, 9, 11, 13, 14, 15, 16]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_left_padded_row_equals_the_same_row_alone(policy):
    padding, length = [0, 37, 70], 200
    q, k, v = draw(length, batch=3)
    q[2, :, :70] = torch.nan  # what is computed from padding may be anything
    batch = new_layer(POLICIES[policy])
    alone = [new_layer(POLICIES[policy]) for _ in padding]
    start = 0
    for tokens in (40, 1, 1, 60, *[1] * 98):
        stop = start + tokens
        out = batch.attend(
            *(x[:, :, start:stop] for x in (q, k, v)), padding=lambda stop=stop: [min(p, stop) for p in padding]
        )
        for row, first in enumerate(padding):
            begin = max(start, first)
            if begin < stop:
                own = alone[row].attend(*(x[row : row + 1, :, begin:stop] for x in (q, k, v)))
                torch.testing.assert_close(out[row : row + 1, :, begin - start :], own)
        start = stop
    assert batch.positions() == [layer.positions()[0] for layer in alone]


@pytest.mark.parametrize("keep", ["heavy_hitters", "prompt_attention", "forget_gate"])
@pytest.mark.parametrize("bits", [0, 2])
def test_chosen_tokens_and_left_padding(keep, bits):
    settings = {
        "keys": {"keep": keep, "bits": bits, "group": 16},
        "values": {"keep": keep, "bits": bits, "group": 16},
        "window": 24,
    }
    padding, length = [0, 37], 330
    q, k, v = draw(length, batch=2)
    gates = torch.nn.functional.logsigmoid(3 + torch.randn(2, length, HEADS, dtype=torch.float64))
    batch, alone = new_layer(settings), [new_layer(settings) for _ in padding]
    start = 0
    for tokens in (40, 200, *[1] * 90):
        stop = start + tokens
        out = batch.attend(
            *(x[:, :, start:stop] for x in (q, k, v)),
            log_forget=gates[:, start:stop],
            padding=lambda stop=stop: [min(p, stop) for p in padding],
        )
        for row, first in enumerate(padding):
            begin = max(start, first)
            own = alone[row].attend(
                *(x[row : row + 1, :, begin:stop] for x in (q, k, v)), log_forget=gates[row : row + 1, begin:stop]
            )
            torch.testing.assert_close(out[row : row + 1, :, begin - start :], own)
        start = stop
    for head in range(KEY_HEADS):
        assert batch.positions(head) == [layer.positions(head)[0] for layer in alone]
    assert all(24 <= len(row) < 24 + 64 for row in batch.positions())


def test_heavy_hitters_stay():
    settings = {
        "keys": {"keep": "heavy_hitters", "bits": 0},
        "values": {"keep": "heavy_hitters", "bits": 0},
        "window": 20,
    }
    q, k, v = draw(400)
    q[..., 0], k[..., 0] = 10.0, 0.0
    k[:, :, [5, 50, 111], 0] = 30.0  # what every query attends to
    layer = new_layer(settings)
    for t in range(400):
        layer.attend(*(x[:, :, t : t + 1] for x in (q, k, v)))
    assert {5, 50, 111} <= set(layer.positions()[0])
    assert set(range(390, 400)) <= set(layer.positions()[0])


@pytest.mark.parametrize("gates", [False, True])
def test_what_the_prompts_end_attends_to_stays_with_its_neighbours(gates):
    settings = both(keep="prompt_attention", group=16) | {"window": 80}
    q, k, v = draw(700)
    q[..., 0], k[..., 0] = 10.0, 0.0
    k[:, 0, [45, 300], 0], k[:, 1, 200, 0] = 30.0, 30.0
    q[:, :, :560, 0] = -10.0  # only the last of the prompt's queries find them
    log_forget = torch.full((1, 700, HEADS), -1e-4, dtype=torch.float64) if gates else None
    layer = new_layer(settings)
    at = 0
    for tokens in (590, 1, 9, *[1] * 100):
        given = None if log_forget is None else log_forget[:, at : at + tokens]
        layer.attend(*(x[:, :, at : at + tokens] for x in (q, k, v)), log_forget=given)
        at += tokens
        if tokens > 1:
            # One value head for both key heads, so both choose together.
            kept = layer.positions()[0]
            assert {45, 300, 200} <= set(kept)
            assert {52, 307, 207} & set(kept)
            assert kept == sorted(set(kept))
        assert set(range(at - 40, at)) <= set(layer.positions()[0])
    assert len(layer.positions()[0]) >= 80
    assert {45, 300, 200} <= set(layer.positions()[0])


def test_tokens_that_came_one_by_one_have_no_votes():
    """Slots that others left may hold their votes; a conversation's second prompt votes anew."""
    settings = both(keep="prompt_attention", group=16) | {"window": 24}
    q, k, v = draw(900)
    layer, at = new_layer(settings), 0
    for tokens in (300, *[1] * 200, 50, *[1] * 150):
        layer.attend(*(x[:, :, at : at + tokens] for x in (q, k, v)))
        at += tokens
        kept = layer.positions()[0]
        assert kept == sorted(set(kept))
        assert kept[-12:] == list(range(at - 12, at))
        assert 24 <= len(kept) < 24 + BLOCK
        if at in (500, 700):
            prompt = (0, 300) if at == 500 else (0, 550)
            assert sum(prompt[0] <= place < prompt[1] for place in kept) >= 12


def test_tokens_chosen_by_the_gate_are_as_dense_as_its_weight():
    """With a constant gate the weight halves every 200 tokens, and so does the number of tokens kept of each 200."""
    settings = both(keep="forget_gate", group=16) | {"window": 192}
    layer = new_layer(settings)
    layer.attend(*draw(2000), log_forget=torch.full((1, 2000, HEADS), -math.log(2) / 200))
    kept = torch.tensor(layer.positions()[0])
    assert kept[-64:].tolist() == list(range(1936, 2000))
    counts = [int(((kept >= 1900 - (n + 1) * 200) & (kept < 1900 - n * 200)).sum()) for n in range(4)]
    for newer, older in itertools.pairwise(counts):
        assert 1.4 * older < newer < 3 * older


@pytest.mark.parametrize("chunks", [[400], [1] * 400, [150, 250]], ids=["one", "singly", "two"])
def test_the_gates_choice_does_not_depend_on_chunks(chunks):
    settings = both(keep="forget_gate", group=16) | {"window": 48}
    q, k, v = draw(400)
    gates = torch.nn.functional.logsigmoid(3 + torch.randn(1, 400, HEADS, generator=torch.Generator().manual_seed(1)))
    layer, start = new_layer(settings), 0
    for tokens in chunks:
        stop = start + tokens
        layer.attend(*(x[:, :, start:stop] for x in (q, k, v)), log_forget=gates[:, start:stop])
        start = stop
    whole = new_layer(settings)
    whole.attend(q, k, v, log_forget=gates)
    assert [layer.positions(head) for head in range(KEY_HEADS)] == [whole.positions(head) for head in range(KEY_HEADS)]


def test_the_gates_choice_needs_gates():
    settings = {"keys": {"keep": "forget_gate", "group": 16}, "values": {"keep": "forget_gate", "group": 16}}
    with pytest.raises(SettingError, match=r"keep=forget_gate needs a model with forget gates"):
        new_layer(settings).attend(*draw(3))


@pytest.mark.parametrize("policy", ["logquant_2", "partial_logquant", "streaming_llm", "full"])
def test_gates_travel_with_their_keys(policy):
    length = 450
    q, k, v = draw(length)
    gates = torch.nn.functional.logsigmoid(4 + torch.randn(1, length, HEADS, dtype=torch.float64))
    sums = gates.cumsum(1).mT
    settings = POLICIES[policy] | {"window": 100}
    layer, simulation = new_layer(settings), Simulation(settings, k, v)
    for t in range(length):
        out = layer.attend(*(x[:, :, t : t + 1] for x in (q, k, v)), log_forget=gates[:, t : t + 1])
        simulation.attend(q[:, :, t : t + 1], is_checked=False)
        keys, values = (
            simulation.held[name][:, :, : t + 1].repeat_interleave(HEADS // heads, 1)
            for name, heads in (("keys", KEY_HEADS), ("values", VALUE_HEADS))
        )
        scores = q[:, :, t : t + 1] @ keys.mT / WIDTH**0.5 + (sums[..., t : t + 1] - sums[..., : t + 1])[:, :, None]
        expected = scores.masked_fill(~simulation.there[: t + 1], -torch.inf).softmax(-1) @ values
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        simulation.release()


def test_float16_keys_with_large_outliers_stay_finite():
    q, k, v = (x.half() for x in draw(300))
    k[..., 3] = 6e4
    k[:, :, ::7, 5] = -6e4
    for policy in ("logquant_2", "rotated"):
        layer = new_layer(POLICIES[policy])
        layer.attend(*(x[:, :, :299] for x in (q * 1e-4, k, v)))
        assert layer.attend(*(x[:, :, 299:] for x in (q * 1e-4, k, v))).isfinite().all()


def test_a_key_that_is_no_number_shows_in_every_later_output_of_its_heads():
    q, k, v = draw(300)
    k[0, 1, 5, 2] = torch.nan
    layer = new_layer(POLICIES["logquant_2"])
    layer.attend(*(x[:, :, :299] for x in (q, k, v)))
    out = layer.attend(*(x[:, :, 299:] for x in (q, k, v)))
    assert out[:, 2:].isnan().all()
    assert out[:, :2].isfinite().all()


def test_storage_is_what_the_policy_needs():
    settings = {"keys": TOKENS | {"group": 64}, "values": CHANNELS, "window": 64}
    layer = new_layer(settings)
    q, k, v = (x.half() for x in draw(8192))
    layer.attend(q, k, v)
    sizes, elements = layer.nbytes(), layer.elements()
    assert elements == 8192 * (KEY_HEADS + VALUE_HEADS) * WIDTH
    assert sizes["dense"] == (3 * 64 + 64) * (KEY_HEADS + VALUE_HEADS) * WIDTH * 2
    packed = len(kept_positions("log_sparse", 8192, 64))
    blocks = (8192 - packed) // 64
    assert sizes["packed"] == blocks * 64 * (KEY_HEADS + VALUE_HEADS) * WIDTH // 4
    assert sizes["numbers"] == 0


def test_capped_logits_refuse_keys_without_their_mean():
    layer = new_layer(POLICIES["balanced"])
    with pytest.raises(ValueError, match="logits are capped: calibrate the model anew"):
        layer.attend(*draw(3), softcap=30.0)


def test_a_head_that_no_group_divides_is_refused():
    with pytest.raises(ValueError, match=r"cache.values: head_dim=16 is not a multiple of group=64"):
        new_layer({"keys": TOKENS, "values": {"group": 64}}).attend(*draw(3))


def test_other_heads_or_rows_are_refused():
    q, k, v = draw(8)
    layer = new_layer(POLICIES["logquant_2"])
    layer.attend(q, k, v)
    with pytest.raises(ValueError, match="begin another model with a new cache"):
        layer.attend(q, k[..., :8], v)
    with pytest.raises(ValueError, match="holds 1 rows, and the new tokens have 2: call its batch_select_indices"):
        layer.attend(*(x.repeat(2, 1, 1, 1) for x in (q, k, v)))
