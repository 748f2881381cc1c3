"""What came, what was right, and which mistake makes exactly what came.

A cause is named only if doing attention with that mistake gives the result that came, within the same allowance, or
if a rule on what came leaves no other reading. Where neither holds, it says what such a failure usually means, or
nothing at all.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from regardant import reference
from regardant.conformance import arithmetic, budget, sight
from regardant.conformance.arithmetic import Naive
from regardant.conformance.case import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from regardant.conformance.arithmetic import Pass
    from regardant.conformance.budget import Expected
    from regardant.conformance.case import Call, Case
    from regardant.problem import Array

# How much farther than what is right a result may lie from what a mistake gives: that was rounded in other places.
SLACK = 4

# A mistake may make larger numbers than are right, and errors with them: some hundred units of the sums' type.
LOOSE = {"float64": 3e-14, "float32": 2e-5}

# How many times the error allowed is hardly more than that, and no sign of a narrower type.
BARELY = 16

# Seconds after which no further mistake is tried.
PATIENCE_S = 20.0

# How many mistakes that give the same numbers are named, and the pairs of queries and keys up to which all are tried.
READINGS, QUICK = 3, 20_000

FLOAT64 = Naive(np.dtype(np.float64))


def number(value: float) -> str:
    """A number in few digits, as a person reads it."""
    return "NaN" if np.isnan(value) else f"{float(value):.6g}"


def detail(where: str, got: Array, want: Expected, wrong: Array) -> str:
    """What came, what was right, the first wrong index, by how much it is wrong, and how many are."""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    said = f"{where}{list(at)} is {number(got[at])}, right is {number(want.exact[at])}"
    finite = np.isfinite(got) & np.isfinite(want.exact)
    if finite.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            over = np.nanmax((np.abs(got - want.exact) / want.allowed)[finite & wrong], initial=0)
        if 0 < over < np.inf:
            said += f", at worst {over:.3g} times the error allowed"
    return f"{said}; {np.count_nonzero(wrong)} of {wrong.size} wrong"


def causes(
    case: Case, call: Call, calls: Sequence[Call], name: str, answer: Mapping[str, Array], want: Expected
) -> tuple[str, ...]:
    """The likely mistake behind a wrong result `name` of a call, one of `calls`; nothing if it cannot be told.

    Where several mistakes give the same numbers, the plainest come first.
    """
    got = answer[name].astype(np.float64)
    call = call.instead or call
    with np.errstate(all="ignore"):  # mistakes overflow
        return _causes(case, call, calls, name, got, want)


def _causes(
    case: Case, call: Call, calls: Sequence[Call], name: str, got: Array, want: Expected
) -> tuple[str, ...]:
    if _is_dead_gradient(call, got, want):
        return ("rows that see nothing give NaN gradients",)
    if _is_of_dead_queries(call, got, want):
        return ("queries that see nothing are read: their NaN reaches the gradients",)
    B, H, _, T, S, _, _ = call.sizes
    # Much gives NaN where there is NaN: there the first reading alone says something.
    most = READINGS if B * H * T * S <= QUICK and _all_finite(call) else 1
    found: dict[str, None] = {}
    if got.size > 1 and not got.any():
        found[f"{name} is 0 everywhere"] = None
    began = time.monotonic()
    for told, wrong in _alternatives(case, call, calls, name, want):
        if told not in found and _explains(got, wrong, want):
            found[told] = None
            if len(found) == most:
                break
        if time.monotonic() - began > PATIENCE_S:
            break  # a large case: what its failure usually means must do
    if found:
        return tuple(found)
    told = _by_rule(call, name, got, want) or case.usual
    told = told or ("" if np.isfinite(got).all() else "NaN or Inf made by the arithmetic")
    return (told,) if told else ()


def _is_dead_gradient(call: Call, got: Array, want: Expected) -> bool:
    """Whether NaN came where nothing but rows that see nothing could bring it in."""
    if call.dout_BHTE is None or not np.isnan(got[np.isfinite(want.exact)]).any() or not _all_finite(call):
        return False
    return bool((arithmetic.forward(call, FLOAT64).lse_BHT == -np.inf).any())


def _is_of_dead_queries(call: Call, got: Array, want: Expected) -> bool:
    """Whether NaN came into gradients, and is among the inputs in queries alone that see nothing."""
    if call.dout_BHTE is None or not np.isnan(got[np.isfinite(want.exact)]).any():
        return False
    bad = np.asarray(~np.isfinite(call.q_BHTD.astype(np.float64)).all(axis=-1))
    if not bad.any() or not _all_finite(dataclasses.replace(call, q_BHTD=np.zeros_like(call.q_BHTD))):
        return False
    dead = np.asarray(~reference.dense(arithmetic.checked(call, np.float64)).visible_BHTS.any(axis=-1))
    return bool(dead[bad].all())


def _all_finite(call: Call) -> bool:
    arrays = [
        call.q_BHTD,
        call.k_BGSD,
        call.v_BGSE,
        *([call.options["bias"]] if "bias" in call.options else []),
    ]
    return all(np.isfinite(array.astype(np.float64)).all() for array in arrays)


def _explains(got: Array, wrong: Array, want: Expected) -> bool:
    """Whether a mistake gives what came, and something else than what is right."""
    if wrong.shape != got.shape:
        return False
    number = "float64" if want.dtype == np.float64 else "float32"
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(np.where(np.isfinite(wrong), wrong, 0)).max(initial=0)
        allowed = (
            SLACK * (want.allowed.max(initial=0) + budget.unit(want.dtype) * size) + LOOSE[number] * size
        )
        near = np.abs(got - wrong) <= allowed
    same = (got == wrong) | (np.isnan(got) & np.isnan(wrong))
    fits = np.where(np.isfinite(wrong), near, same).all()
    return bool(fits) and not _agree(wrong, want)


def _right(values: Array, want: Expected) -> Array:
    with np.errstate(invalid="ignore"):
        near = np.abs(values - want.exact) <= want.allowed
    same = (values == want.exact) | (np.isnan(values) & np.isnan(want.exact))
    return np.asarray(np.where(np.isfinite(want.exact), near, same))


def _agree(values: Array, want: Expected) -> bool:
    return bool(_right(values, want).all())


def _alternatives(
    case: Case, call: Call, calls: Sequence[Call], name: str, want: Expected
) -> Iterator[tuple[str, Array]]:
    """What each known mistake gives for the result `name`, the most particular ones first."""
    if not _all_finite(call):
        for slip in READING:
            yield SLIPS[slip], _result(call, name, None, slip)
    if case.join is not None:
        yield from _joined(case, name)
    yield from _of_other_calls(call, calls, name)
    yield from _of_dead_rows(call, name, want)
    if name == "lse":
        yield from _of_lse(call, want)
    if call.dout_BHTE is not None:
        yield from _of_gradients(call, name, want)
    for told, changed, visible in _mistakes(call):
        yield told, _result(changed, name, visible)
    if not _all_finite(call):
        return  # all else gives NaN too
    for slip, told in SLIPS.items():
        if all(option in call.options for option in NEEDS.get(slip, ())):
            yield told, _result(call, name, None, slip)
    yield from _of_blocks(call, name)
    yield from _of_memory(name, want)
    yield from _of_widths(call, name, want)


def _of_blocks(call: Call, name: str) -> Iterator[tuple[str, Array]]:
    """Online softmax that goes on with a larger maximum and leaves what it has as it was."""
    S = call.sizes[4]
    for block in (1, *sight.BLOCKS):
        if block >= S:
            return
        for slip, what in (("sums not rescaled", "sums"), ("values not rescaled", "values summed so far")):
            how = dataclasses.replace(FLOAT64, slip=slip, block=block)
            told = f"{what} not rescaled when a new maximum comes, in blocks of {block} keys"
            yield told, _pick(call, name, how, arithmetic.forward(call, how))


def _of_memory(name: str, want: Expected) -> Iterator[tuple[str, Array]]:
    """Right numbers in wrong places."""
    exact = want.exact
    if exact.ndim < 3:
        return
    turned = exact.swapaxes(1, 2)
    yield f"{name} has heads and positions exchanged in memory", turned.reshape(exact.shape)
    if exact.shape[1] == exact.shape[2]:
        yield f"{name} has heads and positions exchanged", turned
    yield f"{name} is in reversed order of positions", exact[:, :, ::-1]
    yield f"{name} is in reversed order of heads", exact[:, ::-1]


def _of_widths(call: Call, name: str, want: Expected) -> Iterator[tuple[str, Array]]:
    """Widths and numbers of queries that are cut to what a kernel's tiles divide, or to what they hold."""
    _, _, _, T, _, D, E = call.sizes
    for width in (2, 4, 8, 16, 32, 64, 128, 256):
        cut = D // width * width
        if cut < D:
            told = f"only {cut} of {D} elements of queries and keys are multiplied"
            scale = arithmetic.checked(call).scale
            narrow = dataclasses.replace(
                call.but(scale=scale),
                q_BHTD=call.q_BHTD[..., : max(1, cut)],
                k_BGSD=call.k_BGSD[..., : max(1, cut)],
            )
            found = _result(narrow if cut else narrow.but(scale=0.0), name, None)
            if name in {"dq", "dk"}:
                found = np.concatenate([found[..., :cut], np.zeros_like(want.exact[..., cut:])], axis=-1)
            yield told, found
        if name == "out" and E % width:
            kept = np.arange(E) < E // width * width
            yield (
                f"only {E // width * width} of {E} columns of the values are mixed",
                np.where(kept, want.exact, 0),
            )
        if name == "out" and T % width:
            kept = np.arange(T) < T // width * width
            told = f"the last queries, those of a partial block of {width}, are left out"
            yield told, np.where(kept[:, None], want.exact, 0)


