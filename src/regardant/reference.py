"""The definition of causal attention: one head, many heads, and a float64 oracle for every option.

Everything here is written to be read against the formulas, holds the T × S matrix of weights, and is slow on
purpose: it is what the other implementations are checked against. It refuses nothing that `Problem` admits.

    s_ij = scale · q_i·k_j      lse_i = log Σ_j exp s_ij      a_ij = exp(s_ij − lse_i)      out_i = Σ_j a_ij v_j

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width,
C width of the residual stream.

Sources: Vaswani et al. 2017, "Attention is all you need" (scaled dot products, heads); Milakov & Gimelshein 2018
(the subtracted maximum); Ainslie et al. 2023 (shared key/value heads).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.problem import FLOATS, integer, kind

if TYPE_CHECKING:
    from regardant.problem import Array, Problem, Watch


def causal_attention(x_TC: Array, wq_CD: Array, wk_CD: Array, wv_CE: Array) -> Array:
    """One causal head, by the definition: softmax(QKᵀ/√D) V, each token mixing itself and what came before.

    Args:
        x_TC: the tokens' representations, one row each.
        wq_CD: projection to queries. `wk_CD`: to keys. `wv_CE`: to values.

    Returns:
        out_TE, in x's type. Scores are float32 at least. Memory grows with T².

    Raises:
        TypeError: what is no floating NumPy array.
        ValueError: x that is not one sequence; shapes that do not chain.
    """
    _check_sequence("causal_attention", x_TC)
    for name, w in (("wq", wq_CD), ("wk", wk_CD), ("wv", wv_CE)):
        _check_projection("causal_attention", name, w, x_TC.shape[1], "x's width")
    if wk_CD.shape != wq_CD.shape:
        raise ValueError(f"causal_attention: wk must be {wq_CD.shape}, as wq is; got {wk_CD.shape}")
    wide = np.promote_types(x_TC.dtype, np.float32)
    q_TD, k_TD, v_TE = (x_TC.astype(wide) @ w.astype(wide) for w in (wq_CD, wk_CD, wv_CE))
    s_TT = q_TD @ k_TD.T / math.sqrt(q_TD.shape[-1])
    past_TT = np.tril(np.ones(s_TT.shape, np.bool))
    s_TT = np.where(past_TT, s_TT, -np.inf)
    a_TT = np.exp(s_TT - s_TT.max(axis=-1, keepdims=True, initial=-np.inf))
    a_TT /= a_TT.sum(axis=-1, keepdims=True)
    return mix(a_TT, v_TE, past_TT).astype(x_TC.dtype)


def multi_head_attention(
    x_TC: Array,
    wq_CHD: Array,
    wk_CGD: Array,
    wv_CGE: Array,
    wo_HEC: Array,
    *,
    heads: int,
    kv_heads: int | None = None,
) -> Array:
    """Many causal heads side by side, and the projection that writes what they found back.

    Head h owns the h-th group of columns of wq and of rows of wo, and reads key/value head h // (heads/kv_heads).

    Args:
        x_TC: the tokens' representations.
        wq_CHD: (C, heads·D). `wk_CGD`: (C, kv_heads·D). `wv_CGE`: (C, kv_heads·E). `wo_HEC`: (heads·E, C).
        heads: how many query heads. `kv_heads`: how many key/value heads; as many as `heads` if None.

    Returns:
        out_TC, in x's type. Memory grows with T².

    Raises:
        TypeError: what is no floating NumPy array, or no whole number of heads.
        ValueError: a number of heads that does not divide what it should; shapes that do not chain.
    """
    op = "multi_head_attention"
    heads = integer(op, "heads", heads)
    kv_heads = heads if kv_heads is None else integer(op, "kv_heads", kv_heads)
    _check_sequence(op, x_TC)
    for name, w in (("wq", wq_CHD), ("wk", wk_CGD), ("wv", wv_CGE)):
        _check_projection(op, name, w, x_TC.shape[1], "x's width")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"multi_head_attention: heads must be a multiple of kv_heads; got {heads} and {kv_heads}"
        )
    for name, columns, parts in (
        ("wq", wq_CHD.shape[-1], heads),
        ("wk", wk_CGD.shape[-1], kv_heads),
        ("wv", wv_CGE.shape[-1], kv_heads),
    ):
        if columns % parts:
            raise ValueError(
                f"multi_head_attention: {name} must divide into {parts} heads; got {columns} wide"
            )
    if wk_CGD.shape[1] * heads != wq_CHD.shape[1] * kv_heads:
        wanted = wq_CHD.shape[1] // heads * kv_heads
        raise ValueError(f"{op}: wk must be {wanted} wide, as wq's heads are; got {wk_CGD.shape[1]}")
    _check_projection(op, "wo", wo_HEC, wv_CGE.shape[1] // kv_heads * heads, "the heads' values")
    wq, wo = np.split(wq_CHD, heads, axis=-1), np.split(wo_HEC, heads, axis=0)
    wk, wv = np.split(wk_CGD, kv_heads, axis=-1), np.split(wv_CGE, kv_heads, axis=-1)
    group = heads // kv_heads
    written = [causal_attention(x_TC, wq[h], wk[h // group], wv[h // group]) @ wo[h] for h in range(heads)]
    return np.sum(written, axis=0, dtype=x_TC.dtype)


def _check_sequence(op: str, x_TC: Array) -> None:
    _check_floating(op, "x", x_TC)
    if x_TC.ndim != 2:
        raise ValueError(f"{op}: x must be (T, C), one sequence; got {x_TC.shape}")


def _check_projection(op: str, name: str, w: Array, rows: int, what: str) -> None:
    _check_floating(op, name, w)
    if w.ndim != 2 or w.shape[0] != rows or w.shape[1] == 0:
        raise ValueError(
            f"{op}: {name} must have {rows} rows, {what}, and at least one column; got {w.shape}"
        )


def _check_floating(op: str, name: str, array: Array) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.name not in FLOATS:
        raise TypeError(f"{op}: {name} must be a NumPy array of {', '.join(FLOATS)}; got {kind(array)}")


def mix(a_TS: Array, v_SE: Array, visible_TS: Array) -> Array:
    """Σ_j a_ij v_j over the visible keys only: 0 · NaN of a hidden value must not reach the sum."""
    finite_S: Array = np.all(np.isfinite(v_SE), axis=-1)
    out_TE = a_TS @ np.where(finite_S[:, None], v_SE, 0)
    for j in np.flatnonzero(~finite_S):
        with np.errstate(invalid="ignore"):
            out_TE += np.where(visible_TS[:, j, None], a_TS[:, j, None] * v_SE[j], 0)
    return out_TE


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """The whole calculation in float64, matrix and all."""

    s_BHTS: Array
    a_BHTS: Array
    visible_BHTS: Array
    m_BHT: Array
    lse_BHT: Array
    out_BHTE: Array


def dense(problem: Problem) -> Dense:
    """Scores, weights, lse and output of a problem in float64, by the definition. Memory grows with T·S."""
    B, H, *_ = problem.sizes
    q_BHTD, k_BHSD, v_BHSE = _per_query_head(problem)
    # Hidden NaN and Inf may pass through the arithmetic below; the mask takes them out of every result.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        s_BHTS = _capped(problem, q_BHTD, k_BHSD)
        s_BHTS, visible_BHTS = _options(problem, s_BHTS)
        m_BHT = s_BHTS.max(axis=-1, initial=-np.inf)
        live_BHT = m_BHT != -np.inf
        peak_BHT = m_BHT
        if problem.sinks_H is not None:
            peak_BHT = np.maximum(m_BHT, problem.sinks_H.astype(np.float64)[:, None])
        e_BHTS = np.exp(s_BHTS - np.where(live_BHT, peak_BHT, 0)[..., None])
        total_BHT = e_BHTS.sum(axis=-1)
        if problem.sinks_H is not None:
            total_BHT += np.exp(problem.sinks_H.astype(np.float64)[:, None] - peak_BHT)
        lse_BHT = np.where(live_BHT, peak_BHT + np.log(total_BHT), -np.inf)
        a_BHTS = np.where(live_BHT[..., None], e_BHTS / total_BHT[..., None], 0)
        a_BHTS = np.where(visible_BHTS, a_BHTS, 0)
    out_BHTE = np.zeros((*problem.q_BHTD.shape[:3], v_BHSE.shape[-1]))
    for b, h in np.ndindex(B, H):
        out_BHTE[b, h] = mix(a_BHTS[b, h], v_BHSE[b, h], visible_BHTS[b, h])
    return Dense(s_BHTS, a_BHTS, visible_BHTS, m_BHT, lse_BHT, out_BHTE)


def _per_query_head(problem: Problem) -> tuple[Array, Array, Array]:
    """Queries, and for each query head the keys and values that it reads, in float64."""
    _, H, G, *_ = problem.sizes
    q_BHTD, k_BGSD, v_BGSE = (a.astype(np.float64) for a in (problem.q_BHTD, problem.k_BGSD, problem.v_BGSE))
    reads = np.arange(H) // (H // G if G else 1)  # query head h reads key/value head h // (H // G)
    return q_BHTD, k_BGSD[:, reads], v_BGSE[:, reads]


def _capped(problem: Problem, q_BHTD: Array, k_BHSD: Array) -> Array:
    """Scaled dot products, under the softcap if there is one."""
    s_BHTS: Array = problem.scale * (q_BHTD @ k_BHSD.swapaxes(-1, -2))
    return s_BHTS if problem.softcap is None else problem.softcap * np.tanh(s_BHTS / problem.softcap)


def _options(problem: Problem, s_BHTS: Array) -> tuple[Array, Array]:
    """Bias, ALiBi and every condition on visibility, in the order of the definition."""
    _, _, _, T, S, *_ = problem.sizes
    p_T1, j_S = problem.offset + np.arange(T)[:, None], np.arange(S)
    visible_BHTS = np.ones(s_BHTS.shape, np.bool)
    if problem.bias_BHTS is not None:
        bias_BHTS = problem.bias_BHTS.astype(
            problem.accumulator
        )  # in the type of scores, −1e39 is −∞ in float32
        s_BHTS = s_BHTS + bias_BHTS.astype(np.float64)
        visible_BHTS &= bias_BHTS != -np.inf  # a bias of −∞ hides a key as a mask does
    if problem.alibi_H is not None:
        s_BHTS = s_BHTS - problem.alibi_H.astype(np.float64)[:, None, None] * (p_T1 - j_S)
    if problem.causal:
        visible_BHTS &= j_S <= p_T1
    if problem.window is not None:
        visible_BHTS &= p_T1 - j_S < problem.window
    visible_BHTS &= j_S >= problem.starts_B[:, None, None, None]
    visible_BHTS &= j_S < problem.lengths_B[:, None, None, None]
    if problem.segments is not None:
        q_BT, k_BS = problem.segments
        visible_BHTS &= (q_BT[:, :, None] == k_BS[:, None, :])[:, None]
    if problem.mask_BHTS is not None:
        visible_BHTS &= problem.mask_BHTS
    return np.where(visible_BHTS, s_BHTS, -np.inf), visible_BHTS


def attend(problem: Problem, watch: Watch | None = None) -> dict[str, Array]:
    """Output and lse of a problem and, with `watch`, what was to be kept; all in the types that ops promises."""
    d = dense(problem)
    seen = {"out": d.out_BHTE.astype(problem.q_BHTD.dtype), "lse": d.lse_BHT}
    if watch is not None:
        seen |= _observe(problem, d, watch)
    return {
        name: array.astype(problem.accumulator) if name not in {"out", "top_keys"} else array
        for name, array in seen.items()
    }


def backward(
    problem: Problem,
    out_BHTE: Array,
    lse_BHT: Array,
    dout_BHTE: Array,
    dlse_BHT: Array | None,
    bias_gradient: bool,  # noqa: FBT001 - the three implementations are called alike
) -> dict[str, Array]:
    """Gradients of q, k, v and, where they are there or asked for, sinks and bias. Memory grows with T·S.

    For a loss L with dout = ∂L/∂out and dlse = ∂L/∂lse, where c is the score after the softcap and before the rest:

        dv_j  = Σ_i a_ij dout_i                           da_ij = dout_i·v_j
        δ_i   = Σ_j a_ij da_ij − dlse_i                   ds_ij = a_ij (da_ij − δ_i)       = dbias_ij
        dx_ij = ds_ij · (1 − (c_ij/softcap)²) · scale     dq_i  = Σ_j dx_ij k_j            dk_j = Σ_i dx_ij q_i
        dsink_h = −Σ_i exp(sink_h − lse_i) δ_i

    Σ_j a_ij da_ij is dout_i·out_i, which is what the other implementations take. `out_BHTE` and `lse_BHT` are not
    needed by the definition: they carry the rounding of the forward pass.
    """
    del out_BHTE, lse_BHT
    B, H, G, T, S, D, E = problem.sizes
    q_BHTD, k_BHSD, v_BHSE = _per_query_head(problem)
    dout_BHTE = dout_BHTE.astype(np.float64)
    d = dense(problem)
    live_BHT = d.m_BHT != -np.inf
    visible_BHTS = d.visible_BHTS & live_BHT[..., None]
    # Hidden NaN and Inf may pass through the arithmetic here as well; a narrow type may be too small for a gradient.
    with np.errstate(invalid="ignore", over="ignore"):
        da_BHTS = np.where(visible_BHTS, dout_BHTE @ v_BHSE.swapaxes(-1, -2), 0)
        delta_BHT = (d.a_BHTS * da_BHTS).sum(axis=-1)
        if dlse_BHT is not None:
            delta_BHT -= np.where(live_BHT, dlse_BHT, 0)
        ds_BHTS = np.where(visible_BHTS, d.a_BHTS * (da_BHTS - delta_BHT[..., None]), 0)
        dx_BHTS = problem.scale * ds_BHTS
        if problem.softcap is not None:
            c_BHTS = np.where(visible_BHTS, _capped(problem, q_BHTD, k_BHSD), 0)
            dx_BHTS = dx_BHTS * (1 - (c_BHTS / problem.softcap) ** 2)
        dq_BHTD, dk_BHSD, dv_BHSE = np.zeros((B, H, T, D)), np.zeros((B, H, S, D)), np.zeros((B, H, S, E))
        for at in np.ndindex(B, H):
            dq_BHTD[at] = mix(dx_BHTS[at], k_BHSD[at], visible_BHTS[at])
            dk_BHSD[at] = mix(dx_BHTS[at].T, q_BHTD[at], visible_BHTS[at].T)
            dv_BHSE[at] = mix(d.a_BHTS[at].T, dout_BHTE[at], visible_BHTS[at].T)
        group = (B, G, H // G if G else 1)  # a key/value head gathers from all query heads that read it
        gradients = {
            "dq": dq_BHTD.astype(problem.q_BHTD.dtype),
            "dk": dk_BHSD.reshape(*group, S, D).sum(axis=2).astype(problem.k_BGSD.dtype),
            "dv": dv_BHSE.reshape(*group, S, E).sum(axis=2).astype(problem.v_BGSE.dtype),
        }
        if problem.sinks_H is not None:
            dsinks_H = -(_sink_weights(problem, d) * delta_BHT).sum(axis=(0, 2))
            gradients["dsinks"] = dsinks_H.astype(problem.accumulator)
        if problem.bias_BHTS is not None and bias_gradient:
            repeated = tuple(axis for axis, size in enumerate(problem.bias_sizes) if size == 1)
            dbias = ds_BHTS.sum(axis=repeated, keepdims=True)
            gradients["dbias"] = dbias.astype(problem.bias_BHTS.dtype)
    return gradients


def _sink_weights(problem: Problem, d: Dense) -> Array:
    """The share of each row that its head's sink took; 0 without sinks."""
    if problem.sinks_H is None:
        return np.zeros_like(d.m_BHT)
    live_BHT = d.m_BHT != -np.inf
    log_sink_BHT = problem.sinks_H[:, None] - np.where(live_BHT, d.lse_BHT, 0)
    return np.where(live_BHT, np.exp(np.minimum(log_sink_BHT, 0)), 0)


