"""Each rank's progress and current action, and the wording of the watchdog's findings."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch.profilers import PassThroughProfiler, Profiler

# Actions of Lightning's profiler, by the last part of the name, and their wording for users.
ACTION_NAMES = {
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
LONG_ACTIONS = {"starts", "reports and checkpoints", "writes a checkpoint"}


@dataclass
class RankProgress:
    """How far a rank has come.

    Attributes:
        count: actions started so far.
        step: the last complete optimizer step.
        beat: a heartbeat that grows while the process lives.
        error: the error it failed with.
    """

    rank: int
    host: str
    gpu: int | None
    count: int = 0
    step: int = 0
    doing: str = "starts"
    beat: int = 0
    error: str | None = None

    def gpu_text(self) -> str:
        """Return the GPU as text."""
        return "" if self.gpu is None else f" (GPU {self.gpu})"


class ActionProfiler(PassThroughProfiler):
    """A profiler that reports each started action to the watchdog, and forwards to the previous profiler."""

    def __init__(self, inner: Profiler, mark: Callable[[str], None]) -> None:
        super().__init__()
        self.inner, self.mark = inner, mark

    def start(self, action_name: str) -> None:
        doing = ACTION_NAMES.get(action_name.rpartition(".")[2])
        if doing is not None:
            self.mark(doing)
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)

    def describe(self) -> None:
        self.inner.describe()


def furthest_behind(places: list[RankProgress], seconds: float) -> tuple[RankProgress, str]:
    """Return the rank that is furthest behind, and a description of its work and of the ranks waiting for it."""
    least = min(place.count for place in places)
    culprit, *others = sorted((p for p in places if p.count == least), key=lambda place: place.rank)
    ahead = next((place for place in places if place.count > least), None)
    where, others_too = culprit.gpu_text(), other_ranks(others)
    words = f"hangs{where}: {culprit.doing} since step {culprit.step}, for {seconds:.0f} s{others_too}"
    if ahead is not None:
        words = f"{words}; the others wait for it ({ahead.doing})"
    return culprit, words


def describe_silent_ranks(silent: list[RankProgress]) -> str:
    """Describe ranks whose heartbeat has stopped."""
    culprit, *others = silent
    return (
        f"no longer answers{culprit.gpu_text()}: killed, out of memory, stopped, or its node is down"
        f"{other_ranks(others)}; last seen: {culprit.doing} since step {culprit.step}"
    )


def other_ranks(places: list[RankProgress], most: int = 4) -> str:
    """Name further ranks in the same state, at most `most` of them."""
    if not places:
        return ""
    named = ", ".join(f"rank {place.rank} on {place.host}{place.gpu_text()}" for place in places[:most])
    return f" (so with {named}{f' and {len(places) - most} more' if len(places) > most else ''})"