# Mistakes of the arithmetic, as a person would put them.
SLIPS = {
    "hidden values times 0": "hidden values are multiplied by 0 instead of left out (0 · NaN = NaN)",
    "hidden scores plus -inf": "hidden keys are read, and hidden by adding −∞ or the like (NaN − ∞ = NaN)",
    "bias before softcap": "bias added before the softcap",
    "alibi before softcap": "ALiBi added before the softcap",
    "scale after softcap": "scale applied after the softcap",
    "powers of 2": "exponentials in base 2",
    "sink times scale": "sink logits are scaled",
    "sink as a key of value 0 in dead rows": "rows that see nothing give the sink's logit as lse",
    "maximum over hidden keys": "the row maximum is taken over hidden keys too",
    "hidden before scale": "what is hidden is made −∞ before the scale is applied (−∞ · 0 = NaN, −∞ · −1 = ∞)",
    "hidden before softcap": "what is hidden is capped: softcap applied after the mask",
    "hidden after softmax": "what is hidden is taken out after the softmax, whose sum still has it in",
    "softmax over queries": "softmax over the queries instead of the keys",
    "softcap by clipping": "scores are clipped at the softcap, not bent by tanh",
    "softcap without its factor": "tanh(s / softcap) is not multiplied by softcap",
    "bias after softmax": "bias added to the weights, after the softmax",
    "two sinks": "the sink is counted twice",
    "maximum without the sink": "the sink is left out of the maximum",
    "maximum of everything": "one maximum of all rows is subtracted, not each row's own",
    "mean in dead rows": "rows that see nothing give the mean of all values",
}

