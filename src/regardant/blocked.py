"""Causal attention block by block: the definition's numbers without ever holding the T × S matrix.

A tile of scores at a time is made, used and forgotten. What makes that possible is the recurrence of online
softmax: a row's maximum m, its denominator l = Σ e^(s−m) and its numerator n = Σ e^(s−m)·v can be carried
over from tile to tile, because raising m to m' only multiplies l and n by e^(m−m'). It stands in `_Rows.take`.

Tiles that causality, window or padding make invisible are skipped from the options; a dense mask or bias is
read tile by tile. Memory beyond inputs and outputs is a few tiles, whatever T and S are.

Looking happens inside the same pass and never touches the numbers that become the output.

The way back needs no recurrence: lse tells what a row's denominator came to, so that a tile made again is a tile of
finished weights. A tile's gradients go to its queries, which are done when their last tile is, and to its keys, which
gather from one block of queries after another. One thread does all of a batch row and key/value head, in one order.

Shape legend: B batch, H query heads = G key/value heads × R query heads that share one, T queries, S keys,
D query/key width, E value width; t and s, the queries and keys of one tile; N = R·t, the rows of one tile; K keys
kept by `top`.

Sources: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Rabe & Staats 2021,
"Self-attention does not need O(n²) memory"; Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regardant.threads import each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regardant.problem import Array, Problem, Watch

# One tile of scores over all heads: small enough to stay in cache, large enough that Python's share is small.
TILE = 2**17
QUERIES = 64
KEYS = 1024

# OpenBLAS gives a product of at most so many multiplications to one thread. Larger ones it splits in ways that
# change the last bits with the number of threads.
PRODUCT = 2**18


def attend(problem: Problem, watch: Watch | None = None) -> dict[str, Array]:
    """Output and lse of a problem and, with `watch`, what was to be kept.

    Memory beyond the results: a few tiles for each thread, each of some 2**17 scores.
    """
    B, H, _, T, _, _, E = problem.sizes
    dtype = problem.accumulator
    seen = {
        "out": np.zeros((B, H, T, E), problem.q_BHTD.dtype),
        "lse": np.full((B, H, T), -np.inf, dtype),
    }
    if watch is not None:
        seen |= {
            "max_logit": np.full((B, H, T), -np.inf, dtype),
            "entropy": np.zeros((B, H, T), dtype),
            "sink_weight": np.zeros((B, H, T), dtype),
            "top_keys": np.full((B, H, T, watch.top), -1, np.int64),
            "top_weights": np.zeros((B, H, T, watch.top), dtype),
        }
    queries, keys = _tile_shape(problem)

    def finished(b: int, t: slice, watch: Watch | None, shrink: float) -> dict[str, Array]:
        rows = _Rows(problem, t.stop - t.start, watch)
        q_GNd = _queries(problem, b, t)
        for s in _key_blocks(problem, b, t, keys):
            tile = _scores(problem, b, q_GNd, t, s)
            if tile is not None:
                v_GsE = _rows_contiguous(problem.v_BGSE[b, :, s], dtype)
                rows.take(*tile, v_GsE if shrink == 1 else v_GsE * dtype.type(shrink), s.start)
        return rows.finish()

    def work(block: tuple[int, slice]) -> None:
        b, t = block
        with _quiet():
            results = finished(b, t, watch, 1)
            out_GRtE = results["out"]
            if not np.isfinite(out_GRtE).all():
                # Σ e^(s−m)·v may pass the largest number where the mean does not. A power of two costs no bits.
                shrink = 0.5 ** (int(problem.sizes[4]).bit_length())
                again_GRtE = finished(b, t, None, shrink)["out"] / dtype.type(shrink)
                results["out"] = np.where(np.isfinite(out_GRtE), out_GRtE, again_GRtE)
            for name, part in results.items():
                seen[name][b, :, t] = part.reshape(H, *part.shape[2:])

    # The last queries see the most keys: begun first, they do not leave one thread working alone at the end.
    blocks = [(b, t) for b in range(B if H else 0) for t in _cut(T, queries)][::-1]
    each(work, blocks, small=_is_small(problem))
    if watch is not None and (watch.received or watch.pooled):
        seen |= _column_sums(problem, seen["lse"], watch)
    return seen


class _Rows:
    """The state that a block of query rows carries from one tile of keys to the next."""

    def __init__(self, problem: Problem, t: int, watch: Watch | None) -> None:
        _, H, G, _, _, _, E = problem.sizes
        shape = (G, H // G, t)
        self.sinks_GR1 = None if problem.sinks_H is None else problem.sinks_H.reshape(G, H // G, 1)
        self.m_GRt = np.full(shape, -np.inf, problem.accumulator)  # largest score so far
        self.l_GRt = np.zeros(shape, problem.accumulator)  # Σ e^(s−m)
        self.n_GRtE = np.zeros((*shape, E), problem.accumulator)  # Σ e^(s−m)·v
        self.watching = watch is not None
        self.w_GRt = np.zeros(shape, problem.accumulator)  # Σ e^(s−m)·(s−m), for the entropy
        self.top = _Top(shape, watch.top, problem.accumulator) if watch is not None and watch.top else None

    def take(self, s_GRts: Array, visible: Array | None, v_GsE: Array, first: int) -> None:
        """Fold in one tile: its scores (hidden ones −∞; overwritten), visibility (None: all), values, first key."""
        if self.top is not None:
            self.top.take(s_GRts, first)
        m_GRt = np.maximum(self.m_GRt, s_GRts.max(axis=-1))
        base_GRt = np.where(m_GRt == -np.inf, 0, m_GRt)  # a row that has seen nothing yet: e^(−∞−0) = 0
        s_GRts -= base_GRt[..., None]
        fade_GRt = np.exp(self.m_GRt - base_GRt)
        if self.watching:
            p_GRts = np.exp(s_GRts)
            self._weigh(p_GRts, s_GRts, base_GRt, fade_GRt)
        else:
            p_GRts = np.exp(s_GRts, out=s_GRts)
        self.l_GRt = self.l_GRt * fade_GRt + p_GRts.sum(axis=-1)
        self.n_GRtE *= fade_GRt[..., None]
        n_GNE = _mix(_fold(p_GRts), v_GsE, _fold_visible(visible, p_GRts.shape))
        self.n_GRtE += n_GNE.reshape(self.n_GRtE.shape)
        self.m_GRt = m_GRt

    def _weigh(self, p_GRts: Array, s_GRts: Array, base_GRt: Array, fade_GRt: Array) -> None:
        """Carry Σ e^(s−m)·(s−m): raising m to m' adds (m−m')·l_old first. Overwrites the scores."""
        rise_GRt = np.where(self.m_GRt == -np.inf, 0, self.m_GRt - base_GRt)
        np.maximum(s_GRts, np.finfo(s_GRts.dtype).min, out=s_GRts)  # 0 · −∞ would be NaN; 0 · a number is 0
        self.w_GRt = fade_GRt * (self.w_GRt + rise_GRt * self.l_GRt) + np.vecdot(p_GRts, s_GRts)

    def finish(self) -> dict[str, Array]:
        """The rows' results, axes (G, R, t, …). Rows that saw nothing: out 0, lse −∞, weights 0."""
        live_GRt = self.m_GRt != -np.inf
        lse_GRt = self.m_GRt + np.log(self.l_GRt)
        total_GRt = np.where(live_GRt, self.l_GRt, 1)
        if self.sinks_GR1 is not None:  # a sink joins the denominator, and no value comes with it
            lse_GRt = np.where(live_GRt, np.logaddexp(lse_GRt, self.sinks_GR1), -np.inf)
            total_GRt = np.where(live_GRt, total_GRt + np.exp(self.sinks_GR1 - self.m_GRt), 1)
        seen = {"out": self.n_GRtE / total_GRt[..., None], "lse": lse_GRt}
        if self.watching:
            seen |= self._observed(live_GRt, lse_GRt, total_GRt)
        return seen

    def _observed(self, live_GRt: Array, lse_GRt: Array, total_GRt: Array) -> dict[str, Array]:
        """H = −Σ a log a = Σ a·(lse − m) − Σ a·(s − m), and the sink, if there is one, as one more outcome."""
        entropy_GRt = ((lse_GRt - self.m_GRt) * self.l_GRt - self.w_GRt) / total_GRt
        sink_GRt = np.zeros_like(lse_GRt)
        if self.sinks_GR1 is not None:
            log_sink_GRt = np.where(live_GRt, np.minimum(self.sinks_GR1 - lse_GRt, 0), -np.inf)
            sink_GRt = np.exp(log_sink_GRt)
            entropy_GRt -= sink_GRt * np.where(sink_GRt == 0, 0, log_sink_GRt)
        seen = {
            "max_logit": self.m_GRt,
            "entropy": np.where(live_GRt, entropy_GRt, 0),
            "sink_weight": sink_GRt,
        }
        if self.top is not None:
            keys_GRtK, scores_GRtK = self.top.keys, self.top.scores
            seen["top_keys"] = keys_GRtK
            seen["top_weights"] = np.where(keys_GRtK < 0, 0, np.exp(scores_GRtK - lse_GRt[..., None]))
        return seen


