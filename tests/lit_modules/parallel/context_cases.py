"""Networks whose sequences are split over two and over four processes, against the same on one device: a program.

    python context_cases.py FOLDER

Writes FOLDER/results_<processes>.json: for each process and each case, how far it lies from one device.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from lit_modules.language_modelling import Validation
from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.parallel.context import ContextParallel, split_context
from lit_modules.parallel.recomputing import apply_recomputation
from lit_modules.pretraining import Pretraining
from tests.lit_modules.networks.conftest import ABLATION, RECURRENT, build

VOCABULARY, LENGTH = 61, 64

# Document bounds. With two processes the second starts at 32; with four, others start at 16 and 48 too.
ROWS = {
    "one_document": [0, 64],
    "documents_that_end_at_the_cut": [0, 9, 16, 32, 48, 64],
    "documents_that_end_beside_the_cut": [0, 15, 31, 40, 49, 64],
    "documents_of_one_token_at_the_cut": [0, 15, 16, 17, 31, 32, 33, 64],
    "two_sequences_of_documents": [0, 11, 32, 32, 37, 64],
}
HARDEST = "documents_of_one_token_at_the_cut"
MODELS = {
    name: (ABLATION | RECURRENT)[name]
    for name in (
        "fox_pro",
        "transformer_llama",
        "pro_with_sigmas_heads",
        "hgrn2",
        "gla_convolved",
        "gsa_convolved",
        "mamba2",
        "hybrid_with_rope",
    )
}
EVERY_ROW = ("fox_pro", "gla_convolved")  # they look back by one token, and by three
CASES = {
    2: [(model, row) for model in MODELS for row in ROWS if model in EVERY_ROW or row in ("one_document", HARDEST)],
    4: [("fox_pro", HARDEST), ("gla_convolved", HARDEST), ("pro_with_sigmas_heads", HARDEST), ("mamba2", HARDEST)],
}


def draw_batch(row: str, seed: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    input_ids, targets = torch.randint(VOCABULARY, (2, 1, LENGTH), generator=draw)
    targets[0, [3, 41, 43]] = -100
    component = torch.tensor([1, 0])
    cu_seqlens = torch.tensor(ROWS[row], dtype=torch.int32)
    return {"input_ids": input_ids, "targets": targets, "cu_seqlens": cu_seqlens, "component": component}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference relative to the largest expected value."""
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item()


def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def arguments(part: dict) -> dict:
    return {"input_ids": part["input_ids"], "positions": part["positions"]}


def losses(part: dict) -> dict:
    return arguments(part) | {"shift_labels": part["targets"], "num_items_in_batch": part["targets_per_rank"]}


def compare(whole: PalimpsestForCausalLM, split: PalimpsestForCausalLM, context: ContextParallel, row: str) -> dict:
    batch = draw_batch(row)
    loss = whole(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], shift_labels=batch["targets"]).loss
    loss.backward()
    logits = whole(batch["input_ids"], cu_seqlens=batch["cu_seqlens"]).logits.chunk(context.size, 1)[context.rank]
    part = context.part({name: x for name, x in batch.items() if name != "component"})
    part_loss = split(**losses(part)).loss
    part_loss.backward()
    part_logits = split(**arguments(part)).logits.detach()
    pairs = zip(whole.parameters(), split.parameters(), strict=True)
    gradients = [apart(mean_over_ranks(b.grad), a.grad) for a, b in pairs]
    whole.zero_grad()
    split.zero_grad()
    found = {"outputs": apart(part_logits, logits), "loss": apart(mean_over_ranks(part_loss), loss)}
    return found | {"gradients": max(gradients)}


def pair(**switches) -> tuple[PalimpsestForCausalLM, PalimpsestForCausalLM, ContextParallel]:
    """Return a network twice, and the plan that splits the sequences of the second."""
    whole, split = build(**switches).train(), build(**switches).train()
    return whole, split, split_context(split, dist.group.WORLD)


def equal_one_device(cases: list[tuple[str, str]]) -> dict[str, dict]:
    found = {}
    for name in dict.fromkeys(name for name, _ in cases):
        pair_of_networks = pair(**MODELS[name])
        found |= {f"{name} {row}": compare(*pair_of_networks, row) for model, row in cases if model == name}
    return found


def recomputed() -> dict:
    whole, split, context = pair(**ABLATION["fox_pro"])
    apply_recomputation(split.model.layers, "full")
    return compare(whole, split, context, HARDEST)


def compiled() -> dict:
    """Return blocks of two kinds, which look back by one token and by three."""
    mixers = ["attention", "gla", "attention"]
    whole, split, context = pair(**ABLATION["fox_pro"], mixers=mixers, num_layers=3, short_conv_width=4)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for layer in split.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend=count)
    found = compare(whole, split, context, HARDEST)
    return found | {"graphs": len(graphs)}


def sharded() -> dict:
    """Compare gradients with all weights sharded over the ranks that share the sequence."""
    whole, split, context = pair(**RECURRENT["hybrid"] | {"num_layers": 3})
    mesh = init_device_mesh("cpu", (context.size,))
    for layer in split.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(split, mesh=mesh)
    batch = draw_batch("one_document")
    whole(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], shift_labels=batch["targets"]).loss.backward()
    split(**losses(context.part(batch | {"component": torch.zeros(LENGTH, dtype=torch.int64)}))).loss.backward()
    pairs = zip(whole.parameters(), split.parameters(), strict=True)
    return {"gradients": max(apart(b.grad.full_tensor(), a.grad) for a, b in pairs)}


