"""Pitfalls, each planted in the small attention of `independent.py`: what is replaced by what, and what it is called.

(name, the right line or part of it, the wrong one, words of the diagnosis)
"""

import inspect
import time

import independent
import numpy as np

DEAD = "rows that see nothing"

MUTANTS = [
    # What is visible.
    ("top-left", "first = S - T if offset is None else offset", "first = 0 if offset is None else offset", "aligned top-left"),
    ("always bottom-right", "first = S - T if offset is None else offset", "first = S - T", "bottom-right, whatever the offset"),
    ("causal one too wide", "sees &= j <= p\n", "sees &= j <= p + 1\n", "causal mask one key too wide"),
    ("own key hidden", "sees &= j <= p\n", "sees &= j < p\n", "own key"),
    ("causality ignored", "    if causal:\n", "    if False:\n", "causal mask ignored"),
    ("mask replaces causality", "    if causal:\n", "    if causal and mask is None:\n", "causal mask ignored"),
    ("bias replaces causality", "    if causal:\n", "    if causal and bias is None:\n", "causal mask ignored"),
    ("window one too wide", "p - j < window", "p - j <= window", "window one key too wide"),
    ("window one too narrow", "p - j < window", "p - j < window - 1", "window one key too narrow"),
    ("window without offset", "p - j < window", "p - first - j < window", "window counted without the offset"),
    ("window both ways", "p - j < window", "abs(p - j) < window", "window also cuts the future"),
    ("window ignored", "if window is not None", "if False", "window ignored"),
    ("window needs causality", "if window is not None", "if window is not None and causal", "window ignored"),
    ("starts ignored", "if starts is not None", "if False", "starts ignored"),
    ("starts one too high", "j >= np.asarray(starts)", "j > np.asarray(starts)", "starts one too high"),
    ("lengths ignored", "if lengths is not None", "if False", "lengths ignored"),
    ("lengths one too high", "j < np.asarray(lengths)", "j <= np.asarray(lengths)", "lengths one too high"),
    ("first length for all", "np.asarray(lengths)[:, None", "np.asarray(lengths)[:1, None", "first batch row's lengths"),
    ("lengths move the diagonal", "sees &= j <= p\n", "sees &= j <= (p if lengths is None else p - S + np.asarray(lengths)[:, None, None, None])\n", "lengths move the diagonal"),
    ("segments ignored", "if segments is not None", "if False", "segments ignored"),
    ("segments ordered", "segments[0][:, :, None] == segments", "segments[0][:, :, None] >= segments", "earlier documents are visible"),
    ("ids in 32 bits", "(segments[0][:, :, None] == segments[1][:, None, :])", "(segments[0].astype('int32')[:, :, None] == segments[1].astype('int32')[:, None, :])", "ids are kept in 32 bits"),
    ("mask inverted", "sees &= mask\n", "sees &= ~mask\n", "mask inverted"),
    ("mask ignored", "if mask is not None", "if False", "mask ignored"),
    ("mask of heads for batch", "sees &= mask\n", "sees &= mask if mask.ndim != 3 else (mask[:, None] if mask.shape[0] == B else mask)\n", "mask of the heads taken for one of the batch"),
    ("or instead of and", "sees &= mask\n", "sees |= mask\n", "joined by or"),
    ("minus infinity not hidden", "sees &= bias != -np.inf", "pass", "multiplied by 0"),
    # Rows that see nothing.
    ("dead NaN", "a = np.where(dead, 0, e / np.where(dead, 1, total))", "a = np.where(dead, np.nan, e / total)", DEAD + " give NaN"),
    ("dead mean of V", "s = np.where(sees, s, -np.inf)\n", "s = np.where(sees, s, np.finfo(wide).min)\n", "the mean of all values"),
    ("dead lse 0", "lse = np.where(dead, -np.inf,", "lse = np.where(dead, 0,", DEAD + " give 0 as lse"),
    ("dead lse NaN", "lse = np.where(dead, -np.inf,", "lse = np.where(dead, np.nan,", DEAD + " give NaN as lse"),
    ("dead lse finite", "lse = np.where(dead, -np.inf,", "lse = np.where(dead, np.finfo(wide).min,", DEAD + " give a finite lse"),
    ("dead lse of the sink", "dead = top == -np.inf", "dead = (top == -np.inf) & (sink == -np.inf)", DEAD + " give the sink's logit as lse"),
    ("dead NaN gradients", "dead = top == -np.inf", "dead = (top == -np.inf) & (dout is None)", DEAD + " give NaN gradients"),
    # What is hidden, and what is seen.
    ("0 times NaN", "out = weigh(a, v32, sees)", "out = a @ v32", "multiplied by 0"),
    ("NaN minus infinity", "s = np.where(sees, s, -np.inf)\n", "s = s + np.where(sees, 0, -np.inf).astype(wide)\n", "hidden by adding"),
    ("NaN hushed", "out = weigh(a, v32, sees)", "out = np.nan_to_num(weigh(a, v32, sees), posinf=np.inf, neginf=-np.inf)", "a NaN that is seen does not show"),
    ("maximum over hidden", "top = s.max(axis=-1, keepdims=True, initial=-np.inf)\n", "top = np.where(s.max(axis=-1, keepdims=True, initial=-np.inf) == -np.inf, -np.inf, raw.max(axis=-1, keepdims=True, initial=-np.inf))\n", "maximum is taken over hidden"),
    ("0 times NaN backward", "dq = weigh(dx, k32, sees)", "dq = dx @ k32", "multiplied by 0"),
    ("hidden before scale", "s = np.where(sees, s, -np.inf)\n", "s = np.where(sees, s, -np.inf * wide(scale))\n", "before the scale"),
    # Scores.
    ("scale of E", "1 / np.sqrt(D)", "1 / np.sqrt(v.shape[3])", "value width E"),
    ("scale 1/D", "1 / np.sqrt(D)", "1 / D", "divided by D"),
    ("scale ignored", "if scale is None else scale", "", "given scale ignored"),
    ("scale left out", "* wide(scale)\n        capped", "\n        capped", "scale left out"),
    ("softcap dropped", "capped = raw if softcap is None", "capped = raw if True", "softcap ignored"),
    ("softcap before scale", "raw = (q32 @ np.swapaxes(k32, 2, 3)) * wide(scale)\n        capped = raw if softcap is None else wide(softcap) * np.tanh(raw / wide(softcap))", "raw = q32 @ np.swapaxes(k32, 2, 3)\n        capped = wide(scale) * (raw if softcap is None else wide(softcap) * np.tanh(raw / wide(softcap)))", "scale applied after the softcap"),
    ("softcap after bias", "np.tanh(raw / wide(softcap))", "np.tanh((raw + (0 if bias is None else bias.astype(wide))) / wide(softcap)) - (0 if bias is None else bias.astype(wide))", "bias added before the softcap"),
    ("softcap by exponentials", "np.tanh(raw / wide(softcap))", "((np.exp(2 * raw / wide(softcap)) - 1) / (np.exp(2 * raw / wide(softcap)) + 1))", "exponentials that overflow"),
    ("bias ignored", "s = s + bias.astype(wide)", "pass", "bias ignored"),
    ("bias scaled", "s = s + bias.astype(wide)", "s = s + bias.astype(wide) * wide(scale)", "bias multiplied by the scale"),
    ("bias of heads for batch", "s = s + bias.astype(wide)", "s = s + (bias[:, None] if bias.ndim == 3 and bias.shape[0] == B else bias).astype(wide)", "bias of the heads taken for one of the batch"),
    ("alibi ignored", "if alibi is not None", "if False", "alibi ignored"),
    ("alibi sign", "s = s - np.asarray(alibi", "s = s + np.asarray(alibi", "ALiBi with its sign reversed"),
    ("alibi absolute", "(p - j).astype(wide)", "abs(p - j).astype(wide)", "without its sign"),
    ("alibi without offset", "(p - j).astype(wide)", "(p - first - j).astype(wide)", "without the offset"),
    ("alibi power of two", "np.asarray(alibi, wide)", "np.asarray(2.0 ** (-8 * np.arange(1, H + 1) / H), wide)", "as for a power of two"),
    ("alibi of kv heads", "np.asarray(alibi, wide)", "np.asarray(alibi, wide)[share]", "taken by kv head"),
    ("alibi positions in float32", "p = first + np.arange(T)[:, None]", "p = np.float32(first) + np.arange(T, dtype=np.float32)[:, None]", "positions kept in float32"),
    ("positions in 32 bits", "p = first + np.arange(T)[:, None]", "p = (np.int64(first) + np.arange(T)[:, None]).astype(np.int32)", "positions are kept in 32 bits"),
    # Softmax and sinks.
    ("no maximum", "top = np.where(dead, 0, np.maximum(top, sink))", "top = np.zeros_like(top)", "maximum is not subtracted"),
    ("powers of 2", "e = np.exp(s - top)", "e = np.exp2(s - top)", "exponentials in base 2"),
    ("sink dropped", "total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)", "total = e.sum(axis=-1, keepdims=True)", "sinks ignored"),
    ("sink not in maximum", "np.maximum(top, sink)", "top", "left out of the maximum"),
    ("first sink for all", "np.asarray(sinks, wide)[:, None, None]", "np.asarray(sinks, wide)[:1, None, None].repeat(H, 0)", "first head's sink"),
    ("sink scaled", "np.asarray(sinks, wide)[:, None, None]", "np.asarray(sinks, wide)[:, None, None] * wide(scale)", "sink logits are scaled"),
    ("lse base 2", "lse = lse.astype(wide)", "lse = (lse / np.log(2)).astype(wide)", "lse in base 2"),
    ("lse without maximum", "top + np.log(total)", "np.log(total)", "lse without the row maximum"),
    ("lse without sink", "top + np.log(total)", "top + np.log(e.sum(axis=-1, keepdims=True))", "lse leaves the sink out"),
    ("lse in the input's type", "lse = lse.astype(wide)", "lse = lse.astype(kind)", "lse of another type"),
    ("lse keeps an axis", "lse = lse.astype(wide)", "lse = lse.astype(wide)[..., None] if dout is None else lse.astype(wide)", "lse of another shape"),
    # Heads.
    ("tile", "share = np.arange(H) // max(1, H // max(1, G))", "share = np.arange(H) % max(1, G)", "tiled instead of repeated"),
    ("tile of keys", "k.astype(wide)[:, share]", "k.astype(wide)[:, np.arange(H) % max(1, G)]", "key heads tiled"),
    ("tile of values", "v.astype(wide)[:, share]", "v.astype(wide)[:, np.arange(H) % max(1, G)]", "value heads tiled"),
    ("first kv head", "share = np.arange(H) // max(1, H // max(1, G))", "share = np.arange(H) * 0", "first kv head"),
    # Types.
    ("scores in float16", "raw = (q32 @ np.swapaxes(k32, 2, 3)) * wide(scale)", "raw = ((q @ np.swapaxes(k[:, share], 2, 3)).astype(wide)) * wide(scale)", "overflow float16"),
    ("weights in float16", "out = weigh(a, v32, sees)", "out = weigh(a.astype(np.float16).astype(wide), v32, sees)", "float16"),
    ("float64 in float32", "wide = np.float64 if kind == np.float64 else np.float32", "wide = np.float32", "float32"),
    ("inside in float32", "out = weigh(a, v32, sees)", "out = weigh(a.astype(np.float32), v32.astype(np.float32), sees)", "float32"),
    ("result in float32", "out_type = kind", "out_type = wide", "out of another type"),
    # Sizes and repeats.
    ("keys end at 65,536", "sees &= j <= p\n", "sees &= j <= p\n    sees &= j < 65536\n", "keys from 65,536 on"),
    ("last tile left out", "sees = np.ones((B, H, T, S), bool)", "sees = np.ones((B, H, T, S), bool) & (j < (S if S < 64 else S // 64 * 64))", "partial block of 64"),
    ("writes into q", "raw = (q32 @", "q *= 1 if not q.flags.writeable else wide(0.5) if q.dtype == wide else 1\n        raw = (q32 @", "writes into its inputs"),
    ("noise", "result = out.astype(out_type)", "result = (out * (1 + 1e-7 * np.random.default_rng().standard_normal(out.shape))).astype(out_type)", "gives other bits"),
    ("error of one in 10,000", "result = out.astype(out_type)", "result = (out * wide(1.0001)).astype(out_type)", "out is 1.0001 times what is right"),
    # Gradients.
    ("softcap's slope dropped", "slope = wide(1) if softcap is None", "slope = wide(1) if True", "softcap's derivative"),
    ("scale dropped from gradients", "np.where(sees & ~dead, ds * slope, 0) * wide(scale)", "np.where(sees & ~dead, ds * slope, 0)", "scale is left out of dq"),
    ("group not summed", ".sum(axis=2) if H", "[:, :, 0] if H", "not summed over their query heads"),
    ("dlse ignored", "if dlse is not None", "if False", "arriving at lse is ignored"),
    ("no row sum", "ds = np.where(sees & ~dead, a * (dp - delta), 0)", "ds = np.where(sees & ~dead, a * dp, 0)", "row sum"),
    ("sink gradient's sign", "-np.exp(sink - lse[..., None]) * delta", "np.exp(sink - lse[..., None]) * delta", "dsinks with its sign reversed"),
    ("bias gradient after slope", "dbias = fold(ds, bias)", "dbias = fold(ds * slope, bias)", "goes through the softcap"),
    ("bias gradient scaled", "dbias = fold(ds, bias)", "dbias = fold(ds * wide(scale), bias)", "times what is right"),
    # Far keys, and what other mistakes look like.
    ("keys wrap at 16 bits", "j = np.arange(S)", "j = np.arange(S).astype(np.uint16).astype(int)", "16 bits"),
    ("ALiBi in float16", "(p - j).astype(wide)", "(p - j).astype(np.float16).astype(wide)", "distances are kept in float16"),
    ("causal whatever is asked", "    if causal:\n", "    if True:\n", "though causal=False"),
    ("nothing but zeros", "out = weigh(a, v32, sees)", "out = weigh(a, v32, sees) * wide(0)", "0 everywhere"),
]  # fmt: skip

