"""One step of training with every block sharded over two processes (FSDP2), and the same step without: a program.

    python sharded_step.py RANK FILE

FILE does not exist yet; the two processes meet there. Prints as JSON how far the parameters of the two networks lie
apart after the step, and how far the step went.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM


def fresh() -> PalimpsestForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "intermediate_size": 96}
    mixers = ["attention", "hgrn2", "mamba2", "hgrn2"]  # parameters of blocks, and one that two of them share
    return PalimpsestForCausalLM(PalimpsestConfig(**sizes, qk_norm=True, mixers=mixers, state_dim=8))


def step(model: PalimpsestForCausalLM, ids: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(ids, shift_labels=ids.roll(-1, 1)).loss.backward()
    optimizer.step()


def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def main(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    ids = torch.randint(0, 61, (2, 160), generator=torch.Generator().manual_seed(1))
    whole, sharded = fresh(), fresh()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    step(whole, ids)
    step(sharded, ids[rank : rank + 1])
    parameters = [x.detach() for x in whole.parameters()]
    gathered = [x.detach().full_tensor() for x in sharded.parameters()]
    before = [x.detach() for x in fresh().parameters()]
    apart, moved = largest_difference(parameters, gathered), largest_difference(parameters, before)
    print(json.dumps({"apart": apart, "moved": moved}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
