"""How far each rank has come, what it is doing, and what the watchdog says of those that are behind."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch.profilers import PassThroughProfiler, Profiler

# What Lightning's profiler sees begin, by the last part of its name, and how a person says it.
WORK = {
    "train_dataloader_next": "waits for data",
    "training_step": "forward pass",
    "backward": "backward pass",
    "configure_gradient_clipping": "clips gradients",
    "on_train_batch_end": "reports and checkpoints",
    "save_checkpoint": "writes a checkpoint",
    "val_next": "waits for held-out data",
    "validation_step": "validates",
    "on_validation_end": "reports and checkpoints",
}
LONG = {"starts", "reports and checkpoints", "writes a checkpoint"}


@dataclass
class RankProgress:
    """How far a rank has come. `count`: of what has begun; `step`: the last whole optimizer step; `beat`: grows as long
    as the process lives; `error`: what it failed with."""

    rank: int
    host: str
    gpu: int | None
    count: int = 0
    step: int = 0
    doing: str = "starts"
    beat: int = 0
    error: str | None = None

    def where(self) -> str:
        """Its GPU in words."""
        return "" if self.gpu is None else f" (GPU {self.gpu})"


class Marks(PassThroughProfiler):
    """Tells the watchdog what begins, and passes it on to the profiler that was there."""

    def __init__(self, inner: Profiler, mark: Callable[[str], None]) -> None:
        super().__init__()
        self.inner, self.mark = inner, mark

    def start(self, action_name: str) -> None:
        doing = WORK.get(action_name.rpartition(".")[2])
        if doing is not None:
            self.mark(doing)
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)

    def describe(self) -> None:
        self.inner.describe()


def furthest_behind(places: list[RankProgress], seconds: float) -> tuple[RankProgress, str]:
    """The rank that is furthest behind, and in words what it does, and others; where none is, what all do."""
    least = min(place.count for place in places)
    culprit, *others = sorted((p for p in places if p.count == least), key=lambda place: place.rank)
    ahead = next((place for place in places if place.count > least), None)
    told = f"hangs{culprit.where()}: {culprit.doing} since step {culprit.step}, for {seconds:.0f} s{too(others)}"
    if ahead is not None:
        told = f"{told}; the others wait for it ({ahead.doing})"
    return culprit, told


def no_answer(silent: list[RankProgress]) -> str:
    """What is said of ranks whose beat has stopped."""
    culprit, *others = silent
    return (
        f"no longer answers{culprit.where()}: killed, out of memory, stopped, or its node is down{too(others)}; "
        f"last seen: {culprit.doing} since step {culprit.step}"
    )


def too(places: list[RankProgress], most: int = 4) -> str:
    """Further ranks of which the same is true, the first few of many by name."""
    if not places:
        return ""
    named = ", ".join(f"rank {place.rank} on {place.host}{place.where()}" for place in places[:most])
    return f" (so with {named}{f' and {len(places) - most} more' if len(places) > most else ''})"
