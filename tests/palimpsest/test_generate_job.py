"""`job=generate` on a run, an export, and invalid paths."""

import io
import json
import sys

import pytest

from lit_modules.launching import run_folder


@pytest.fixture(scope="module")
def trained(workplace, tmp_path_factory):
    from tests.conftest import Command

    command = Command(workplace, tmp_path_factory.mktemp("trained"))
    process = command.start("seed=21", "max_tokens=2048", "callbacks.samples.prompts=[]")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return command.runs()[-1]


def generate(run, checkpoint, *overrides):
    return run("job=generate", f"checkpoint={checkpoint}", "max_new_tokens=12", "device=cpu", *overrides, tiny=False)


def test_a_run_and_its_export_write_the_same_text_from_the_same_seed(run, trained):
    texts = [generate(run, c, "prompt='the kernel'", "seed=3") for c in (trained, trained / "export")]
    assert texts[0].status == 0, texts[0].err
    assert texts[0].out == texts[1].out
    assert texts[0].out.startswith("the kernel")
    other = generate(run, trained, "prompt='the kernel'", "seed=4")
    assert other.out != texts[0].out


def test_temperature_zero_top_k_one_and_a_tiny_nucleus_are_greedy(run, trained):
    greedy = generate(run, trained, "prompt=a", "temperature=0").out
    assert generate(run, trained, "prompt=a", "top_k=1", "seed=5").out == greedy
    assert generate(run, trained, "prompt=a", "top_p=1e-6", "seed=6").out == greedy


def test_a_file_of_prompts_gives_what_each_gives_alone(run, trained, tmp_path):
    prompts = ["the kernel forgets", "a", "this head reads the state and then"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
    found = generate(run, trained, f"prompts_file={tmp_path}/prompts.txt", "temperature=0", "batch_size=2")
    records = [json.loads(line) for line in found.out.splitlines()]
    assert [r["prompt"] for r in records] == prompts
    for record in records:
        alone = generate(run, trained, f"prompt='{record['prompt']}'", "temperature=0").out
        assert alone.rstrip("\n") == (record["prompt"] + record["text"]).rstrip("\n")
    written = generate(
        run, trained, f"prompts_file={tmp_path}/prompts.txt", "temperature=0", f"output={tmp_path}/o.jsonl"
    )
    assert written.out == ""
    assert [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()] == records


def test_a_prompt_is_the_same_text_on_the_command_line_in_a_file_and_on_standard_input(
    run, trained, tmp_path, monkeypatch
):
    text = 'What\'s up, "${x}"?\n\ttrue: def f(x):'
    found = generate(run, trained, f"prompt={text}", "temperature=0")
    assert found.status == 0, found.err
    assert found.out.startswith(text)
    (tmp_path / "prompt.txt").write_text(f"{text}\n")
    assert generate(run, trained, f"prompt_file={tmp_path}/prompt.txt", "temperature=0").out == found.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n".encode())))
    assert generate(run, trained, "prompt_file=-", "temperature=0").out == found.out


def test_an_unfinished_run_generates_from_its_newest_checkpoint(run, trained, tmp_path):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "export")
    (copy / run_folder.SUMMARY).unlink()
    whole = generate(run, trained, "prompt=a", "temperature=0").out
    assert generate(run, copy, "prompt=a", "temperature=0").out == whole


def test_generating_leaves_no_files(run, trained, command):
    before = set(command.folder.rglob("*"))
    generate(run, trained, "prompt=a")
    assert set(command.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "prompt="),
        (["prompt=a", "prompts_file=b"], "prompt="),
        (["prompt=a", "prompt_file=b"], "prompt_file="),
        (["prompt_file=/nonexistent.txt"], "prompt_file=/nonexistent.txt"),
        (["prompt=Hello,", "world"], "world is not key=value: put quotes around the whole prompt"),
        (["prompt=a", "output=o.jsonl"], "output=o.jsonl is for prompts_file=FILE"),
        (["prompt=a", "batch_size=2"], "batch_size=2 is for prompts_file=FILE"),
        (
            ["prompt=a", "max_tokens=5"],
            "max_tokens=5 changes nothing with job=generate: leave it out; did you mean max_",
        ),
        (["prompt=a", "model.num_layers=2"], "model.num_layers=2 changes nothing with job=generate"),
        (["prompt=a", "data=alpaca"], "data=alpaca changes nothing with job=generate"),
        (["prompts_file=/nonexistent.txt"], "prompts_file=/nonexistent.txt"),
        (["prompt=a", "temperature=-1"], "temperature=-1"),
        (["prompt=a", "top_p=0"], "top_p=0"),
        (["prompt=a", "top_k=0"], "top_k=0"),
        (["prompt=a", "max_new_tokens=0"], "max_new_tokens=0"),
        (["prompt=a", "device=abacus"], "device=abacus"),
        (["prompt=a", "checkpoint=/nonexistent/run"], "checkpoint=/nonexistent/run is not a folder"),
        (["prompt=a", "temperature=abc"], "temperature=abc"),
        (["prompt=a", "top_k=1.5"], "top_k=1.5"),
        (["prompts_file=5"], "prompts_file=5"),
        ([f"prompts_file={__file__}", "output=/proc/nowhere/o.jsonl"], "output=/proc/nowhere/o.jsonl"),
    ],
)
def test_what_cannot_be_generated_from_is_refused_in_one_line(run, trained, overrides, said):
    given = [] if any(o.startswith("checkpoint=") for o in overrides) else [f"checkpoint={trained}"]
    found = run("job=generate", *given, *overrides, tiny=False)
    assert found.status == 2
    assert said in found.err.splitlines()[-1]
    assert "Traceback" not in found.err


