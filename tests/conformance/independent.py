"""A small attention in NumPy that shares no line with the package, forward and backward, every option.

It holds the whole matrix. Its lines are also what the mutants of `mutants.py` are made from: each takes one of them
out for one that is wrong.
"""

import numpy as np


def attention(  # noqa: C901, PLR0915 - one page, to be read from top to bottom
    q, k, v, *, causal=True, offset=None, window=None, starts=None, lengths=None, segments=None, mask=None, bias=None,
    alibi=None, softcap=None, sinks=None, scale=None, return_lse=False, dout=None, dlse=None, bias_gradient=False,
    threads=None,  # noqa: ARG001 - there is one
):  # fmt: skip
    kind = q.dtype
    wide = np.float64 if kind == np.float64 else np.float32
    out_type = kind
    B, H, T, D = q.shape
    G, S = k.shape[1:3]
    first = S - T if offset is None else offset
    scale = 1 / np.sqrt(D) if scale is None else scale

    # Which query sees which key.
    p = first + np.arange(T)[:, None]
    j = np.arange(S)
    sees = np.ones((B, H, T, S), bool)
    if causal:
        sees &= j <= p
    if window is not None:
        sees &= p - j < window
    if starts is not None:
        sees &= j >= np.asarray(starts)[:, None, None, None]
    if lengths is not None:
        sees &= j < np.asarray(lengths)[:, None, None, None]
    if segments is not None:
        sees &= (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
    if mask is not None:
        sees &= mask
    if bias is not None:
        sees &= bias != -np.inf

    # Scores.
    share = np.arange(H) // max(1, H // max(1, G))
    q32, k32, v32 = q.astype(wide), k.astype(wide)[:, share], v.astype(wide)[:, share]
    with np.errstate(all="ignore"):
        raw = (q32 @ np.swapaxes(k32, 2, 3)) * wide(scale)
        capped = raw if softcap is None else wide(softcap) * np.tanh(raw / wide(softcap))
        s = capped
        if bias is not None:
            s = s + bias.astype(wide)
        if alibi is not None:
            s = s - np.asarray(alibi, wide)[:, None, None] * (p - j).astype(wide)
        s = np.where(sees, s, -np.inf)

        # Softmax with a sink in the denominator.
        sink = np.full((H, 1, 1), -np.inf, wide) if sinks is None else np.asarray(sinks, wide)[:, None, None]
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        dead = top == -np.inf
        top = np.where(dead, 0, np.maximum(top, sink))
        e = np.exp(s - top)
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        a = np.where(dead, 0, e / np.where(dead, 1, total))
        lse = np.where(dead, -np.inf, top + np.log(total))[..., 0]
        out = weigh(a, v32, sees)
        result = out.astype(out_type)
        lse = lse.astype(wide)
    if dout is None:
        return (result, lse) if return_lse else result

    # Backward.
    with np.errstate(all="ignore"):
        do = dout.astype(wide)
        dp = do @ np.swapaxes(v32, 2, 3)
        delta = np.where(sees, a * dp, 0).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse[..., None].astype(wide)
        ds = np.where(sees & ~dead, a * (dp - delta), 0)
        slope = wide(1) if softcap is None else 1 - (capped / wide(softcap)) ** 2
        dx = np.where(sees & ~dead, ds * slope, 0) * wide(scale)
        dq = weigh(dx, k32, sees)
        back = np.swapaxes(sees & ~dead, 2, 3)
        dk = weigh(np.swapaxes(dx, 2, 3), q32, back)
        dv = weigh(np.swapaxes(a, 2, 3), do, back)
        dk, dv = (gather(x, G) for x in (dk, dv))
        dsinks = None
        if sinks is not None:
            dsinks = (
                np.where(dead, 0, -np.exp(sink - lse[..., None]) * delta).sum(axis=(0, 2, 3)).astype(wide)
            )
        dbias = fold(ds, bias).astype(bias.dtype) if bias_gradient else None
        return dq.astype(kind), dk.astype(kind), dv.astype(kind), dsinks, dbias


def weigh(a, v, sees):
    """Weighted sums over what is seen; what is not finite and seen is added by itself."""
    good = np.isfinite(v)
    sums = a @ np.where(good, v, 0)
    for b, h, j in np.argwhere(~good.all(axis=-1)):
        sums[b, h] += np.where(sees[b, h, :, j, None] & ~good[b, h, j], a[b, h, :, j, None] * v[b, h, j], 0)
    return sums


def gather(x, G):
    """Sum what the query heads of one key/value head give."""
    B, H = x.shape[:2]
    return x.reshape(B, G, H // max(1, G), *x.shape[2:]).sum(axis=2) if H else np.zeros((B, G, *x.shape[2:]))


def fold(ds, bias):
    """Sum over the axes that a bias was repeated along."""
    shape = (1,) * (4 - bias.ndim) + bias.shape
    for axis, size in enumerate(shape):
        if size == 1:
            ds = ds.sum(axis=axis, keepdims=True)
    return ds.reshape(bias.shape)
