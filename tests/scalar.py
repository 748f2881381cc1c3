"""Attention one number at a time, in plain Python: an oracle that shares no line with the package.

Every sum is math.fsum, every condition is one `if`, so that each can be read against the definition.
"""

import math

import numpy as np


def visible(b, h, i, j, *, causal, offset, window, starts, lengths, segments, mask, bias):  # noqa: PLR0911
    p = offset + i
    if causal and j > p:
        return False
    if window is not None and p - j >= window:
        return False
    if starts is not None and j < starts[b]:
        return False
    if lengths is not None and j >= lengths[b]:
        return False
    if segments is not None and segments[0][b][i] != segments[1][b][j]:
        return False
    if mask is not None and not mask[b, h, i, j]:
        return False
    return bias is None or bias[b, h, i, j] != -math.inf


def attention(
    q,
    k,
    v,
    *,
    causal=True,
    offset=None,
    window=None,
    starts=None,
    lengths=None,
    segments=None,
    mask=None,
    bias=None,
    alibi=None,
    softcap=None,
    sinks=None,
    scale=None,
):
    """(out, lse, weights) in float64 for (B, H, T, D) queries; rows that see nothing are 0 and -inf."""
    B, H, T, D = q.shape
    G, S, E = v.shape[1:]
    offset = S - T if offset is None else offset
    scale = 1 / math.sqrt(D) if scale is None else scale
    mask = None if mask is None else np.broadcast_to(mask, (B, H, T, S))
    bias = None if bias is None else np.broadcast_to(bias, (B, H, T, S)).astype(np.float64)
    q, k, v = (a.astype(np.float64).tolist() for a in (q, k, v))
    out, lse, weights = np.zeros((B, H, T, E)), np.full((B, H, T), -np.inf), np.zeros((B, H, T, S))
    for b, h, i in np.ndindex(B, H, T):
        g = h // (H // G)
        seen = [
            j
            for j in range(S)
            if visible(
                b, h, i, j, causal=causal, offset=offset, window=window, starts=starts, lengths=lengths,
                segments=segments, mask=mask, bias=bias,
            )
        ]  # fmt: skip
        if not seen:
            continue
        scores = {}
        for j in seen:
            s = scale * math.fsum(x * y for x, y in zip(q[b][h][i], k[b][g][j], strict=True))
            if softcap is not None:
                s = softcap * math.tanh(s / softcap)
            if bias is not None:
                s += float(bias[b, h, i, j])
            if alibi is not None:
                s -= float(alibi[h]) * (offset + i - j)
            scores[j] = s
        peak = max(scores.values())
        terms = [math.exp(s - peak) for s in scores.values()]
        if sinks is not None:
            terms.append(math.exp(float(sinks[h]) - peak))
        lse[b, h, i] = peak + math.log(math.fsum(terms))
        for j, s in scores.items():
            weights[b, h, i, j] = math.exp(s - lse[b, h, i])
        for e in range(E):
            out[b, h, i, e] = math.fsum(weights[b, h, i, j] * v[b][g][j][e] for j in seen)
    return out, lse, weights