def test_an_export_that_lacks_a_file_is_named(run, trained, tmp_path):
    import shutil

    copy = tmp_path / "export"
    shutil.copytree(trained / "export", copy)
    (copy / "model.safetensors").unlink()
    found = generate(run, copy, "prompt=a")
    assert found.status == 2
    assert f"checkpoint={copy}" in found.err


def test_a_truncated_export_is_named(run, trained, tmp_path):
    import os
    import shutil

    copy = tmp_path / "export"
    shutil.copytree(trained / "export", copy)
    os.truncate(copy / "model.safetensors", 1000)
    found = generate(run, copy, "prompt=a")
    assert found.status == 2
    assert f"checkpoint={copy} cannot be loaded" in found.err


def test_one_checkpoint_of_a_run_can_be_read(run, trained):
    newest = sorted((trained / "checkpoints").glob("step_*"))[-1]
    whole = generate(run, trained, "prompt=a", "temperature=0").out
    assert generate(run, newest, "prompt=a", "temperature=0").out == whole


def test_a_damaged_checkpoint_is_named_with_its_file(run, trained, tmp_path):
    import shutil

    newest = sorted((trained / "checkpoints").glob("step_*"))[-1]
    copy = shutil.copytree(newest, tmp_path / newest.name)
    (copy / "__0_0.distcp").unlink()
    found = generate(run, copy, "prompt=a")
    assert found.status == 2
    assert f"checkpoint={copy} cannot be loaded: __0_0.distcp is missing" in found.err


def test_without_a_bos_prompts_begin_with_the_eos_that_training_put_before_documents(trained):
    from transformers import AutoTokenizer

    from lit_modules.generation.job import continue_prompts, load

    model, tokenizer = load(str(trained))
    expected = continue_prompts(model, tokenizer, ["a", "the kernel"], 8, {"do_sample": False})
    bare = AutoTokenizer.from_pretrained(trained / "tokenizer")
    bare.bos_token = bare.pad_token = None
    assert bare.bos_token_id is None
    assert bare.pad_token_id is None
    assert continue_prompts(model, bare, ["a", "the kernel"], 8, {"do_sample": False}) == expected
    assert len(continue_prompts(model, bare, [""], 8, {"do_sample": False})) == 1
    bare.eos_token = None  # the model's own settings still end a text
    assert continue_prompts(model, bare, ["a", "the kernel"], 8, {"do_sample": False}) == expected


def test_an_output_that_is_there_stays_until_there_is_something_to_put_in_its_place(run, trained, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    output = tmp_path / "old.jsonl"
    output.write_text("precious\n")
    overrides = (f"prompts_file={tmp_path}/prompts.txt", f"output={output}")
    assert generate(run, tmp_path / "nowhere", *overrides).status == 2
    assert output.read_text() == "precious\n"
    assert generate(run, trained, *overrides, "temperature=0").status == 0
    assert json.loads(output.read_text())["prompt"] == "a"


@pytest.mark.parametrize("cache", ["logquant", "partial_logquant", "streaming_llm", "h2o", "selective_v"])
def test_a_cache_that_holds_and_reads_all_changes_no_text(run, trained, cache):
    groups = (
        [] if cache in ("streaming_llm", "h2o", "selective_v") else ["cache.keys.group=16", "cache.values.group=16"]
    )
    asked = ("prompt='the kernel'", "temperature=0")
    full, compressed = (generate(run, trained, *asked, *more) for more in ([], [f"cache={cache}", *groups]))
    assert compressed.status == 0, compressed.err
    assert compressed.out == full.out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["cache=logquant", "cache.window=0"], "cache.window=0: give a whole number, 1 or more"),
        (["cache=logquant", "cache.keys.bits=3"], "cache.keys.bits=3: give one of 0, 2, 4, 16"),
        (["cache=oscar"], "cache.rotations=null with keys.transform=rotation: name the file that job=calibrate wrote"),
        (
            ["cache=best"],
            "cache.rotations=null with keys.transform=balanced: name the file that job=calibrate wrote (palimpsest "
            "job=calibrate checkpoint=CHECKPOINT text=TEXT output=FILE.safetensors)",
        ),
        (
            ["cache=best", "cache.rotations=nowhere.safetensors"],
            "rotations=nowhere.safetensors is not a file: give the output of job=calibrate (palimpsest job=calibrate ",
        ),
        (["cache=logquant", "cache.values.group=64"], "is not a multiple of group=64: give a group that divides it"),
        (["cache=selective_v", "cache.top_values=0"], "cache.top_values=0: give a whole number, 1 or more"),
        (
            ["cache=logquant", "cache.top_values=100"],
            "cache.top_values=100 reads tokens of 16 bits, but keys.bits=2: set keys.bits=16 and values.bits=16, or ",
        ),
        (["cache=h2o", "cache.values.keep=recent"], "cache.values.keep=recent chooses for keys and values at once"),
    ],
)
def test_a_cache_that_does_not_fit_ends_in_one_line(run, trained, overrides, line):
    found = generate(run, trained, "prompt=a", *overrides)
    assert found.status == 2
    assert line in found.err
    assert len(found.err.splitlines()) == 1
    assert found.out == ""
