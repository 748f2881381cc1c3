"""Attention done naively, in a number type of one's choosing and, if wanted, with a known mistake in it.

Two things need it. How far from the exact answer a right implementation may be is measured by how far the naive one
is, in several orders of summation. And a wrong result is understood by finding the mistake that makes the same one.
It holds the T × S matrix and more; what is expected never comes from here.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant import problem as problems
from regardant import reference
from regardant.conformance.case import DEFAULTS, Call

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from regardant.problem import Array, Problem


def checked(call: Call, number: DTypeLike | None = None) -> Problem:
    """The call as a `Problem`, its arrays widened to `number` first if one is given."""
    arrays = [call.q_BHTD, call.k_BGSD, call.v_BGSE]
    options = DEFAULTS | dict(call.options)
    if number is not None:
        arrays = [array.astype(number) for array in arrays]
        if options["bias"] is not None:
            options["bias"] = options["bias"].astype(number)
    return problems.problem("conformance", *arrays, **options)


def accumulator(call: Call) -> np.dtype[Any]:
    """The type that scores and sums have: float64 for float64 input, float32 for all else."""
    return np.dtype(np.float64 if call.q_BHTD.dtype == np.float64 else np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Naive:
    """One way of doing the sums.

    Attributes:
        number: the type that all of it is done in. `order`: a seed for the order of sums, or None for the natural
        one.
        slip: a mistake by name, or "" for none; see `SLIPS`. `block`: how many keys at a time, for some of them.
    """

    number: np.dtype[Any]
    order: int | None = None
    slip: str = ""
    block: int = 1


# Mistakes in the arithmetic itself. (Those in what is visible, in heads and in options are made by changing the
# call.)
SLIPS = (
    "bias before softcap",
    "alibi before softcap",
    "scale after softcap",
    "hidden values times 0",
    "hidden scores plus -inf",
    "powers of 2",
    "sink times scale",
    "sink as a key of value 0 in dead rows",
    "maximum over hidden keys",
    "hidden before scale",
    "hidden before softcap",
    "hidden after softmax",
    "softmax over queries",
    "softcap by clipping",
    "softcap without its factor",
    "bias after softmax",
    "two sinks",
    "maximum of everything",
    "maximum without the sink",
    "rounded to the input's type",
    "sums not rescaled",
    "values not rescaled",
    "mean in dead rows",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """All that the forward pass made, in the number type of a `Naive`."""

    c_BHTS: Array
    s_BHTS: Array
    a_BHTS: Array
    visible_BHTS: Array
    lse_BHT: Array
    out_BHTE: Array

    def again(self, lse_BHT: Array) -> Pass:
        """The same with the weights made again from an lse, as kernels do in their backward pass."""
        seen = self.visible_BHTS & (lse_BHT[..., None] != -np.inf)
        with np.errstate(all="ignore"):
            a_BHTS = np.where(seen, np.exp(self.s_BHTS - lse_BHT[..., None]), 0)
        return dataclasses.replace(self, a_BHTS=a_BHTS.astype(self.a_BHTS.dtype), lse_BHT=lse_BHT)


def forward(call: Call, how: Naive, visible_BHTS: Array | None = None) -> Pass:
    """The forward pass of a call; `visible_BHTS` saves finding out again which keys are visible."""
    if visible_BHTS is None:
        visible_BHTS = reference.dense(checked(call)).visible_BHTS
    problem = checked(call)
    _, H, G, _, S, D, _ = call.sizes
    repeats = H // G if G else 1
    j_S, d_D = _orders(how.order, S, D)
    q = problem.q_BHTD.astype(how.number)
    k, v = (np.repeat(a, repeats, axis=1).astype(how.number) for a in (problem.k_BGSD, problem.v_BGSE))
    # Scaling the queries or their products is equally naive, and rounds in other places.
    early = how.order is not None and how.order % 2 == 1
    scale = how.number.type(problem.scale)
    with np.errstate(all="ignore"):
        scaled = q * scale if early else q
        raw = scaled[..., d_D] @ k[..., d_D].swapaxes(-1, -2)
        if how.order is not None:
            # Kernels do not sum every key's product in the same order, at the edges of their tiles above all.
            raw[..., 1::2] = scaled[..., d_D[::-1]] @ k[..., 1::2, :][..., d_D[::-1]].swapaxes(-1, -2)
        if how.slip == "hidden before softcap":
            raw = np.where(visible_BHTS, raw, -np.inf)
        if how.slip == "rounded to the input's type":
            raw = raw.astype(call.q_BHTD.dtype).astype(how.number)
        c_BHTS, s_BHTS = _scores(problem, raw, how.number.type(1) if early else scale, how)
        s_BHTS, peak_BHT1 = _hidden(problem, s_BHTS, visible_BHTS, how)
        a_BHTS, lse_BHT = _softmax(problem, s_BHTS, peak_BHT1, j_S, how)
        a_BHTS = _weights(problem, a_BHTS, visible_BHTS, how)
        if how.slip in {"hidden values times 0", "hidden scores plus -inf"}:
            out_BHTE = a_BHTS @ v
        elif how.order is not None and how.order % 4 > 1:
            # So is dividing by the sum first or last.
            out_BHTE = _divided_last(a_BHTS, s_BHTS, peak_BHT1, v, visible_BHTS, j_S)
        else:
            out_BHTE = _mix(a_BHTS, v, visible_BHTS, j_S)
    return Pass(c_BHTS, s_BHTS, a_BHTS, visible_BHTS, lse_BHT, out_BHTE)


def _hidden(problem: Problem, s: Array, visible: Array, how: Naive) -> tuple[Array, Array]:
    """The scores with those hidden that are not visible, and what each row subtracts before it exponentiates."""
    peak = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if how.slip in {"hidden before softcap", "hidden after softmax"}:
        return s, peak
    if how.slip == "hidden scores plus -inf":
        s = s + np.where(visible, 0, -np.inf).astype(how.number)
    elif how.slip == "hidden before scale":
        s = np.where(visible, s, -np.inf * how.number.type(problem.scale))
    else:
        s = np.where(visible, s, -np.inf)
    if how.slip == "maximum over hidden keys":
        return s, peak
    peak = s.max(axis=-1, keepdims=True, initial=-np.inf)
    if how.slip == "maximum of everything":
        peak = np.where(peak == -np.inf, peak, s.max(initial=-np.inf))
    return s, peak


def _weights(problem: Problem, a: Array, visible: Array, how: Naive) -> Array:
    """The weights, with what some mistakes do to them after the softmax."""
    if how.slip == "hidden after softmax":
        return np.where(visible, a, 0)
    if how.slip == "rounded to the input's type":
        return a.astype(problem.q_BHTD.dtype).astype(how.number)
    if how.slip == "bias after softmax" and problem.bias_BHTS is not None:
        return np.where(visible, a + problem.bias_BHTS.astype(how.number), 0)
    if how.slip == "mean in dead rows":
        return np.where(visible.any(axis=-1, keepdims=True), a, 1 / max(1, a.shape[-1])).astype(a.dtype)
    return a


def _orders(seed: int | None, S: int, D: int) -> tuple[Array, Array]:
    """Orders of summation over keys and widths."""
    if seed is None:
        return np.arange(S), np.arange(D)
    rng = np.random.default_rng(seed)
    return rng.permutation(S), rng.permutation(D)


def _scores(problem: Problem, raw: Array, scale: Any, how: Naive) -> tuple[Array, Array]:
    """The scores after the softcap, and after everything that is added to them."""
    number = how.number.type
    added = {"bias before softcap": number(0), "alibi before softcap": number(0)}
    _, _, _, T, S, *_ = problem.sizes
    if problem.bias_BHTS is not None:
        added["bias before softcap"] = problem.bias_BHTS.astype(how.number)
    if problem.alibi_H is not None:
        distance = (problem.offset + np.arange(T)[:, None] - np.arange(S)).astype(how.number)
        added["alibi before softcap"] = -problem.alibi_H.astype(how.number)[:, None, None] * distance
    c = raw if how.slip == "scale after softcap" else raw * scale
    early = number(0) if how.slip == "bias after softmax" else added.pop(how.slip, number(0))
    if how.slip == "bias after softmax":
        added.pop("bias before softcap")
    c = _capped(problem, c + early, how)
    if how.slip == "scale after softcap":
        c = c * scale
    s = c
    for term in added.values():
        s = s + term
    return c, s


def _capped(problem: Problem, raw: Array, how: Naive) -> Array:
    """The scores after the softcap, if there is one."""
    if problem.softcap is None:
        return raw
    cap = how.number.type(problem.softcap)
    if how.slip == "softcap by clipping":
        return np.asarray(np.clip(raw, -cap, cap))
    bent: Array = np.tanh(raw / cap)
    return bent if how.slip == "softcap without its factor" else np.asarray(cap * bent)


def _softmax(problem: Problem, s: Array, m: Array, j_S: Array, how: Naive) -> tuple[Array, Array]:
    """Weights and lse, given each row's maximum; rows that see nothing have weights 0 and lse −∞."""
    sinks_H = np.full(problem.sizes[1], -np.inf) if problem.sinks_H is None else problem.sinks_H
    sink = sinks_H.astype(how.number)[:, None, None]
    if how.slip == "sink times scale":
        sink = sink * how.number.type(problem.scale)
    exp = np.exp2 if how.slip == "powers of 2" else np.exp
    if how.slip == "two sinks":
        sink = sink + how.number.type(np.log(2))
    if how.slip == "softmax over queries":
        m = s.max(axis=-2, keepdims=True, initial=-np.inf)
        e = np.where(m == -np.inf, 0, exp(s - m))
        return e / np.where(m == -np.inf, 1, e.sum(axis=-2, keepdims=True)), np.zeros(s.shape[:3], s.dtype)
    dead = m == -np.inf
    if how.slip == "sink as a key of value 0 in dead rows":
        dead = dead & (sink == -np.inf)
    m = np.where(dead, 0, m if how.slip == "maximum without the sink" else np.maximum(m, sink))
    e = exp(s - m)
    total = e[..., j_S].sum(axis=-1, keepdims=True) + exp(sink - m)
    if how.slip in {"sums not rescaled", "values not rescaled"}:
        e = exp(s - _so_far(s, how.block))
    if how.slip == "sums not rescaled":
        total = e.sum(axis=-1, keepdims=True) + exp(sink - m)
    total = np.where(dead, 1, total)
    lse = np.where(dead, -np.inf, m + np.log(total))[..., 0]
    return np.where(dead, 0, e / total), lse


