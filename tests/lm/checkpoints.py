"""Tiny random models of every family, written to disk by transformers, and as GGUF by the gguf package."""

import json

import gguf
import numpy as np
import tokenizers
import torch
import transformers

TEXT = "The trophy did not fit in the suitcase because it was too big. Où est le café ? 12 345 😀\n" * 3
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama untied, with biases": lambda: transformers.LlamaConfig(
        **_SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=32
    ),
    "llama3 rope": lambda: transformers.LlamaConfig(**_SIZES, rope_parameters=dict(LLAMA3_ROPE)),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=16),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_embd=64, n_head=4, n_layer=2, n_positions=128),
}


def random_model(kind):
    """Make a model whose every weight is random: norms and biases too, or errors in them would not show."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3 + (1 if weight.ndim == 1 else 0))
    return model


def write_tokenizer(folder, **settings):
    """Write a tokenizer.json of 300 tokens, byte-level, trained on TEXT, and its tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_folder(folder, model, **options):
    """Save a model as transformers does, with a tokenizer beside it."""
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return folder


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    """Give the name that llama.cpp writes a Hugging Face tensor under."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _WHOLES:
        return f"{_WHOLES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def paired(weight, heads):
    """Order the rows of llama's q and k as llama.cpp's converter does (convert_hf_to_gguf.py, `permute`)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, kind=gguf.GGMLQuantizationType.F32, *, metadata=(), tokenizer=True, extra=()):
    """Write a model as llama.cpp's converter would, its matrices quantised to `kind`."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in metadata:
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    if tokenizer:
        add_vocabulary(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if architecture == "llama" and ".self_attn.q_proj." in name:
            weight = paired(weight, config.num_attention_heads)
        if architecture == "llama" and ".self_attn.k_proj." in name:
            weight = paired(weight, config.num_key_value_heads)
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(weight, stored), raw_dtype=stored)
    for name, values in extra:
        writer.add_tensor(name, np.asarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer, size=300):
    """Add a byte-level vocabulary: <|end|>, the 256 letters, a few merges, unused tokens up to `size`."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "Ġ t", "Ġt h", "a n", "i n"]
    tokens = ["<|end|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    kinds = [3] + [1] * (len(tokens) - 1) + [5] * (size - len(tokens))
    tokens += [f"[unused {n}]" for n in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