# The options without which a mistake is none.
NEEDS = {
    "bias before softcap": ("bias", "softcap"),
    "alibi before softcap": ("alibi", "softcap"),
    "scale after softcap": ("softcap",),
    "hidden before softcap": ("softcap",),
    "softcap by clipping": ("softcap",),
    "softcap without its factor": ("softcap",),
    "bias after softmax": ("bias",),
    "sink times scale": ("sinks",),
    "sink as a key of value 0 in dead rows": ("sinks",),
    "two sinks": ("sinks",),
    "maximum without the sink": ("sinks",),
}

# Those that a NaN in what is hidden shows.
READING = ("hidden values times 0", "hidden scores plus -inf")


def _result(call: Call, name: str, visible: Array | None, slip: str = "") -> Array:
    how = dataclasses.replace(FLOAT64, slip=slip)
    if slip.startswith("maximum"):
        how = dataclasses.replace(how, number=arithmetic.accumulator(call))
    seen = arithmetic.forward(call, how, visible)
    return _pick(call, name, how, seen)


def _pick(call: Call, name: str, how: Naive, seen: Pass) -> Array:
    if call.dout_BHTE is not None:
        made = arithmetic.backward(call, how, seen, slip=how.slip)
        return made[name] if name in made else np.zeros(0)
    return (seen.lse_BHT if name == "lse" else seen.out_BHTE).astype(np.float64)


def _joined(case: Case, name: str) -> Iterator[tuple[str, Array]]:
    """Results joined from calls that all have the same mistake in them, or whose lse is wrong."""
    assert case.join is not None  # noqa: S101 - asked before
    calls = case.calls()
    passes = [arithmetic.forward(call, FLOAT64) for call in calls]
    for told, factor in (("lse in base 2", 1 / math.log(2)), ("lse multiplied by ln 2", math.log(2))):
        parts = [{"out": seen.out_BHTE, "lse": factor * seen.lse_BHT} for seen in passes]
        yield told, np.asarray(case.join(parts)[name], np.float64)
    # Of the same name, the first: it says most.
    wrong = [
        {told: (changed, visible) for told, changed, visible in reversed(list(_mistakes(call)))}
        for call in calls
    ]
    for told in dict.fromkeys(told for mistakes in wrong for told in mistakes):
        parts = []
        for call, mistakes in zip(calls, wrong, strict=True):
            changed, visible = mistakes.get(told, (call, None))
            seen = arithmetic.forward(changed, FLOAT64, visible)
            parts.append({"out": seen.out_BHTE, "lse": seen.lse_BHT})
        yield told, np.asarray(case.join(parts)[name], np.float64)


