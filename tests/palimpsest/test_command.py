"""The command line: help, and errors raised before any data is read."""

import errno
import importlib.metadata
import resource
import subprocess
import sys

import pytest
from hydra.errors import InstantiationException

import palimpsest
from lit_modules.launching.conf_files import ConfFiles
from tests.conftest import ROOT, composed

pytestmark = pytest.mark.core


def test_help_takes_under_two_seconds_of_a_core_without_torch_and_names_jobs_and_experiments():
    code = (
        "import sys, palimpsest\nsys.argv = ['palimpsest', '--help']\n"
        "try: palimpsest.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'transformers', 'datasets', 'wandb'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    seconds = []
    for _ in range(3):  # the machine may be busy, which slows a core, too: one of three is enough
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 2:
            break
    assert min(seconds) < 2
    assert "HEAVY []" in found.stdout
    for said in (
        "pretrain",
        "generate",
        "fox/fox_pro_360m",
        "demo",
        "palimpsest experiment=demo",
        "job=generate checkpoint=",
    ):
        assert said in found.stdout


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.batch_tokens=700"], "data.batch_tokens=700"),
        (["data.micro_batch_size=3"], "data.micro_batch_size=3"),
        (["data.sequence_length=256"], "data.sequence_length=256"),
        (["data.sequence_length=48"], "data.sequence_length=48"),
        (["model.num_heads=5"], "num_heads=5"),
        (["model.forget_gate=sometimes"], "forget_gate"),
        (["experiment=fox/fox_pro_999b"], "experiment=fox/fox_pro_999b"),
        (["experiment=fox/fox_pro_125m"], "palimpsest: data.source.path is missing: give it a value"),
        (["experiment=liger/gla"], "palimpsest: base is missing: give it a value"),
        (["optimizer.lr=abc"], "optimizer"),
        (["optimizer.learning_rate=1"], "optimizer.learning_rate"),
        (["schedule.warmup_tokens=20000"], "schedule.warmup_tokens=20000"),
        (["schedule=wsd"], "schedule=wsd"),
        (["max_tokens=0"], "max_tokens=0"),
        (["validation_tokens=0"], "validation_tokens=0"),
        (["max_tokens=many"], "max_tokens=many"),
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed"),
        (["trainer.accelerator=cuda"], "trainer"),
        (["callbacks.position_loss.window=100"], "callbacks.position_loss.window=100"),
        (["callbacks.checkpoints.keep_last=0"], "callbacks.checkpoints.keep_last=0"),
        (["resume=runs/nowhere"], "palimpsest: resume=runs/nowhere"),
        (["-m", "resume=runs/nowhere"], "resume=runs/nowhere is not the folder of a run or of a sweep"),
        (["trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val=-1"),
        (["trainer.gradient_clip_val=abc"], "trainer.gradient_clip_val=abc"),
        (["trainer.devices=abc"], "trainer"),
        (["+trainer.bogus=1"], "trainer"),
        (["optimizer.betas=[0.9]"], "optimizer"),
        (["schedule.final=abc"], "schedule.final=abc"),
        (["callbacks.samples.max_new_tokens=0"], "callbacks.samples.max_new_tokens=0"),
        (["callbacks.forget_gates.heads=0"], "callbacks.forget_gates.heads=0"),
        (["compile=maybe"], "compile=maybe"),
        (["seed=-1"], "seed=-1"),
        (["logger=wandb", "logger.wandb.mode=sometimes"], "logger.wandb.mode=sometimes"),
        (["job._target_=nope.run"], "job._target_=nope.run"),
        (["job._target_=os.getcwd"], "job._target_=os.getcwd is not a job: give a function of one argument, cfg"),
        (["modle.num_heads=2"], "palimpsest: modle is not known: did you mean model?"),
        (["+max_token=5"], "palimpsest: max_token is not known: did you mean max_tokens?"),
        (["max_tokens"], "palimpsest: max_tokens cannot be read as KEY=VALUE: "),
        (["model.mixers=[attention"], "palimpsest: model.mixers=[attention cannot be read as KEY=VALUE: "),
    ],
)
def test_a_config_that_cannot_work_is_refused_in_one_line_that_names_the_key(run, command, overrides, said):
    # there is no text: the error must come before the command looks for it
    places = [] if any("experiment" in o for o in overrides) else ["data.source.path=/nonexistent/*.txt"]
    if places:
        found = run(*overrides, *places)
    else:
        found = run(*overrides, f"runs_dir={command.runs_dir}", "trainer=cpu", tiny=False)
    assert found.status == 2
    assert said in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert "Traceback" not in found.err
    assert not [p for p in command.runs_dir.rglob("*") if p.is_file()]


def test_debug_shows_the_traceback(run):
    with pytest.raises(InstantiationException, match="num_heads=5"):
        run("model.num_heads=5", "debug=true")


def test_the_other_package_named_kernels_is_pointed_out(run, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9" if name == "kernels" else version(name))
    found = run("--help", tiny=False)
    assert found.status == 2
    assert "kernels 0.9" in found.err
    assert "pip uninstall kernels" in found.err


@pytest.mark.parametrize("experiment", ConfFiles([ROOT / "conf"]).choices("experiment"))
def test_every_experiment_composes_and_builds_its_parts(experiment):
    import hydra
    import torch
    from omegaconf import OmegaConf

    from lit_modules.jobs.linearize import build_stage
    from lit_modules.jobs.training_job import check_settings
    from lit_modules.launching import start
    from lit_modules.networks import PalimpsestForCausalLM

    start.register_resolvers()
    cfg = composed("config", f"experiment={experiment}")
    # Values that only the user knows.
    if OmegaConf.is_missing(cfg, "base"):
        cfg.base = "/given"
    if "source" in cfg.data and OmegaConf.is_missing(cfg.data.source, "path"):
        cfg.data.source.path = "/given"
    check_settings(cfg)
    data = hydra.utils.instantiate(cfg.data)
    assert data.accumulation(1) * data.micro_batch_size * data.sequence_length == cfg.data.batch_tokens
    schedule = hydra.utils.instantiate(cfg.schedule)
    assert schedule(cfg.schedule.get("warmup_tokens", 0)) == 1
    if "model" not in cfg:  # that of `base` is changed
        hydra.utils.instantiate(cfg.linearization, _convert_="all")
        assert [build_stage(name, stage) for name, stage in cfg.stages.items() if stage is not None]
        return
    with torch.device("meta"):
        PalimpsestForCausalLM(hydra.utils.instantiate(cfg.model, _convert_="all"))


@pytest.mark.parametrize(
    ("module", "extra"), [("warcio", "corpus"), ("openai.types", "rewrite"), ("lxml_html_clean", "corpus")]
)
def test_a_package_that_is_missing_is_one_line_that_names_the_extra(capsys, module, extra):
    with pytest.raises(SystemExit) as ended, palimpsest.one_line_errors():
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert module in line
    assert f"palimpsest-lm[{extra}]" in line


def test_a_module_of_no_extra_keeps_its_traceback():
    with pytest.raises(ModuleNotFoundError), palimpsest.one_line_errors():
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")


def test_a_full_disk_ends_a_start_in_one_line(run, command, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "config.yaml")

    monkeypatch.setattr(palimpsest.start, "prepare_rank", full)
    found = run()
    assert found.status == 1
    assert (
        found.err == "palimpsest: config.yaml could not be written (No space left on device): make room, then retry\n"
    )
