"""Attention on tensors of any device, block by block, with its gradients: plain torch, no T × S matrix.

It is what runs where there is no compiled kernel of ours and torch has none that honours the options. A tile of
scores at a time is made, used and forgotten; for the gradients it is made again from q, k and lse (Dao et al. 2022).
What a row carries from tile to tile is its maximum m, its denominator l = Σ e^(s−m) and the mean of the values so
far, which, unlike their sum, no finite values can make overflow.

Tiles that causality and the window hide are skipped; bounds, segments, mask and bias are read tile by tile. Hidden
scores are −∞, so hidden keys do not matter; a hidden value, or a hidden query in a sum of gradients, would matter if
it were not finite, as 0 · NaN is NaN. So whether all are finite is asked once a call, which waits for the device,
and if not, products leave the others out. Memory beyond inputs and outputs: a few tiles.

Shape legend: B batch, H query heads = G key/value heads × R query heads that share one, T queries, S keys, D
query/key width, E value width; t and s, the queries and keys of one tile, N = R·t; K keys kept by `top`; M heads and
L queries of rows asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regardant.problem import Watch
    from regardant.torch.problem import TensorProblem

# One tile of scores over all batch rows and heads, at most, unless those alone are more.
TILE = 2**22
QUERIES = 256
KEYS = 1024


class Gradients(NamedTuple):
    """What `backward` gives, in the shapes and types of what each belongs to; dsinks in the accumulation type."""

    dq_BHTD: torch.Tensor
    dk_BGSD: torch.Tensor
    dv_BGSE: torch.Tensor
    dsinks_H: torch.Tensor | None
    dbias: torch.Tensor | None


def attend(p: TensorProblem, watch: Watch | None = None) -> dict[str, torch.Tensor]:
    """Output and lse of a problem and, with `watch`, what was to be kept, under the names of a `Look`."""
    B, H, _, T, *_ = p.sizes
    finite = _finite(p.v_BGSE)
    parts: list[dict[str, torch.Tensor]] = []
    queries, keys = _tile_shape(p)
    for t in _cut(T, queries):
        rows = _Rows(p, t.stop - t.start, watch)
        q_BGND = _queries(p, t)
        for s in _key_blocks(p, t, keys):
            s_BGRts, visible = _scores(p, q_BGND, t, s)
            rows.take(s_BGRts, visible, p.v_BGSE[:, :, s].to(p.accumulator), s.start, finite=finite)
        parts.append({name: part.reshape(B, H, *part.shape[3:]) for name, part in rows.finish().items()})
    if not parts:
        rows = _Rows(p, 0, watch)
        parts = [{name: part.reshape(B, H, *part.shape[3:]) for name, part in rows.finish().items()}]
    seen = {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
    seen["out"] = seen["out"].to(p.q_BHTD.dtype)
    if watch is not None and (watch.received or watch.pooled):
        seen |= _column_sums(p, seen["lse"], watch)
    return seen


class _Rows:
    """The state that a block of query rows carries from one tile of keys to the next."""

    def __init__(self, p: TensorProblem, t: int, watch: Watch | None) -> None:
        B, H, G, _, _, _, E = p.sizes
        like = {"dtype": p.accumulator, "device": p.q_BHTD.device}
        shape = (B, G, H // G if G else 0, t)
        self.sinks_GR1 = None if p.sinks_H is None else p.sinks_H.reshape(*shape[1:3], 1)
        self.m_BGRt = torch.full(shape, -torch.inf, **like)  # largest score so far
        self.l_BGRt = torch.zeros(shape, **like)  # Σ e^(s−m)
        self.mean_BGRtE = torch.zeros((*shape, E), **like)  # Σ e^(s−m)·v / l
        self.watch = watch
        self.w_BGRt = torch.zeros(shape, **like)  # Σ e^(s−m)·(s−m), for the entropy
        K = 0 if watch is None else watch.top
        self.top_scores = torch.full((*shape, K), -torch.inf, **like)
        self.top_keys = torch.full((*shape, K), -1, dtype=torch.int64, device=like["device"])

    def take(
        self,
        s_BGRts: torch.Tensor,
        visible: torch.Tensor | None,
        v_BGsE: torch.Tensor,
        first: int,
        *,
        finite: bool,
    ) -> None:
        """Fold in one tile: its scores (hidden ones −∞), visibility (None: all), values, first key."""
        m_BGRt = torch.maximum(self.m_BGRt, s_BGRts.amax(dim=-1))
        base_BGRt = torch.where(
            m_BGRt == -torch.inf, 0, m_BGRt
        )  # a row that has seen nothing yet: e^(−∞−0) = 0
        fade_BGRt = torch.exp(self.m_BGRt - base_BGRt)
        relative_BGRts = s_BGRts - base_BGRt[..., None]
        e_BGRts = torch.exp(relative_BGRts)
        if self.watch is not None:
            self._watch(s_BGRts, relative_BGRts, e_BGRts, base_BGRt, fade_BGRt, first)
        past_BGRt = self.l_BGRt * fade_BGRt
        self.l_BGRt = past_BGRt + e_BGRts.sum(dim=-1)
        total_BGRt = torch.where(self.l_BGRt == 0, 1, self.l_BGRt)
        new_BGRtE = _mix(e_BGRts / total_BGRt[..., None], v_BGsE, None if finite else visible)
        self.mean_BGRtE = self.mean_BGRtE * (past_BGRt / total_BGRt)[..., None] + new_BGRtE
        self.m_BGRt = m_BGRt

    def _watch(
        self, s_BGRts: torch.Tensor, relative_BGRts: torch.Tensor, e_BGRts: torch.Tensor, base_BGRt: torch.Tensor,
        fade_BGRt: torch.Tensor, first: int,
    ) -> None:  # fmt: skip
        """Carry the entropy's sum (raising m to m' adds (m−m')·l first) and the heaviest keys."""
        rise_BGRt = torch.where(self.m_BGRt == -torch.inf, 0, self.m_BGRt - base_BGRt)
        lowest = torch.finfo(s_BGRts.dtype).min  # 0 · −∞ would be NaN; 0 · a number is 0
        new_BGRt = (e_BGRts * relative_BGRts.clamp(min=lowest)).sum(dim=-1)
        self.w_BGRt = fade_BGRt * (self.w_BGRt + rise_BGRt * self.l_BGRt) + new_BGRt
        K = self.top_keys.shape[-1]
        if K:
            keys_s = torch.arange(first, first + s_BGRts.shape[-1], device=s_BGRts.device)
            scores = torch.cat([self.top_scores, s_BGRts], dim=-1)
            keys = torch.cat([self.top_keys, keys_s.expand(s_BGRts.shape)], dim=-1)
            # What is kept comes first: a stable sort then prefers the earlier key among equals.
            scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
            self.top_scores, self.top_keys = scores[..., :K], keys.gather(-1, order[..., :K])

    def finish(self) -> dict[str, torch.Tensor]:
        """The rows' results, axes (B, G, R, t, …). Rows that saw nothing: out 0, lse −∞, weights 0."""
        live_BGRt = self.m_BGRt != -torch.inf
        lse_BGRt = self.m_BGRt + torch.log(self.l_BGRt)
        total_BGRt = torch.where(live_BGRt, self.l_BGRt, 1)
        out_BGRtE = self.mean_BGRtE
        if self.sinks_GR1 is not None:  # a sink joins the denominator, and no value comes with it
            lse_BGRt = torch.where(live_BGRt, torch.logaddexp(lse_BGRt, self.sinks_GR1), -torch.inf)
            total_BGRt = torch.where(live_BGRt, self.l_BGRt + torch.exp(self.sinks_GR1 - self.m_BGRt), 1)
            out_BGRtE = out_BGRtE * (self.l_BGRt / total_BGRt)[..., None]
        seen = {"out": out_BGRtE, "lse": lse_BGRt}
        if self.watch is not None:
            seen |= self._observed(live_BGRt, total_BGRt, lse_BGRt)
        return seen

    def _observed(
        self, live_BGRt: torch.Tensor, total_BGRt: torch.Tensor, lse_BGRt: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """H = −Σ a log a = Σ a·(lse − m) − Σ a·(s − m), and the sink, if there is one, as one more outcome."""
        entropy_BGRt = ((lse_BGRt - self.m_BGRt) * self.l_BGRt - self.w_BGRt) / total_BGRt
        sink_BGRt = torch.zeros_like(lse_BGRt)
        if self.sinks_GR1 is not None:
            log_sink_BGRt = torch.where(live_BGRt, (self.sinks_GR1 - lse_BGRt).clamp(max=0), -torch.inf)
            sink_BGRt = torch.exp(log_sink_BGRt)
            entropy_BGRt = entropy_BGRt - sink_BGRt * torch.where(sink_BGRt == 0, 0, log_sink_BGRt)
        hidden = self.top_scores == -torch.inf
        weights = torch.exp(self.top_scores - torch.where(live_BGRt, lse_BGRt, 0)[..., None])
        return {
            "max_logit": self.m_BGRt,
            "entropy": torch.where(live_BGRt, entropy_BGRt, 0),
            "sink_weight": sink_BGRt,
            "top_keys": torch.where(hidden, -1, self.top_keys),
            "top_weights": torch.where(hidden, 0, weights),
        }


def backward(
    p: TensorProblem,
    out_BHTE: torch.Tensor,
    lse_BHT: torch.Tensor,
    dout_BHTE: torch.Tensor,
    dlse_BHT: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Gradients:
    """Gradients from what `attend` gave and what arrives at it; that of `bias`, the caller's tensor, if it is given.

    With P = exp(s − lse), dP = dO·Vᵀ and δ = Σ_e dO·O − dlse:  dS = P ∘ (dP − δ), dbias = dS; then, through the
    softcap times 1 − (s/softcap)², dQ = scale · dS·K and dK = scale · dSᵀ·Q; dV = Pᵀ·dO; dsink = −Σ e^(sink−lse)·δ.
    A row that sees nothing gives 0. Memory beyond the results: them in the accumulation type, and a few tiles.
    """
    live_BHT = lse_BHT != -torch.inf
    base_BHT = torch.where(live_BHT, lse_BHT, 0)
    delta_BHT = (dout_BHTE.to(p.accumulator) * out_BHTE.to(p.accumulator)).sum(dim=-1)
    if dlse_BHT is not None:
        delta_BHT = delta_BHT - dlse_BHT
    sums = _Sums(p, bias, finite=all(map(_finite, (p.q_BHTD, p.k_BGSD, p.v_BGSE, dout_BHTE))))
    queries, keys = _tile_shape(p)
    for t in _cut(p.sizes[3], queries):
        block = _Block(p, t, base_BHT, delta_BHT, dout_BHTE)
        for s in _key_blocks(p, t, keys):
            sums.take(block, s)
    dsinks_H = None
    if p.sinks_H is not None:
        pull_BHT = -torch.exp(p.sinks_H[:, None] - base_BHT) * delta_BHT
        widest = p.accumulator if p.q_BHTD.device.type == "mps" else torch.float64  # which has no float64
        dsinks_H = torch.where(live_BHT, pull_BHT, 0).sum(dim=(0, 2), dtype=widest).to(p.accumulator)
    return sums.finish(bias, dsinks_H)


class _Block:
    """A block of query rows and what arrives at them, heads that share keys folded into rows."""

    def __init__(
        self,
        p: TensorProblem,
        t: slice,
        base_BHT: torch.Tensor,
        delta_BHT: torch.Tensor,
        dout_BHTE: torch.Tensor,
    ) -> None:
        B, H, G, *_ = p.sizes
        self.t = t
        self.shape = (B, G, H // G if G else 0, t.stop - t.start)
        self.q_BGND = _queries(p, t)
        self.dout_BGNE = _fold(dout_BHTE[:, :, t].to(p.accumulator), G)
        self.base_BGRt1 = base_BHT[:, :, t].reshape(*self.shape, 1)
        self.delta_BGRt1 = delta_BHT[:, :, t].reshape(*self.shape, 1)


class _Sums:
    """The gradients as they add up, tile by tile, in the accumulation type."""

    def __init__(self, p: TensorProblem, bias: torch.Tensor | None, *, finite: bool) -> None:
        self.p, self.finite = p, finite
        like = {"dtype": p.accumulator, "device": p.q_BHTD.device}
        self.dq_BHTD = torch.zeros(p.q_BHTD.shape, **like)
        self.dk_BGSD = torch.zeros(p.k_BGSD.shape, **like)
        self.dv_BGSE = torch.zeros(p.v_BGSE.shape, **like)
        shape = () if bias is None else (1,) * (4 - bias.ndim) + tuple(bias.shape)
        self.dbias = torch.zeros(shape, **like) if shape else None

    def take(self, block: _Block, s: slice) -> None:
        """Add what the keys `s` and the block's queries give each other."""
        p, t = self.p, block.t
        k_BGsD, v_BGsE = (x[:, :, s].to(p.accumulator) for x in (p.k_BGSD, p.v_BGSE))
        capped_BGRts = _capped(p, _raw(p, block.q_BGND, k_BGsD, block.shape))
        s_BGRts, visible = _finished(p, capped_BGRts, t, s)
        a_BGRts = _hide(torch.exp(s_BGRts - block.base_BGRt1), visible)
        da_BGRts = (block.dout_BGNE @ v_BGsE.transpose(-1, -2)).reshape(s_BGRts.shape)
        ds_BGRts = _hide(a_BGRts * (da_BGRts - block.delta_BGRt1), visible)
        if self.dbias is not None:
            _add_bias(self.dbias, ds_BGRts.flatten(1, 2), t, s)
        if p.softcap is not None:
            ds_BGRts = _hide(ds_BGRts * (1 - (capped_BGRts / p.softcap) ** 2), visible)
        aside = None if self.finite else visible
        dq_BGRtD = _mix(ds_BGRts, k_BGsD, aside)
        self.dq_BHTD[:, :, t] += p.scale * dq_BGRtD.flatten(1, 2)
        self.dk_BGSD[:, :, s] += p.scale * _gather(ds_BGRts, block.q_BGND, aside)
        self.dv_BGSE[:, :, s] += _gather(a_BGRts, block.dout_BGNE, aside)

    def finish(self, bias: torch.Tensor | None, dsinks_H: torch.Tensor | None) -> Gradients:
        """Round to the types of what each belongs to."""
        dtype = self.p.q_BHTD.dtype
        dbias = None if bias is None or self.dbias is None else self.dbias.reshape(bias.shape).to(bias.dtype)
        return Gradients(
            self.dq_BHTD.to(dtype), self.dk_BGSD.to(dtype), self.dv_BGSE.to(dtype), dsinks_H, dbias
        )


def rows(
    p: TensorProblem, lse_BHT: torch.Tensor, queries_L: torch.Tensor, heads_M: torch.Tensor
) -> torch.Tensor:
    """Weights of the given queries of the given heads, (B, M, L, S), from q, k and lse. Memory: the result."""
    B, _, _, _, S, *_ = p.sizes
    a_BMLS = torch.zeros((B, len(heads_M), len(queries_L), S), dtype=p.accumulator, device=p.q_BHTD.device)
    _, keys = _tile_shape(p)
    for n in _cut(len(queries_L), QUERIES):
        t = queries_L[n]
        q_BGND = _queries(p, t)
        for s in _cut(S, keys):
            a_BHts = _weights(p, q_BGND, lse_BHT, t, s)
            a_BMLS[:, :, n, s] = a_BHts[:, heads_M]
    return a_BMLS


def _column_sums(p: TensorProblem, lse_BHT: torch.Tensor, watch: Watch) -> dict[str, torch.Tensor]:
    """A second pass, over finished weights: what each key gave in all, and the mass in blocks of the matrix."""
    B, H, _, T, S, *_ = p.sizes
    R, C = watch.pooled or (1, 1)
    like: dict[str, Any] = {"dtype": p.accumulator, "device": p.q_BHTD.device}
    received_BHS, pooled_BHRC = torch.zeros((B, H, S), **like), torch.zeros((B, H, R, C), **like)
    row_TR, column_SC = _blocks_of(T, R, like), _blocks_of(S, C, like)
    queries, keys = _tile_shape(p)
    for t in _cut(T, queries):
        q_BGND = _queries(p, t)
        for s in _key_blocks(p, t, keys):
            a_BHts = _weights(p, q_BGND, lse_BHT, t, s)
            received_BHS[:, :, s] += a_BHts.sum(dim=-2)
            if watch.pooled is not None:
                pooled_BHRC += row_TR[t].T @ (a_BHts @ column_SC[s])
    seen = {}
    if watch.received:
        seen["received"] = received_BHS
    if watch.pooled is not None:
        seen["pooled"] = pooled_BHRC
    return seen


def _blocks_of(count: int, parts: int, like: dict[str, Any]) -> torch.Tensor:
    """1 where a position (row) lies in a block (column), where block r holds count·r//parts … count·(r+1)//parts."""
    edges = torch.arange(1, parts + 1, device=like["device"]) * count // parts
    block = torch.searchsorted(edges, torch.arange(count, device=like["device"]), right=True)
    return torch.nn.functional.one_hot(block, parts).to(like["dtype"])


def _weights(
    p: TensorProblem, q_BGND: torch.Tensor, lse_BHT: torch.Tensor, t: slice | torch.Tensor, s: slice
) -> torch.Tensor:
    """Finished weights e^(s − lse) of one tile, (B, H, t, s); hidden ones and rows that see nothing are 0."""
    B, H, *_ = p.sizes
    s_BGRts, visible = _scores(p, q_BGND, t, s)
    lse_BGRt1 = lse_BHT[:, :, t].reshape(*s_BGRts.shape[:-1], 1)
    a_BGRts = torch.exp(s_BGRts - torch.where(lse_BGRt1 == -torch.inf, 0, lse_BGRt1))
    return _hide(a_BGRts, visible).reshape(B, H, *a_BGRts.shape[-2:])


# ----------------------------------------------------------------------------------------------- one tile


def _queries(p: TensorProblem, t: slice | torch.Tensor) -> torch.Tensor:
    """The queries `t`, the heads that share keys folded into rows: (B, G, R·t, D)."""
    return _fold(p.q_BHTD[:, :, t].to(p.accumulator), p.sizes[2])


def _fold(x_BHtW: torch.Tensor, G: int) -> torch.Tensor:
    B, H, t, W = x_BHtW.shape
    return x_BHtW.reshape(B, G, (H // G if G else 0) * t, W)


def _scores(
    p: TensorProblem, q_BGND: torch.Tensor, t: slice | torch.Tensor, s: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One tile: scores (B, G, R, t, s) with −∞ where hidden, and the visibility, None where all is visible."""
    B, H, G, *_ = p.sizes
    R = H // G if G else 0
    t_count = (t.stop - t.start) if isinstance(t, slice) else len(t)
    raw_BGRts = _raw(p, q_BGND, p.k_BGSD[:, :, s].to(p.accumulator), (B, G, R, t_count))
    return _finished(p, _capped(p, raw_BGRts), t, s)


def _raw(
    p: TensorProblem, q_BGND: torch.Tensor, k_BGsD: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    return (q_BGND @ k_BGsD.transpose(-1, -2)).reshape(*shape, k_BGsD.shape[2]) * p.scale


def _capped(p: TensorProblem, s_BGRts: torch.Tensor) -> torch.Tensor:
    return s_BGRts if p.softcap is None else p.softcap * torch.tanh(s_BGRts / p.softcap)


def _finished(
    p: TensorProblem, s_BGRts: torch.Tensor, t: slice | torch.Tensor, s: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add bias and ALiBi to a tile of scores, and hide what is not visible."""
    device = s_BGRts.device
    at_t = torch.arange(t.start, t.stop, device=device) if isinstance(t, slice) else t
    distance_ts = (p.offset + at_t)[:, None] - torch.arange(s.start, s.stop, device=device)
    if p.bias_BHTS is not None:
        s_BGRts = s_BGRts + _bias(p, t, s, s_BGRts.shape)
    if p.alibi_H is not None:
        slopes_GR11 = p.alibi_H.reshape(*s_BGRts.shape[1:3], 1, 1)
        s_BGRts = s_BGRts - slopes_GR11 * distance_ts.to(s_BGRts.dtype)
    visible = _visible(p, t, s, distance_ts, s_BGRts.shape)
    return (s_BGRts if visible is None else torch.where(visible, s_BGRts, -torch.inf)), visible


def _visible(
    p: TensorProblem, t: slice | torch.Tensor, s: slice, distance_ts: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Which of a tile's scores count, broadcastable to (B, G, R, t, s); None if no option hides any."""
    conditions = []
    last, first = _positions(p, t)
    if p.causal and s.stop - 1 > first:
        conditions.append(distance_ts >= 0)
    if p.window is not None and last - s.start >= p.window:
        conditions.append(distance_ts < p.window)
    j_s = torch.arange(s.start, s.stop, device=distance_ts.device)
    if p.starts_B is not None:
        conditions.append((j_s >= p.starts_B[:, None])[:, None, None, None])
    if p.lengths_B is not None:
        conditions.append((j_s < p.lengths_B[:, None])[:, None, None, None])
    if p.segments is not None:
        q_BT, k_BS = p.segments
        conditions.append((q_BT[:, t, None] == k_BS[:, None, s])[:, None, None])
    if p.mask_BHTS is not None:
        conditions.append(p.mask_BHTS[:, :, t, s].reshape(shape))
    if p.bias_BHTS is not None:  # a bias of −∞ hides a key as a mask does
        conditions.append(_bias(p, t, s, shape) != -torch.inf)
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = visible & condition
    return visible


def _positions(p: TensorProblem, t: slice | torch.Tensor) -> tuple[int, int]:
    """The last and the first position of a tile's queries, as far as is known without asking the device."""
    if isinstance(t, slice):
        return p.offset + t.stop - 1, p.offset + t.start
    return p.offset + p.sizes[3] - 1, p.offset


def _hide(x_BGRts: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return x_BGRts if visible is None else torch.where(visible, x_BGRts, 0)


def _bias(p: TensorProblem, t: slice | torch.Tensor, s: slice, shape: tuple[int, ...]) -> torch.Tensor:
    assert p.bias_BHTS is not None  # noqa: S101 - asked only where there is one
    return p.bias_BHTS[:, :, t, s].reshape(shape).to(p.accumulator)


def _mix(a_BGRts: torch.Tensor, x_BGsW: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Σ_s a x, (B, G, R, t, W); over visible pairs only, should `visible` be given."""
    B, G, R, t, s = a_BGRts.shape
    aside = None if visible is None else visible.expand(a_BGRts.shape).reshape(B, G, R * t, s)
    y_BGNW = _product(a_BGRts.reshape(B, G, R * t, s), x_BGsW, aside)
    return y_BGNW.reshape(B, G, R, t, y_BGNW.shape[-1])


def _gather(a_BGRts: torch.Tensor, x_BGNW: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Σ_(R, t) a x, (B, G, s, W); over visible pairs only, should `visible` be given."""
    B, G, R, t, s = a_BGRts.shape
    aside = (
        None if visible is None else visible.expand(a_BGRts.shape).reshape(B, G, R * t, s).transpose(-1, -2)
    )
    return _product(a_BGRts.reshape(B, G, R * t, s).transpose(-1, -2), x_BGNW, aside)


def _product(a_BGnm: torch.Tensor, x_BGmW: torch.Tensor, visible_BGnm: torch.Tensor | None) -> torch.Tensor:
    """Compute a @ x. With `visible`, hidden pairs, where a is 0, do not count even if x is not finite there."""
    if visible_BGnm is None:
        return a_BGnm @ x_BGmW
    y_BGnW = a_BGnm @ torch.where(torch.isfinite(x_BGmW), x_BGmW, 0)
    # What visible infinities and NaN make of a sum depends on the signs alone; 0 · ∞ is NaN.
    plus, minus = a_BGnm > 0, a_BGnm < 0
    up, down = x_BGmW == torch.inf, x_BGmW == -torch.inf
    rises = _any(plus, up) | _any(minus, down)
    falls = _any(plus, down) | _any(minus, up)
    neither = visible_BGnm & ~plus & ~minus
    none = torch.isnan(y_BGnW) | _any(visible_BGnm, torch.isnan(x_BGmW)) | _any(neither, up | down)
    y_BGnW = torch.where(rises, torch.inf, torch.where(falls, -torch.inf, y_BGnW))
    return torch.where(none | (rises & falls), torch.nan, y_BGnW)


def _any(a_BGnm: torch.Tensor, x_BGmW: torch.Tensor) -> torch.Tensor:
    """Whether any m has both, as a product of matrices."""
    return (a_BGnm.float() @ x_BGmW.float()) > 0


def _add_bias(dbias_BHTS: torch.Tensor, ds_BHts: torch.Tensor, t: slice, s: slice) -> None:
    """Add a tile to the bias's gradient, summed over every axis along which the bias was broadcast."""
    T, S = dbias_BHTS.shape[2:]
    place = dbias_BHTS[:, :, t if T > 1 else slice(None), s if S > 1 else slice(None)]
    place += ds_BHts.sum_to_size(place.shape)


# ----------------------------------------------------------------------------------------------- the cut


def _finite(x: torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _tile_shape(p: TensorProblem) -> tuple[int, int]:
    B, H, _, T, *_ = p.sizes
    queries = min(max(T, 1), QUERIES)
    return queries, max(64, min(KEYS, TILE // max(1, B * H * queries)))


def _cut(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _key_blocks(p: TensorProblem, t: slice, keys: int) -> Iterator[slice]:
    """The tiles that queries `t` may see anything of, from causality and window alone."""
    low, high = 0, p.sizes[4]
    if p.causal:
        high = min(high, p.offset + t.stop)
    if p.window is not None:
        low = max(low, p.offset + t.start - p.window + 1)
    for first in range(low, high, keys):
        yield slice(first, min(first + keys, high))
