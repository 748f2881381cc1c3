"""Configurations: what transformers writes is read, what is not implemented is refused by its name."""

import json

import pytest
import transformers

from regardant.lm.config import Config, ConfigError, Llama3Scaling, Rope, UnsupportedModelError
from regardant.lm.errors import UserError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(base=LLAMA, **change):
    return Config.from_hugging_face(base | change)


def without(name, base=LLAMA):
    return {key: value for key, value in base.items() if key != name}


def of(model_type, **change):
    return read(model_type=model_type, **change)


def test_a_llama_is_read_whole():
    assert read() == Config(
        family="llama",
        layers=3,
        width=48,
        ffn_width=80,
        heads=6,
        kv_heads=2,
        head_width=8,
        vocab_size=100,
        context=512,
        norm_eps=1e-5,
        rope=Rope(50_000.0),
        windows=(None, None, None),
        scales=(None, None, None),
        tied=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        activation="silu",
    )


def test_a_gpt2_is_read_whole():
    assert read(GPT2) == Config(
        family="gpt2",
        layers=3,
        width=48,
        ffn_width=192,
        heads=6,
        kv_heads=6,
        head_width=8,
        vocab_size=100,
        context=64,
        norm_eps=1e-5,
        rope=None,
        windows=(None, None, None),
        scales=(None, None, None),
        tied=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        activation="gelu_tanh",
    )


def test_the_config_of_smollm2_is_read():
    given = {
        "_name_or_path": "checkpoint",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    }
    config = Config.from_hugging_face(given)
    assert (config.layers, config.width, config.head_width, config.tied) == (30, 576, 64, True)
    assert config.rope == Rope(100_000.0)


