"""Networks made on the meta device, spread over two or four ranks and then initialized: a program.

    python spread_initialization.py RANKS FILE

FILE does not exist yet; the processes meet there. Prints as JSON, for each network, the names of the parameters that
differ on any rank from those of the ordinary constructor, and whether the random generator ended elsewhere.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.parallel.materializing import materialize
from lit_modules.parallel.tensor import split_tensors

SIZES = {"vocab_size": 61, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "intermediate_size": 96}
PRO = {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True}
SPLIT = {
    "fox_pro": PRO,
    "sigma": {"rope": True, "num_key_heads": 2, "key_head_dim": 8, "augmented_query_dim": 72},
    "learned_times": {"forget_gate": "data_independent", "gate_time_min": 2.0, "gate_time_max": 64.0},
}
SHARDED = {
    "tied": {"tie_word_embeddings": True},
    "hybrid": {"mixers": ["hgrn2", "mamba2", "hgrn2"], "state_dim": 8, "short_conv_width": 4},
    "gla_and_gsa": {"mixers": ["gla", "gsa", "attention"], "state_dim": 8},
}


def differing(config: PalimpsestConfig, spread) -> list[str]:
    torch.manual_seed(5)
    expected = PalimpsestForCausalLM(config)
    end = torch.random.get_rng_state()
    torch.manual_seed(5)
    with torch.device("meta"):
        model = PalimpsestForCausalLM(config)
    spread(model)
    materialize(model, torch.device("cpu"))
    names = [] if torch.random.get_rng_state().equal(end) else ["the random generator"]
    found = dict(model.named_parameters())
    assert list(found) == [name for name, _ in expected.named_parameters()]
    for name, parameter in expected.named_parameters():
        whole = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        if not whole.equal(parameter):
            names.append(name)
    ids = torch.arange(61)[None]
    loss, of_spread = (m(ids, shift_labels=ids).loss for m in (expected, model))
    of_spread.backward()
    return names if abs(loss - of_spread) < 1e-5 else [*names, "the loss"]


def main(rank: int, ranks: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
    everyone = init_device_mesh("cpu", (ranks,))
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tensor"))

    def shard(model: PalimpsestForCausalLM) -> None:
        for block in model.model.layers:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)

    def split(model: PalimpsestForCausalLM) -> None:
        split_tensors(model, mesh["tensor"])
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=everyone)

    ways = dict.fromkeys(SPLIT, split) | dict.fromkeys(SHARDED, shard)
    results = {}
    for name, switches in (SPLIT | SHARDED).items():
        of_ranks = [None] * ranks
        dist.all_gather_object(of_ranks, differing(PalimpsestConfig(**SIZES | switches), ways[name]))
        results[name] = of_ranks
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    # forked: what was imported above is shared by all
    torch.multiprocessing.start_processes(main, (ranks, sys.argv[2]), nprocs=ranks, start_method="fork")