class _Top:
    """The K largest scores of each row so far, heaviest first; among equals the earlier key."""

    def __init__(self, shape: tuple[int, ...], K: int, dtype: np.dtype[np.floating]) -> None:
        self.scores = np.full((*shape, K), -np.inf, dtype)
        self.keys = np.full((*shape, K), -1, np.int64)

    def take(self, s_GRts: Array, first: int) -> None:
        """Merge a tile in. Only rows whose largest score beats their K-th so far have anything to do."""
        largest_GRt = np.take_along_axis(s_GRts, s_GRts.argmax(axis=-1)[..., None], axis=-1)[..., 0]
        new_GRt = ~(largest_GRt <= self.scores[..., -1])  # written so that NaN counts as new
        if not new_GRt.any():
            return
        K = self.keys.shape[-1]
        keys_NK, scores_NK = _largest(s_GRts[new_GRt], K, least_N=self.scores[new_GRt][:, -1])
        # What is kept comes first: a stable sort then prefers the earlier key among equals.
        keys_N2K = np.concatenate([self.keys[new_GRt], np.where(keys_NK < 0, -1, keys_NK + first)], axis=-1)
        scores_N2K = np.concatenate([self.scores[new_GRt], scores_NK], axis=-1)
        order_NK = np.argsort(-scores_N2K, axis=-1, kind="stable")[:, :K]
        self.keys[new_GRt] = np.take_along_axis(keys_N2K, order_NK, axis=-1)
        self.scores[new_GRt] = np.take_along_axis(scores_N2K, order_NK, axis=-1)