class Step(torch.nn.Module):
    """Module for DDP, whose forward pass is its training step."""

    def __init__(self, module: Pretraining) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.module.training_step(batch, 0)


def pretraining(**switches) -> Pretraining:
    """Return a module with the parameters from `build`."""
    model = build(**switches).train()
    module = Pretraining(
        model.config,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        schedule=lambda tokens: 1.0,
        batch_tokens=LENGTH,
        sequence_length=LENGTH // 2,
    )
    module.model, module.components = model, ("news", "code")
    return module


def trained() -> dict:
    """Two steps by DDP, then a validation."""
    alone, shared = pretraining(**ABLATION["fox_pro"]), pretraining(**ABLATION["fox_pro"])
    shared.context = split_context(shared.model, dist.group.WORLD)
    for module, step in ((alone, Step(alone)), (shared, torch.nn.parallel.DistributedDataParallel(Step(shared)))):
        optimizer = module.configure_optimizers()["optimizer"]
        for seed in (1, 2):
            step(draw_batch("two_sequences_of_documents", seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    reported = torch.stack(shared.micro_losses).mean()
    return {
        "parameters": max(apart(b.detach(), a.detach()) for a, b in pairs),
        "reported_loss": apart(mean_over_ranks(reported), torch.stack(alone.micro_losses).mean()),
        "validation": validated(alone, shared),
    }


@torch.no_grad()
def validated(alone: Pretraining, shared: Pretraining) -> float:
    found = []
    for module in (alone, shared):
        module._sums, module._component_sums = torch.zeros(2, 64).double(), torch.zeros(2, 2).double()
        module.validation_step(draw_batch("two_sequences_of_documents", 3), 0)
        sums = [module._sums, module._component_sums]
        found.append(sums if module is alone else [mean_over_ranks(x) * shared.context.size for x in sums])
    assert Validation(*found[0][0].numpy()).tokens == 61
    assert found[0][1][1].tolist() == [30, 31]  # of the second sequence, and of the first
    return max(apart(b, a) for a, b in zip(*found, strict=True))


def suspended() -> dict:
    """Generate text on each rank separately, with a network whose sequences are split in training."""
    whole, split, context = pair(**RECURRENT["hybrid_with_rope"])
    prompt = draw_batch("one_document")["input_ids"][:, : 5 + context.rank]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 60}
    with context.suspended():
        texts = [model.eval().generate(prompt, **options) for model in (whole, split)]
    return {"equal": torch.equal(*texts), "again": compare(whole.train(), split.train(), context, "one_document")}


def refused() -> dict[str, str]:
    """What is said to a whole sequence, to generation, and to parts that are too short."""
    _, split, context = pair(**RECURRENT["gla_convolved"])
    batch = draw_batch("one_document")
    short = {name: x[:, :4] for name, x in batch.items() if name in ("input_ids", "targets")}
    short |= {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}
    calls = {
        "whole": lambda: split(batch["input_ids"], use_cache=False),
        "cached": lambda: split.eval().generate(batch["input_ids"], max_new_tokens=2, pad_token_id=60),
        "short": lambda: split(**arguments(context.part(short))),
        "uneven": lambda: context.part(batch | {"targets": batch["targets"][:, :63]}),
        "heads": lambda: split_context(build(**RECURRENT["mamba2"] | {"state_heads": 1}), dist.group.WORLD),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def bounds() -> dict:
    """What the operation of each rank is told of the logits of its heads; and the way there and back."""
    context, told = ContextParallel(dist.group.WORLD), []

    def operation(inputs, positions, *, logit_bound):
        told.extend(logit_bound.tolist())
        return inputs[0]

    x = torch.randn(1, 6, 4, 3)
    out = context.over_heads(operation, 2, (x, x, x, None), None, logit_bound=torch.arange(4.0))
    return {"told": told, "back": torch.equal(out[:, 2:], x[:, 2:]) and not out[:, :2].any()}


def shared_heads() -> dict:
    """Heads that are views of one are sent as one to each rank, and are views again there."""
    context, sent, seen = ContextParallel(dist.group.WORLD), [], []
    exchange = context._exchange
    context._exchange = lambda parts: sent.append(parts.shape[-1]) or exchange(parts)

    def operation(inputs, positions):
        seen.extend(x.stride(2) for x in inputs)
        return inputs[0] + inputs[1]

    of_heads, of_one = torch.randn(1, 6, 8, 5), torch.randn(1, 6, 1, 5).expand(-1, -1, 8, -1)
    out = context.over_heads(operation, 0, (of_heads, of_one), None)
    return {"sent": sent[0], "strides": seen, "equal": torch.equal(out, of_heads + of_one)}


def run(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_{size}", rank=rank, world_size=size)
    found = equal_one_device(CASES[size])
    if size == 2:
        for case in (recomputed, compiled, sharded, trained, suspended, refused, bounds, shared_heads):
            found[case.__name__] = case()
    everywhere = [None] * size
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        Path(folder, f"results_{size}.json").write_text(json.dumps(everywhere))
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in (2, 4):
        # Forked, so that torch and transformers are imported once.
        torch.multiprocessing.start_processes(run, (size, sys.argv[1]), nprocs=size, start_method="fork")
