"""Two steps of training with the heads of every layer split over ranks, and the same two on one device: a program.

    python split_training.py RANKS FILE

FILE does not exist yet; the processes meet there. Two ranks share all heads; of four, two pairs share them, and each
pair's part of the weights is spread over two ranks (FSDP2). Prints as JSON, for each network, how far the results lie
apart on any rank.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.parallel.gradients import clip_gradients
from lit_modules.parallel.recomputing import apply_recomputation
from lit_modules.parallel.tensor import split_tensors

SIZES = {"vocab_size": 61, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96}
PRO = {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True}
TIMES = {"gate_time_min": 2.0, "gate_time_max": 64.0}
FEWER = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8}
NETWORKS = {
    "fox_pro": PRO,
    "fox_pro_pruned": PRO | {"prune": -10.0, "num_key_heads": 2},
    "llama": {"forget_gate": "none", "rope": True, "tie_word_embeddings": True},
    "sigma": PRO | FEWER | {"rope": True, "augmented_query_dim": 72},
    "learned_times": {"forget_gate": "data_independent"} | TIMES,
    "fixed_times": {"forget_gate": "fixed", "intermediate_size": None} | TIMES,
}
SHARDED = ("fox_pro", "sigma", "llama")  # those that four ranks train
OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")


def fresh(**switches) -> PalimpsestForCausalLM:
    """A network whose every parameter is far enough from its start to matter."""
    torch.manual_seed(0)
    model = PalimpsestForCausalLM(PalimpsestConfig(**SIZES | {"initializer_range": 0.1} | switches))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in model.no_decay_parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    """Two of packed documents, of an odd number of tokens, some without a target."""
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(2):
        ids = torch.randint(0, 61, (1, 161), generator=draw)
        targets = ids.roll(-1, 1)
        targets[0, 20:50] = -100
        found.append({"input_ids": ids, "shift_labels": targets, "cu_seqlens": torch.tensor([0, 70, 161]).int()})
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: PalimpsestForCausalLM, batches_of_steps: list, averaging=None) -> dict[str, torch.Tensor]:
    """Two steps of AdamW on the mean loss of each step's batches; what came out, by name."""
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=sharded)  # so by default on GPUs
    found = {}
    for step, of_this_step in enumerate(batches_of_steps):
        optimizer.zero_grad()
        loss = torch.stack([model(**batch).loss for batch in of_this_step]).mean()
        loss.backward()
        if averaging is not None:
            average_outside(model, averaging)
        if step == 0:
            found |= {f"gradient {name}": whole(p.grad).clone() for name, p in model.named_parameters()}
        norm = clip_gradients(model.parameters(), 1.0)
        found |= {f"loss {step}": loss.detach(), f"norm {step}": norm}
        optimizer.step()
    return found | {f"weight {name}": whole(p.detach()).clone() for name, p in model.named_parameters()}


def average_outside(model: PalimpsestForCausalLM, group: dist.ProcessGroup) -> None:
    """Reduce gradients of parameters outside the blocks as FSDP over all ranks does."""
    for name, parameter in model.named_parameters():
        if name.startswith(OUTSIDE):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each kind over ranks, relative to the largest expected value."""
    assert list(found) == list(expected)
    apart = {}
    for name, value in expected.items():
        kind = name.split()[0]
        difference = (found[name] - value).abs().max() / value.abs().max()
        apart[kind] = difference.maximum(apart.get(kind, difference)).float()
    for difference in apart.values():
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return {kind: difference.item() for kind, difference in apart.items()}


class Messages(TorchDispatchMode):
    """Counts the collectives of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional" and "wait" not in str(function) and "wrap" not in str(function):
            self.counts[str(function).split(".")[1]] += 1
        return function(*args, **(kwargs or {}))


def split_only(name: str, mesh: DeviceMesh) -> dict:
    """One network whose heads two ranks share."""
    one, split, steps = fresh(**NETWORKS[name]), fresh(**NETWORKS[name]), batches()
    split_tensors(split, mesh)
    found, expected = {}, {}
    for model, results in ((one, expected), (split, found)):
        with torch.no_grad():
            results["losses of tokens"] = model(**steps[0], reduction="none").loss
            results["logits"] = model(steps[0]["input_ids"]).logits
    with Messages() as messages:
        split(**steps[0]).loss.backward()
    found |= train(split, [steps[:1], steps[1:]], mesh.get_group())
    expected |= train(one, [steps[:1], steps[1:]])
    rows = [split.model.layers[0].self_attn.q_proj.weight.to_local().shape[0], one.config.hidden_size]
    return compare(found, expected) | {"messages": messages.counts, "rows": rows}


def sharded(name: str, mesh: DeviceMesh, everyone: DeviceMesh, compiled: bool = False) -> dict:
    """One network under FSDP2 whose heads two ranks share; each such pair has a separate batch."""
    one, split, steps = fresh(**NETWORKS[name]), fresh(**NETWORKS[name]), batches()
    split_tensors(split, mesh["tensor"])
    if compiled:
        apply_recomputation(split.model.layers, "selective")
        for block in split.model.layers:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for block in split.model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(split, mesh=everyone)
    own, steps = steps[mesh.get_local_rank("shard")], steps[: mesh.size(0)]
    expected, found = train(one, [steps, steps]), train(split, [[own], [own]])
    for key in ("loss 0", "loss 1"):
        dist.all_reduce(found[key])
        found[key] /= everyone.size()
    return compare(found, expected)


def main(rank: int, ranks: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
    everyone = init_device_mesh("cpu", (ranks,))
    if ranks == 2:
        results = {name: split_only(name, mesh["tensor"]) for name in NETWORKS}
        results["compiled"] = sharded("sigma", mesh, everyone, compiled=True)
    else:
        results = {name: sharded(name, mesh, everyone) for name in SHARDED}
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    # forked: what was imported above is shared by all
    torch.multiprocessing.start_processes(main, (ranks, sys.argv[2]), nprocs=ranks, start_method="fork")
