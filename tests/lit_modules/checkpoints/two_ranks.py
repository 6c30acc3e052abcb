"""What two ranks do with checkpoints, as one program, since a process takes seconds to start: `two_ranks.py FOLDER
RANK`, with torchrun's variables. Each rank leaves FOLDER/rank_<n>.json: what was recorded in each case."""

import json
import logging
import sys
from pathlib import Path

import torch

from lit_modules.checkpoints import folders, writing
from lit_modules.parallel.strategies import DataParallel, Sharded
from tests.lit_modules.checkpoints import training

folder = Path(sys.argv[1])
found: dict[str, dict] = {}
rank = int(sys.argv[2])


def case(name: str, strategy, *, resume: str | None = None, **settings) -> None:
    """Run one training, from the start or from the third step of another training."""
    path = None if resume is None else folder / resume / "checkpoints" / "step_00000003"
    recorder, _ = training.train(folder / name, strategy, devices=2, resume=path, **settings)
    found[name] = {"losses": recorder.losses, "draws": recorder.draws}


torch.set_num_threads(1)
logging.basicConfig(filename=folder / f"rank_{rank}.log", format="%(message)s")
case("sharded", Sharded(), recorder=training.Recorder(step_1=lambda module: torch.manual_seed(rank)))
case("replicated", DataParallel())
case("copies_of_shards", Sharded(shard_size=1))
case("sharded_from_replicated", Sharded(), resume="replicated")
case("replicated_from_sharded", DataParallel(), resume="sharded")
case("sharded_from_copies", Sharded(), resume="copies_of_shards")
case("sharded_from_one", Sharded(), resume="one")
case("sharded_again", Sharded(), resume="sharded")

writing.VISIBLE_SECONDS = 0.2
real_write, real_partial = writing.TensorFileWriter.write_data, folders.partial_path


def refuse(self, *args, **kwargs):
    if rank == 1 and "step_00000003" in str(self.path):
        raise OSError(28, "No space left on device")
    return real_write(self, *args, **kwargs)


writing.TensorFileWriter.write_data = refuse
case("full_disk", Sharded())
writing.TensorFileWriter.write_data = real_write


def elsewhere(path: Path) -> Path:
    return real_partial(path if rank == 0 else folder / "disk_of_another_node" / "checkpoints" / path.name)


writing.partial_path = elsewhere
case("not_shared", Sharded())
(folder / f"rank_{rank}.json").write_text(json.dumps(found))
