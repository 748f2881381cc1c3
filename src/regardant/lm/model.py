"""The model: token ids in, logits out, one short function for each formula.

The same lines run on NumPy arrays and on torch tensors, through the array API standard. Weights are a plain
mapping from Hugging Face checkpoint names to arrays, read and never copied. Norms, rotations and activations are
computed in float32 at least, whatever the type of the weights. It refuses ids outside the vocabulary and
positions that the model has not learned; what a configuration may ask for is settled in `config`.

Shape legend: B batch, T tokens, N = B·T rows, S keys (the past and T), C width of the residual stream, F width
of the feed-forward, H query heads, G key/value heads, D head width, P = D/2 rotated pairs, V vocabulary,
L learned positions, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace as find_namespace
from array_api_compat import device, is_torch_array

from regardant.lm.blas import one_thread, rows_of_one
from regardant.threads import each

if TYPE_CHECKING:
    from regardant.cache import KVCache
    from regardant.lm.config import Config, Rope

Array: TypeAlias = Any  # a NumPy array or a torch tensor
Weights: TypeAlias = Mapping[str, Array]
Attend: TypeAlias = Callable[..., Array]

ROWS = 128  # the rows that everything but attention works on at a time: see `by_rows`


def forward(
    ids_BT: Array,
    weights: Weights,
    config: Config,
    *,
    starts_B: Array | None = None,
    segments_BT: Array | None = None,
    cache: KVCache | None = None,
    attend: Attend | None = None,
    last: int | None = None,
    call: Callable[..., Array] = lambda function, *arguments: function(*arguments),
) -> Array:
    """Run the model and return the residual stream after the final norm, (B, T, C) in the weights' type.

    Args:
        ids_BT: integer token ids.
        weights: the arrays that `expected_weights(config)` names.
        config: what the model is made of.
        starts_B: first real position in each row of a batch that is padded on the left. Positions are counted
            from it and keys before it are invisible; what comes out before it is finite and means nothing.
        segments_BT: integer document ids, of rows that are packed with documents; none sees another. Positions run
            on through a row: rotary scores depend on differences of positions alone, so that to begin anew with each
            document would change nothing but roundings. Learned positions do not allow it, and are refused.
        cache: the past. Every layer writes its new keys and values; it is the caller who advances it.
        attend: called as attend(layer, q_BHTD, k_BGSD, v_BGSD, causal=True, offset=..., window=..., starts=...)
            for out_BHTD, with scale=... where the model has its own and segments=... where documents are packed; by
            default regardant's `attention`.
        last: return only so many last positions of each row, (B, last, C), and leave out what the last layer would
            compute for the others: of SmolLM2's 30 layers 3 % of the time. None for all.
        call: how each layer is run, as call(function, *arguments); torch's `checkpoint` forgets what it computed.

    Memory: some N·(C + F) numbers and what `attend` takes; nothing but the cache outlives the call.

    Raises:
        TypeError: ids that are not integers.
        ValueError: ids of another rank or outside the vocabulary; starts of another shape or outside the text;
            segments of another shape, with a cache or with learned positions; more positions than the model has
            learned; a `last` outside the text.
    """
    names = _names(config)
    embedding_VC = weights[names.embedding]
    xp = array_namespace(embedding_VC)
    ids_BT = _checked_ids(ids_BT, embedding_VC)
    B, T = ids_BT.shape
    if last is not None and not 0 <= last <= T:
        raise ValueError(f"forward: last must lie between 0 and the {T} positions; got {last}")
    offset = 0 if cache is None else cache.length
    if segments_BT is not None:
        _check_segments(segments_BT, (B, T), config, cache)
    if starts_B is not None:
        starts_B = _checked_starts(starts_B, B, embedding_VC)
        # A row may begin beyond what the cache holds so far; until then it sees nothing.
        starts_B = starts_B if cache is None else xp.clip(starts_B, max=offset + T)
    positions_N = token_positions(B, T, offset, starts_B, embedding_VC)

    x_NC = xp.take(embedding_VC, xp.reshape(ids_BT, (-1,)), axis=0)
    turn: tuple[Array, ...] = ()
    if config.rope is None:
        x_NC = x_NC + learned_positions(positions_N, weights[names.positions])
    else:
        turn = rotary_tables(positions_N, config.rope, config.head_width, embedding_VC)
    step = _Step((B, T), offset, starts_B, segments_BT, turn, cache, attend or _default_attend(embedding_VC))
    ours = _is_numpy(embedding_VC) and B * T > ROWS  # the threads are: see `by_rows`
    with one_thread() if ours else contextlib.nullcontext():
        for layer in range(config.layers):
            only = last if layer == config.layers - 1 else None
            x_NC = call(transform, x_NC, layer, weights, config, step, only)
        (hidden_NC,) = by_rows(lambda x: (norm(x, weights, names.final_norm, config),), x_NC)
    return xp.reshape(hidden_NC, (B, T if last is None else last, config.width))


def logits(hidden_BTC: Array, weights: Weights, config: Config) -> Array:
    """Score every token of the vocabulary as the next one: hidden · Wᵀ, (B, T, V).

    Slice `hidden_BTC` to the positions that are wanted first: V numbers for each is a lot.
    """
    xp = array_namespace(hidden_BTC)
    out_VC = weights[_names(config).embedding if config.tied else "lm_head.weight"]
    scores_NV = xp.reshape(hidden_BTC, (-1, config.width)) @ out_VC.T
    return xp.reshape(scores_NV, (*hidden_BTC.shape[:-1], config.vocab_size))


@dataclasses.dataclass(frozen=True)
class _Step:
    """What all layers of one call share."""

    shape: tuple[int, int]  # B, T
    offset: int
    starts_B: Array | None
    segments_BT: Array | None
    turn: tuple[Array, ...]  # cosines and sines for each row, or nothing
    cache: KVCache | None
    attend: Attend


def transform(
    x_NC: Array, layer: int, weights: Weights, config: Config, step: _Step, last: int | None = None
) -> Array:
    """Take the residual stream through one layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

    With `last`, all positions are read from and so many of each row are written: the stream has (B·last, C) then.
    """
    names = _names(config)

    def before(x: Array, *turn: Array) -> tuple[Array, ...]:
        h = norm(x, weights, names.attention_norm.format(layer), config)
        return queries_keys_values(h, turn, layer, weights, config)

    def after(x: Array, mixed: Array) -> tuple[Array]:
        x = x + project(mixed, weights, names.output.format(layer), config, bias=config.output_bias)
        h = norm(x, weights, names.ffn_norm.format(layer), config)
        return (x + feed_forward(h, layer, weights, config),)

    q_NHD, k_NGD, v_NGD = by_rows(before, x_NC, *step.turn)
    if last is not None:
        x_NC, q_NHD = (last_positions(array, step.shape, last) for array in (x_NC, q_NHD))
    mixed_NI = mix(q_NHD, k_NGD, v_NGD, layer, config, step)
    (x_NC,) = by_rows(after, x_NC, mixed_NI)
    return x_NC


def by_rows(compute: Callable[..., tuple[Array, ...]], *arrays: Array) -> tuple[Array, ...]:
    """Apply what treats every row for itself to `ROWS` rows at a time, and join what comes out.

    The intermediate arrays of so many rows stay in the processor's cache and reuse each other's memory; whole, the
    system has to find and clear new pages for each of them, which takes longer than the arithmetic does. The pieces
    are spread over the package's threads, so that elementwise work takes part; their cut does not depend on how many
    there are. That is NumPy's: torch has threads and an allocator of its own, and each piece would be one more in its
    graph of gradients.
    """
    N = arrays[0].shape[0]
    if N <= ROWS or not _is_numpy(arrays[0]):
        return compute(*arrays)
    firsts = range(0, N, ROWS)
    pieces: list[tuple[Array, ...]] = [()] * len(firsts)

    def work(piece: int) -> None:
        first = firsts[piece]
        pieces[piece] = compute(*(array[first : first + ROWS] for array in arrays))

    each(work, range(len(firsts)))
    return tuple(np.concatenate(parts, axis=0) for parts in zip(*pieces, strict=True))


def last_positions(array_NX: Array, shape: tuple[int, int], last: int) -> Array:
    """The rows of the last positions of each text of a batch, (B·last, ...)."""
    xp = array_namespace(array_NX)
    B, T = shape
    rest = array_NX.shape[1:]
    return xp.reshape(xp.reshape(array_NX, (B, T, *rest))[:, T - last :], (B * last, *rest))


def mix(q_NHD: Array, k_NGD: Array, v_NGD: Array, layer: int, config: Config, step: _Step) -> Array:
    """Let each token mix the values of the tokens up to itself; the heads' outputs side by side, (N, H·D)."""
    xp = array_namespace(q_NHD)
    B, T = step.shape
    queries = q_NHD.shape[0] // max(B, 1)  # all T positions, or the last of them
    q_BHTD, k_BGSD, v_BGSD = (
        xp.permute_dims(xp.reshape(rows, (B, length, *rows.shape[1:])), (0, 2, 1, 3))
        for rows, length in ((q_NHD, queries), (k_NGD, T), (v_NGD, T))
    )
    if step.cache is not None:
        k_BGSD, v_BGSD = step.cache.write(layer, k_BGSD, v_BGSD)
    options: dict[str, Any] = {} if config.scales[layer] is None else {"scale": config.scales[layer]}
    if step.segments_BT is not None:
        options["segments"] = (step.segments_BT[:, T - queries :], step.segments_BT)
    out_BHTD = step.attend(
        layer,
        q_BHTD,
        k_BGSD,
        v_BGSD,
        causal=True,
        offset=step.offset + T - queries,
        window=config.windows[layer],
        starts=step.starts_B,
        **options,
    )
    out_BTHD = xp.permute_dims(out_BHTD, (0, 2, 1, 3))
    return xp.reshape(out_BTHD, (q_NHD.shape[0], config.heads * config.head_width))