def _largest(s_Ns: Array, K: int, least_N: Array) -> tuple[Array, Array]:
    """Indices and values of the K largest of each row, in order; −1 and −∞ where fewer, or none above `least`.

    One arg max after another: it is the one search that NumPy vectorises, and it finds the first among equals.
    """
    keys_NK = np.full((len(s_Ns), K), -1, np.int64)
    scores_NK = np.full((len(s_Ns), K), -np.inf, s_Ns.dtype)
    at_N = np.arange(len(s_Ns))
    for i in range(min(K, s_Ns.shape[-1])):
        key_N = s_Ns.argmax(axis=-1)
        score_N = s_Ns[at_N, key_N]
        if (score_N <= least_N).all():
            break
        keys_NK[:, i] = np.where(score_N == -np.inf, -1, key_N)
        scores_NK[:, i] = score_N
        s_Ns[at_N, key_N] = -np.inf
    return keys_NK, scores_NK


def _mix(p_GNM: Array, x_GMW: Array, visible_GNM: Array | None) -> Array:
    """Σ_m p_nm x_m over visible pairs only: 0 · NaN of a hidden row of x must not reach the sum."""
    if visible_GNM is None or np.isfinite(x_GMW).all():
        return _product(p_GNM, x_GMW)
    finite_M: Array = np.all(np.isfinite(x_GMW), axis=(0, -1))
    sum_GNW = _product(p_GNM, np.where(finite_M[:, None], x_GMW, 0))
    for m in np.flatnonzero(~finite_M):
        sum_GNW += np.where(visible_GNM[..., m, None], p_GNM[..., m, None] * x_GMW[:, None, m], 0)
    return sum_GNW


