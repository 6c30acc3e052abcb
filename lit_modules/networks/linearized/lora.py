"""LoRA on a linearized model through peft: add it, choose trainable parameters, merge it."""

import copy
import re
from collections.abc import Iterable, Sequence

from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from common.settings import SettingError, check_choice, check_number, check_whole
from lit_modules.networks.linearized.models import LinearizedForCausalLM

ADAPTER = "default"  # peft's name for the one adapter

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
FUSED = ("q_proj", "k_proj", "v_proj")  # one qkv_proj in Phi-3

GROUPS = {
    "lora": r"\.lora_[AB]\.",
    "feature_maps": r"\.self_attn\..*feature_map",
    "scalars": r"\.self_attn\.(weights|window_weight|gate_shift)\.",
    "norms": r"\.self_attn\.output_norm\.",
    "gates": r"\.self_attn\.gate_proj\.",
    "projections": r"\.self_attn\.(q|k|v|qkv)_proj\.(base_layer\.)?(weight|bias)$",
    "all": r"",
}
"""Groups of trainable parameters, as patterns of parameter names. "projections": the pretrained projections of queries,
keys and values; "all": full fine-tuning."""


def add_lora(
    model: LinearizedForCausalLM,
    *,
    rank: int = 8,
    alpha: float = 8,
    targets: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    dropout: float = 0.0,
    where: str = "all",
) -> LinearizedForCausalLM:
    """Add LoRA to projections of the attention layers, in place; everything else is frozen.

    The LoRA weights are float32 for any model dtype. Initially they do not change the model's output.

    Args:
        targets: some of q_proj, k_proj, v_proj, o_proj. In Phi-3 the first three mean the fused qkv_proj. Other modules
            are not allowed, because the teacher in the same model shares them.
        where: "all" layers, including softmax attention (as the code of arXiv 2503.01496 does), or only "linearized"
            ones.

    Raises:
        ValueError: if a projection does not exist, rank or dropout is out of range, or the model already has LoRA.
    """
    check_whole("lora.rank", rank, 1, model.config.hidden_size)
    check_number("lora.alpha", alpha, above=0)
    check_number("lora.dropout", dropout, least=0, below=1)
    check_choice("lora.where", where, ("all", "linearized"))
    if isinstance(targets, str) or not isinstance(targets, Sequence):
        raise SettingError("lora.targets", targets, "give projections as [q_proj,k_proj]", "is not a list")
    if has_lora(model):
        raise ValueError("the model has LoRA: merge it before more is added")
    kept = model.linearization.softmax_layers
    layers = [number for number in range(len(model.model.layers)) if where == "all" or number not in kept]
    if not layers:
        raise SettingError("lora.where", where, "all layers stay softmax attention, give all")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=dropout,
        target_modules=lora_targets(model, targets),
        layers_to_transform=None if where == "all" else layers,
        task_type="CAUSAL_LM",
    )
    return inject(model, config)


def inject(model: LinearizedForCausalLM, config: PeftConfig) -> LinearizedForCausalLM:
    """Add the LoRA of a peft configuration to the model, in place, in float32; everything else is frozen."""
    model.add_adapter(config, ADAPTER)
    for layer in lora_layers(model).values():
        layer.lora_A.float()  # peft uses the projection's dtype, which would round small steps away
        layer.lora_B.float()
    return model


def lora_targets(model: LinearizedForCausalLM, targets: Sequence[str]) -> list[str]:
    """Return the names of the modules that `targets` mean in this model, without duplicates.

    Raises:
        ValueError: if a name is not in the model's attention, or none is given.
    """
    attention = model.model.layers[0].self_attn
    here = [name for name in PROJECTIONS if isinstance(getattr(attention, name, None), nn.Linear)]
    fused = "qkv_proj" in here
    known = [*FUSED, *(name for name in here if name not in FUSED)] if fused else here
    unknown = [name for name in targets if name not in known]
    if unknown or not targets:
        problem = "is not a projection of this model's attention"
        raise SettingError("lora.targets", unknown[0] if unknown else [], f"give {', '.join(known)}", problem)
    return sorted({"qkv_proj" if fused and name in FUSED else name for name in targets})


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the modules with which peft replaced projections, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def has_lora(model: nn.Module) -> bool:
    """Return whether the model has unmerged LoRA."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


def trainable(model: nn.Module, groups: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameter names of each group of GROUPS.

    Raises:
        ValueError: if a group is unknown, or the model has no parameter of it.
    """
    names, found = [name for name, _ in model.named_parameters()], {}
    for group in groups:
        if group not in GROUPS:
            raise SettingError("train", group, f"give some of {', '.join(GROUPS)}", "is not known")
        found[group] = [name for name in names if re.search(GROUPS[group], name)]
        if not found[group]:
            fix = f"give some of {', '.join(groups_of(names))}"
            raise SettingError("train", group, fix, "has no parameter in this model")
    return found


def groups_of(names: Sequence[str]) -> list[str]:
    """Return the groups of GROUPS that contain parameters of these names, without duplicates."""
    return [group for group, pattern in GROUPS.items() if any(re.search(pattern, name) for name in names)]


def set_trainable(model: nn.Module, groups: Iterable[str]) -> dict[str, list[str]]:
    """Train these groups and freeze all other parameters; returns and raises as `trainable`."""
    found = trainable(model, groups)
    chosen = {name for names in found.values() for name in names}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return found


def merge(model: LinearizedForCausalLM) -> LinearizedForCausalLM:
    """Merge LoRA into the projections, in place, and remove its modules.

    Base weights shared with another model change there too.

    Raises:
        ValueError: if there is no LoRA, or its weights are not finite.
    """
    layers = lora_layers(model)
    if not layers:
        raise ValueError("the model has no LoRA to merge")
    for name, layer in layers.items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model


def merged_copy(model: LinearizedForCausalLM) -> LinearizedForCausalLM:
    """Return a merged copy that shares all but the adapted projections; without LoRA, the model itself."""
    layers = lora_layers(model)
    if not layers:
        return model
    own = {id(layer.get_base_layer().weight) for layer in layers.values()}
    # Tensors that modules keep from the last pass are shared too: deepcopy refuses tensors with a graph.
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    tensors = (*model.parameters(), *model.buffers(), *kept)
    return merge(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors if id(tensor) not in own}))
