"""A model small enough to be made for the occasion, in a folder as transformers writes it."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write_tokenizer(folder, template=None) -> None:
    """A tokenizer of single bytes, and one token that ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama over bytes that never ends a text by itself, with a context of 2,000 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2000,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=256,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        model.lm_head.weight[256] = 0
    model.save_pretrained(folder)
    write_tokenizer(folder, TEMPLATE)
    return folder