# More of them, by where they hide.
MUTANTS += [
    # What is visible.
    ("window from the first key", "p - j < window", "0 * p + j < window", "window counted from the first key"),
    ("window from the last key", "p - j < window", "0 * p + S - 1 - j < window", "window counted from the last key"),
    ("window divided", "p - j < window", "abs(p - j) <= window // 2", "window divided between past and future"),
    ("window forgotten in decoding", "if window is not None", "if window is not None and T > 1", "window ignored"),
    ("offset forgotten with a window", "if offset is None else offset", "if offset is None or window is not None else offset", "offset ignored: the last query is put at the last key"),
    ("an offset of 0 is none", "S - T if offset is None else offset", "offset or S - T", "bottom-right, whatever the offset"),
    ("offset forgotten in decoding", "if offset is None else offset", "if offset is None or T == 1 else offset", "bottom-right, whatever the offset"),
    ("top-left for more queries alone", "S - T if offset is None", "min(0, S - T) * 0 + max(0, S - T) if offset is None", "aligned top-left"),
    ("no causality in decoding", "    if causal:\n", "    if causal and T > 1:\n", "causal mask ignored"),
    ("padding on the wrong side", "j < np.asarray(lengths)[:, None, None, None]", "j >= S - np.asarray(lengths)[:, None, None, None]", "lengths taken for the other side"),
    ("left padding on the wrong side", "j >= np.asarray(starts)[:, None, None, None]", "j < S - np.asarray(starts)[:, None, None, None]", "starts taken for the other side"),
    ("lengths of the neighbour", "j < np.asarray(lengths)[:", "j < np.roll(np.asarray(lengths), 1)[:", "lengths of the batch row before"),
    ("longest length for all", "j < np.asarray(lengths)[:, None, None, None]", "j < np.asarray(lengths).max()", "largest of lengths"),
    ("lengths hide queries", "sees &= j < np.asarray(lengths)[:, None, None, None]", "sees &= (j < np.asarray(lengths)[:, None, None, None]) & (p < np.asarray(lengths)[:, None, None, None])", "lengths hide queries too"),
    ("a length of 0 is none", "j < np.asarray(lengths)[", "j < np.where(np.asarray(lengths) == 0, S, np.asarray(lengths))[", "rows that see nothing give attention over all keys"),
    ("segments with <=", "segments[0][:, :, None] == segments", "segments[0][:, :, None] <= segments", "later documents are visible"),
    ("segments of keys alone", "(segments[0][:, :, None] == segments", "(segments[1][:, :T, None] == segments", "ids of the first keys"),
    ("segments of the first batch row", "(segments[0][:, :, None] == segments[1][:, None, :])", "(segments[0][:1, :, None] == segments[1][:1, None, :])", "first batch row's documents"),
    ("ids in float32", "(segments[0][:, :, None] == segments[1][:, None, :])", "(segments[0].astype('float32')[:, :, None] == segments[1].astype('float32')[:, None, :])", "float32"),
    ("documents by their edges", "(segments[0][:, :, None] == segments[1][:, None, :])", "((np.cumsum(np.diff(segments[0], prepend=segments[0][:, :1]) != 0, -1))[:, :, None] == (np.cumsum(np.diff(segments[1], prepend=segments[1][:, :1]) != 0, -1))[:, None, :])", "comes back"),
    ("segments forgotten over a cache", "if segments is not None", "if segments is not None and T == S", "segments ignored"),
    ("mask transposed", "sees &= mask\n", "sees &= np.swapaxes(mask, -1, -2) if mask.shape[-1] == mask.shape[-2] else mask\n", "mask transposed"),
    ("mask of the first batch row", "sees &= mask\n", "sees &= mask[:1] if mask.ndim == 4 else mask\n", "first batch row's mask"),
    ("mask of the first head", "sees &= mask\n", "sees &= np.broadcast_to(mask, (B, H, T, S))[:, :1]\n", "first head's mask"),
    ("mask by kv head", "sees &= mask\n", "sees &= np.broadcast_to(mask, (B, H, T, S))[:, np.arange(H) // max(1, H // max(1, G))]\n", "masks are taken by kv head"),
    ("mask forgotten in decoding", "if mask is not None", "if mask is not None and T > 1", "mask ignored"),
    ("mask after softmax", "out = weigh(a, v32, sees)", "a = np.exp(raw - raw.max(axis=-1, keepdims=True, initial=-np.inf)); a = np.where(sees, a / np.maximum(a.sum(axis=-1, keepdims=True), wide(1e-30)), 0); out = weigh(a, v32, sees)", "taken out after the softmax"),
    ("mask of −1e9", "s = np.where(sees, s, -np.inf)\n", "s = np.where(sees, s, wide(-1e9))\n", "the mean of all values"),
    ("mask adds −10,000", "s = np.where(sees, s, -np.inf)\n", "s = s - np.where(sees, 0, 10000).astype(wide)\n", "rows that see nothing give"),
    ("softmax over queries", "a = np.where(dead, 0, e / np.where(dead, 1, total))", "e = np.exp(s - np.maximum(s.max(axis=-2, keepdims=True, initial=-np.inf), -1e30)); a = e / np.maximum(e.sum(axis=-2, keepdims=True), 1e-30)", "softmax over the queries"),
    # Rows that see nothing.
    ("dead rows see all", "    # Scores.\n", "    sees |= ~sees.any(axis=-1, keepdims=True)\n", "rows that see nothing give attention over all keys"),
    ("dead first value", "    # Scores.\n", "    sees |= ~sees.any(axis=-1, keepdims=True) & (j == 0)\n", "rows that see nothing give the first value"),
    ("dead ones", "result = out.astype(out_type)", "result = np.where(dead, 1, out).astype(out_type)", "rows that see nothing give something else than 0"),
    ("dead lse small", "lse = np.where(dead, -np.inf,", "lse = np.where(dead, -1e6,", "rows that see nothing give a finite lse"),
    ("dead NaN of a tile", "out = weigh(a, v32, sees)", "out = weigh(a, v32, sees); out = np.where(~sees[..., :64].any(axis=-1, keepdims=True) & ~dead & (S > 64), np.nan, out)", "whole block of keys is hidden"),
    # What is hidden, and what is seen.
    ("NaN of queries spreads", "s = np.where(sees, s, -np.inf)\n", "s = np.where(sees, s + 0 * q32.sum(), -np.inf)\n", "reaches the result"),
    ("NaN of mates spreads", "out = weigh(a, v32, sees)", "out = weigh(a, v32, sees) + 0 * v32[::-1].sum(axis=(1, 2, 3), keepdims=True)", "another batch row"),
    ("NaN set to 0", "q32, k32, v32 = q.astype(wide), k.astype(wide)[:, share], v.astype(wide)[:, share]", "q32, k32, v32 = (np.where(np.isnan(x), 0, x) for x in (q.astype(wide), k.astype(wide)[:, share], v.astype(wide)[:, share]))", "a NaN that is seen does not show"),
    ("one maximum for all", "top = s.max(axis=-1, keepdims=True, initial=-np.inf)\n", "top = s.max(axis=-1, keepdims=True, initial=-np.inf)\n        top = np.where(top == -np.inf, top, s.max(initial=-np.inf))\n", "one maximum of all rows"),
    # Scores.
    ("scale twice", "* wide(scale)\n        capped", "* wide(scale) ** 2\n        capped", "scale applied twice"),
    ("scale on top of 1/√D", "if scale is None else scale", "if scale is None else scale / np.sqrt(D)", "given scale multiplied by 1/√D"),
    ("a scale of 0 is none", "1 / np.sqrt(D) if scale is None else scale", "scale or 1 / np.sqrt(D)", "given scale ignored"),
    ("scale of all heads", "1 / np.sqrt(D)", "1 / np.sqrt(D * max(1, H))", "width of all heads"),
    ("scale's sign", "1 / np.sqrt(D) if scale is None else scale", "1 / np.sqrt(D) if scale is None else abs(scale)", "scale without its sign"),
    ("softcap after mask", "capped = raw if softcap", "raw = np.where(sees, raw, -np.inf) if softcap is not None else raw; sees = np.ones_like(sees) if softcap is not None else sees; capped = raw if softcap", "what is hidden is capped"),
    ("softcap by clipping", "wide(softcap) * np.tanh(raw / wide(softcap))", "np.clip(raw, -wide(softcap), wide(softcap))", "clipped at the softcap"),
    ("softcap not multiplied", "wide(softcap) * np.tanh", "np.tanh", "not multiplied by softcap"),
    ("softcap forgotten in decoding", "capped = raw if softcap is None", "capped = raw if softcap is None or T == 1", "softcap ignored"),
    ("bias's sign", "s = s + bias.astype(wide)", "s = s - np.where(np.isfinite(bias), bias, 0).astype(wide)", "bias with its sign reversed"),
    ("bias after softmax", "out = weigh(a, v32, sees)", "a = a if bias is None else np.where(sees, np.exp(capped - np.where(sees, capped, -np.inf).max(-1, keepdims=True, initial=-1e30)), 0); a = a if bias is None else np.where(sees, a / np.maximum(a.sum(-1, keepdims=True), 1e-30) + bias, 0).astype(wide); out = weigh(a, v32, sees)", "after the softmax"),
    ("bias of the first head", "s = s + bias.astype(wide)", "s = s + np.broadcast_to(bias, (B, H, T, S))[:, :1].astype(wide)", "first head's bias"),
    ("bias to the first batch row alone", "s = s + bias.astype(wide)", "s = s + bias.astype(wide) * (np.arange(B) == 0).reshape(-1, 1, 1, 1)", "first batch row alone"),
    ("bias of the first batch row", "s = s + bias.astype(wide)", "s = s + np.broadcast_to(bias, (B, H, T, S))[:1].astype(wide)", "first batch row's bias"),
    ("bias by kv head", "s = s + bias.astype(wide)", "s = s + np.broadcast_to(bias, (B, H, T, S))[:, share].astype(wide)", "biases are taken by kv head"),
    ("bias transposed", "s = s + bias.astype(wide)", "s = s + np.swapaxes(np.broadcast_to(bias, (B, H, T, S)), 2, 3).astype(wide) if T == S else s + bias", "bias transposed"),
    ("alibi scaled", "np.asarray(alibi, wide)", "wide(scale) * np.asarray(alibi, wide)", "ALiBi multiplied by the scale"),
    ("alibi of the first head", "np.asarray(alibi, wide)", "np.full(H, alibi[0], wide)", "first head's ALiBi slope"),
    ("alibi one too far", "(p - j).astype(wide)", "(p + 1 - j).astype(wide)", "one too far"),
    # Softmax and sinks.
    ("sink twice", "+ np.exp(sink - top)", "+ 2 * np.exp(sink - top)", "sink is counted twice"),
    ("sink in lse alone", "a = np.where(dead, 0, e / np.where(dead, 1, total))", "a = np.where(dead, 0, e / np.where(dead, 1, e.sum(axis=-1, keepdims=True)))", "sinks ignored"),
    ("sinks by kv head", "np.asarray(sinks, wide)[:", "np.asarray(sinks, wide)[share][:", "sinks taken by kv head"),
    ("sinks of 0", "np.asarray(sinks, wide)[:", "np.zeros(H, wide)[:", "sink logits taken for 0"),
    ("sinks forgotten in decoding", "if sinks is None else", "if sinks is None or T == 1 else", "sinks ignored"),
    ("lse in float16", "lse = lse.astype(wide)", "lse = lse.astype(np.float16).astype(wide)", "float16"),
    ("lse is the maximum", "top + np.log(total)", "top + 0 * np.log(total)", "row maximum alone"),
    ("lse before the scale", "lse = lse.astype(wide)", "lse = (lse / wide(scale)).astype(wide)", "times what is right"),
    ("sums not rescaled", "e = np.exp(s - top)", "e = np.nan_to_num(np.exp(s - np.maximum.accumulate(s, axis=-1)))", "sums not rescaled when a new maximum comes, in blocks of 1 keys"),
    ("values not rescaled", "out = weigh(a, v32, sees)", "m4 = np.maximum.accumulate(s, axis=-1)[..., np.minimum(np.arange(S) // 4 * 4 + 4, S) - 1]; a = a if S < 5 else np.where(m4 == -np.inf, 0, a * np.exp(np.where(dead, 0, top - np.where(m4 == -np.inf, top, m4)))); out = weigh(a, v32, sees)", "values summed so far not rescaled when a new maximum comes, in blocks of 4 keys"),
    # Heads, widths and memory.
    ("kv heads by the modulus of G", "np.arange(H) // max(1, H // max(1, G))", "np.minimum(np.arange(H) // max(1, G), max(0, G - 1))", "h // G"),
    ("kv heads reversed", "np.arange(H) // max(1, H // max(1, G))", "(max(1, G) - 1 - np.arange(H) // max(1, H // max(1, G)))", "reversed order"),
    ("out's memory", "result = out.astype(out_type)", "result = np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape).astype(out_type)", "exchanged in memory"),
    ("width cut at 256", "raw = (q32 @ np.swapaxes(k32, 2, 3))", "raw = (q32[..., :256] @ np.swapaxes(k32[..., :256], 2, 3))", "only 256 of 320 elements"),
    ("odd width", "raw = (q32 @ np.swapaxes(k32, 2, 3))", "raw = (q32[..., : D // 2 * 2] @ np.swapaxes(k32[..., : D // 2 * 2], 2, 3))", "only 6 of 7 elements"),
    ("columns of values in eights", "result = out.astype(out_type)", "out[..., out.shape[-1] // 8 * 8 :] = 0; result = out.astype(out_type)", "columns of the values"),
    ("last query left out", "result = out.astype(out_type)", "out[:, :, T // 4 * 4 :] *= T < 8; result = out.astype(out_type)", "partial block of 4"),
    ("contiguous memory", "q32, k32, v32 = q.astype(wide), k.astype(wide)", "q, k, v = (x.ravel(order='K').reshape(x.shape) for x in (q, k, v)); q32, k32, v32 = q.astype(wide), k.astype(wide)", "as if it were contiguous"),
    ("contiguous bias", "    # Scores.\n", "    bias = bias if bias is None else bias.ravel(order='K').reshape(bias.shape) if bias.flags.f_contiguous else bias\n", "as if it were contiguous"),
    # Types.
    ("sums in float16", "total = e.sum(axis=-1, keepdims=True)", "total = (np.add.accumulate(e, axis=-1, dtype=np.float16 if kind == np.float16 else wide)[..., -1:] if S else e.sum(axis=-1, keepdims=True))", "float16"),
    ("float32 out of float64", "out_type = kind", "out_type = np.float32 if kind == np.float64 else kind", "out of another type"),
    ("float32 out of bfloat16", "out_type = kind", "out_type = np.float32 if kind not in (np.float16, np.float64) else kind", "out of another type"),
    ("gradients of another type", "return dq.astype(kind)", "return dq.astype(wide)", "dq of another type"),
    ("lse of float64 always", "lse = lse.astype(wide)", "lse = lse.astype(np.float64)", "lse of another type"),
    # What is written.
    ("writes into the bias", "s = s + bias.astype(wide)", "s = s + bias.astype(wide); bias *= 1 if not bias.flags.writeable else 2", "writes into its inputs"),
    ("writes into the lengths", "sees &= j < np.asarray(lengths)", "lengths[:] = np.minimum(lengths, S - 1); sees &= j < np.asarray(lengths)", "writes into its inputs"),
    ("writes into the ids", "sees &= (segments[0]", "segments[1][:, :1] *= 2; segments[1][:, -1:] += 1; sees &= (segments[0]", "writes into its inputs"),
    ("writes into dout", "do = dout.astype(wide)", "dout *= 2 if dout.flags.writeable else 1; do = dout.astype(wide)", "writes into its inputs"),
    # Gradients.
    ("softcap's slope by the raw score", "1 - (capped / wide(softcap)) ** 2", "1 - (raw / wide(softcap)) ** 2", "not capped"),
    ("groups averaged", "dk, dv = (gather(x, G) for x in (dk, dv))", "dk, dv = (gather(x, G) * wide(G / max(1, H)) for x in (dk, dv))", "averaged, not summed"),
    ("groups gathered by tiles", "return x.reshape(B, G, H // max(1, G), *x.shape[2:]).sum(axis=2)", "return x.reshape(B, H // max(1, G), G, *x.shape[2:]).sum(axis=1)", "tiled"),
    ("dlse reversed", "delta = delta - dlse", "delta = delta + dlse", "arriving at lse with its sign reversed"),
    ("sinks' gradient of the first batch row", ".sum(axis=(0, 2, 3)).astype(wide)", "[:1].sum(axis=(0, 2, 3)).astype(wide)", "first batch row alone"),
    ("sinks' gradient averaged", ".sum(axis=(0, 2, 3)).astype(wide)", ".mean(axis=(0, 2, 3)).astype(wide)", "averaged"),
    ("dq's scale dropped", "dq = weigh(dx, k32, sees)", "dq = weigh(dx / wide(scale), k32, sees)", "scale is left out of dq"),
    ("dk of hidden keys", "back = np.swapaxes(sees & ~dead, 2, 3)", "back = np.ones((B, H, S, T), bool)", "NaN"),
    ("dead rows' mean passes gradients", "back = np.swapaxes(sees & ~dead, 2, 3)", "back = np.swapaxes(sees & ~dead, 2, 3); a = np.where(dead, wide(1) / max(1, S), a)", "the mean of all values"),
    ("dv in float16", "dv = weigh(np.swapaxes(a, 2, 3), do, back)", "dv = weigh(np.swapaxes(a.astype(np.float16).astype(wide), 2, 3), do, back)", "float16"),
    ("dout read as contiguous", "do = dout.astype(wide)", "do = dout.ravel(order='K').reshape(dout.shape).astype(wide)", "as if it were contiguous"),
    ("window forgotten backward", "    # Backward.\n", "    if window is not None and causal:\n        sees = np.broadcast_to(j <= p, sees.shape)\n        a = np.where(sees & ~dead, np.exp(capped - np.where(dead, 0, lse[..., None])), 0)\n", "in the backward pass: window ignored"),
]  # fmt: skip


