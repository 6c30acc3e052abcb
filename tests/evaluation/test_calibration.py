"""`job=calibrate`: what it writes and prints, and user errors."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from evaluation.calibration import as_markdown, read_beginning, sequences
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.caches.calibration import LayerErrors
from lit_modules.networks.caches.rotations import read_rotations
from tests.evaluation.conftest import TEXT, make_tokenizer


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join([TEXT] * 20))
    return tmp_path / "text.txt"


@pytest.fixture
def calibrate(run, tmp_path, text):
    """Run the command on a text of 400 tokens or so; return how it ended."""

    def call(checkpoint, *changes):
        return run(
            *("job=calibrate", f"checkpoint={checkpoint}", f"text={text}", f"output={tmp_path}/out/r.safetensors"),
            *("tokens=200", "device=cpu", *changes),
            tiny=False,
        )

    return call


def saved(model, folder):
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_the_command_writes_rotations_of_the_checkpoint_and_prints_the_errors_of_each_layer(
    request, calibrate, tmp_path, name
):
    folder = request.getfixturevalue(name)
    done = calibrate(folder, "sequence_length=64")
    assert done.status == 0, done.err
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = read_rotations(tmp_path / "out" / "r.safetensors", model)
    assert sorted(found.layers) == ([0] if name == "ours" else [0, 1])  # the other one is a recurrence
    assert found.tokens >= 180  # with the start of each sequence
    lines = [line for line in done.out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [*map(str, found.layers), "mean"]
    assert "tokens read" in done.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.safetensors"]


def test_the_same_command_gives_the_same_file(calibrate, tmp_path, llama):
    written = []
    for _ in range(2):
        assert calibrate(llama).status == 0
        written.append((tmp_path / "out" / "r.safetensors").read_bytes())
    assert written[0] == written[1]


def test_sequences_hold_every_token_once_and_each_begins_a_text():
    cut = sequences([*range(1, 11)], [0], 4, torch.device("cpu"))
    assert [row.tolist() for row in cut] == [[[0, 1, 2, 3]], [[0, 4, 5, 6]], [[0, 7, 8, 9]], [[0, 10]]]


def test_no_more_of_a_text_is_read_than_is_needed(tmp_path):
    (tmp_path / "t").write_text("a" * 1000 + "é" * 1000, encoding="utf-8")
    assert len(read_beginning(tmp_path / "t", 1500)) == 1500


def test_the_last_line_has_the_means():
    low, high = LayerErrors((0.1,) * 5, (0.5,) * 5), LayerErrors((0.3,) * 5, (0.6,) * 5)
    assert as_markdown({0: low, 3: high}).splitlines()[-1] == "| mean " + "| 0.200 " * 5 + "| 0.550 " * 5 + "|"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tokens=99", "tokens=99"),
        ("tokens=many", "tokens=many"),
        ("tokens=100000", "has 779 tokens, fewer than tokens=100,000"),
        ("sequence_length=1", "sequence_length=1"),
        ("sequence_length=9999", "is longer than the model's context"),
        ("text=/no/such/file", "text=/no/such/file cannot be read"),
        ("text=/dev", "text=/dev cannot be read"),
        ("output=/proc/nowhere/r.safetensors", "output=/proc/nowhere/r.safetensors cannot be written"),
        ("output=rotations.pt", "output=rotations.pt: give a .safetensors file"),
        ("checkpoint=/no/such/run", "checkpoint=/no/such/run is not a folder"),
        ("device=abacus", "device=abacus"),
        ("dtype=int8", "dtype=int8"),
        ("token=5", "did you mean tokens?"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(calibrate, llama, change, said):
    done = calibrate(llama, change)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert said in done.err


def test_a_text_that_is_no_text_is_one_line(calibrate, llama, text):
    text.write_bytes(b"\xff\xfe\x00")
    done = calibrate(llama)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "cannot be read" in done.err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda: LlamaForCausalLM(
                LlamaConfig(vocab_size=300, hidden_size=40, intermediate_size=8, num_attention_heads=2)
            ),
            "has heads 20 wide, which cannot be packed",
        ),
        (
            lambda: PalimpsestForCausalLM(
                PalimpsestConfig(vocab_size=300, hidden_size=32, num_layers=1, num_heads=2, mixers="gla")
            ),
            "no layer that caches keys and values",
        ),
    ],
)
def test_a_model_whose_cache_cannot_be_quantized_is_one_line(calibrate, tmp_path, model, said):
    done = calibrate(saved(model(), tmp_path / "model"))
    assert (done.status, done.err.strip().count("\n")) == (2, 0)
    assert said in done.err
    assert not (tmp_path / "out" / "r.safetensors").exists()


def test_the_help_names_the_job(run):
    assert "calibrate" in run("--help", tiny=False).out