def _fold(tile_GRts: Array) -> Array:
    """A tile with the heads that share keys folded into rows: (G, R·t, s)."""
    G, R, t, s = tile_GRts.shape
    return tile_GRts.reshape(G, R * t, s)


def _fold_visible(visible: Array | None, shape: tuple[int, ...]) -> Array | None:
    return None if visible is None else _fold(np.broadcast_to(visible, shape))


def _scores(
    problem: Problem, b: int, q_GNd: Array, t: slice | Array, s: slice
) -> tuple[Array, Array | None] | None:
    """One tile: scores (G, R, t, s) with −∞ where hidden, and the visibility, None where all is visible.

    The tile itself is None if nothing in it is visible. `t` are the queries' indices, `s` a slice of keys.
    """
    at_t = np.arange(t.start, t.stop) if isinstance(t, slice) else t
    p_t1 = problem.offset + at_t[:, None]
    j_s = np.arange(s.start, s.stop)
    visible = _visible(problem, b, t, s, p_t1, j_s)
    if visible is not None and not visible.any():
        return None
    s_GRts = _capped(problem, b, q_GNd, s)
    return _placed(problem, b, s_GRts, t, s, p_t1 - j_s, visible), visible


def _capped(problem: Problem, b: int, q_GNd: Array, s: slice) -> Array:
    """Scaled dot products with the keys `s`, under the softcap if there is one: (G, R, t, s)."""
    _, H, G, *_ = problem.sizes
    k_GsD = _rows_contiguous(problem.k_BGSD[b, :, s], q_GNd.dtype)
    s_GRts = _product(q_GNd, k_GsD.swapaxes(-1, -2)).reshape(G, H // G, -1, k_GsD.shape[1])
    if _scale_left(problem) != 1:
        s_GRts *= s_GRts.dtype.type(problem.scale)
    if problem.softcap is not None:
        s_GRts /= problem.softcap
        np.tanh(s_GRts, out=s_GRts)
        s_GRts *= problem.softcap
    return s_GRts


def _placed(
    problem: Problem,
    b: int,
    s_GRts: Array,
    t: slice | Array,
    s: slice,
    distance_ts: Array,
    visible: Array | None,
) -> Array:
    """The scores after what depends on the place: bias, ALiBi, −∞ where hidden. Overwrites them."""
    _, H, G, *_ = problem.sizes
    if problem.bias_BHTS is not None:
        s_GRts += problem.bias_BHTS[b][:, t, s].astype(s_GRts.dtype).reshape(s_GRts.shape)
    if problem.alibi_H is not None:
        s_GRts -= problem.alibi_H.reshape(G, H // G, 1, 1) * distance_ts.astype(s_GRts.dtype)
    if visible is not None:
        np.copyto(s_GRts, -np.inf, where=~visible)
    return s_GRts


def _visible(problem: Problem, b: int, t: slice | Array, s: slice, p_t1: Array, j_s: Array) -> Array | None:
    """Which of a tile's scores count, broadcastable to (G, R, t, s); None if all do."""
    _, _, G, *_ = problem.sizes
    conditions = []
    if problem.causal and s.stop - 1 > p_t1.min(initial=s.stop):
        conditions.append(j_s <= p_t1)
    if problem.window is not None and p_t1.max(initial=s.start) - s.start >= problem.window:
        conditions.append(p_t1 - j_s < problem.window)
    if problem.starts_B[b] > s.start or problem.lengths_B[b] < s.stop:
        conditions.append(((j_s >= problem.starts_B[b]) & (j_s < problem.lengths_B[b]))[None, :])
    if problem.segments is not None:
        q_BT, k_BS = problem.segments
        conditions.append(q_BT[b, t][:, None] == k_BS[b, s])
    if problem.mask_BHTS is not None:
        conditions.append(_per_head(problem.mask_BHTS[b][:, t, s], G))
    if problem.bias_BHTS is not None:  # a bias of −∞ hides a key as a mask does
        bias_Hts = problem.bias_BHTS[b][:, t, s].astype(problem.accumulator)
        conditions.append(_per_head(bias_Hts != -np.inf, G))
    partial = [condition for condition in conditions if not condition.all()]
    if not partial:
        return None
    visible = partial[0]
    for condition in partial[1:]:
        visible = visible & condition
    return visible


def _per_head(tile_Hts: Array, G: int) -> Array:
    return tile_Hts.reshape(G, tile_Hts.shape[0] // G, *tile_Hts.shape[1:])


def _queries(problem: Problem, b: int, t: slice | Array) -> Array:
    """The queries `t` of one batch row, the heads that share keys folded into rows: (G, R·t, D).

    They carry the scale if that costs no rounding, as for D = 16, 64 or 256; any other is left to be applied.
    """
    _, H, G, _, _, D, _ = problem.sizes
    q_HtD: Array = problem.q_BHTD[b][:, t].astype(problem.accumulator)
    if _scale_left(problem) == 1:
        q_HtD *= problem.accumulator.type(problem.scale)
    return q_HtD.reshape(G, H // G * q_HtD.shape[1], D)


def _scale_left(problem: Problem) -> float:
    """The factor on the dot products that `_queries` has not put into the queries."""
    return 1.0 if abs(math.frexp(problem.scale)[0]) == 0.5 else problem.scale


def _rows_contiguous(x_GsW: Array, dtype: np.dtype[np.floating]) -> Array:
    """Keys or values in a layout that BLAS takes as it is: a view where rows lie whole, else a copy of the tile."""
    *_, row, item = x_GsW.strides
    if x_GsW.dtype == dtype and item == x_GsW.itemsize and row >= x_GsW.shape[-1] * item:
        return x_GsW
    return np.ascontiguousarray(x_GsW, dtype=dtype)


def _quiet() -> np.errstate:
    """Hidden NaN and Inf may pass through the arithmetic of a tile; the mask takes them out of every result."""
    return np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore")


def _product(a_GNK: Array, b_GKM: Array) -> Array:
    """The matrix products a @ b, a few rows at a time, so that their bits do not depend on BLAS's threads."""
    G, N, K = a_GNK.shape
    M = b_GKM.shape[-1]
    if N == 1:  # a single row would go to the matrix-vector product, which splits its sums sooner
        return _product(np.repeat(a_GNK, 2, axis=1), b_GKM)[:, :1]
    rows = max(2, PRODUCT // (K * M))
    out_GNM = np.empty((G, N, M), a_GNK.dtype)
    for first in range(0, N, rows):
        # A lone row at the end would again be a matrix-vector product: it is done together with its neighbour.
        piece = slice(min(first, N - 2), first + rows)
        np.matmul(a_GNK[:, piece], b_GKM, out=out_GNM[:, piece])
    return out_GNM


def _tile_shape(problem: Problem) -> tuple[int, int]:
    """How many queries and keys make a tile: a matter of the shapes alone, so that equal input gives equal bits."""
    _, H, G, T, _, D, E = problem.sizes
    queries = min(max(T, 1), QUERIES)
    keys = min(
        KEYS, max(128, (TILE // max(1, H * queries) + 32) // 64 * 64)
    )  # whole vectors, whole cache lines
    # What one thread multiplies at a time should be 16 rows high, if there are so many, by all keys of a tile.
    rows = min(16, max(2, H // max(G, 1) * queries))
    return queries, max(1, min(keys, PRODUCT // (rows * max(D, E))))


def _is_small(problem: Problem) -> bool:
    """Whether the work is too little for more than one thread to pay."""
    B, H, _, T, S, *_ = problem.sizes
    return B * H * T * S < TILE


def _cut(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _key_blocks(problem: Problem, b: int, t: slice, keys: int) -> Iterator[slice]:
    """The tiles that queries `t` may see anything of, from causality, window and padding alone."""
    low, high = int(problem.starts_B[b]), int(problem.lengths_B[b])
    if problem.causal:
        high = min(high, problem.offset + t.stop)
    if problem.window is not None:
        low = max(low, problem.offset + t.start - problem.window + 1)
    for first in range(low, high, keys):
        yield slice(first, min(first + keys, high))


def backward(
    problem: Problem,
    out_BHTE: Array,
    lse_BHT: Array,
    dout_BHTE: Array,
    dlse_BHT: Array | None,
    bias_gradient: bool,  # noqa: FBT001 - the three implementations are called alike
) -> dict[str, Array]:
    """Gradients of q, k, v and, where they are there or asked for, sinks and bias.

    The formulas are those of `ops.attention_backward`. Memory beyond the results: for each thread a few tiles, and dk
    and dv of one key/value head in the accumulation type.
    """
    B, H, G, T, S, D, E = problem.sizes
    dtype = problem.accumulator
    gradients = {
        "dq": np.zeros((B, H, T, D), problem.q_BHTD.dtype),
        "dk": np.zeros((B, G, S, D), problem.k_BGSD.dtype),
        "dv": np.zeros((B, G, S, E), problem.v_BGSE.dtype),
    }
    dsinks_BH = np.zeros((B, H))  # one number from all rows: float64 keeps their order from mattering
    dbias = np.zeros(problem.bias_sizes, dtype) if bias_gradient else None

    def work(at: tuple[int, int]) -> None:
        b, g = at
        group = problem.group(g)
        heads = slice(g * (H // G), (g + 1) * (H // G))
        dk_GSD, dv_GSE = np.zeros((1, S, D), dtype), np.zeros((1, S, E), dtype)
        queries, keys = _backward_tile_shape(group)
        with _quiet():
            for t in _cut(T, queries):
                here = (b, heads, t)
                dlse_Rt = None if dlse_BHT is None else dlse_BHT[here]
                rows = _arrived(group, b, t, out_BHTE[here], lse_BHT[here], dout_BHTE[here], dlse_Rt)
                dq_GND = np.zeros_like(rows.q_GND)
                for s in _key_blocks(group, b, t, keys):
                    tile = _differentiate(group, b, rows, s)
                    if tile is None:
                        continue
                    a_GNs, ds_GNs, dx_GNs, visible_GNs = tile
                    k_GsD = _rows_contiguous(group.k_BGSD[b, :, s], dtype)
                    dq_GND += _mix(dx_GNs, k_GsD, visible_GNs)  # Σ_j dx_ij k_j
                    dk_GSD[:, s] += _mix_columns(dx_GNs, rows.q_GND, visible_GNs)  # Σ_i dx_ij q_i
                    dv_GSE[:, s] += _mix_columns(a_GNs, rows.dout_GNE, visible_GNs)  # Σ_i a_ij dout_i
                    if dbias is not None:
                        _add_repeated(dbias, (slice(b, b + 1), heads, t, s), ds_GNs)
                dq_GND *= dtype.type(problem.scale)
                gradients["dq"][here] = dq_GND.reshape(gradients["dq"][here].shape)
                if group.sinks_H is not None:
                    dsinks_BH[b, heads] += _sinks_gradient(group.sinks_H, rows)
            dk_GSD *= dtype.type(_scale_left(problem))  # the queries have brought the rest of it
            gradients["dk"][b, g], gradients["dv"][b, g] = dk_GSD[0], dv_GSE[0]

    # Batch rows and heads may share a bias: one thread then sums its gradient, in one order.
    items = [(b, g) for b in range(B) for g in range(G if H else 0)]
    each(work, items, small=dbias is not None or _is_small(problem))
    if problem.sinks_H is not None:
        gradients["dsinks"] = dsinks_BH.sum(axis=0).astype(dtype)
    if dbias is not None and problem.bias_BHTS is not None:
        with _quiet():
            gradients["dbias"] = dbias.astype(problem.bias_BHTS.dtype)
    return gradients


class _ArrivedRows(NamedTuple):
    """A block of query rows of one batch row and one key/value head (G = 1), on the way back."""

    t: slice
    q_GND: Array  # as `_queries` gives them
    dout_GNE: Array
    lse_GRt1: Array
    delta_GRt1: Array  # dout·out − dlse: what a row's softmax, or its lse, takes off all its scores alike


def _arrived(
    group: Problem, b: int, t: slice, out_RtE: Array, lse_Rt: Array, dout_RtE: Array, dlse_Rt: Array | None
) -> _ArrivedRows:
    dout_GRtE = dout_RtE[None].astype(group.accumulator)
    delta_GRt = (dout_GRtE * out_RtE.astype(group.accumulator)).sum(axis=-1)
    if dlse_Rt is not None:
        delta_GRt -= dlse_Rt
    return _ArrivedRows(
        t, _queries(group, b, t), _fold(dout_GRtE), lse_Rt[None, ..., None], delta_GRt[..., None]
    )


def _differentiate(
    group: Problem, b: int, rows: _ArrivedRows, s: slice
) -> tuple[Array, Array, Array, Array | None] | None:
    """One tile on the way back, each (G, N, s): weights, gradients of the scores and of the dot products, visibility.

    What is hidden is 0. The dot products' lack the factor `scale`. None if nothing in the tile is visible.
    """
    p_t1, j_s = group.offset + np.arange(rows.t.start, rows.t.stop)[:, None], np.arange(s.start, s.stop)
    visible = _visible(group, b, rows.t, s, p_t1, j_s)
    live_GRt1 = rows.lse_GRt1 != -np.inf
    if not live_GRt1.all():
        visible = live_GRt1 if visible is None else visible & live_GRt1
    if visible is not None and not visible.any():
        return None
    s_GRts = _capped(group, b, rows.q_GND, s)
    slope_GNs = None if group.softcap is None else _fold(1 - (s_GRts / group.softcap) ** 2)
    s_GRts = _placed(group, b, s_GRts, rows.t, s, p_t1 - j_s, visible)
    s_GRts -= rows.lse_GRt1
    a_GNs = _fold(np.exp(s_GRts, out=s_GRts))
    v_GsE = _rows_contiguous(group.v_BGSE[b, :, s], a_GNs.dtype)
    ds_GNs = _product(rows.dout_GNE, v_GsE.swapaxes(-1, -2))
    ds_GNs -= _fold(rows.delta_GRt1)
    ds_GNs *= a_GNs  # a_ij (dout_i·v_j − δ_i)
    dx_GNs = ds_GNs if slope_GNs is None else ds_GNs * slope_GNs
    visible_GNs = _fold_visible(visible, s_GRts.shape)
    if visible_GNs is not None:
        for tile_GNs in (a_GNs, ds_GNs, dx_GNs):
            np.copyto(tile_GNs, 0, where=~visible_GNs)
    return a_GNs, ds_GNs, dx_GNs, visible_GNs


def _mix_columns(p_GNs: Array, x_GNW: Array, visible_GNs: Array | None) -> Array:
    """Σ_n p_ns x_n over visible pairs only, (G, s, W): what keys gather from a block of queries."""
    visible_GsN = None if visible_GNs is None else visible_GNs.swapaxes(-1, -2)
    return _mix(p_GNs.swapaxes(-1, -2), x_GNW, visible_GsN)


def _sinks_gradient(sinks_R: Array, rows: _ArrivedRows) -> Array:
    """−Σ_i exp(sink − lse_i) δ_i for each head, over the rows that see anything."""
    lse_Rt, delta_Rt = rows.lse_GRt1[0, ..., 0], rows.delta_GRt1[0, ..., 0]
    terms_Rt = np.where(lse_Rt == -np.inf, 0, -np.exp(sinks_R[:, None] - lse_Rt) * delta_Rt)
    dsinks_R: Array = terms_Rt.sum(axis=-1, dtype=np.float64)
    return dsinks_R


def _add_repeated(dbias: Array, place: tuple[slice, slice, slice, slice], ds_GNs: Array) -> None:
    """Add a tile of gradients at its place, summed over the axes that the bias was repeated along."""
    _, heads, t, s = place
    repeated = tuple(axis for axis, size in enumerate(dbias.shape) if size == 1)
    own = tuple(cut if size > 1 else slice(None) for cut, size in zip(place, dbias.shape, strict=True))
    ds_1Rts = ds_GNs.reshape(1, heads.stop - heads.start, t.stop - t.start, s.stop - s.start)
    dbias[own] += ds_1Rts.sum(axis=repeated, keepdims=True)


def _backward_tile_shape(group: Problem) -> tuple[int, int]:
    """As `_tile_shape`; sums over the rows of a tile are products too, and kept as small."""
    _, R, _, _, _, D, E = group.sizes
    queries, keys = _tile_shape(group)
    return max(1, min(queries, PRODUCT // (4 * R * max(D, E)))), keys


def _column_sums(problem: Problem, lse_BHT: Array, watch: Watch) -> dict[str, Array]:
    """A second pass, over finished weights: what each key gave in all, and the mass in blocks of the matrix.

    One head after another: sums over queries meet in the same place, and so always in the same order.
    """
    B, H, _, T, S, *_ = problem.sizes
    R, C = watch.pooled or (1, 1)
    row_T, column_S = _block_of(T, R), _block_of(S, C)
    received, pooled = np.zeros((B, H, S)), np.zeros((B, H, R, C))

    def work(at: tuple[int, int]) -> None:
        b, h = at
        with _quiet():
            for t, s, a_ts in _weight_tiles(problem.head(h), b, lse_BHT[b, h]):
                received[b, h, s] += a_ts.sum(axis=0)
                if watch.pooled is not None:
                    rows, row_starts = np.unique(row_T[t], return_index=True)
                    columns, column_starts = np.unique(column_S[s], return_index=True)
                    blocks = np.add.reduceat(a_ts.astype(np.float64), row_starts, axis=0)
                    pooled[b, h][rows[:, None], columns] += np.add.reduceat(blocks, column_starts, axis=1)

    each(work, [(b, h) for b in range(B) for h in range(H)], small=_is_small(problem))
    seen: dict[str, Array] = {}
    if watch.received:
        seen["received"] = received.astype(problem.accumulator)
    if watch.pooled is not None:
        seen["pooled"] = pooled.astype(problem.accumulator)
    return seen


def _weight_tiles(head: Problem, b: int, lse_T: Array) -> Iterator[tuple[slice, slice, Array]]:
    """All tiles of finished weights of a problem of one head that anything is visible in."""
    T = len(lse_T)
    queries, keys = _tile_shape(head)
    for t in _cut(T, queries):
        q_GNd = _queries(head, b, t)
        for s in _key_blocks(head, b, t, keys):
            tile = _scores(head, b, q_GNd, t, s)
            if tile is not None:
                yield t, s, _weights(*tile, lse_T[t])


def _block_of(count: int, parts: int) -> Array:
    """The block of each of `count` positions, where block r holds count·r//parts … count·(r+1)//parts."""
    edges = count * np.arange(1, parts + 1) // parts
    return np.searchsorted(edges, np.arange(count), side="right")


def _weights(s_GRts: Array, visible: Array | None, lse_t: Array) -> Array:
    """Finished weights e^(s − lse) of one tile of one head, (t, s); hidden ones and rows that see nothing are 0."""
    a_GRts: Array = np.exp(s_GRts - np.where(lse_t == -np.inf, 0, lse_t)[:, None])
    if visible is not None:
        np.copyto(a_GRts, 0, where=~visible)
    a_ts: Array = a_GRts[0, 0]
    return a_ts


def rows(problem: Problem, lse_BHT: Array, queries_N: Array, heads_M: Array) -> Array:
    """Weights of the given queries of the given heads, (B, M, N, S), from q, k and lse. Memory: the result."""
    B, _, _, _, S, *_ = problem.sizes
    a_BMNS = np.zeros((B, len(heads_M), len(queries_N), S), problem.accumulator)
    if not queries_N.size:
        return a_BMNS

    def work(at: tuple[int, int]) -> None:
        b, m = at
        h = int(heads_M[m])
        head = problem.head(h)
        _, keys = _tile_shape(head)
        for n in _cut(len(queries_N), QUERIES):
            t = queries_N[n]
            q_GNd = _queries(head, b, t)
            with _quiet():
                for s in _key_blocks(head, b, slice(int(t.min()), int(t.max()) + 1), keys):
                    tile = _scores(head, b, q_GNd, t, s)
                    if tile is not None:
                        a_BMNS[b, m, n, s] = _weights(*tile, lse_BHT[b, h, t])

    each(work, [(b, m) for b in range(B) for m in range(len(heads_M))], small=a_BMNS.size < TILE)
    return a_BMNS