@pytest.mark.parametrize(
    ("change", "rope"),
    [
        ({}, Rope(50_000.0)),
        ({"rope_theta": 7}, Rope(7.0)),
        ({"rope_scaling": None}, Rope(50_000.0)),
        ({"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, Rope(9.0)),
        ({"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 1.0}}, Rope(9.0)),
        ({"rope_scaling": {"type": "default"}}, Rope(50_000.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", **SCALING}},
            Rope(50_000.0, Llama3Scaling(8.0, 1.0, 4.0, 128)),
        ),
        (
            {"rope_parameters": {"rope_theta": 3.0, "type": "llama3", **SCALING}},
            Rope(3.0, Llama3Scaling(8.0, 1.0, 4.0, 128)),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **without("original_max_position_embeddings", SCALING)}},
            Rope(50_000.0, Llama3Scaling(8.0, 1.0, 4.0, 512)),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **SCALING}, "original_max_position_embeddings": 64},
            Rope(50_000.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
    ],
)
def test_rotary_positions_are_read_as_either_version_writes_them(change, rope):
    assert read(**change).rope == rope


THEIRS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
BARE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@pytest.mark.parametrize("model_type", THEIRS)
def test_absent_fields_have_the_defaults_of_transformers(model_type):
    sizes = {name: LLAMA[name] for name in BARE} | {"model_type": model_type, "num_attention_heads": 32}
    sizes["hidden_size"] = 64
    theirs = THEIRS[model_type](**{name: sizes[name] for name in BARE[1:]})
    bare = Config.from_hugging_face(sizes)
    assert bare == Config.from_hugging_face(json.loads(theirs.to_json_string(use_diff=True)))
    assert bare == Config.from_hugging_face(json.loads(theirs.to_json_string(use_diff=False)))
    assert bare.kv_heads == theirs.num_key_value_heads
    assert bare.context == theirs.max_position_embeddings
    assert bare.norm_eps == theirs.rms_norm_eps
    assert bare.rope == Rope(theirs.rope_parameters["rope_theta"])
    assert bare.windows == (getattr(theirs, "sliding_window", None),) * 3
    assert bare.head_width == {"qwen3": 128}.get(model_type, 2)
    assert bare.tied == theirs.tie_word_embeddings


def test_absent_fields_of_gpt2_have_the_defaults_of_transformers():
    theirs = transformers.GPT2Config(vocab_size=100, n_embd=48, n_layer=3, n_head=6)
    bare = Config.from_hugging_face(without("n_positions", GPT2))
    for diff in (True, False):
        assert bare == Config.from_hugging_face(json.loads(theirs.to_json_string(use_diff=diff)))
    assert (bare.context, bare.norm_eps, bare.tied) == (1024, theirs.layer_norm_epsilon, True)


@pytest.mark.parametrize(
    ("model_type", "change", "windows"),
    [
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": 5}, (5, 5, 5)),
        ("mistral", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 3}, (5, 5, 5)),
        ("llama", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        ("qwen2", {"sliding_window": 5}, (None, None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True}, (None, None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, (None, 5, 5)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, (5, 5, 5)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 3),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        (
            "qwen3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (5, None, 5),
        ),
    ],
)
def test_windows(model_type, change, windows):
    assert of(model_type, **change).windows == windows


def test_the_families_differ_where_they_should():
    biases = lambda config: (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)  # noqa: E731
    assert biases(read(attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert biases(of("mistral")) == (False, False, False, False)
    assert biases(of("qwen2")) == (True, False, False, False)
    assert biases(of("qwen3")) == (False, False, False, True)
    assert biases(of("qwen3", attention_bias=True)) == (True, True, False, True)
    assert read(head_dim=16).head_width == 16
    assert read(head_dim=None).head_width == 8
    assert read(hidden_act="swish").activation == "silu"
    assert read(num_key_value_heads=None).kv_heads == 6
    assert Config.from_hugging_face(without("num_key_value_heads")).kv_heads == 6
    assert of("mistral", num_key_value_heads=None).kv_heads == 6
    assert read(GPT2, n_inner=50).ffn_width == 50
    assert read(GPT2, n_inner=None).ffn_width == 192
    assert read(GPT2, activation_function="gelu_pytorch_tanh").activation == "gelu_tanh"


def test_the_scales_of_gpt2():
    assert read(GPT2, scale_attn_weights=False).scales == (1.0, 1.0, 1.0)
    assert read(GPT2, scale_attn_by_inverse_layer_idx=True).scales == (8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3)
    both = read(GPT2, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert both.scales == (1.0, 1 / 2, 1 / 3)


UNSUPPORTED = [
    ({"model_type": "mamba"}, "model_type 'mamba'"),
    ({"model_type": "mixtral"}, "model_type 'mixtral'"),
    ({"model_type": "gemma2"}, "model_type 'gemma2'"),
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope type 'mrope'"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"rope_type": "llama3", **SCALING, "attention_factor": 2.0}}, "attention_factor 2.0"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ({"num_local_experts": 8}, "num_local_experts 8"),
    ({"num_experts": 64}, "num_experts 64"),
    ({"n_routed_experts": 64}, "n_routed_experts 64"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ({"pretraining_tp": 2}, "pretraining_tp 2"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"compression_config": {"bits": 4}}, "compression_config"),
    ({"is_causal": False}, "is_causal False"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ({"logits_scaling": 8.0}, "logits_scaling 8.0"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
    ({"residual_multiplier": 0.2}, "residual_multiplier 0.2"),
    ({"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ({"attention_chunk_size": 64}, "attention_chunk_size 64"),
    ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    ({"rope_interleaved": True}, "rope_interleaved True"),
    ({"sliding_window": 64}, "sliding_window 64 is not implemented for llama"),
    ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias True is not implemented for mistral"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types .* for mistral"),
    ({"model_type": "qwen2", "attention_bias": False}, "attention_bias False is not implemented for qwen2"),
    ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias True is not implemented for qwen3"),
]
UNSUPPORTED_GPT2 = [
    ({"activation_function": "gelu"}, "activation_function 'gelu'"),
    ({"add_cross_attention": True}, "add_cross_attention True"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder True"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters .* for gpt2"),
    ({"sliding_window": 4}, "sliding_window 4"),
    ({"pruned_heads": {"1": [0]}}, "pruned_heads"),
]


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [(LLAMA, *each) for each in UNSUPPORTED] + [(GPT2, *each) for each in UNSUPPORTED_GPT2],
)
def test_what_is_not_implemented_is_refused_by_name(base, change, message):
    with pytest.raises(
        UnsupportedModelError, match=f"{message}.* (is|are) not implemented|{message}"
    ) as caught:
        read(base, **change)
    assert "not implemented" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": None},
        {"num_local_experts": 0},
        {"pretraining_tp": None},
        {"partial_rotary_factor": 1.0},
        {"logits_scaling": 1.0},
        {"is_causal": True},
        {"torch_dtype": "float16", "use_cache": False, "auto_map": {"AutoConfig": "x"}},
    ],
)
def test_fields_that_change_nothing_are_let_through(change):
    assert read(**change) == read()


NONSENSE = [
    ({"num_key_value_heads": 4}, "heads must be a multiple of the key/value heads; got 6 and 4"),
    ({"num_attention_heads": 5}, "hidden_size must be a multiple of the number of heads; got 48 and 5"),
    ({"head_dim": 7}, "head width must be even.*got 7"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1; got 0"),
    ({"hidden_size": -48}, "hidden_size must be a whole number of at least 1; got -48"),
    ({"vocab_size": "100"}, "vocab_size must be a whole number of at least 1; got '100'"),
    ({"vocab_size": True}, "vocab_size must be a whole number of at least 1; got True"),
    ({"intermediate_size": 80.0}, "intermediate_size must be a whole number"),
    ({"intermediate_size": None}, "intermediate_size must be a whole number.*got None"),
    ({"rms_norm_eps": 0}, "epsilon must be greater than 0; got 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number; got '1e-5'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number; got nan"),
    ({"rope_theta": -1.0}, "rope_theta must be greater than 0; got -1.0"),
    ({"rope_theta": float("inf")}, "rope_theta must be a finite number; got inf"),
    ({"rope_scaling": "linear"}, "rope_parameters must be a mapping; got 'linear'"),
    ({"rope_scaling": {"rope_type": "llama3", **SCALING, "factor": None}}, "factor must be a finite number"),
    ({"rope_scaling": {"rope_type": "llama3", **without("factor", SCALING)}}, "factor is missing"),
    (
        {"rope_scaling": {"rope_type": "llama3", **SCALING, "factor": 0.5}},
        "factor must be at least 1; got 0.5",
    ),
    ({"rope_scaling": {"rope_type": "llama3", **SCALING, "low_freq_factor": 4.0}}, "got 4.0 and 4.0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false; got 'yes'"),
    ({"hidden_act": 3}, "hidden_act must be a string; got 3"),
    ({"model_type": 3}, "model_type must be a string; got 3"),
    ({"layer_types": ["full_attention"]}, "layer_types must be a list of 3 entries"),
    ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in force"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a whole number of at least 1"),
    ({"model_type": "qwen2", "max_window_layers": -1}, "max_window_layers must be .* at least 0; got -1"),
    ({"model_type": "qwen3", "head_dim": None}, "head_dim must be a whole number"),
]


@pytest.mark.parametrize(("change", "message"), NONSENSE)
def test_nonsense_is_one_clear_sentence(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(**change)
    assert not isinstance(caught.value, UnsupportedModelError)
    assert isinstance(caught.value, UserError)
    assert str(caught.value).startswith("model config: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model_type", *BARE[1:]])
def test_a_missing_size_is_named(name):
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        Config.from_hugging_face(without(name))


@pytest.mark.parametrize("name", ["vocab_size", "n_embd", "n_layer", "n_head"])
def test_a_missing_size_of_gpt2_is_named(name):
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        Config.from_hugging_face(without(name, GPT2))


def test_a_list_is_no_configuration():
    with pytest.raises(ConfigError, match="must be a mapping of fields; got list"):
        Config.from_hugging_face([LLAMA])