def _so_far(s: Array, block: int) -> Array:
    """The largest score of each row up to the end of a key's block, +∞ where there is none yet."""
    S = s.shape[-1]
    running = np.maximum.accumulate(s, axis=-1)
    ends = np.minimum(np.arange(S) // block * block + block, S) - 1
    found = running[..., ends]
    return np.where(found == -np.inf, np.inf, found)


def _divided_last(a: Array, s: Array, m: Array, v: Array, visible: Array, j_S: Array) -> Array:
    """The weighted mean as sums of exponentials times values, divided by the sum of exponentials at the end."""
    e = np.where(a == 0, 0, np.exp(s - np.where(m == -np.inf, 0, m)))
    share = a.sum(axis=-1, keepdims=True)  # less than 1 where there is a sink
    total = e[..., j_S].sum(axis=-1, keepdims=True)
    return np.asarray(_mix(e, v, visible, j_S) * (share / np.where(total == 0, 1, total)))


def _mix(a: Array, v: Array, visible: Array, j_S: Array) -> Array:
    """Σ_j a_ij v_j over what is visible, in a given order."""
    clean = np.isfinite(v)
    out = a[..., j_S] @ np.where(clean, v, 0)[..., j_S, :]
    if clean.all():
        return out
    for b, h, j in zip(*np.nonzero(~clean.all(axis=-1)), strict=True):
        added = visible[b, h, :, j, None] & ~clean[b, h, j]
        out[b, h] += np.where(added, a[b, h, :, j, None] * v[b, h, j], 0)
    return out


def backward(
    call: Call, how: Naive, seen: Pass, *, delta_from: Array | None = None, slip: str = ""
) -> dict[str, Array]:
    """The gradients of a call, in a number type of one's choosing.

    Args:
        call: with dout. `how`: the arithmetic. `seen`: its forward pass.
        delta_from: the output that δ is made from; from the weights, as automatic differentiation does, if None.
        slip: a mistake in the backward pass alone, or "".
    """
    assert call.dout_BHTE is not None  # noqa: S101 - who asks for gradients has one
    problem, number = checked(call), how.number
    B, H, G, T, S, D, E = call.sizes
    repeats = H // G if G else 1
    k, v = (np.repeat(a, repeats, axis=1).astype(number) for a in (problem.k_BGSD, problem.v_BGSE))
    q, dout = problem.q_BHTD.astype(number), call.dout_BHTE.astype(number)
    a, visible = seen.a_BHTS, seen.visible_BHTS & (seen.lse_BHT[..., None] != -np.inf)
    i_T, d_D = _orders(how.order, T, E)
    j_S = _orders(how.order, S, D)[0]
    with np.errstate(all="ignore"):
        dp = dout[..., d_D] @ v.swapaxes(-1, -2)[..., d_D, :]
        if delta_from is None:
            delta = np.where(visible, a * dp, 0).sum(axis=-1)
        else:
            delta = (dout * delta_from.astype(number)).sum(axis=-1)
        if call.dlse_BHT is not None and slip != "dlse":
            delta = delta - call.dlse_BHT.astype(number)
        if slip == "delta":
            delta = np.zeros_like(delta)
        ds = np.where(visible, a * (dp - delta[..., None]), 0)
        dx = ds
        if problem.softcap is not None and slip != "softcap":
            dx = np.where(visible, ds * (1 - (seen.c_BHTS / number.type(problem.softcap)) ** 2), 0)
        if problem.softcap is not None and slip == "slope of uncapped scores":
            dx = np.where(visible, ds * (1 - np.arctanh(seen.c_BHTS / number.type(problem.softcap)) ** 2), 0)
        if slip == "bias through softcap":
            ds = dx
        scale = number.type(problem.scale)
        visible = np.ones_like(visible) if slip == "hidden values times 0" else visible
        turned = visible.swapaxes(-1, -2)
        dq = _mix(dx, k, visible, j_S) * (1 if slip == "scale of dq" else scale)
        dk = _mix(dx.swapaxes(-1, -2), q, turned, i_T) * (1 if slip == "scale of dk" else scale)
        dv = _mix(a.swapaxes(-1, -2), dout, turned, i_T)
        made = {
            "dq": dq,
            "dk": dk.reshape(B, G, repeats, S, D).sum(axis=2),
            "dv": dv.reshape(B, G, repeats, S, E).sum(axis=2),
        }
        if slip == "group":
            made["dk"], made["dv"] = dk[:, ::repeats], dv[:, ::repeats]
        return made | _extras(call, problem, seen, ds, delta)


def _extras(call: Call, problem: Problem, seen: Pass, ds: Array, delta: Array) -> dict[str, Array]:
    """The gradients of sinks and bias."""
    made = {}
    if problem.sinks_H is not None:
        sink = problem.sinks_H.astype(ds.dtype)[:, None]
        there = (seen.lse_BHT != -np.inf) & (sink != -np.inf)
        made["dsinks"] = np.where(there, -np.exp(sink - seen.lse_BHT) * delta, 0).sum(axis=(0, 2))
    if call.bias_gradient and "bias" in call.options:
        given = call.options["bias"]
        axes = tuple(axis for axis, size in enumerate(problem.bias_sizes) if size == 1)
        made["dbias"] = ds.sum(axis=axes, keepdims=True).reshape(given.shape)
    return made
