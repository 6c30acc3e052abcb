"""Shared fixtures of whole runs: a small text, and the command in this process or a separate one."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hydra
import hypothesis
import pytest
import torch
from omegaconf import DictConfig

from common.uncollected import uncollected

if not torch.cuda.is_available():
    # Triton's kernels are defined when they are imported, for a GPU or for its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["HF_HUB_OFFLINE"] = "1"  # what no test reaches by a name, none shall look up

ROOT = Path(__file__).resolve().parent.parent

# A model and lengths that train in seconds on a CPU; the tokenizer and the blocks are prepared once a session.
TINY = (
    "data=text_files",
    "trainer=cpu",
    "model=fox_pro_tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=64",
    "tokenizer.vocab_size=384",
    "model.vocab_size=384",
    "data.block_length=128",
    "data.sequence_length=64",
    "data.validation_length=128",
    "data.batch_tokens=512",
    "data.micro_batch_size=4",
    "data.validation_fraction=0.1",
    "data.processes=1",
    "max_tokens=10240",
    "log_every_tokens=1024",
    "validate_every_tokens=5120",
    "checkpoint_every_tokens=2048",
    "schedule.warmup_tokens=1024",
    "callbacks.samples.max_new_tokens=8",
    "callbacks.forget_gates=null",
    "callbacks.position_loss=null",
)
PICTURES = ("callbacks.forget_gates.tokens=32", "callbacks.forget_gates.heads=1", "callbacks.position_loss.window=101")
"""What a run is given besides for the pictures of its network: to draw them takes as long as to train it."""


def composed(file: str, *overrides: str) -> DictConfig:
    """Compose a file of conf/ with its includes, such as model/fox_pro_125m; its keys are below its group's name."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose(file, list(overrides))


def write_text(folder: Path, documents: int = 120) -> Path:
    """Write a folder of learnable text: sentences from a small grammar, the same on every machine."""
    draw = random.Random(0)
    subjects, verbs = ["the kernel", "a gate", "this head", "the cache"], ["forgets", "keeps", "reads", "writes"]
    objects, ends = ["the key", "a value", "every token", "the state"], [".", ", then stops.", " again."]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        sentences = (
            f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)} {number}{draw.choice(ends)}"
            for _ in range(draw.randint(2, 40))
        )
        (folder / f"{number:03d}.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return folder


LONGEST = (
    "test_survival.py",
    "test_pretrain_job.py",
    "test_triton_recurrence.py",
    "test_triton_attention.py",
    "test_launching.py",
    "test_triton_compilation.py",
    "test_executor.py",
    "test_job.py",
    "test_generate_job.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="after which a process starts no further test: make quick")
    parser.addoption("--soak-seconds", type=float, help="of each kernel beside each neighbour in test_soak.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the files that take minutes first, so that none is left alone at the end. The cluster's runs, which mostly
    wait, run one at a time in parallel with files that compute."""
    if config.getoption("--seconds"):
        return  # the nearest first
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(Path(item.fspath).name, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect the tests without searching what that imports and makes for garbage."""
    with uncollected():
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Make a failed hypothesis test print how to reproduce it."""
    hypothesis.settings.register_profile("repeatable", hypothesis.settings.default, print_blob=True)
    hypothesis.settings.load_profile("repeatable")


STARTED = pytest.StashKey[float]()
"""When this process started its first test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    spent = time.monotonic() - item.config.stash.setdefault(STARTED, time.monotonic())
    if (seconds := item.config.getoption("--seconds")) and spent > seconds:
        pytest.skip("make quick has no time left for it: make test")


@pytest.fixture(autouse=True)
def the_same_draws_alone_as_among_others() -> None:
    """Seed the default generators before each test, so that it draws the same alone and after others."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def drawn_seed() -> int:
    """Return a seed that differs between runs; a failure shows it, and PALIMPSEST_TEST_SEED repeats it."""
    seed = int(os.environ.get("PALIMPSEST_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"PALIMPSEST_TEST_SEED={seed} repeats what this test draws")
    return seed


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """At the tests' sizes threads only wait for one another: on busy cores they made them ten times slower. The command
    in a process of its own has one, too: runs that are compared bit for bit must add in the same order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `text/`; prepared data goes to its `data/`."""
    folder = tmp_path_factory.mktemp("workplace")
    write_text(folder / "text")
    return folder


@dataclass
class Finished:
    """Result of a command."""

    status: int
    out: str
    err: str


@dataclass
class Command:
    """`palimpsest` with the tiny settings, in its own folder of runs."""

    folder: Path
    runs_dir: Path

    def arguments(self, *overrides: str) -> list[str]:
        given = {o.split("=")[0].lstrip("+~") for o in overrides}
        places = (
            f"data.source.path={self.folder}/text/*.txt",
            f"data_dir={self.folder}/data",
            f"runs_dir={self.runs_dir}",
        )
        # What is null here has no keys that could be given.
        given |= {key.rpartition(".")[0] for key in given if f"{key.rpartition('.')[0]}=null" in TINY}
        settings = [o for o in (*TINY, *places) if o.split("=")[0] not in given]
        return sorted((*settings, *overrides), key=lambda o: not o.startswith("-"))  # flags first

    def start(self, *overrides: str, **kwargs) -> subprocess.Popen:
        """Start the command in a separate process."""
        return subprocess.Popen(
            [sys.executable, str(ROOT / "palimpsest.py"), *self.arguments(*overrides)],
            cwd=self.folder,
            env={**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **kwargs,
        )

    def runs(self, experiment: str = "default") -> list[Path]:
        """Return the folders of its runs, oldest first."""
        parent = self.runs_dir / experiment
        return sorted(parent.iterdir()) if parent.is_dir() else []


@pytest.fixture
def command(workplace: Path, tmp_path: Path) -> Command:
    return Command(workplace, tmp_path / "runs")


@pytest.fixture
def run(command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Run the command in this process; return its exit status and output."""
    import logging

    import palimpsest

    def call(*overrides: str, tiny: bool = True) -> Finished:
        monkeypatch.chdir(command.folder)
        monkeypatch.setattr(sys, "argv", ["palimpsest", *(command.arguments(*overrides) if tiny else overrides)])
        level, handlers = logging.root.level, list(logging.root.handlers)
        capfd.readouterr()
        status = 0
        try:
            palimpsest.main()
        except SystemExit as end:
            status = end.code or 0
        finally:
            logging.root.setLevel(level)
            logging.root.handlers = handlers
        return Finished(status, *capfd.readouterr())

    return call