def mutant(right, wrong):
    """The small attention with one part replaced."""
    source = inspect.getsource(independent)
    assert right in source, right
    names = {}
    exec(compile(source.replace(right, wrong), "mutant", "exec"), names)  # noqa: S102
    return names["attention"]


def stateful():
    """Mutants that no single line shows: what is kept between calls."""
    masks, buffers = {}, {}

    def stale(q, k, v, *, causal=True, window=None, offset=None, scale=None, mask=None):
        key = (q.shape, k.shape, causal, mask is None)
        masks.setdefault(key, (window, offset))
        window, offset = masks[key]
        return independent.attention(
            q, k, v, causal=causal, window=window, offset=offset, scale=scale, mask=mask
        )

    scales = {}

    def of_first_scale(q, k, v, *, causal=True, scale=None):
        scale = scales.setdefault(q.shape, scale)
        return independent.attention(q, k, v, causal=causal, scale=scale)

    shared = {}

    def careless(q, k, v, *, causal=True, scale=None):
        shared["q"] = q
        time.sleep(0.05)
        return independent.attention(shared["q"], k, v, causal=causal, scale=scale)

    def reused(q, k, v, *, causal=True, scale=None):
        made = independent.attention(q, k, v, causal=causal, scale=scale)
        buffer = buffers.setdefault((made.shape, made.dtype), np.empty_like(made))
        buffer[:] = made
        return buffer

    return [
        ("masks kept by shape", stale, "earlier call's options"),
        ("scale kept by shape", of_first_scale, "earlier call's options"),
        ("buffer used again", reused, "overwrites"),
        ("memory shared by threads", careless, "share memory"),
    ]