def _of_other_calls(call: Call, calls: Sequence[Call], name: str) -> Iterator[tuple[str, Array]]:
    """What other calls of the same shapes asked for, or gave."""
    for other in calls:
        if (
            other is call
            or other.sizes != call.sizes
            or other.dout_BHTE is not None
            or call.dout_BHTE is not None
        ):
            continue
        kept = [dict(other.options)]
        kept += [
            dict(call.options) | {option: other.options.get(option)}
            for option in {**other.options, **call.options}
        ]
        for options in kept:
            mixed = call.but(**dict.fromkeys(call.options) | options)
            yield "an earlier call's options are used again", _result(mixed, name, None)
        if other.asks == call.asks:
            yield "a later call overwrites what an earlier one gave", _result(other, name, None)


def _of_dead_rows(call: Call, name: str, want: Expected) -> Iterator[tuple[str, Array]]:
    """What rows that see nothing have been seen to give."""
    seen = arithmetic.forward(call, FLOAT64)
    dead = seen.lse_BHT == -np.inf
    if not dead.any():
        return
    B, H, G, _, S, _, _ = call.sizes
    told = "rows that see nothing give "
    if name == "lse":
        for what, value in (("NaN", np.nan), ("0", 0.0), ("+∞", np.inf), ("log S", math.log(max(S, 1)))):
            yield f"{told}{what} as lse", np.where(dead, value, want.exact)
        low = float(np.finfo(arithmetic.accumulator(call)).min)
        yield f"{told}a finite lse", np.where(dead, low, want.exact)
    elif name == "out":
        v = np.repeat(call.v_BGSE.astype(np.float64), H // G if G else 1, axis=1)
        yield f"{told}NaN", np.where(dead[..., None], np.nan, want.exact)
        yield (
            f"{told}the mean of all values",
            np.where(dead[..., None], v.sum(-2, keepdims=True) / max(1, S), want.exact),
        )
        past = sight.conditions(call).get("causal")
        if past is not None:
            a = np.broadcast_to(past, (B, H, *past.shape[-2:])).astype(np.float64)
            mean = a @ v / np.maximum(a.sum(-1, keepdims=True), 1)
            yield f"{told}the mean of the values before them", np.where(dead[..., None], mean, want.exact)


def _of_lse(call: Call, want: Expected) -> Iterator[tuple[str, Array]]:
    """Other things that have been given as lse."""
    exact = want.exact
    m = reference.dense(arithmetic.checked(call, np.float64)).m_BHT
    with np.errstate(invalid="ignore", over="ignore"):
        yield "lse in base 2", exact / math.log(2)
        yield "lse multiplied by ln 2", exact * math.log(2)
        yield "lse without the row maximum", exact - np.where(np.isfinite(m), m, 0)
        yield "lse is the row maximum alone", m
        yield "lse is the sum, without its logarithm", np.exp(exact)
        yield "lse with its sign reversed", -exact
    if "sinks" in call.options:
        yield "lse leaves the sink out", _result(call.but(sinks=None), "lse", None)
    for slip in ("softcap", "bias", "alibi"):
        if slip in call.options:
            yield f"lse leaves the {slip} out", _result(call.but(**{slip: None}), "lse", None)


# Mistakes of the backward pass alone.
BACKWARD = {
    "softcap": "the softcap's derivative is left out of the gradient",
    "scale of dq": "the scale is left out of dq",
    "scale of dk": "the scale is left out of dk",
    "group": "gradients of shared kv heads are not summed over their query heads",
    "dlse": "the gradient arriving at lse is ignored",
    "delta": "the gradient of the softmax leaves out its row sum",
    "slope of uncapped scores": "the softcap's derivative is made from scores that are not capped",
    "bias through softcap": "the bias's gradient goes through the softcap",
    "hidden values times 0": "hidden keys and values are multiplied by 0 in the backward pass (0 · NaN = NaN)",
}


def _of_gradients(call: Call, name: str, want: Expected) -> Iterator[tuple[str, Array]]:
    seen = arithmetic.forward(call, FLOAT64)
    for slip, told in BACKWARD.items():
        yield told, arithmetic.backward(call, FLOAT64, seen, slip=slip)[name]
    yield f"{name} with its sign reversed", -want.exact
    yield from _of_groups(call, name)
    if call.dlse_BHT is not None:
        reversed_ = dataclasses.replace(call, dlse_BHT=-call.dlse_BHT)
        yield "the gradient arriving at lse with its sign reversed", _result(reversed_, name, None)
    if name == "dsinks" and "sinks" in call.options:
        yield from _of_sinks(call, seen)
    for told, changed, visible in _mistakes(call):
        # The forward pass was right, so that its lse is; the weights are made again from it, wrongly.
        wrong = arithmetic.forward(changed, FLOAT64, visible)
        if changed.sizes != call.sizes:
            continue
        again = wrong.again(seen.lse_BHT)
        for delta_from in (seen.out_BHTE, None):
            made = arithmetic.backward(changed, FLOAT64, again, delta_from=delta_from)
            if name in made:
                yield f"in the backward pass: {told}", made[name]


def _of_groups(call: Call, name: str) -> Iterator[tuple[str, Array]]:
    """What each query head gives its kv head, gathered wrongly, or from a wrong head to begin with."""
    B, H, G, *_ = call.sizes
    if G in {0, H} or name not in {"dq", "dk", "dv"}:
        return
    repeats = H // G
    repeated, tiled = np.arange(H) // repeats, np.arange(H) % G
    ways = (
        ("kv heads tiled instead of repeated", tiled, tiled),
        ("gradients of kv heads are gathered from tiled query heads", repeated, tiled),
    )
    for told, read, given in ways:
        wide = dataclasses.replace(call, k_BGSD=call.k_BGSD[:, read], v_BGSE=call.v_BGSE[:, read])
        found = _result(wide, name, None)
        if name != "dq":
            found = np.stack([found[:, given == g].sum(axis=1) for g in range(G)], axis=1)
        yield told, found
    if name != "dq":
        right = _result(call, name, None)
        yield "gradients of shared kv heads are averaged, not summed", right / repeats
        wide = dataclasses.replace(call, k_BGSD=call.k_BGSD[:, repeated], v_BGSE=call.v_BGSE[:, repeated])
        each = _result(wide, name, None).reshape(B, G, repeats, *right.shape[2:])
        yield "gradients of shared kv heads are not summed: the last query head's is kept", each[:, :, -1]


def _of_sinks(call: Call, seen: Pass) -> Iterator[tuple[str, Array]]:
    """The sinks' gradient made wrongly."""
    made = arithmetic.backward(call, FLOAT64, seen)["dsinks"]
    B, _, _, T, *_ = call.sizes
    yield "the sinks' gradient is averaged over batch and queries, not summed", made / max(1, B * T)
    yield "the sinks' gradient is averaged over the batch, not summed", made / max(1, B)
    for row, told in ((slice(0, 1), "first"), (slice(-1, None), "last")):
        arrays = {"q_BHTD": call.q_BHTD[row], "k_BGSD": call.k_BGSD[row], "v_BGSE": call.v_BGSE[row]}
        assert call.dout_BHTE is not None  # noqa: S101 - asked before
        if all(name not in call.options for name in ("mask", "bias", "segments", "starts", "lengths")):
            dlse = None if call.dlse_BHT is None else call.dlse_BHT[row]
            part = dataclasses.replace(call, **arrays, dout_BHTE=call.dout_BHTE[row], dlse_BHT=dlse)  # type: ignore[arg-type]
            yield f"the sinks' gradient is of the {told} batch row alone", _result(part, "dsinks", None)


def _mistakes(call: Call) -> Iterator[tuple[str, Call, Array | None]]:
    """Mistakes in what is visible, in heads and in options: each as another call, or another visibility."""
    options = DEFAULTS | dict(call.options)
    if not options["causal"]:
        yield "causal mask applied though causal=False", call.but(causal=True), None
    if options["window"] is not None or options["alibi"] is not None:
        yield from ((told, changed, None) for told, changed in _offsets(call))
    for told, visible in sight.mistaken(call):
        yield told, call, visible
    yield from ((told, changed, None) for told, changed in _heads(call))
    yield from ((told, changed, None) for told, changed in _options(call))


def _offsets(call: Call) -> Iterator[tuple[str, Call]]:
    """Positions of queries taken wrongly by all that depends on them."""
    _, _, _, T, S, _, _ = call.sizes
    offset = call.options.get("offset")
    if offset is not None and abs(offset) >= 2**31:
        yield "positions are kept in 32 bits", call.but(offset=int(np.int64(offset).astype(np.int32)))
    if offset is None and T != S:
        yield "causal mask aligned top-left", call.but(offset=0)
    if offset not in {None, 0}:
        yield "offset ignored: positions begin at 0", call.but(offset=0)
    if offset is not None and offset != S - T:
        yield "offset ignored: the last query is put at the last key", call.but(offset=None)


def _heads(call: Call) -> Iterator[tuple[str, Call]]:
    _, H, G, _, _, D, E = call.sizes
    if D == E:
        yield (
            "keys and values are exchanged",
            dataclasses.replace(call, k_BGSD=call.v_BGSE, v_BGSE=call.k_BGSD),
        )
    if call.dout_BHTE is not None or G in {0, 1, H}:
        return
    k, v = call.k_BGSD, call.v_BGSE
    repeated = np.arange(H) // (H // G)
    by_groups = np.minimum(np.arange(H) // G, G - 1)
    for told, at_k, at_v in (
        ("kv heads tiled instead of repeated", np.arange(H) % G, np.arange(H) % G),
        ("key heads tiled instead of repeated", np.arange(H) % G, repeated),
        ("value heads tiled instead of repeated", repeated, np.arange(H) % G),
        ("all query heads read the first kv head", np.zeros(H, int), np.zeros(H, int)),
        ("all query heads read the last kv head", np.full(H, G - 1), np.full(H, G - 1)),
        ("kv heads in reversed order", G - 1 - repeated, G - 1 - repeated),
        ("kv heads by h // G instead of h // (H // G)", by_groups, by_groups),
    ):
        yield told, dataclasses.replace(call, k_BGSD=k[:, at_k], v_BGSE=v[:, at_v])


def _options(call: Call) -> Iterator[tuple[str, Call]]:
    yield from _scales(call)
    for name in ("softcap", "bias", "sinks"):
        if name in call.options:
            yield f"{name} ignored", call.but(**{name: None})
    if "alibi" in call.options:
        yield from _alibi(call)
    if "sinks" in call.options:
        sinks = np.asarray(call.options["sinks"])
        yield "the first head's sink is used for all heads", call.but(sinks=np.full_like(sinks, sinks[0]))
        yield "sink logits with their sign reversed", call.but(sinks=-sinks)
        yield "sink logits of the heads in reversed order", call.but(sinks=sinks[::-1].copy())
        yield "sink logits taken for 0", call.but(sinks=np.zeros_like(sinks))
        yield from _by_kv_head(call, "sinks", sinks)
    if "bias" in call.options:
        yield from _biases(call)
    if "softcap" in call.options:
        yield "softcap used inverted, as 1/softcap", call.but(softcap=1 / call.options["softcap"])


def _by_kv_head(call: Call, name: str, given: Array) -> Iterator[tuple[str, Call]]:
    """What belongs to query heads, taken by the kv head that they read."""
    _, H, G, *_ = call.sizes
    if G not in {0, H}:
        shared = np.arange(H) // (H // G)
        yield f"{name} taken by kv head", call.but(**{name: given[shared]})
        yield f"{name} taken by kv head", call.but(**{name: given[shared * (H // G)]})


def _biases(call: Call) -> Iterator[tuple[str, Call]]:
    B, H, G, T, S, _, _ = call.sizes
    bias, scale = call.options["bias"], arithmetic.checked(call).scale
    full = np.broadcast_to(bias, (B, H, T, S))
    others = [
        ("bias multiplied by the scale", (bias * scale).astype(bias.dtype)),
        ("bias with its sign reversed", np.where(bias == -np.inf, bias, -bias)),
        ("bias added twice", 2 * bias),
        ("the first batch row's bias is used for all", full[:1]),
        ("the first head's bias is used for all heads", full[:, :1]),
        ("the bias's first row is used for all queries", full[:, :, :1]),
        ("bias added to the first batch row alone", np.where(np.arange(B)[:, None, None, None] > 0, 0, full)),
        ("bias added to the first head alone", np.where(np.arange(H)[:, None, None] > 0, 0, full)),
    ]
    if B == H:
        others.append(("bias of the heads taken for one of the batch", full.swapaxes(0, 1)))
    if T == S:
        others.append(("bias transposed: queries and keys exchanged", full.swapaxes(2, 3)))
    if G not in {0, H}:
        others.append(("biases are taken by kv head", full[:, np.arange(H) // (H // G)]))
    for told, other in others:
        if call.bias_gradient and other.shape != bias.shape:
            continue
        yield told, call.but(bias=other)


def _scales(call: Call) -> Iterator[tuple[str, Call]]:
    _, H, G, _, _, D, E = call.sizes
    scale = arithmetic.checked(call).scale
    if call.q_BHTD.dtype == np.float64:
        narrow = np.float32(scale)
        for rounded in (narrow, np.sqrt(narrow).astype(np.float64) ** 2, 1 / np.sqrt(np.float32(D))):
            yield "scale rounded to float32", call.but(scale=float(rounded))
    if "scale" in call.options:
        yield "the given scale ignored, 1/√D used", call.but(scale=None)
        yield "the given scale multiplied by 1/√D", call.but(scale=scale / math.sqrt(D))
    for told, other in (
        ("scale left out", 1.0),
        ("divided by D instead of √D", 1 / D),
        ("scale applied twice", scale * scale),
        ("scale made from the value width E", 1 / math.sqrt(E)),
        ("multiplied by √D instead of divided", math.sqrt(D)),
        ("scale made from the width of all heads together", 1 / math.sqrt(max(1, H) * D)),
        ("scale made from the width of all kv heads together", 1 / math.sqrt(max(1, G) * D)),
        ("scale with its sign reversed", -scale),
        ("scale without its sign", abs(scale)),
    ):
        if other != scale:
            yield told, call.but(scale=other)


def _alibi(call: Call) -> Iterator[tuple[str, Call]]:
    _, H, _, T, S, _, _ = call.sizes
    slopes = np.asarray(call.options["alibi"])
    yield "alibi ignored", call.but(alibi=None)
    yield "ALiBi with its sign reversed", call.but(alibi=-slopes)
    yield "ALiBi slopes of the heads in reversed order", call.but(alibi=slopes[::-1].copy())
    yield (
        "the first head's ALiBi slope is used for all heads",
        call.but(alibi=np.full_like(slopes, slopes[:1])),
    )
    yield (
        "ALiBi multiplied by the scale",
        call.but(alibi=slopes * slopes.dtype.type(arithmetic.checked(call).scale)),
    )
    for told, changed in _by_kv_head(call, "alibi", slopes):
        yield told.replace("alibi", "ALiBi slopes"), changed
    standard = 2.0 ** (-8.0 * np.arange(1, H + 1) / max(H, 1))
    yield "ALiBi slopes as for a power of two of heads", call.but(alibi=standard)
    if "bias" in call.options:
        return
    p = arithmetic.checked(call).offset + np.arange(T)[:, None]
    for told, distance in (
        ("ALiBi takes the distance without its sign", np.abs(p - np.arange(S))),
        ("ALiBi counts distances without the offset", p * 0 + np.arange(T)[:, None] - np.arange(S)),
        ("ALiBi adds the key's position alone", -np.arange(S) + 0 * p),
        ("ALiBi counts distances one too far", p + 1 - np.arange(S)),
        ("ALiBi's distances are kept in float16", (p - np.arange(S)).astype(np.float16).astype(np.float64)),
    ):
        bias = -slopes.astype(np.float64)[:, None, None] * distance
        yield told, call.but(alibi=None, bias=bias.astype(np.float64))


def _by_rule(call: Call, name: str, got: Array, want: Expected) -> str:
    """What a result shows by itself."""
    told = _of_dead_rows_alone(call, name, got, want)
    if told:
        return told
    bad = ~np.isfinite(got) & np.isfinite(want.exact)
    if bad.any():
        return _of_not_finite(call, name, bad)
    if (np.isfinite(got) & np.isnan(want.exact)).any():
        return "a NaN that is seen does not show"
    finite = np.isfinite(want.exact) & np.isfinite(got)
    if not finite.all() or not want.exact.any():
        return ""
    factor = _factor(got, want)
    if factor is not None:
        return f"{name} is {number(factor)} times what is right"
    return _of_precision(call, name, got, want)


def _of_dead_rows_alone(call: Call, name: str, got: Array, want: Expected) -> str:
    """Whether nothing is wrong but rows that see nothing, and what they give."""
    if name not in {"out", "lse", "dq"}:
        return ""
    dead = arithmetic.forward(call, FLOAT64).lse_BHT == -np.inf
    wrong = ~_right(got, want)
    if not dead.any() or (wrong & ~(dead if name == "lse" else dead[..., None])).any():
        return ""
    given = got[wrong]
    if name == "lse":
        return (
            f"rows that see nothing give {'a finite lse' if np.isfinite(given).all() else 'NaN or +∞ as lse'}"
        )
    what = "NaN" if np.isnan(given).any() else "something else than 0"
    return f"rows that see nothing give {what}{' as gradient' if name == 'dq' else ''}"


def _of_not_finite(call: Call, name: str, bad: Array) -> str:
    if not _all_finite(call):
        return _spread(call, name, bad)
    if call.q_BHTD.dtype.name == "float16":
        return "scores or sums overflow float16"
    seen = arithmetic.forward(call, FLOAT64)
    dead = seen.lse_BHT == -np.inf
    if np.nanmax(np.abs(np.where(dead, 0, seen.lse_BHT)), initial=0) > 80:
        return "exponentials overflow or vanish: the row maximum is not subtracted"
    return _of_hidden_blocks(name, bad, seen, dead)


def _of_hidden_blocks(name: str, bad: Array, seen: Pass, dead: Array) -> str:
    """Whether NaN came in rows alone that see something, but not everything."""
    if name not in {"out", "lse"} or bad.ndim < 3:
        return ""
    rows = bad if name == "lse" else bad.any(axis=-1)
    partly = ~seen.visible_BHTS.all(axis=-1) & ~dead
    if (rows & ~partly).any():
        return ""
    return "NaN in rows from which a whole block of keys is hidden (−∞ − (−∞) = NaN)"


def _spread(call: Call, name: str, bad: Array) -> str:
    """Where a number that is not finite, and that the wrong rows do not see, came from."""
    arrays = (call.q_BHTD, call.k_BGSD, call.v_BGSE)
    own = [np.asarray(~np.isfinite(a.astype(np.float64)).all(axis=(1, 2, 3))) for a in arrays]
    mates = "bias" not in call.options and not (own[0] | own[1] | own[2])[np.argwhere(bad)[:, 0]].any()
    if name in {"out", "lse"} and mates:
        return "what another batch row holds reaches the result"
    if name in {"out", "lse"} and not (own[1] | own[2]).any():
        if own[0].any():
            return "what another query holds reaches the result"
        problem = arithmetic.checked(call)
        visible = reference.dense(problem).visible_BHTS
        if problem.bias_BHTS is not None and (visible & np.isnan(problem.bias_BHTS)).any():
            return "what another query sees reaches the result"
    return "what is hidden reaches the result"


def _factor(got: Array, want: Expected) -> float | None:
    """The one factor that everything is off by, if there is one."""
    size = float(np.vdot(want.exact, want.exact))
    factor = float(np.vdot(got, want.exact)) / size
    # A result that is only too inexact is no multiple of what is right.
    apart = abs(factor - 1) * np.abs(want.exact).max()
    if not 1e-3 < abs(factor) < 1e3 or apart <= 4 * SLACK * want.allowed.max():
        return None
    near = np.abs(got - factor * want.exact) <= SLACK * want.allowed * max(1, abs(factor))
    return factor if near.all() and got.size > 1 else None


def _of_precision(call: Call, name: str, got: Array, want: Expected) -> str:
    """Whether the error is that of a narrower type."""
    error = np.abs(got - want.exact).max()
    if call.q_BHTD.dtype.itemsize == 2 and name == "out":
        how = Naive(arithmetic.accumulator(call), slip="rounded to the input's type")
        lost = np.abs(arithmetic.forward(call, how).out_BHTE - want.exact).max()
        if np.isfinite(lost) and error <= 2 * lost + want.allowed.max():
            return f"scores and weights are rounded to {call.q_BHTD.dtype.name}"
    lower = {"float64": (np.float32, np.float16), "float32": (np.float16,), "float16": (np.float16,)}
    narrower = lower.get(call.q_BHTD.dtype.name, ())
    if error <= BARELY * want.allowed.max():
        return "more rounding than the same sums need"
    # In another order the scale comes first, which keeps products within float16.
    for low, order in ((low, order) for low in narrower for order in (None, 1)):
        how = Naive(np.dtype(low), order)
        made = _pick(call, name, how, arithmetic.forward(call, how))
        lost = np.abs(made.astype(np.float64) - want.exact).max()
        if np.isfinite(lost) and error <= SLACK * lost:
            return f"partly computed in {'float32' if low is np.float32 else 'float16 or bfloat16'}"
    return ""
