"""Tiny random transformers models of many architectures, with attention so loud that a wrong mask or scale shows.

Queries and keys are scaled up, learned sinks are drawn at random, softcaps are small, windows and chunks are shorter
than the texts.

Errors are measured against eager attention in float64: what is computed in float32 may err twice as much as eager
attention in float32 does, plus one rounding.
"""

import contextlib
import copy

import torch
import transformers as hf

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
NO_ENDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _llama(**more):
    return hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, **HEADS, **NO_ENDS, **more)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

BUILDERS = {
    "llama": _llama,
    "llama3": lambda: _llama(rope_parameters=LLAMA3, max_position_embeddings=64),
    "mistral": lambda: (
        hf.MistralForCausalLM, hf.MistralConfig(**SIZES, **HEADS, **NO_ENDS, sliding_window=6)
    ),
    "qwen2": lambda: (
        hf.Qwen2ForCausalLM, hf.Qwen2Config(**SIZES, **HEADS, **NO_ENDS, use_sliding_window=True, **ALTERNATING)
    ),
    "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SIZES, **HEADS, **NO_ENDS)),
    "qwen3_moe": lambda: (
        hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SIZES, **HEADS, **NO_ENDS, **EXPERTS, num_experts=4)
    ),
    "gemma2": lambda: (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **SIZES, **HEADS, **NO_ENDS, **ALTERNATING, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
            query_pre_attn_scalar=4,
        ),
    ),
    "gemma3": lambda: (
        hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SIZES, **HEADS, **NO_ENDS, **ALTERNATING, query_pre_attn_scalar=4)
    ),
    "gpt_oss": lambda: (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(**SIZES, **HEADS, **NO_ENDS, **ALTERNATING, num_local_experts=4, num_experts_per_tok=2),
    ),
    "phi3": lambda: (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, **NO_ENDS, sliding_window=6
        ),
    ),
    "olmo2": lambda: (
        hf.Olmo2ForCausalLM, hf.Olmo2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, **NO_ENDS)
    ),
    "smollm3": lambda: (
        hf.SmolLM3ForCausalLM,
        hf.SmolLM3Config(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, **NO_ENDS, no_rope_layers=[1, 0],
            use_sliding_window=True, **ALTERNATING,
        ),
    ),
    "gpt2": lambda: (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **NO_ENDS,
            scale_attn_by_inverse_layer_idx=True, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        ),
    ),
    "gpt_neox": lambda: (
        hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SIZES, num_attention_heads=4, **NO_ENDS)
    ),
    "phi": lambda: (
        hf.PhiForCausalLM, hf.PhiConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, **NO_ENDS)
    ),
    "opt": lambda: (
        hf.OPTForCausalLM,
        hf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
            word_embed_proj_dim=32, dropout=0.0, **NO_ENDS,
        ),
    ),
    "llama4": lambda: (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig(
            **SIZES, **HEADS, **NO_ENDS, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
            attention_chunk_size=6, no_rope_layers=[1, 0], floor_scale=4, attn_scale=0.5,
        ),
    ),
    "deepseek_v3": lambda: (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **SIZES, **NO_ENDS, **EXPERTS, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16,
            q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4, n_group=2,
            topk_group=1, first_k_dense_replace=1,
        ),
    ),
    "cohere2": lambda: (
        hf.Cohere2ForCausalLM,
        hf.Cohere2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, **NO_ENDS, **ALTERNATING),
    ),
}  # fmt: skip


def build(name, seed=0, **more):
    """A model in evaluation mode, loaded with eager attention."""
    torch.manual_seed(seed)
    kind, config = BUILDERS[name]()
    for option, value in more.items():
        setattr(config, option, value)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = kind(config).eval()
    loud(model)
    return model


def loud(model):
    """Draw all weights anew, those of queries and keys large."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            leaf = parameter_name.rpartition(".")[0].rpartition(".")[2]
            if parameter_name.endswith("sinks"):
                parameter.normal_(0, 2)
            elif parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                size = parameter.shape[-1] ** -0.5
                if leaf in {"q_proj", "k_proj", "q_b_proj", "query_key_value", "c_attn", "qkv_proj"}:
                    size *= 3
                parameter.normal_(0, size)


def exact(model):
    """The same model in float64; with `wide_softmax` its eager attention is so throughout."""
    return copy.deepcopy(model).double()


@contextlib.contextmanager
def wide_softmax():
    """Let eager attention keep to float64, where models ask its softmax for float32."""
    plain = torch.nn.functional.softmax

    def softmax(scores, dim=None, dtype=None, **more):
        return plain(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype, **more)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


def assert_in_budget(ours, eager, exact):
    """Errors relative to each tensor's largest number; the largest of them count, as one may be small by luck."""
    errors = []
    for got in (ours, eager):
        assert [a.shape for a in got] == [a.shape for a in exact]
        scales = [max(float(want.abs().max()), 1e-30) for want in exact]
        errors.append(
            max(
                float((a.double() - b.double()).abs().max()) / c
                for a, b, c in zip(got, exact, scales, strict=True)
            )
        )
    assert errors[0] <= 2 * errors[1] + torch.finfo(torch.float32).eps
