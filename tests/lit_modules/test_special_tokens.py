"""An export in plain transformers reads and writes what `job=generate` does: the same start token, the same ends."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lit_modules.generation import job
from lit_modules.jobs import pretrain
from lit_modules.launching import run_folder
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM

LLAMA = {"forget_gate": "none", "rope": True, "qk_norm": False, "output_norm": False}
START, END = "<start>", "<end>"


def make_tokenizer(**names: str) -> PreTrainedTokenizerFast:
    """Bytes, and two special tokens; `names` says what they are for."""
    vocabulary = {token: n for n, token in enumerate([START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(switches: dict) -> PalimpsestForCausalLM:
    torch.manual_seed(0)
    config = PalimpsestConfig(
        vocab_size=258,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
        **switches,
    )
    return PalimpsestForCausalLM(config)


def export(folder, switches: dict, **names: str) -> None:
    """What `job=pretrain` leaves in a run's folder, untrained."""
    module = SimpleNamespace(model=make_model(switches))
    data = SimpleNamespace(
        hf_tokenizer=make_tokenizer(**names), manifest={"vocab_size": 258}, documents_have_start=True
    )
    pretrain.adopt_tokenizer(OmegaConf.create(), module, data, folder)
    data.hf_tokenizer.save_pretrained(folder / "tokenizer")
    pretrain.export(module.model, data.hf_tokenizer, folder / "export")


@pytest.mark.parametrize("switches", [{}, LLAMA], ids=["FoX", "stock Llama"])
@pytest.mark.parametrize(
    ("names", "start"),
    [({"bos_token": START, "eos_token": END}, 0), ({"eos_token": END}, 1), ({"bos_token": END}, 1)],
    ids=["bos and eos", "eos alone", "bos alone"],
)
def test_an_export_in_plain_transformers_writes_what_the_job_writes(tmp_path, switches, names, start):
    export(tmp_path, switches, **names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(model).__name__ == ("LlamaForCausalLM" if switches else "PalimpsestForCausalLM")
    inputs = tokenizer("the gate", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[start, *tokenizer("the gate", add_special_tokens=False)["input_ids"]]]
    assert model.config.bos_token_id == model.generation_config.bos_token_id == start
    named = model.generation_config.eos_token_id  # either end of a document: eos, or the start of the next one
    assert {*(named if isinstance(named, list) else [named])} == {start, 1 if "eos_token" in names else start}
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
    plain = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert job.continue_prompts(model, tokenizer, ["the gate"], 24, {"do_sample": False}) == [plain]


@pytest.mark.parametrize("switches", [{}, LLAMA], ids=["FoX", "stock Llama"])
def test_a_run_made_before_tokenizers_added_the_start_token_still_begins_as_it_was_trained(tmp_path, switches):
    make_tokenizer(bos_token=START, eos_token=END).save_pretrained(tmp_path / "tokenizer")
    pretrain.export(make_model(switches), make_tokenizer(bos_token=START, eos_token=END), tmp_path / "export")
    data = {"_target_": "data_pipeline.tokens.datamodule.TextData"}
    (tmp_path / run_folder.CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create({"data": data})))
    _, tokenizer = job.load(str(tmp_path))
    assert tokenizer("a")["input_ids"][0] == 0
    _, tokenizer = job.load(str(tmp_path / "export"))
    assert (tokenizer("a")["input_ids"][0] == 0) == (not switches)  # a stock Llama alone may be anybody's
