"""Unknown keys and choices are refused when the command line is composed, before torch is loaded."""

import ast
import inspect
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from lit_modules.launching import start
from lit_modules.launching.command_line import check_command_line
from lit_modules.launching.conf_files import ConfFiles
from lit_modules.launching.known_keys import OF_TRAINER
from lit_modules.launching.signatures import Arguments, arguments
from tests.conftest import ROOT

CONF = ROOT / "conf"
HEADER = "# @package _global_\n"


@pytest.fixture(scope="module", autouse=True)
def _resolvers():
    start.register_resolvers()


def said(*given: str) -> str | None:
    """Return the error line of a command line; None if it is accepted."""
    try:
        check_command_line(given, CONF)
    except ValueError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line
    return line


def write(folder: Path, text: str, name: str = "experiment/mine") -> tuple[str, ...]:
    """What to give the command for an experiment of one's own."""
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return ("--config-dir", str(folder), "experiment=mine")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("optimiser: {lr: 1e-1}", "optimiser is not known: did you mean optimizer?"),
        ("complie: true", "complie is not known: did you mean compile?"),
        ("loger: wandb", "loger is not known: did you mean logger?"),
        ("checkpoint_evry_tokens: 5", "did you mean checkpoint_every_tokens?"),
        ("strategy: {context_paralel: 2}", "did you mean strategy.context_parallel_size, for strategy=ddp?"),
        (
            "logger: wandb",
            "logger=wandb is not known: it has keys; to choose one give logger=wandb, or `override /logger: wandb`",
        ),
        ("callbacks: {sample: {temperature: 1.0}}", "callbacks.sample is not known: did you mean callbacks.samples?"),
        ("callbacks: {sampels: null}", "callbacks.sampels is not known: did you mean callbacks.samples?"),
        ("model: {num_haeds: 4}", "model.num_haeds is not known: did you mean model.num_heads?"),
        ("data: {source: {pckages: null}}", "data.source.pckages is not known: did you mean data.source.packages?"),
        ("trainer: {acelerator: cpu}", "trainer.acelerator is not known: did you mean trainer.accelerator?"),
        ("trainer: {max_steps: 5}", "trainer.max_steps follows from other keys: give max_tokens"),
        ("foo", "foo is not known: give one of max_tokens, "),
        ("model.num_layers: 2", "model.num_layers is one key with dots in it: write model: {num_layers: ...}"),
        ("optimizer: {betas: {a: 1}}", "optimizer.betas has no keys"),
        ("job: {target: x}", "job.target is not known: give one of makes_a_run"),
        ("defaults: [model: fox_pro_tiny]", "write `override /model: fox_pro_tiny`"),
        ("defaults: [override model: fox_pro_tiny]", "write `override /model: CHOICE`"),
        ("base: somewhere", "base is not a key of job=pretrain: it is for job=linearize"),
        ("job: {make_a_run: true}", "job.make_a_run is not known: did you mean job.makes_a_run?"),
        ("defaults: [fox/pro_360m]", "experiment=fox/pro_360m is not known: did you mean fox/fox_pro_360m, "),
        ("defaults: [override /modle: fox_pro_tiny]", "modle is not a group: did you mean model?"),
        ("defaults: [override /job: linearize]\nlora: {ranks: 8}", "lora.ranks is not known: did you mean lora.rank?"),
        ("defaults: [override /job: linearize]\nstages: {finetuning: {kll: 1}}", "did you mean stages.finetuning.kl?"),
        ("defaults: [override /job: linearize]\nstages: {alignmet: {kl: 1}}", "did you mean stages.alignment?"),
        ("defaults: [override /job: rewrite]\nrewrite: {attemps: 1}", "did you mean rewrite.attempts?"),
        ("defaults: [override /job: corpus]\ncorpus: {sources: {web: x}}", "corpus.sources.web is not known"),
    ],
)
def test_a_key_of_an_experiment_that_nothing_reads_is_refused_with_the_nearest(tmp_path, body, line):
    assert line in said(*write(tmp_path, HEADER + body + "\n"))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("+max_token=5", "max_token is not known: did you mean max_tokens?"),
        ("max_token=5", "max_token is not known: did you mean max_tokens?"),
        ("+foo=1", "foo is not known: give one of max_tokens, "),
        ("++model.num_haeds=3", "did you mean model.num_heads?"),
        (
            "checkpoint=here",
            "checkpoint is not a key of job=pretrain: it is for job=calibrate and job=evaluate and job=export",
        ),
        ("linearization=liger_gla", "linearization is for job=linearize"),
        ("+linearization=liger_gla", "linearization is not a key of job=pretrain: it is for job=linearize"),
        ("strategy.shard_size=4", "is not a key of strategy=auto: it is for strategy=fsdp and strategy=hsdp"),
        ("hydra.launcher.nodes=4", "is not a key of hydra/launcher=basic: it is for hydra/launcher=slurm"),
        ("-m model.num_haeds=1,2", "did you mean model.num_heads?"),
        (
            "-m logger=csv,wandb logger.wandb.project=x",
            "logger.wandb is not a key of logger=csv: it is for logger=wandb",
        ),
        ("data.source=foo", "data.source=foo is not known: it has keys, such as data.source.packages"),
        ("data.tokenizer=foo", "data.tokenizer=foo is not known: it has keys, such as data.tokenizer.vocab_size"),
        ("callbacks.samples=5", "callbacks.samples has no _target_"),
        ("data.source=null", "data.source=null leaves out what the job needs: give its keys"),
        ("model=null", "model=null is not a choice: give model=CHOICE, such as fox_llama_125m, "),
        (
            "data._target_=data_pipeline.datamodule.TextData",
            "data._target_=data_pipeline.datamodule.TextData has moved: give data_pipeline.tokens.datamodule.TextData",
        ),
        ("model._target_=5", "model._target_=5: give the path of a class or function, such as lit_modules.networks."),
        ("max_tokens.foo=1", "max_tokens has no keys: give max_tokens=VALUE"),
        ("job=corpus +corpus.cleaning.quality.rules.lengh=null", "did you mean corpus.cleaning.quality.rules.length?"),
        (
            "job=corpus +cleaning@corpus.cleaning.labels=labels corpus.cleaning.labels.backend=5",
            "corpus.cleaning.labels.backend=5 is not known: it has keys, such as corpus.cleaning.labels.backend.",
        ),
        ("job=corpus corpus.taks=3", "did you mean corpus.tasks?"),
        ("job=plan plan.gpuu=h200", "did you mean plan.gpu?"),
        ("job=evaluate benchmark.taks=[a]", "did you mean benchmark.tasks?"),
        ("job=rewrite rewrite.styles.textbook=5", "rewrite.styles.textbook=5 is not known: it has keys, such as "),
    ],
)
def test_a_key_of_the_command_line_that_nothing_reads_is_refused_with_the_nearest(given, line):
    assert line in said(*given.split())


@pytest.mark.parametrize(
    "given",
    [
        "+callbacks.mine._target_=lightning.pytorch.callbacks.Timer +callbacks.mine.duration=00:01:00:00",
        "+optimizer.fused=true +trainer.deterministic=true logger=wandb logger.wandb.project=x",
        "job=corpus +source@corpus.sources.web=web corpus.sources.web.paths=crawl corpus.cleaning.quality=null",
        "job=evaluate +benchmark.num_fewshot.arc_easy=5 checkpoint=here",
        "job=corpus +corpus.cleaning.quality.by_category.debug.length.min_doc_words=5 ~corpus.cleaning.masks",
        "job=plan experiment=liger/best plan.gpu=h200",
        "-m experiment=demo,liger/best,lolcats/llm,sigma/10b,supra/llm,fox/fox_pro_125m hydra/launcher=slurm",
        "data=mixture +data.components.mine.path=crawl",
    ],
)
def test_what_is_meant_is_taken(given):
    assert said(*given.split()) is None


def test_a_users_own_files_are_taken(tmp_path):
    write(tmp_path, HEADER + "plan: {gpu: a100}\ndata_dir: /scratch\n", "local/default")
    write(tmp_path, "_target_: torch.optim.SGD\n_partial_: true\nlr: 1.0\nmomentum: 0.9\n", "optimizer/mine")
    body = "defaults: [override /optimizer: mine]\noptimizer: {nesterov: true}\nstages_of_mine: null\n"
    assert "stages_of_mine is not known" in said(*write(tmp_path, HEADER + body))
    assert said(*write(tmp_path, HEADER + body.replace("stages_of_mine: null\n", ""))) is None
    write(tmp_path, "_target_: torch.optim.SGD\n_partial_: true\nmomentun: 0.9\n", "optimizer/mine")
    assert "did you mean optimizer.momentum?" in said(*write(tmp_path, HEADER + body))


def test_an_experiment_that_is_no_mapping_of_utf8_text_is_named(tmp_path):
    given = write(tmp_path, HEADER + "- a\n")
    assert said(*given).startswith(f"{tmp_path}/experiment/mine.yaml holds a list: give keys with values")
    (tmp_path / "experiment" / "mine.yaml").write_text(HEADER + "max_tokens: 5\n", encoding="utf-16")
    assert said(*given) == f"{tmp_path}/experiment/mine.yaml is not UTF-8 text: save it as UTF-8"


