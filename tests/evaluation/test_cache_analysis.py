"""`job=measure benchmark=cache_analysis`: attention, coverage, errors and user errors, held to direct computations."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from evaluation.cache_analysis import heads, job, selections
from evaluation.cache_analysis.coverage import Coverage, Distances, bin_edges
from evaluation.cache_analysis.distortion import EVICTED, AttentionError, Reconstruction, Rounding
from evaluation.cache_analysis.heads import KeyHead
from kernels.packed_kv import Format, dequantize, quantize
from lit_modules.networks import Linearization, PalimpsestConfig, PalimpsestForCausalLM, linearize
from lit_modules.networks.attention_inputs import AttentionInputs, watched_attention
from lit_modules.networks.caches import CacheSettings, CompressedCache, log_sparse_positions
from lit_modules.networks.caches.rotations import LayerRotations, Rotations, Transform, hadamard
from tests.evaluation.conftest import TEXT

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


def stock(name):
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    sizes = SIZES | {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3, "sliding_window": 64}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager")).eval()


def ours(**switches):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    return PalimpsestForCausalLM(PalimpsestConfig(**sizes | {"initializer_range": 0.3} | switches)).eval()


def seen(model, length):
    """Return each layer's inputs for random tokens, and its output before the output norm and projection."""
    inputs, outputs = {}, {}
    handles = []
    for number, layer in enumerate(model.model.layers):
        projection = layer.self_attn.o_proj
        handles.append(
            projection.register_forward_pre_hook(lambda module, given, n=number: outputs.update({n: given[0][0]}))
        )
    with torch.no_grad(), watched_attention(model, lambda layer, found: inputs.update({layer: found})):
        model(input_ids=torch.randint(1, 60, (1, length)), use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs, outputs


MODELS = {
    "llama": lambda: stock("llama"),
    "gemma2": lambda: stock("gemma2"),
    "linearized": lambda: linearize(stock("llama"), Linearization(softmax_layers=[0, 1])).eval(),
    "fox": lambda: ours(forget_gate="data_dependent", output_gate=False, output_norm=False),
    "diffqkv": lambda: ours(num_key_heads=1, num_value_heads=2, key_head_dim=4, rope=True, output_gate=False,
                            output_norm=False, forget_gate="none"),
    "more_keys": lambda: ours(num_key_heads=4, num_value_heads=2, output_gate=False, output_norm=False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_attention_of_each_head_gives_the_output_of_the_layer(name):
    inputs, outputs = seen(MODELS[name](), 21)
    assert list(inputs) == [0, 1]
    for layer, found in inputs.items():
        heads = [KeyHead(found, number, 5) for number in range(found.keys.shape[1])]
        assert [head for each in heads for head in each.query_heads] == list(range(4))
        out = torch.cat([head.outputs(head.weights) for head in heads])  # [Hq, Q, Dv]
        assert torch.allclose(out.transpose(0, 1).flatten(1), outputs[layer][-5:], atol=1e-5)
        for head in heads:
            assert torch.allclose(head.weights.sum(-1), torch.ones(4 // len(heads), 5))
            assert torch.allclose(head.changed_keys(lambda keys: keys.float()), found.keys[0, head.head], atol=1e-5)


def random_head(length=90, queries=10, shared=2, gates=False):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 16, generator=draw) for heads in (shared, 1, 1))
    log_forget = -torch.rand(1, shared, length, generator=draw) if gates else None
    return KeyHead(AttentionInputs(3 * q, k, v, k, log_forget=log_forget), 0, queries)


@pytest.mark.parametrize("gates", [False, True])
def test_accumulated_attention_is_the_sum_over_all_queries_before(gates):
    head = random_head(gates=gates)
    every = KeyHead(head.inputs, 0, 90)
    for row, position in enumerate(head.rows):
        assert torch.allclose(head.accumulated[row], every.weights[:, :position].sum((0, 1)), atol=1e-5)


def weighted(weights):
    """Return a head with these attention weights `[g, Q, S]`."""
    length = weights.shape[-1]
    rows = torch.arange(length - weights.shape[1], length)
    return SimpleNamespace(weights=weights, rows=rows, length=length, kept_by_content=lambda _: {})


def test_coverage_is_the_attention_on_kept_tokens_without_the_first_two():
    weights = torch.zeros(1, 1, 40)
    weights[0, 0, [0, 1, 20, 33, 39]] = torch.tensor([0.3, 0.2, 0.1, 0.15, 0.25])
    found = Coverage([12], range(39, 40), CPU).of_head(weighted(weights))
    kept = log_sparse_positions(40, 4)
    expected = 0.25 + 0.15 * (33 in kept) + 0.1 * (20 in kept)
    mass, share, tokens = found["coverage", "log_sparse", 12][0].tolist()
    assert (mass, share, tokens) == pytest.approx((expected, expected / 0.5, len(kept)))
    assert found["coverage", "recent", 12][0].tolist() == pytest.approx([0.4, 0.8, 12])  # 28 to 39
    assert found["coverage", "four_and_recent", 12][0].tolist() == pytest.approx([0.4, 0.8, 12])  # 32 to 39
    assert found["coverage", "recent_as_many", 12][0, 2] == len(kept)
    assert found["coverage", "largest", 12][0].tolist() == pytest.approx([0.5, 1, 12])


def test_what_the_prompts_end_reads_is_what_a_cache_keeps_of_the_prompt():
    model, window, prompt, more = stock("llama"), 96, 96 + 2 * 128, 10
    ids, found = torch.randint(1, 60, (1, prompt + more)), []
    with torch.no_grad(), watched_attention(model, lambda layer, inputs: found.append(inputs)):
        model(input_ids=ids, use_cache=False)
    tensor = {"keep": heads.PROMPT, "bits": 2}
    cache = CompressedCache(model.config, CacheSettings.of({"keys": tensor, "values": tensor, "window": window}))
    with torch.no_grad():
        model(input_ids=ids[:, :prompt], past_key_values=cache)
    for head in heads.key_heads(found[0], more, [window]):
        kept = selections.most_attended(head.votes, torch.tensor([prompt - 1]), window)[0].nonzero()[:, 0]
        held = torch.tensor(cache.layers[0].positions(head.head)[0])
        # Neighbors have the same votes, of which either may be kept.
        assert torch.allclose(head.votes[held].sort().values, head.votes[kept].sort().values)
        assert len({*held.tolist()} & {*kept.tolist()}) > 0.95 * window
        assert head.kept_by_content(window)[heads.PROMPT].sum(-1).tolist() == [window] * more


def test_coverage_by_the_gate_has_the_tokens_that_a_cache_keeps():
    torch.manual_seed(0)
    model = PalimpsestForCausalLM(
        PalimpsestConfig(
            vocab_size=60, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, initializer_range=0.5
        )
    ).eval()
    ids, window, found = torch.randint(1, 60, (1, 700)), 96, []
    with torch.no_grad(), watched_attention(model, lambda layer, inputs: found.append(inputs.log_forget)):
        model(input_ids=ids, use_cache=False)
    mask = selections.by_gate(found[0].double().cumsum(-1).float(), range(690, 700), window)
    tensor = {"keep": heads.GATE, "bits": 2}
    cache = CompressedCache(model.config, CacheSettings.of({"keys": tensor, "values": tensor, "window": window}))
    with torch.no_grad():
        for place, part in enumerate([ids[:, :691], *ids[:, 691:].split(1, 1)]):
            model(part, past_key_values=cache, use_cache=True)
            for head in range(2):
                assert sorted(cache.layers[0].positions(head)[0]) == mask[head, place].nonzero()[:, 0].tolist()


def test_heavy_hitters_keep_the_last_half_and_what_had_most_attention_before_it():
    accumulated = torch.zeros(1, 20)
    accumulated[0, [3, 9, 15, 18]] = torch.tensor([5.0, 2.0, 3.0, 9.0])
    kept = selections.most_attended(accumulated, torch.tensor([19]), 5)
    assert kept[0].nonzero().flatten().tolist() == [3, 15, 17, 18, 19]


def test_no_attention_beyond_the_first_two_tokens_is_covered_by_none():
    weights = torch.zeros(1, 1, 30)
    weights[0, 0, 0] = 1
    assert Coverage([6], range(29, 30), CPU).of_head(weighted(weights))["coverage", "recent", 6][0, :2].tolist() == [
        0,
        0,
    ]


def test_distances_count_each_token_but_the_first_two_once():
    rows = range(27, 30)
    weights = torch.rand(2, 3, 30).masked_fill(torch.arange(30) > torch.tensor(rows)[:, None], 0)
    found = Distances(rows, CPU)
    values = found.of_head(weighted(weights))
    assert (values["distance",] * found.tokens).sum(1).tolist() == pytest.approx(weights[..., 2:].sum((1, 2)).tolist())
    assert values["distance",][0, 0] == pytest.approx(weights[0, range(3), rows].mean().item())
    assert values["first_and_newest",][:, 0].tolist() == pytest.approx(weights[..., :2].sum(-1).mean(-1).tolist())
    assert int(found.tokens.sum()) == 26 + 27 + 28
    assert bin_edges(20) == [0, 1, 2, 3, 4, 6, 8, 11, 16, 20]


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize(("along", "transform"), [("tokens", "plain"), ("channels", "plain")])
def test_l1_errors_equal_those_of_a_cache_that_is_filled_token_by_token(along, transform, gates):
    head, rounding = random_head(gates=gates), Rounding(2, along, transform, 16)
    found = AttentionError([12, 18], [rounding], range(80, 90), CPU).of_head(head, 0)
    exact, keys = head.logits, head.inputs.keys
    for name, select in (("log_sparse", selections.log_sparse), ("recent", selections.recent)):
        for reserved in (12, 18):
            errors = {"evicted": [], rounding.name: []}
            for row, position in enumerate(head.rows.tolist()):
                selection = select(reserved)
                released, held = by_hand(selection.keep, position + 1, selection.window)
                packed = released[: len(released) // 16 * 16]
                rows = keys[:, :, packed]
                format = Format(2, along, 16)
                changed = keys.clone()
                changed[:, :, packed] = dequantize(*quantize(rows, format), format)
                delta = 0.25 * (head.inputs.queries[0, :, position] @ (changed - keys)[0, 0].T)
                rounded = (exact[:, row] + delta).softmax(-1)
                errors[rounding.name].append((rounded - head.weights[:, row]).abs().sum(-1))
                left = torch.full_like(exact[:, row], -math.inf)
                left[:, held] = exact[:, row, held]
                errors["evicted"].append((left.softmax(-1) - head.weights[:, row]).abs().sum(-1))
            for how, values in errors.items():
                expected = torch.stack(values).mean(0)
                assert torch.allclose(found["l1", name, reserved, how], expected, atol=1e-5), (name, reserved, how)


def by_hand(keep, length, window):
    """Apply a policy's rule to one token after another; return the released tokens in order, and the kept ones."""
    released, held = [], []
    for position in range(length):
        held.append(position)
        if keep == "log_sparse" and len(held) == 3 * window:
            released += held[1 : 2 * window : 2]
            held = held[0 : 2 * window : 2] + held[2 * window :]
        elif keep == "recent" and len(held) > window:
            released.append(held.pop(0))
    return released, held


def test_reconstruction_errors_are_those_of_all_but_the_last_tokens():
    head, rounding = random_head(), Rounding(2, "tokens", "plain", 16)
    found = Reconstruction([rounding], 12, range(80, 90), CPU).of_head(head, 0)
    order = list(range(64))  # 78 were released at the last query, and are quantized in groups of 16
    changed = {}
    for name, x, along in (("keys", head.inputs.keys, "tokens"), ("values", head.inputs.values, "channels")):
        format = Format(2, along, 16)
        rounded = dequantize(*quantize(x[:, :, order], format), format)
        changed[name] = torch.cat((rounded, x[:, :, 64:]), 2)
        error, whole = found["error", rounding.name, name].sum(0)
        assert error / whole == pytest.approx(
            ((changed[name] - x)[:, :, order] ** 2).sum() / (x[:, :, order] ** 2).sum()
        )
    logits = torch.stack([0.25 * q @ changed["keys"][0, 0].T for q in head.inputs.queries[0, :, 80:]])
    logits = logits.masked_fill(head.logits == -math.inf, -math.inf)
    error, whole = found["error", rounding.name, "outputs"].sum(0)
    exact = head.weights @ head.inputs.values[0, 0]
    assert error == pytest.approx(((logits.softmax(-1) @ changed["values"][0, 0] - exact) ** 2).sum().item(), rel=1e-4)
    assert whole == pytest.approx((exact**2).sum().item(), rel=1e-5)
    error = (logits - head.logits)[..., :64]
    error = error - error.mean(-1, keepdim=True)
    squared, count = found["error", rounding.name, "scores"].sum(0)
    assert squared / count == pytest.approx((error**2).mean().item(), rel=1e-4)


def test_a_rotation_is_undone_after_rounding():
    x = torch.randn(1, 1, 32, 16)
    x[..., 3] *= 50  # an outlier channel, whose rows a Hadamard matrix spreads
    order, turn = torch.arange(32), hadamard(16)
    rotations = Rotations({0: LayerRotations(turn, turn, *2 * [Transform(3 * turn, turn / 3, x[0].mean(1))])}, {}, 1)
    plain, spread, fitted, balanced = (
        Rounding(2, "channels", transform, 16, rotations).of_keys(order, 0, slice(0, 1))(x)
        for transform in ("plain", "hadamard", "rotation", "balanced")
    )
    assert torch.equal(spread, fitted)
    small = [channel for channel in range(16) if channel != 3]
    assert (plain - x)[..., small].norm() > (x[..., small]).norm() / 2
    assert not torch.equal(plain, spread)
    assert (spread - x).norm() < 0.5 * x.norm()
    assert (balanced - x).norm() < 0.5 * x.norm()


@pytest.fixture
def analyse(run, tmp_path):
    """Run the command on a text of 3,000 tokens or so; return how it ended, and the report."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join([TEXT] * 100))

    def call(checkpoint, *settings):
        done = run(
            *("job=measure", "benchmark=cache_analysis", f"benchmark.text={text}", f"checkpoint={checkpoint}"),
            *("benchmark.length=90", "benchmark.queries=8", "benchmark.reserved=[12,18]", "benchmark.group=16"),
            *("benchmark.sequences=2", "device=cpu", f"output={tmp_path}", *settings),
            tiny=False,
        )
        path = tmp_path / "evaluation" / "cache_analysis.json"
        return done, json.loads(path.read_text()) if path.is_file() else None

    return call


@pytest.mark.parametrize("folder", ["ours", "llama"])
def test_the_job_leaves_a_report_a_table_and_a_picture(analyse, request, folder, tmp_path):
    done, report = analyse(request.getfixturevalue(folder))
    assert done.status == 0, done.err
    assert report["layers"] == ([0] if folder == "ours" else [0, 1])
    assert done.out.strip() == (tmp_path / "evaluation" / "cache_analysis.md").read_text().strip()
    assert (tmp_path / "evaluation" / "cache_analysis.png").stat().st_size > 10_000
    for length in ("12", "18"):
        row = report["coverage"][length]
        most = row["largest"]["mass"]["value"]
        assert all(0 <= each["mass"]["value"] <= most + 1e-6 for name, each in row.items() if name != heads.GATE)
        assert (heads.GATE in row) == (folder == "ours")
        assert row["recent_as_many"]["tokens"]["value"] == row["log_sparse"]["tokens"]["value"]
        assert report["kept"][length]["recent"] == int(length)
        assert heads.PROMPT in row
        for name, ways in report["l1"][length].items():
            # The gate's choice keeps up to a block more, here all tokens.
            assert all((0 if name != heads.GATE else -1) < way["value"] < 2 for way in ways.values())
            if name in (heads.HEAVY, heads.PROMPT, heads.GATE):
                assert list(ways) == [EVICTED]
            else:
                assert ways["4 bits, tokens, plain"]["value"] < ways["2 bits, tokens, plain"]["value"]
            assert ways[EVICTED]["sum_over_heads"]["value"] == pytest.approx(
                ways[EVICTED]["value"] * 2 * len(report["layers"])
            )


def test_other_seeds_draw_other_sequences_of_the_text(llama):
    settings = SimpleNamespace(length=10, sequences=3, text="text")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    text = " ".join(f"{number} gate" for number in range(200))
    drawn = []
    for seed in (0, 0, 1):
        settings.seed = seed
        drawn.append(torch.cat(job.some_sequences(text, tokenizer, settings)))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (3, 10)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["benchmark.reserved=[12,70]"], "benchmark.reserved=70 leaves no tokens to quantize"),
        (["benchmark.reserved=[]"], "benchmark.reserved is empty: give one or more numbers"),
        (["benchmark.reserved=[3]"], "benchmark.reserved=3: give a whole number, 6 or more"),
        (["benchmark.bits=3"], "benchmark.bits=3: give one of 2, 4"),
        (["benchmark.group=20"], "benchmark.group=20 does not fit"),
        (["benchmark.queries=0"], "benchmark.queries=0: give a whole number, 1 or more"),
        (["benchmark.sequences=900"], "benchmark.sequences=900 are more than the"),
        (["benchmark.text=/nowhere"], "benchmark.text=/nowhere cannot be read"),
        (["benchmark.length=1000", "benchmark.reserved=12"], "benchmark.length=1000 is more than the checkpoint reads"),
        (["benchmark.rotations=/nowhere"], "rotations=/nowhere is not a file"),
        (["dtype=int8"], "dtype=int8: give one of auto"),
        (["output=null"], "output"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(analyse, llama, settings, line):
    done, _ = analyse(llama, *settings)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith(f"palimpsest: {line}")
    assert "Traceback" not in done.err


def test_a_model_without_attention_to_all_tokens_is_told(analyse, linearized):
    done, _ = analyse(linearized)
    assert done.status == 2
    assert "palimpsest: checkpoint has no attention layer that sees all tokens" in done.err


def test_layers_with_a_window_shorter_than_the_sequence_are_left_out():
    model = stock("gemma2")
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    for length, layers in ((64, [0, 1]), (70, [1])):  # its window is 64
        settings = job.Settings("text", length, 1, 4, (12,), (2,), 16, None, "auto", 0)
        assert job.measure(model, [torch.randint(1, 60, (1, length))], settings, None)[0].layers == layers


def test_learned_sinks_are_told():
    model = stock("llama")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="checkpoint=some has learned sinks"):
        job.check_model(model, "some", 10)


def test_a_damaged_model_is_told(llama):
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    with torch.no_grad():
        model.model.norm.weight[0] = model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    settings = job.Settings("text", 60, 1, 4, (12,), (2,), 16, None, "auto", 0)
    with pytest.raises(ValueError, match="checkpoint: the attention of layer 1 is not numbers"):
        job.measure(model, [torch.randint(1, 60, (1, 60))], settings, None)
