"""Small pretrained models in folders, and LoRA on them, for tests of adapters."""

import torch

from lit_modules.networks.linearized.conversion import load_pretrained
from lit_modules.networks.linearized.families import FAMILIES
from lit_modules.networks.linearized.lora import add_lora
from lit_modules.networks.linearized.settings import Linearization

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # so that attention, and what is added to it, shows in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SETTINGS = Linearization(window=4)
LEARNED = Linearization(
    window=4, gate_source="random", learned_weights="head", learned_gate_shift=True, output_norm=True,
    feature_map="learned",
)  # fmt: skip
LOLCATS = Linearization(mixer="lolcats", feature_map="learned", window=4)
TOKENS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(0))


def write_base(folder, family="llama", seed=0, **changes):
    """Save a random stock model in a folder and return the folder."""
    torch.manual_seed(seed)
    stock = FAMILIES[family]
    stock.model_class(stock.config_class(**{**SIZES, **changes})).save_pretrained(folder)
    return folder


def adapted(base, settings=SETTINGS, dtype=torch.float32, **options):
    """Return a linearized model whose LoRA is not the identity."""
    torch.manual_seed(0)
    model = add_lora(load_pretrained(str(base), settings, dtype), **{"rank": 2, **options}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits
