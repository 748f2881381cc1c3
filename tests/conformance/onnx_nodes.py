"""ONNX's operators Attention, RotaryEmbedding and RMSNormalization by regardant, and the standard's own cases of
them.

ONNX counts differently in places, which the adapter turns into regardant's terms: without a past, causality is
offset 0; with `nonpad_kv_seqlen` each batch row has an offset of its own; `left_window_size=L` keeps L + 1 keys.
Scores, which the operator can give as well, are nothing that regardant's `attention` gives: they are made here.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width, C
hidden.
"""

import functools
import importlib
import warnings

import numpy as np
from onnx import helper
from onnx.backend.test.case import node as nodes

import regardant as rg
from regardant.lm import model


@functools.cache
def standard():
    """The standard's cases of the three operators, by name; those of their expansions into others left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the standard's own reference divides 0 by 0 on its way
        for module in ("attention", "rotaryembedding", "rmsnormalization"):
            importlib.import_module(f"{nodes.__name__}.{module}")  # which makes its cases
    cases = [case for case in nodes._NodeTestCases if not case.name.endswith("_expanded")]
    return {case.name: case for case in cases if case.model.graph.node[0].op_type in OPERATORS}


def run(case, inputs, **options):
    """The outputs of a case's node, by regardant."""
    node = case.model.graph.node[0]
    given = dict.fromkeys(PARAMETERS[node.op_type])
    graph = [value.name for value in case.model.graph.input]
    by_name = dict(zip(graph, inputs, strict=True))
    for parameter, name in zip(PARAMETERS[node.op_type], node.input, strict=False):
        given[parameter] = by_name.get(name)
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    made = OPERATORS[node.op_type](**given, **attributes, **options)
    return [array for name, array in zip(node.output, made, strict=False) if name]


def attention(
    Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *, is_causal=0, scale=None,
    softcap=0.0, q_num_heads=None, kv_num_heads=None, qk_matmul_output_mode=0, left_window_size=-1,
    right_window_size=-1, softmax_precision=None, impl="auto",
):  # fmt: skip
    """Y, present_key, present_value, qk_matmul_output."""
    del softmax_precision  # scores are float32 at least in any case
    flat = Q.ndim == 3
    if flat:
        Q, K, V = heads(Q, q_num_heads), heads(K, kv_num_heads), heads(V, kv_num_heads)
    past = 0 if past_key is None else past_key.shape[2]
    if past:
        K, V = np.concatenate([past_key, K], axis=2), np.concatenate([past_value, V], axis=2)
    B, _, T, _ = Q.shape
    added = (
        {}
        if attn_mask is None
        else {("mask" if attn_mask.dtype == bool else "bias"): padded(attn_mask, K.shape[2])}
    )
    options = {"softcap": softcap or None, "scale": scale, "impl": impl}
    rows, scores = [], []
    for b in range(B):
        at = slice(b, b + 1)
        one = {
            name: array[at] if array.ndim == 4 and array.shape[0] == B else array
            for name, array in added.items()
        }
        offset = past
        if nonpad_kv_seqlen is not None:
            one["lengths"] = nonpad_kv_seqlen[at]
            offset = past if past_key is not None else int(nonpad_kv_seqlen[b]) - T
        one |= window(offset, is_causal, left_window_size, right_window_size, T, K.shape[2], one)
        rows.append(rg.attention(Q[at], K[at], V[at], **options, **one))
        scores.append(matrix(Q[at], K[at], V[at], qk_matmul_output_mode, **options, **one))
    Y = np.concatenate(rows)
    if flat:
        Y = Y.swapaxes(1, 2).reshape(B, T, -1)
    return Y, K, V, np.concatenate(scores)


def heads(x_BTC, count):
    B, T, C = x_BTC.shape
    return x_BTC.reshape(B, T, count, C // count).swapaxes(1, 2)


def padded(mask, S):
    """A mask that is shorter than the keys hides the rest."""
    hidden = False if mask.dtype == bool else -np.inf
    if mask.shape[-1] in {1, S}:
        return mask
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])], constant_values=hidden)


def window(offset, is_causal, left, right, T, S, given):
    """Causality and ONNX's two-sided window, as options of regardant."""
    options = {"causal": bool(is_causal), "offset": offset}
    p, j = offset + np.arange(T)[:, None], np.arange(S)
    if left >= 0:
        options["window"] = left + 1
    if right >= 0:
        options["mask"] = (j <= p + right) & given.get("mask", True)
    return options


def matrix(q, k, v, mode, *, impl, **options):
    """What the operator gives besides: 0 scaled scores, 1 after the softcap, 2 after the mask, 3 after softmax."""
    if mode == 3:
        return rg.look(q, k, v, impl=impl, **options).rows(range(q.shape[2])).astype(q.dtype)
    group = q.shape[1] // k.shape[1]
    scale = options["scale"] or q.shape[3] ** -0.5
    s = scale * q @ np.repeat(k, group, axis=1).swapaxes(2, 3)
    if mode >= 1 and options["softcap"]:
        s = options["softcap"] * np.tanh(s / options["softcap"])
    if mode == 2:
        s = s + options.get("bias", 0)
        past = np.arange(s.shape[3]) <= options["offset"] + np.arange(s.shape[2])[:, None]
        s = np.where(options.get("mask", True) & (past | (not options["causal"])), s, -np.inf)
    return s.astype(q.dtype)


def rotary_embedding(
    X, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=None, rotary_embedding_dim=0
):
    """X with its positions turned into it, by the model's own `rotate`."""
    x = heads(X, num_heads) if X.ndim == 3 else X
    width = rotary_embedding_dim or x.shape[-1]
    cos, sin = (cache if position_ids is None else cache[position_ids] for cache in (cos_cache, sin_cache))
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:  # pairs (0, 1), (2, 3), … where the model's are (i, i + D/2)
        turned = np.concatenate([turned[..., ::2], turned[..., 1::2]], axis=-1)
    table_cos, table_sin = (np.concatenate(parts, axis=-1)[:, None] for parts in ((cos, cos), (-sin, sin)))
    turned = model.rotate(turned, table_cos, table_sin)
    if interleaved:
        turned = np.stack(np.split(turned, 2, axis=-1), axis=-1).reshape(turned.shape)
    made = np.concatenate([turned, rest], axis=-1)
    return [made.swapaxes(1, 2).reshape(X.shape) if X.ndim == 3 else made]


def rms_normalization(X, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """X over its root mean square from an axis on, by the model's own `rms_norm`."""
    del stash_type
    shape = X.shape[:axis] if axis else ()
    flat = X.reshape(*shape, -1)
    return [model.rms_norm(flat, scale.reshape(-1), epsilon).reshape(X.shape)]


OPERATORS = {
    "Attention": attention,
    "RotaryEmbedding": rotary_embedding,
    "RMSNormalization": rms_normalization,
}
PARAMETERS = {
    "Attention": ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"),
    "RotaryEmbedding": ("X", "cos_cache", "sin_cache", "position_ids"),
    "RMSNormalization": ("X", "scale"),
}
