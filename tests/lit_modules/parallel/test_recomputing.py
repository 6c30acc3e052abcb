"""Recomputation policies: the same gradients with fewer saved tensors."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from common.settings import shown
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.parallel.recomputing import EXPENSIVE, apply_recomputation, check_policy

IDS = torch.randint(0, 61, (2, 32), generator=torch.Generator().manual_seed(1))
PRO = {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True}
NETWORKS = {
    "fox_pro": PRO,
    "sigma": {"rope": True, "num_key_heads": 2, "key_head_dim": 8, "augmented_query_dim": 48},
    "hybrid": {"mixers": ["hgrn2", "attention", "hgrn2", "mamba2"], "state_dim": 8},
}
POLICIES = ["none", 2, 3, "selective", "full"]


def fresh(policy="none", **switches) -> PalimpsestForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "intermediate_size": 64}
    model = PalimpsestForCausalLM(PalimpsestConfig(**sizes | switches))
    apply_recomputation(model.model.layers, policy)
    return model


def loss(model: PalimpsestForCausalLM) -> torch.Tensor:
    return model(IDS, shift_labels=IDS.roll(-1, 1)).loss


def gradients(model: PalimpsestForCausalLM) -> dict[str, torch.Tensor]:
    loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Watch(TorchDispatchMode):
    """Counts operations by name, and tracks all created tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.made = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                self.made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def held(self) -> int:
        """Return the bytes of the tensors that are still alive."""
        return sum(size for reference, size in self.made.values() if not reference.expired())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_a_bit_of_a_gradient(network, policy):
    expected = gradients(fresh(**NETWORKS[network]))
    found = gradients(fresh(policy, **NETWORKS[network]))
    assert list(found) == list(expected)
    assert all(found[name].equal(gradient) for name, gradient in expected.items())


@pytest.mark.parametrize(("policy", "blocks"), [("none", []), (2, [1, 3]), (3, [2]), ("full", [0, 1, 2, 3])])
def test_the_blocks_that_a_policy_names_run_again(policy, blocks):
    model, calls = fresh(policy), []
    for number, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    gradients(model)
    assert calls[:4] == [0, 1, 2, 3]
    assert sorted(calls[4:]) == blocks


def test_selective_makes_norms_again_and_neither_products_nor_attention_nor_recurrences():
    def expensive_and_others(policy: str) -> tuple[int, int]:
        with Watch() as watch:
            gradients(fresh(policy, **NETWORKS["hybrid"] | PRO))
        kept = sum(call in EXPENSIVE for call in watch.calls)
        return kept, len(watch.calls) - kept

    kept, others = expensive_and_others("none")
    assert expensive_and_others("full")[0] > kept
    found = expensive_and_others("selective")
    assert found[0] == kept
    assert found[1] > 1.2 * others


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_held_for_the_backward_pass_falls_from_none_to_selective_to_full(network):
    held = {}
    for policy in POLICIES:
        model = fresh(policy, **NETWORKS[network])
        with Watch() as watch:
            result = loss(model)
        held[policy] = watch.held()
        del result
    assert held["none"] > held[3] > held[2] > held["full"]
    assert held["none"] > 1.3 * held["selective"]
    assert held["selective"] > 1.3 * held["full"]


@pytest.mark.parametrize("policy", [2, "selective", "full"])
def test_blocks_compile_around_their_recomputation_without_a_graph_break(policy):
    expected = gradients(fresh(**PRO))
    torch._dynamo.reset()
    model = fresh(policy, **PRO)
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    found = gradients(model)
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected)


def test_generation_fills_its_cache_once():
    plain, model = fresh(**PRO), fresh("full", **PRO)
    expected = plain.eval().generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=60)
    assert model.eval().generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=60).equal(expected)
    cache = model.train().new_cache()
    model(IDS, past_key_values=cache).logits.sum().backward()
    assert cache.get_seq_length() == 32


@pytest.mark.parametrize("policy", [True, False, 1, 0, -2, 2.0, "all", None, "2"])
def test_another_policy_is_refused_by_its_key(policy):
    with pytest.raises(
        ValueError, match=f"activation_checkpointing={shown(policy)} is not a policy: give none, full, "
    ):
        check_policy(policy)
