"""Layers and training step of arXiv 2503.01496's code (OpenSparseLLMs/Linearization), rebuilt from parts that run here.

Their package needs flash_attn, flash-linear-attention's fused_chunk_gla, and transformers 4 (`why_not_theirs`). Hence
the same computation on flash-linear-attention's chunk_gla and PyTorch's fastest windowed attention, in Hugging Face's
Llama, with peft's LoRA and the loss over all logits.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from benchmarks.measuring.timing import one_line
from kernels.gated_recurrence import gated_recurrence, gated_recurrence_reference

WINDOW = 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal softmax attention in the window, of q, k, v [B, T, H, D] with as many heads."""
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Gated linear attention of scale 1, of q, k, v, log_decay [B, T, H, D]."""


def chunk_gla(device: torch.device) -> Recurrence:
    """Return flash-linear-attention's chunk_gla. It needs a GPU; on the CPU return the project's CPU form."""
    if device.type != "cuda":
        return lambda q, k, v, log_decay: gated_recurrence(q, k, v, log_decay.float())[0]
    kernel = importlib.import_module("fla.ops.gla").chunk_gla
    return lambda q, k, v, log_decay: kernel(q, k, v, log_decay, scale=1.0, output_final_state=True)[0]


def tune(size: Sequence[int], dtype: torch.dtype) -> None:
    """Have chunk_gla's kernels, forward and backward, find their configurations for [B, T, H, D] of a dtype on CUDA."""
    new = functools.partial(torch.randn, size, device="cuda")
    q, k, v = (new(dtype=dtype).requires_grad_() for _ in range(3))
    log_decay = (F.logsigmoid(new(dtype=dtype)) / 16).requires_grad_()
    chunk_gla(q.device)(q, k, v, log_decay).sum().backward()
    torch.cuda.synchronize()


def plain_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Compute the definition, token by token."""
    return gated_recurrence_reference(q, k, v, log_decay)[0]


def flash_attention(length: int, device: torch.device) -> Attention:
    """Return PyTorch's FlashAttention-2, the kernel that their code calls."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Among the public functions only the one for packed sequences supports a window, in some versions of PyTorch.
        return torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, length, length, 0.0, True, False, window_size_left=WINDOW - 1, window_size_right=0
        )[0]

    return attend


def flex(length: int, device: torch.device) -> Attention:
    """Return compiled FlexAttention; its block mask skips blocks that no query sees."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < WINDOW)

    blocks = create_block_mask(visible, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks).transpose(1, 2)

    return attend


def banded(length: int, device: torch.device) -> Attention:
    """Return scaled_dot_product_attention with the window as a mask."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    band = (distance >= 0) & (distance < WINDOW)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=band).transpose(1, 2)

    return attend


WINDOWED = {"FlashAttention-2": flash_attention, "FlexAttention": flex, "SDPA with a band": banded}


class PeerAttention(nn.Module):
    """Their layer for gated linear attention, on the projections of a Llama layer.

    K and V are repeated to the query heads; feature maps and gates are computed in the model's dtype and cast to
    `dtype` for the recurrence. pooled: include their layer's average pooling from the keys' width to the gates' width,
    which are equal here.
    """

    def __init__(
        self, stock: nn.Module, attention: Attention, recurrence: Recurrence, dtype: torch.dtype, pooled: bool
    ) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = stock.q_proj, stock.k_proj, stock.v_proj, stock.o_proj
        self.head_dim, self.groups = stock.head_dim, stock.num_key_value_groups
        self.attention, self.recurrence, self.dtype = attention, recurrence, dtype
        self.pool = nn.AdaptiveAvgPool1d(self.k_proj.out_features) if pooled else nn.Identity()

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, None]:
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        gate = self.pool(k)
        q, k, v, gate = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v, gate))
        k, v, gate = (x.repeat_interleave(self.groups, 2) for x in (k, v, gate))
        inputs = (q.softmax(-1), k.softmax(-1), v, F.logsigmoid(gate) / 16)
        recurrent = self.recurrence(*(x.to(self.dtype).contiguous() for x in inputs))
        rotated = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        out = 0.5 * self.attention(*rotated, v) + 0.5 * recurrent
        return self.o_proj(out.to(hidden_states.dtype).flatten(-2)), None


def peer(
    stock: nn.Module,
    attention: Attention,
    recurrence: Recurrence | None = None,
    dtype: torch.dtype = torch.float32,
    pooled: bool = False,
) -> nn.Module:
    """Convert a Hugging Face Llama in place to their layers, and wrap it in peft's model with their LoRA settings.

    recurrence: `chunk_gla` if None.
    """
    recurrence = recurrence or chunk_gla(stock.device)
    for layer in stock.model.layers:
        layer.self_attn = PeerAttention(layer.self_attn, attention, recurrence, dtype, pooled)
    targets = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    return get_peft_model(stock, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules=targets))


def peer_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute next-token cross-entropy over all logits, like their trainer."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].contiguous()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def published_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute `peer_loss` with their trainer's extra work: copying logits to the host and reading the perplexity."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].contiguous()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    logits.cpu()
    loss.exp().item()
    return loss


def why_not_theirs() -> list[str]:
    """Return the requirements of their package that are missing here, one line each."""

    def imported(module: str, name: str) -> None:
        getattr(importlib.import_module(module), name)

    def fused() -> None:
        from fla.ops.gla import fused_chunk_gla

        fused_chunk_gla(*(torch.zeros(1, 1, 1, 16) for _ in range(4)))

    def tuples() -> None:
        found = inspect.signature(LlamaDecoderLayer.forward).return_annotation
        if found is Tensor:
            raise RuntimeError("returns a tensor, of which their model takes the first row for the hidden states")

    asked = {
        "flash_attn": functools.partial(imported, "flash_attn", "flash_attn_func"),
        "fla.ops.gla.fused_chunk_gla": fused,
        "transformers.utils.add_start_docstrings_to_model_forward": functools.partial(
            imported, "transformers.utils", "add_start_docstrings_to_model_forward"
        ),
        "a tuple from Hugging Face's LlamaDecoderLayer": tuples,
    }
    missing = []
    for what, need in asked.items():
        try:
            need()
        except Exception as error:
            missing.append(f"{what}: {one_line(error)}")
    return missing
