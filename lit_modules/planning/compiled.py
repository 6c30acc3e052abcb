"""The cost of a block under torch.compile, estimated without compiling.

Its graphs are partitioned into forward and backward as the compiler does, and a fused kernel is assumed to move each
tensor that enters or leaves it once. A tensor is made in memory ("real") if something that is not fused reads it (a
matrix product, one of our operations, the end of the graph), or a later kernel does: a kernel runs after the products
whose results it needs.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import CheckpointPolicy

from lit_modules.parallel.recomputing import EXPENSIVE
from lit_modules.planning.eager import on_gpu
from lit_modules.planning.work import PRODUCTS, Pass, Traced, Work, size, workspace

VIEWS = {"view", "_unsafe_view", "permute", "transpose", "t", "expand", "alias", "unsqueeze", "squeeze", "select"}
VIEWS |= {"slice", "as_strided", "reshape", "detach", "split", "split_with_sizes", "unbind"}


def trace_compiled(function: Callable[..., Tensor], module: nn.Module, inputs: Sequence[Tensor], policy: str) -> Traced:
    """Trace the compiled `function(*inputs)` forward and backward, with fake tensors in a FakeTensorMode.

    Args:
        module: module that `function` calls; its parameters count as always resident.
        inputs: only the first one gets a gradient.
        policy: recomputation policy, "none", "selective" or "full".
    """
    # Here, as half a second of every run's start would go to them.
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[str, fx.Graph] = {}
    names, weights = zip(*module.named_parameters(), strict=True)
    first_weight = len(inputs)

    def functional(*arguments: Tensor) -> Tensor:
        with _reparametrize_module(module, dict(zip(names, arguments[first_weight:], strict=True))):
            return function(*arguments[:first_weight])

    def keep(name: str) -> Callable:
        def compiler(module: fx.GraphModule, _: Any) -> Callable:
            graphs[name] = module.graph
            return make_boxed_func(module.forward)

        return compiler

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        mark(joint.graph, policy)
        static = list(range(first_weight, first_weight + len(weights)))
        return min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )

    out = aot_function(
        on_gpu(functional, fused=False),
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(*inputs, *weights)
    torch.autograd.grad(out, [inputs[0], *weights], torch.empty_like(out))
    return read_graphs(graphs["forward"], graphs["backward"], first_weight)


def mark(graph: fx.Graph, policy: str) -> None:
    """Mark the forward nodes of a joint graph as torch.compile does inside a checkpoint."""
    if policy == "none":
        return
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(x in backward for x in node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            source = node.args[0] if node.target is operator.getitem else node
            kept = policy == "selective" and source.target in EXPENSIVE
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def read_graphs(forward: fx.Graph, backward: fx.Graph, first_weight: int) -> Traced:
    """Count the cost of the two graphs. `first_weight` is the number of forward inputs before the weights."""
    first, last = Graph(forward), Graph(backward)
    saved = [node for node in first.end.args[0][1:] if isinstance(node, fx.Node)]
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    own = [node for node in saved if first.memory_of(node) not in inputs[1:]]
    memory = {first.memory_of(node) for node in own}
    casts = [node for node in memory if node.op != "placeholder" and first.sources[node] <= set(inputs[first_weight:])]
    return Traced(
        first.count(freed=set()),
        last.count(freed={node.name for node in own}),
        sum(map(bytes_of, memory)),
        sum(map(bytes_of, casts)),
    )


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's value; their sum if it has several."""
    value = node.meta.get("val")
    return sum(map(size, value)) if isinstance(value, tuple | list) else size(value)