def queries_keys_values(
    h_NC: Array, turn: tuple[Array, ...], layer: int, weights: Weights, config: Config
) -> tuple[Array, Array, Array]:
    """Project the stream to q_NHD, k_NGD and v_NGD; norm queries and keys where `qk_norm` says so, and turn them."""
    xp = array_namespace(h_NC)
    names = _names(config)
    if config.family == "gpt2":  # one projection whose outputs lie side by side
        qkv_NO = project(h_NC, weights, names.queries.format(layer), config, bias=config.qkv_bias)
        parts = [qkv_NO[:, i * config.width : (i + 1) * config.width] for i in range(3)]
    else:
        layer_names = [name.format(layer) for name in (names.queries, names.keys, names.values)]
        parts = project_all(h_NC, weights, layer_names, config, bias=config.qkv_bias)
    N, D = h_NC.shape[0], config.head_width
    q_NHD, k_NGD, v_NGD = (xp.reshape(part, (N, part.shape[1] // D, D)) for part in parts)
    if config.qk_norm:
        q_NHD = rms_norm(q_NHD, weights[names.query_norm.format(layer)], config.norm_eps)
        k_NGD = rms_norm(k_NGD, weights[names.key_norm.format(layer)], config.norm_eps)
    if turn:
        q_NHD, k_NGD = rotate(q_NHD, *turn), rotate(k_NGD, *turn)
    return q_NHD, k_NGD, v_NGD


def feed_forward(h_NC: Array, layer: int, weights: Weights, config: Config) -> Array:
    """Transform each token by itself: down(silu(gate(h)) · up(h)), or GPT-2's down(gelu(up(h))); (N, C)."""
    names = _names(config)
    if config.activation == "silu":  # the gated form, SwiGLU (Shazeer 2020)
        layer_names = [names.gate.format(layer), names.up.format(layer)]
        gate_NF, up_NF = project_all(h_NC, weights, layer_names, config, bias=config.mlp_bias)
        inner_NF = silu(gate_NF) * up_NF
    else:
        inner_NF = gelu_tanh(project(h_NC, weights, names.up.format(layer), config, bias=config.mlp_bias))
    return project(inner_NF, weights, names.down.format(layer), config, bias=config.mlp_bias)


def project(x_NI: Array, weights: Weights, name: str, config: Config, *, bias: bool) -> Array:
    """Compute x · Wᵀ + b. Checkpoints hold W as (O, I); GPT-2 alone holds it as (I, O)."""
    matrix = weights[name + ".weight"]
    y_NO = x_NI @ (matrix if config.family == "gpt2" else matrix.T)
    return y_NO + weights[name + ".bias"] if bias else y_NO


def project_all(
    x_NI: Array, weights: Weights, names: list[str], config: Config, *, bias: bool
) -> list[Array]:
    """Compute `project` by each of several weights; in one product where they are the rows of one array."""
    matrices = [weights[name + ".weight"] for name in names]
    whole = rows_of_one(matrices)
    if whole is None:
        return [project(x_NI, weights, name, config, bias=bias) for name in names]
    parts = side_by_side(x_NI @ whole.T, [matrix.shape[0] for matrix in matrices])
    return [part + weights[name + ".bias"] if bias else part for name, part in zip(names, parts, strict=True)]


def side_by_side(y_NO: Array, widths: list[int]) -> list[Array]:
    """Views of so many columns each. torch's `split` has them joined in one go when gradients come back."""
    if not _is_numpy(y_NO):
        return list(y_NO.split(widths, dim=1))
    return [
        y_NO[:, last - width : last] for width, last in zip(widths, itertools.accumulate(widths), strict=True)
    ]


def norm(x_NC: Array, weights: Weights, name: str, config: Config) -> Array:
    """The family's norm: LayerNorm for GPT-2, RMSNorm for the others."""
    if config.family == "gpt2":
        return layer_norm(x_NC, weights[name + ".weight"], weights[name + ".bias"], config.norm_eps)
    return rms_norm(x_NC, weights[name + ".weight"], config.norm_eps)


def rms_norm(x: Array, gain_C: Array, eps: float) -> Array:
    """Compute x / √(mean(x²) + eps) · gain over the last axis (Zhang & Sennrich 2019)."""
    if not _is_numpy(x):  # the same, with a shorter way back for gradients
        from regardant.lm import tensors

        return tensors.rms_norm(x, gain_C, eps)
    xp = array_namespace(x)
    wide = _at_least_float32(x, xp)
    mean_square = xp.vecdot(wide, wide)[..., None] / x.shape[-1]
    return _back(wide * (mean_square + eps) ** -0.5, x) * gain_C


def layer_norm(x: Array, gain_C: Array, bias_C: Array, eps: float) -> Array:
    """Compute (x − mean) / √(variance + eps) · gain + bias over the last axis (Ba et al. 2016)."""
    xp = array_namespace(x)
    wide = _at_least_float32(x, xp)
    centred = wide - xp.mean(wide, axis=-1, keepdims=True)
    variance = xp.vecdot(centred, centred)[..., None] / x.shape[-1]
    return _back(centred * (variance + eps) ** -0.5, x) * gain_C + bias_C


def silu(x: Array) -> Array:
    """Compute x · sigmoid(x) = x / (1 + e^(−x)) (Elfwing et al. 2017)."""
    xp = array_namespace(x)
    if not _is_numpy(x):  # one pass instead of five, and one backward
        return xp.nn.functional.silu(x)
    wide = _at_least_float32(x, xp)
    # e^88 is near the top of float32; beyond it the result is 0 to any precision.
    return _back(wide / (1 + xp.exp(xp.minimum(-wide, 88.0))), x)


def gelu_tanh(x: Array) -> Array:
    """Compute x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), GPT-2's form of gelu (Hendrycks & Gimpel 2016)."""
    xp = array_namespace(x)
    wide = _at_least_float32(x, xp)
    return _back(0.5 * wide * (1 + xp.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))), x)


def rotate(x_NHD: Array, cos_N1D: Array, sin_N1D: Array) -> Array:
    """Turn each pair (x_i, x_{i + D/2}) by its position's angle (RoPE, Su et al. 2021).

    The pair (a, b) becomes (a·cos − b·sin, b·cos + a·sin); the tables hold both halves and the sign.
    """
    xp = array_namespace(x_NHD)
    wide = _at_least_float32(x_NHD, xp)
    half = x_NHD.shape[-1] // 2
    if not _is_numpy(x_NHD):  # the same, with a shorter way back for gradients; NumPy's is slow to begin
        other = xp.roll(wide, half, axis=-1)
    else:
        other = xp.concat([wide[..., half:], wide[..., :half]], axis=-1)
    return _back(wide * cos_N1D + other * sin_N1D, x_NHD)


def rotary_tables(positions_N: Array, rope: Rope, head_width: int, like: Array) -> tuple[Array, Array]:
    """Cosines (cos, cos) and signed sines (−sin, sin) of position · frequency for both halves of a head, (N, 1, D).

    Angles are rounded to float32, as they were where the checkpoints were trained: at position 8,000 that moves
    them by up to 5e-4, which a model is used to and a more exact table would not reproduce.
    """
    xp = array_namespace(like)
    frequencies_P = xp.asarray(inverse_frequencies(rope, head_width), dtype=xp.float32, device=device(like))
    angles_NP = xp.astype(positions_N, xp.float32)[:, None] * frequencies_P
    if like.dtype == xp.float64:
        angles_NP = xp.astype(angles_NP, xp.float64)
    cos, sin = xp.cos(angles_NP), xp.sin(angles_NP)
    return xp.concat([cos, cos], axis=-1)[:, None], xp.concat([-sin, sin], axis=-1)[:, None]


@functools.lru_cache(maxsize=8)
def inverse_frequencies(rope: Rope, head_width: int) -> tuple[float, ...]:
    """Radians per position of each pair: theta^(−2i/D), slowed as Llama 3.1 does if `rope.scaling` says so.

    With wavelength w = 2π/f and L the original context: f where w < L/high, f/factor where w > L/low, and
    (1 − r)·f/factor + r·f with r = (L/w − low)/(high − low) in between.
    """
    exponents = np.arange(0, head_width, 2, dtype=np.float32) / np.float32(head_width)
    f = 1 / np.float32(rope.theta) ** exponents
    if rope.scaling is not None:
        factor, low, high = rope.scaling.factor, rope.scaling.low_freq_factor, rope.scaling.high_freq_factor
        # Products with reciprocals, as torch divides a number by a tensor: so the last bits agree with it.
        wavelengths = 1 / f * (2 * math.pi)
        r = np.clip((1 / wavelengths * rope.scaling.original_context - low) / (high - low), 0, 1)
        f = (1 - r) * f / factor + r * f
    return tuple(f.tolist())


def token_positions(B: int, T: int, offset: int, starts_B: Array | None, like: Array) -> Array:
    """The position of each new token, (N,): counted from its row's start, 0 before it."""
    xp = array_namespace(like)
    positions_BT = xp.broadcast_to(xp.arange(offset, offset + T, device=device(like)), (B, T))
    if starts_B is not None:
        positions_BT = xp.clip(positions_BT - starts_B[:, None], min=0)
    return xp.reshape(positions_BT, (-1,))


def learned_positions(positions_N: Array, table_LC: Array) -> Array:
    """The learned embedding of each position, (N, C)."""
    xp = array_namespace(table_LC)
    last = int(xp.max(positions_N)) if positions_N.shape[0] else 0
    if last >= table_LC.shape[0]:
        raise ValueError(f"forward: the model has {table_LC.shape[0]} positions; got {last + 1}")
    return xp.take(table_LC, positions_N, axis=0)


def output_projection(layer: int, weights: Weights, config: Config) -> Array:
    """What each head writes into the residual stream per unit of its output: a view wo_HDC of the weights."""
    xp = array_namespace(weights[_names(config).embedding])
    matrix = weights[_names(config).output.format(layer) + ".weight"]
    if config.family == "gpt2":
        return xp.reshape(matrix, (config.heads, config.head_width, config.width))
    wo_CHD = xp.reshape(matrix, (config.width, config.heads, config.head_width))
    return xp.permute_dims(wo_CHD, (1, 2, 0))


def expected_weights(config: Config) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all the weights that the calculation reads."""
    names, C = _names(config), config.width
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, C)}
    if config.rope is None:
        shapes[names.positions] = (config.context, C)
    for layer in range(config.layers):
        for name, shape in _layer_weights(config).items():
            shapes[name.format(layer)] = shape
    shapes |= _norm_weights(names.final_norm, config)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def _layer_weights(config: Config) -> dict[str, tuple[int, ...]]:
    names, C, F, D = _names(config), config.width, config.ffn_width, config.head_width
    q, kv = config.heads * D, config.kv_heads * D
    fused = config.family == "gpt2"
    inputs_outputs_bias = [
        (names.queries, C, 3 * C if fused else q, config.qkv_bias),
        *([] if fused else [(names.keys, C, kv, config.qkv_bias), (names.values, C, kv, config.qkv_bias)]),
        (names.output, q, C, config.output_bias),
        *([] if fused else [(names.gate, C, F, config.mlp_bias)]),
        (names.up, C, F, config.mlp_bias),
        (names.down, F, C, config.mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, inputs, outputs, bias in inputs_outputs_bias:
        shapes[name + ".weight"] = (inputs, outputs) if fused else (outputs, inputs)
        if bias:
            shapes[name + ".bias"] = (outputs,)
    shapes |= _norm_weights(names.attention_norm, config) | _norm_weights(names.ffn_norm, config)
    if config.qk_norm:
        shapes |= {names.query_norm: (D,), names.key_norm: (D,)}
    return shapes


def _norm_weights(name: str, config: Config) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.family == "gpt2" else ("weight",)
    return {f"{name}.{part}": (config.width,) for part in parts}


@dataclasses.dataclass(frozen=True)
class _Names:
    """Where a checkpoint keeps each part; {} stands for the layer."""

    embedding: str = "model.embed_tokens.weight"
    positions: str = ""
    attention_norm: str = "model.layers.{}.input_layernorm"
    queries: str = "model.layers.{}.self_attn.q_proj"
    keys: str = "model.layers.{}.self_attn.k_proj"
    values: str = "model.layers.{}.self_attn.v_proj"
    query_norm: str = "model.layers.{}.self_attn.q_norm.weight"
    key_norm: str = "model.layers.{}.self_attn.k_norm.weight"
    output: str = "model.layers.{}.self_attn.o_proj"
    ffn_norm: str = "model.layers.{}.post_attention_layernorm"
    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    down: str = "model.layers.{}.mlp.down_proj"
    final_norm: str = "model.norm"


_LLAMA_NAMES = _Names()
_GPT2_NAMES = _Names(
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    attention_norm="transformer.h.{}.ln_1",
    queries="transformer.h.{}.attn.c_attn",
    output="transformer.h.{}.attn.c_proj",
    ffn_norm="transformer.h.{}.ln_2",
    up="transformer.h.{}.mlp.c_fc",
    down="transformer.h.{}.mlp.c_proj",
    final_norm="transformer.ln_f",
)


_namespaces: dict[type, Any] = {}


def array_namespace(x: Array) -> Any:
    """The library of an array, remembered by its type: looking takes 10 µs, and a token asks 200 times."""
    found = _namespaces.get(type(x))
    if found is None:
        found = _namespaces[type(x)] = find_namespace(x)
    return found


def _is_numpy(x: Array) -> bool:
    """Whether an array is NumPy's; else it is torch's. A compiler can trace this question."""
    return isinstance(x, np.ndarray)


def _names(config: Config) -> _Names:
    return _GPT2_NAMES if config.family == "gpt2" else _LLAMA_NAMES


def _checked_ids(ids_BT: Array, embedding_VC: Array) -> Array:
    xp = array_namespace(embedding_VC)
    ids_BT = xp.asarray(ids_BT, device=device(embedding_VC))
    if ids_BT.ndim != 2:
        raise ValueError(f"forward: ids must be (B, T); got {tuple(ids_BT.shape)}")
    if not xp.isdtype(ids_BT.dtype, "integral"):
        raise TypeError(f"forward: ids must be integers; got {ids_BT.dtype}")
    if math.prod(ids_BT.shape):
        low, high, vocabulary = int(xp.min(ids_BT)), int(xp.max(ids_BT)), embedding_VC.shape[0]
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"forward: ids must lie between 0 and {vocabulary - 1}; got {wrong}")
    return ids_BT


def _checked_starts(starts_B: Array, B: int, like: Array) -> Array:
    xp = array_namespace(like)
    starts_B = xp.asarray(starts_B, device=device(like))
    if tuple(starts_B.shape) != (B,):
        raise ValueError(f"forward: starts must be ({B},), one a row; got {tuple(starts_B.shape)}")
    if not xp.isdtype(starts_B.dtype, "integral"):
        raise TypeError(f"forward: starts must be integers; got {starts_B.dtype}")
    return starts_B


def _check_segments(
    segments_BT: Array, shape: tuple[int, int], config: Config, cache: KVCache | None
) -> None:
    if tuple(segments_BT.shape) != shape:
        raise ValueError(f"forward: segments must be {shape}, one a token; got {tuple(segments_BT.shape)}")
    if cache is not None or config.rope is None:
        what = "a cache" if cache is not None else "learned positions"
        raise ValueError(
            f"forward: segments cannot be combined with {what}: give each document a row of its own"
        )


def _default_attend(like: Array) -> Attend:
    """Regardant's own attention for arrays of this kind."""
    front = import_module("regardant.torch" if is_torch_array(like) else "regardant.ops")

    def attend(_layer: int, q_BHTD: Array, k_BGSD: Array, v_BGSD: Array, **options: Any) -> Array:
        return front.attention(q_BHTD, k_BGSD, v_BGSD, **options)

    return attend


def _at_least_float32(x: Array, xp: Any) -> Array:
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)


def _back(wide: Array, x: Array) -> Array:
    """Round a result to the type of x."""
    return wide if wide.dtype == x.dtype else array_namespace(x).astype(wide, x.dtype)
