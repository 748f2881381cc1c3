"""What a model is made of: sizes, norms, positions, windows, read once from a Hugging Face `config.json`.

`Config.from_hugging_face` takes the mapping as transformers 4 writes it (`rope_theta`, `rope_scaling`) and as
transformers 5 does (`rope_parameters`), with transformers' own defaults where a field is absent; the sizes
themselves must be there. It refuses by name whatever `regardant.lm.model` does not compute (other families,
other rope types, experts, soft caps, ...): a field that is passed over is a model that is run wrong.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeAlias

from regardant.lm.errors import UserError

Windows: TypeAlias = tuple[int | None, ...]

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
ACTIVATIONS = ("silu", "gelu_tanh")
_SIZES = ("layers", "width", "ffn_width", "heads", "kv_heads", "head_width", "vocab_size", "context")


class ConfigError(UserError):
    """The configuration lacks something or contradicts itself."""


class UnsupportedModelError(ConfigError):
    """The configuration may be sound, but it asks for something that is not implemented here."""


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its slow rotary frequencies (Grattafiori et al. 2024, The Llama 3 Herd).

    Attributes:
        factor: what the lowest frequencies are divided by.
        low_freq_factor: wavelengths over original_context / low_freq_factor are divided by `factor` outright.
        high_freq_factor: wavelengths under original_context / high_freq_factor stay; between, a linear blend.
        original_context: the context, in tokens, that the model was trained on before it was stretched.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _require(self.factor >= 1, f"the rope factor must be at least 1; got {self.factor}")
        _require(
            0 < self.low_freq_factor < self.high_freq_factor,
            "rope low_freq_factor must lie between 0 and high_freq_factor; "
            f"got {self.low_freq_factor} and {self.high_freq_factor}",
        )
        _require(
            self.original_context >= 1,
            f"rope original_max_position_embeddings must be at least 1; got {self.original_context}",
        )


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021): pair i of D/2 turns by position · theta^(-2i/D) radians."""

    theta: float
    scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        _require(self.theta > 0, f"rope_theta must be greater than 0; got {self.theta}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that the calculation in `regardant.lm.model` needs to know besides the weights.

    Attributes:
        family: "llama" (Llama, SmolLM2, Mistral), "qwen2", "qwen3" or "gpt2".
        layers: pairs of attention and feed-forward.
        width: of the residual stream. `ffn_width`: inside the feed-forward.
        heads: query heads. `kv_heads`: key/value heads, a divisor of `heads`. `head_width`: of each head.
        vocab_size: rows of the embedding. `context`: positions the model was made for.
        norm_eps: added to the variance (or mean square) under the root.
        rope: rotary positions; None where positions are learned (gpt2).
        windows: per layer, how many keys a query reaches back over, its own included; None for all.
        scales: per layer, the factor on q·k; None for 1/√head_width.
        tied: whether the embedding is also the output layer.
        qkv_bias: on the projections into attention. `output_bias`: on the one out of it.
        mlp_bias: on the projections of the feed-forward.
        qk_norm: whether each head's queries and keys are RMS-normalised before they are turned (qwen3).
        activation: "silu" or "gelu_tanh".

    Raises:
        UnsupportedModelError: a family or an activation that is not implemented.
        ConfigError: sizes that do not fit together; the message names them.
    """

    family: str
    layers: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int
    context: int
    norm_eps: float
    rope: Rope | None
    windows: Windows
    scales: tuple[float | None, ...]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: str

    def __post_init__(self) -> None:
        _supported("family", self.family, FAMILIES)
        _supported("activation", self.activation, ACTIVATIONS)
        for name in _SIZES:
            size = getattr(self, name)
            _require(size >= 1, f"{name} must be at least 1; got {size}")
        _require(self.norm_eps > 0, f"the norm's epsilon must be greater than 0; got {self.norm_eps}")
        _require(
            self.heads % self.kv_heads == 0,
            f"the heads must be a multiple of the key/value heads; got {self.heads} and {self.kv_heads}",
        )
        _require(
            self.rope is None or self.head_width % 2 == 0,
            f"the head width must be even, rotary positions turn pairs; got {self.head_width}",
        )
        for name in ("windows", "scales"):
            entries = len(getattr(self, name))
            _require(entries == self.layers, f"{name} must be {self.layers}, one a layer; got {entries}")
        for window in self.windows:
            _require(window is None or window >= 1, f"a window must be at least 1; got {window}")

    @classmethod
    def from_hugging_face(cls, mapping: Mapping[str, Any]) -> Config:
        """Read the contents of a `config.json`, as transformers 4 or 5 writes it.

        Raises:
            UnsupportedModelError: the model wants something that is not implemented; the message names it.
            ConfigError: a field is missing, of the wrong kind, or does not fit the others.
        """
        _require(
            isinstance(mapping, Mapping), f"it must be a mapping of fields; got {type(mapping).__name__}"
        )
        fields = _Fields(mapping)
        model_type = fields.text("model_type")
        _supported("model_type", model_type, tuple(_READERS))
        _refuse_what_is_not_computed(fields, model_type)
        return _READERS[model_type](fields)


def _require(condition: bool, sentence: str) -> None:  # noqa: FBT001 - reads as a sentence at every call
    if not condition:
        raise ConfigError(f"model config: {sentence}")


def _supported(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedModelError(
            f"model config: {name} {_brief(value)} is not implemented; known are {', '.join(known)}"
        )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A configuration's fields, types checked as they are read. Without a default a field is compulsory."""

    mapping: Mapping[str, Any]

    def absent(self, name: str) -> bool:
        """Whether the field is not there, or null."""
        return self.mapping.get(name) is None

    def null(self, name: str) -> bool:
        """Whether the field is there and null, which to some fields means none rather than the default."""
        return name in self.mapping and self.mapping[name] is None

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._get(name, default)
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        _require(
            whole and value >= low, f"{name} must be a whole number of at least {low}; got {_brief(value)}"
        )
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        _require(real and math.isfinite(value), f"{name} must be a finite number; got {_brief(value)}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name, default)
        _require(isinstance(value, bool), f"{name} must be true or false; got {_brief(value)}")
        return bool(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        _require(isinstance(value, str), f"{name} must be a string; got {_brief(value)}")
        return str(value)

    def _get(self, name: str, default: object) -> Any:
        _require(name in self.mapping or default is not None, f"{name} is missing")
        return self.mapping.get(name, default)


# What would change the result, with the values under which it does not. An absent or null field never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_layer_types": (),
    "moe_intermediate_size": (),
    "moe_num_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_experts_per_tok": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}

# Fields that some families read and transformers passes over in the others, where they mean another model.
_FOREIGN: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"sliding_window": (), "use_sliding_window": (False,)},
    "mistral": {"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (True,)},
    "qwen2": {"attention_bias": (True,), "mlp_bias": (False,)},
    "qwen3": {"mlp_bias": (False,)},
    "gpt2": dict.fromkeys(
        ("sliding_window", "layer_types", "rope_scaling", "rope_parameters", "rope_theta"), ()
    ),
}


def _refuse_what_is_not_computed(fields: _Fields, model_type: str) -> None:
    for name, neutral in {**_NEUTRAL, **_FOREIGN[model_type]}.items():
        if not fields.absent(name) and fields.mapping[name] not in neutral:
            raise UnsupportedModelError(
                f"model config: {name} {_brief(fields.mapping[name])} is not implemented for {model_type}"
            )


def _llama(fields: _Fields) -> Config:
    heads = fields.integer("num_attention_heads")
    bias = fields.flag("attention_bias", default=False)
    return _gated(
        fields,
        "llama",
        kv_heads=_kv_heads(fields, default=heads),
        context=2048,
        windows=_windows(fields, window=None),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def _mistral(fields: _Fields) -> Config:
    window = None if fields.null("sliding_window") else fields.integer("sliding_window", 4096)
    return _gated(
        fields,
        "llama",
        kv_heads=_kv_heads(fields, default=8),
        context=131_072,
        windows=_windows(fields, window=window),
    )


def _qwen2(fields: _Fields) -> Config:
    return _gated(
        fields,
        "qwen2",
        kv_heads=_kv_heads(fields, default=32),
        context=32_768,
        windows=_qwen_windows(fields),
        qkv_bias=True,
    )


def _qwen3(fields: _Fields) -> Config:
    bias = fields.flag("attention_bias", default=False)
    return _gated(
        fields,
        "qwen3",
        kv_heads=_kv_heads(fields, default=32),
        head_width=fields.integer("head_dim", 128),
        context=32_768,
        windows=_qwen_windows(fields),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _gated(
    fields: _Fields,
    family: str,
    *,
    kv_heads: int,
    context: int,
    windows: Windows,
    head_width: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Config:
    """Make a Config of a family with rotary positions, RMS norms and a gated feed-forward."""
    width, heads, layers = map(fields.integer, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    _supported("hidden_act", fields.text("hidden_act", "silu"), ("silu", "swish"))
    context = fields.integer("max_position_embeddings", context)
    if head_width is None:
        explicit = not fields.absent("head_dim")
        head_width = fields.integer("head_dim") if explicit else _divided("hidden_size", width, heads)
    return Config(
        family=family,
        layers=layers,
        width=width,
        ffn_width=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocab_size=fields.integer("vocab_size"),
        context=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, context),
        windows=windows,
        scales=(None,) * layers,
        tied=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        activation="silu",
    )


def _gpt2(fields: _Fields) -> Config:
    width, heads, layers = map(fields.integer, ("n_embd", "n_head", "n_layer"))
    head_width = _divided("n_embd", width, heads)
    # gelu_pytorch_tanh is gelu_new under another name.
    activation = fields.text("activation_function", "gelu_new")
    _supported("activation_function", activation, ("gelu_new", "gelu_pytorch_tanh"))
    fields.flag("reorder_and_upcast_attn", default=False)  # scores are float32 at least here in any case
    return Config(
        family="gpt2",
        layers=layers,
        width=width,
        ffn_width=4 * width if fields.absent("n_inner") else fields.integer("n_inner"),
        heads=heads,
        kv_heads=heads,
        head_width=head_width,
        vocab_size=fields.integer("vocab_size"),
        context=fields.integer("n_positions", 1024),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        rope=None,
        windows=(None,) * layers,
        scales=_gpt2_scales(fields, layers, head_width),
        tied=fields.flag("tie_word_embeddings", default=True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        activation="gelu_tanh",
    )


_READERS = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gpt2": _gpt2}


def _kv_heads(fields: _Fields, default: int) -> int:
    """Absent means the family's default, null as many as there are query heads."""
    if fields.null("num_key_value_heads"):
        return fields.integer("num_attention_heads")
    return fields.integer("num_key_value_heads", default)


def _divided(name: str, width: int, heads: int) -> int:
    _require(width % heads == 0, f"{name} must be a multiple of the number of heads; got {width} and {heads}")
    return width // heads


def _gpt2_scales(fields: _Fields, layers: int, head_width: int) -> tuple[float | None, ...]:
    scaled = fields.flag("scale_attn_weights", default=True)
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", default=False)
    if scaled and not by_layer:
        return (None,) * layers
    base = head_width**-0.5 if scaled else 1.0
    return tuple(base / (layer + 1 if by_layer else 1) for layer in range(layers))


def _qwen_windows(fields: _Fields) -> Windows:
    wanted = fields.flag("use_sliding_window", default=False) and not fields.null("sliding_window")
    window = fields.integer("sliding_window", 4096) if wanted else None
    return _windows(fields, window=window, first=fields.integer("max_window_layers", 28, low=0), free=True)


def _windows(fields: _Fields, *, window: int | None, first: int = 0, free: bool = False) -> Windows:
    """Give each layer its window: from layer `first` on, or by `layer_types` if the family is `free` to."""
    layers = fields.integer("num_hidden_layers")
    implied = tuple(None if layer < first else window for layer in range(layers))
    if fields.absent("layer_types"):
        return implied
    kinds = fields.mapping["layer_types"]
    _require(
        isinstance(kinds, list | tuple) and len(kinds) == layers,
        f"layer_types must be a list of {layers} entries, one a layer; got {_brief(kinds)}",
    )
    for kind in kinds:
        _supported("layer_types entry", kind, ("full_attention", "sliding_attention"))
    _require(
        window is not None or "sliding_attention" not in kinds,
        "layer_types has sliding_attention, but no sliding_window is in force",
    )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not free and windows != implied:
        raise UnsupportedModelError(
            f"model config: layer_types {_brief(kinds)} is not implemented for {fields.text('model_type')}"
        )
    return windows


_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope(fields: _Fields, context: int) -> Rope:
    """Read the rotary positions: one mapping in transformers 5, a mapping and a number before it."""
    given = fields.mapping.get("rope_scaling") or fields.mapping.get("rope_parameters") or {}
    _require(isinstance(given, Mapping), f"rope_parameters must be a mapping; got {_brief(given)}")
    rope = _Fields(given)
    kind = rope.text("rope_type", rope.text("type", "default"))
    _supported("rope type", kind, ("default", "llama3"))
    read = {"rope_type", "type", "rope_theta", *(_LLAMA3_FIELDS if kind == "llama3" else ())}
    for name, value in given.items():
        if name not in read and (name, value) != ("partial_rotary_factor", 1):
            raise UnsupportedModelError(
                f"model config: {name} {_brief(value)} is not implemented for rope type {kind}"
            )
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return Rope(theta)
    original = "original_max_position_embeddings"
    return Rope(
        theta,
        Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            # As in transformers, a field of that name outside the mapping goes first.
            original_context=(rope if fields.absent(original) else fields).integer(original, context),
        ),
    )