def test_an_experiment_without_its_first_line_is_pointed_out(tmp_path):
    assert said(*write(tmp_path, "seed: 5\n")) == "experiment/mine.yaml: give it the first line `# @package _global_`"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("experiment=fox", "experiment=fox is a folder: give one of fox/fox_llama_125m, "),
        ("experiment=fox/fox_pro_999b", "did you mean fox/fox_pro_760m, fox/fox_pro_360m or fox/fox_pro_125m?"),
        ("experiment=fox/pro_360m", "did you mean fox/fox_pro_360m, "),  # the names that these had
        ("experiment=fox/llama_760m_48b", "did you mean fox/fox_llama_760m_48b, "),
        ("experiment=dmeo", "did you mean demo?"),
        ("linearization=_bases job=linearize", "give one of joint, liger_gated_retention, "),
        (
            "schedule=wsd",
            "schedule=wsd is not known: give one of cosine, linear, plateau, warmup_stable_decay",
        ),
        (
            "job=rewrite rewrite/style=[textbok]",
            "rewrite/style=textbok is not known: ",
        ),
    ],
)
def test_a_choice_that_there_is_not_is_refused_with_those_that_there_are(given, line):
    assert line in said(*given.split())


def test_what_the_help_prints_can_be_used_as_it_is_written(run):
    examples, groups = run("--help", tiny=False).out.split("Examples\n")[1].split("Groups and their choices")
    for line in examples.replace("\\\n", "").strip().splitlines():
        command, *given = shlex.split(line)
        assert command == "palimpsest"
        assert said(*given) is None, line
    before, named = [], {"hydra/help", "hydra/job_logging"}
    for line in groups.partition("Everything in")[0].splitlines()[1:]:
        group, _, choices = line.strip().partition(": ")
        if line.startswith("With "):
            before = line.split()[1:]
        elif group:
            assert said(*before, f"{group}={choices.split(', ')[0]}") is None, line
            named.add(group.lstrip("+").partition("@")[0])
    there = {str(file.parent.relative_to(CONF)) for file in CONF.rglob("*.yaml") if "local" not in file.parts}
    assert {folder for folder in there if not folder.startswith("experiment/")} - {"."} == named


def test_nothing_heavy_is_loaded():
    code = (
        "import sys, pathlib\n"
        "from lit_modules.launching import command_line, start\n"
        "start.register_resolvers()\n"
        f"command_line.check_command_line(['experiment=demo', '+optimizer.fused=true'], pathlib.Path({str(CONF)!r}))\n"
        "print(sorted({'torch', 'lightning', 'transformers', 'datasets', 'wandb'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_arguments_are_read_in_folders_without_an_init_file(tmp_path, monkeypatch):
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "module.py").write_text("class Thing:\n    def __init__(self, size): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert arguments("outer.inner.module.Thing").names == ("size",)


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.AdamW",
        "lightning.Trainer",
        "lit_modules.schedules.WarmupStableDecay",
        "lit_modules.linearization.stages.TrainingStage",
        "data_pipeline.rewriting.backends.served.Served",
        "data_pipeline.tokens.datamodule.TextData",
    ],
)
def test_arguments_read_from_source_are_those_of_the_class(target):
    from hydra.utils import get_object

    kinds = inspect.signature(get_object(target)).parameters.values()
    found = arguments(target)
    assert set(found.names) == {each.name for each in kinds if each.kind is not inspect.Parameter.VAR_KEYWORD}
    assert found.others == any(each.kind is inspect.Parameter.VAR_KEYWORD for each in kinds)


def test_arguments_of_a_networks_configuration_are_its_own_fields_and_any_of_hugging_faces():
    from transformers import PreTrainedConfig

    from lit_modules.networks import PalimpsestConfig

    inherited = {each.name for each in fields(PreTrainedConfig)}
    own = [each.name for each in fields(PalimpsestConfig) if each.name not in inherited]
    assert arguments("lit_modules.networks.PalimpsestConfig") == Arguments(tuple(own), others=True)


def test_every_choice_has_the_keys_of_its_target():
    files = ConfFiles([CONF])
    for file in CONF.rglob("[!_]*.yaml"):
        body = files.whole(str(file.relative_to(CONF).with_suffix("")))
        target = body.get("_target_")
        if target and (found := arguments(target)) and found.names != ("cfg",) and not found.others:
            assert not {key for key in body if not key.startswith("_")} - set(found.names), file


def test_what_the_trainer_is_given_by_the_code_is_refused_as_a_key():
    tree = ast.parse((ROOT / "lit_modules" / "jobs" / "training_job.py").read_text())
    calls = [
        each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == "lightning.Trainer"
    ]
    given = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    assert given
    assert given <= set(OF_TRAINER) <= set(arguments("lightning.Trainer").names)