class Graph:
    """A graph of one pass, by its tensors in memory: inputs, results of unfused operations, and real fused results.

    A node's memory is the node behind its views. Its stage is the number of unfused operations on the longest path to
    it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
        *_, self.end = graph.nodes
        self.stage: dict[fx.Node, int] = {}
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the inputs of the graph that a node depends on
        for node in self.nodes:
            before = node.all_input_nodes
            self.stage[node] = max((self.stage[x] for x in before), default=0) + is_whole(node)
            own = {node} if node.op == "placeholder" else set()
            self.sources[node] = frozenset(own.union(*(self.sources[x] for x in before)))
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            for x in () if self.is_view(node) else node.all_input_nodes:
                self.readers[self.memory_of(x)].append(node)
        self.results = {self.memory_of(x) for x in self.end.all_input_nodes}
        self.reads: dict[fx.Node, set[fx.Node]] = {}  # tensors that the kernel of a fused node reads for it
        for node in filter(self.is_fused, self.nodes):
            self.reads[node] = self._read_by(node)

    def is_view(self, node: fx.Node) -> bool:
        """Return whether a node is a view of another's memory; outputs of unfused operations have their own."""
        if node.target is operator.getitem:
            return not is_whole(node.args[0])
        return name_of(node) in VIEWS

    def memory_of(self, node: fx.Node) -> fx.Node:
        while self.is_view(node):
            node = node.all_input_nodes[0]
        return node

    def is_fused(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not (
            is_whole(node) or self.is_view(node) or node.target is operator.getitem
        )

    def is_real(self, node: fx.Node) -> bool:
        """Return whether a fused result is made in memory."""
        if node in self.results:
            return True
        later = self.stage[node] > 0
        return any(is_whole(x) or (later and self.stage[x] > self.stage[node]) for x in self.readers[node])

    def _read_by(self, node: fx.Node) -> set[fx.Node]:
        found = set()
        for x in map(self.memory_of, node.all_input_nodes):
            earlier = self.stage[x] < self.stage[node]
            if not self.is_fused(x) or (earlier and self.is_real(x)):
                found.add(x)
            elif earlier:  # recomputed cheaply in this kernel, from tensors in memory
                found |= self.reads[x]
        return found

    def count(self, freed: set[str]) -> Pass:
        """Count the work of the graph and its peak above the start; `freed` names inputs that nothing else holds."""
        work = Work()
        reads: dict[int, set[fx.Node]] = defaultdict(set)  # by stage
        last_use: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            if is_whole(node):
                read = {self.memory_of(x) for x in node.all_input_nodes}
                work.add(node.target, [x.meta["val"] for x in node.all_input_nodes], values(node))
            elif self.is_fused(node):
                read = self.reads[node]
                reads[self.stage[node]] |= read
                if self.is_real(node):
                    work.traffic += bytes_of(node)
                    work.kernels += 1
            else:
                continue
            last_use |= dict.fromkeys(read, node)
        work.traffic += sum(bytes_of(x) for read in reads.values() for x in read)
        return Pass(work, self._rise(freed, last_use))

    def _rise(self, freed: set[str], last_use: dict[fx.Node, fx.Node]) -> int:
        ends = defaultdict(list)
        for memory, node in last_use.items():
            mine = memory.op != "placeholder" or memory.name in freed
            if mine and memory not in self.results:
                ends[node].append(memory)
        held = most = 0
        for node in self.nodes:
            part = node.target is operator.getitem and not self.is_view(node)
            alone = is_whole(node) and isinstance(node.meta["val"], Tensor)
            if part or alone or (self.is_fused(node) and self.is_real(node)):
                held += bytes_of(node)
                most = max(most, held)
            elif is_whole(node):
                most = max(most, held + workspace(node.target, [x.meta["val"] for x in node.all_input_nodes]))
            held -= sum(map(bytes_of, ends[node]))
        return most


def name_of(node: fx.Node) -> str:
    """Return the bare name of the operation that a node calls, such as "mm"."""
    return node.target._schema.name.partition("::")[2] if hasattr(node.target, "_schema") else ""


def is_whole(node: fx.Node) -> bool:
    """Return whether a node calls an operation that is never fused: a matrix product, or one of ours."""
    name = node.target._schema.name if hasattr(node.target, "_schema") else ""
    return name.startswith("palimpsest::") or name.partition("::")[2] in PRODUCTS


def values(node: fx.Node) -> list[Tensor]:
    """Return the tensors of a node's value."""
    value = node.meta["val"]
    return [value] if isinstance(value, Tensor) else [x for x in value if isinstance(x, Tensor)]
