"""A program: two ranks over gloo, each of which has a part of a model, look at its gates and have it write.
Prints what rank 0 sees, as JSON.

Called with a port and a folder. The ranks are forks of one process, since what they import takes longer than they do.
"""

import json
import multiprocessing
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_modules.callbacks import forget_gates
from lit_modules.callbacks.forget_gates import ForgetGates
from lit_modules.callbacks.samples import Samples
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.parallel.tensor import split_tensors


class Letters:
    """A byte tokenizer with the methods that generation needs."""

    eos_token_id, bos_token_id, pad_token_id = 0, 1, 2

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def batch_decode(self, rows: torch.Tensor, **_: object) -> list[str]:
        return [bytes(x for x in row if x > 2).decode("latin-1") for row in rows.tolist()]


class Strategy(SimpleNamespace):
    """The part of a strategy that the callbacks use."""

    def broadcast(self, value: object) -> object:
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


def look(folder: Path, rank: int, shared: str | None) -> tuple[dict[str, float], list[str]]:
    """Return the model's gates and texts seen by `rank`. `shared`: what the ranks split, its "weights" or "heads"."""
    torch.manual_seed(0)
    model = PalimpsestForCausalLM(
        PalimpsestConfig(vocab_size=256, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    )
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor")) if shared else None
    if shared == "heads":
        split_tensors(model, mesh["tensor"])
    if shared == "weights":
        mesh = mesh["tensor"]
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    module = SimpleNamespace(model=model, context=None, device=torch.device("cpu"))
    logged: list[dict[str, float]] = []
    trainer = SimpleNamespace(
        sanity_checking=False,
        is_global_zero=rank == 0,
        global_step=1,
        default_root_dir=folder,
        loggers=[SimpleNamespace(log_metrics=lambda metrics, step: logged.append(metrics))],
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
        datamodule=SimpleNamespace(hf_tokenizer=Letters()),
        strategy=Strategy(
            needs_all_ranks=shared is not None,
            tensor_group=mesh["tensor"].get_group() if shared == "heads" else None,
        ),
    )
    gates, samples = ForgetGates(heads=2), Samples(["abc", "d"], max_new_tokens=12, temperature=1.0, top_p=0.9)
    text = torch.arange(3, 3 + 20 + 5 * rank)[None]  # of another length on rank 1
    gates.on_validation_batch_start(
        trainer, module, {"cu_seqlens": torch.tensor([0, text.shape[1]]), "input_ids": text}, 0
    )
    gates.on_validation_end(trainer, module)
    samples.on_validation_end(trainer, module)
    return (logged[0] if rank == 0 else {}), samples.texts


def main(rank: int, port: str, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    forget_gates.draw_gates = lambda maps, path: path.parent.mkdir(parents=True) or path.write_text(str(len(maps)))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {shared: look(folder / shared / f"rank{rank}", rank, shared) for shared in ("weights", "heads")}
    if rank == 0:
        print("found", json.dumps({**found, "alone": look(folder / "alone" / "rank0", rank, None)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, sys.argv[1], Path(sys.argv[2]))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