def _observe(problem: Problem, d: Dense, watch: Watch) -> dict[str, Array]:
    B, H, _, T, S, *_ = problem.sizes
    a_BHTS = d.a_BHTS
    log_a_BHTS = np.where(a_BHTS > 0, np.log(np.where(a_BHTS > 0, a_BHTS, 1)), 0)
    sink_BHT = _sink_weights(problem, d)
    log_sink_BHT = np.where(sink_BHT > 0, np.log(np.where(sink_BHT > 0, sink_BHT, 1)), 0)
    # Heaviest first; among equals the earlier key, which a stable sort of the negated scores gives.
    order_BHTS = np.argsort(-d.s_BHTS, axis=-1, kind="stable")[..., : watch.top]
    listed_BHTK = np.take_along_axis(d.s_BHTS, order_BHTS, axis=-1) != -np.inf
    top_keys = np.full((B, H, T, watch.top), -1, np.int64)
    top_weights = np.zeros((B, H, T, watch.top))
    top_keys[..., : min(S, watch.top)] = np.where(listed_BHTK, order_BHTS, -1)
    top_weights[..., : min(S, watch.top)] = np.where(
        listed_BHTK, np.take_along_axis(a_BHTS, order_BHTS, axis=-1), 0
    )
    seen = {
        "max_logit": d.m_BHT,
        "entropy": -(a_BHTS * log_a_BHTS).sum(axis=-1) - sink_BHT * log_sink_BHT,
        "sink_weight": sink_BHT,
        "top_keys": top_keys,
        "top_weights": top_weights,
    }
    if watch.received:
        seen["received"] = a_BHTS.sum(axis=-2)
    if watch.pooled is not None:
        R, C = watch.pooled
        seen["pooled"] = np.zeros((B, H, R, C))
        for r, c in np.ndindex(R, C):
            block = (slice(T * r // R, T * (r + 1) // R), slice(S * c // C, S * (c + 1) // C))
            seen["pooled"][..., r, c] = a_BHTS[..., *block].sum(axis=(-2, -1))
    return seen


def rows(problem: Problem, lse_BHT: Array, queries_N: Array, heads_M: Array) -> Array:
    """Weights of the given queries of the given heads, (B, M, N, S). `lse_BHT` is not needed by the definition."""
    del lse_BHT
    a_BHTS: Array = dense(problem).a_BHTS
    picked: np.ndarray[Any, Any] = a_BHTS[:, heads_M][:, :, queries_N]
    return picked.astype(problem.accumulator)
