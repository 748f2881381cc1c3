"""What is expected of a call, from the float64 reference, and how far from it is still right.

The allowance is derived, never guessed: at most twice the largest error of the naive computation in the same input
type, taken over several orders of summation, plus one rounding of the output. What is not finite must come out
exactly.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant import reference
from regardant.conformance import arithmetic
from regardant.conformance.arithmetic import Naive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regardant.conformance.case import Call
    from regardant.problem import Array
    from regardant.reference import Dense

# Orders of summation that an expected error is estimated from: more, the fewer rows there are to see it in.
ORDERS, MOST_ORDERS, ROWS = 4, 32, 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Expected:
    """One result: its exact values in float64, the type it must have, and the error allowed, element by element."""

    exact: Array
    dtype: np.dtype[Any]
    allowed: Array


def expected(call: Call) -> dict[str, Expected]:
    """What must come out of a call, by name. Memory grows with T·S."""
    call = call.instead or call
    number = arithmetic.accumulator(call)
    types = {name: np.dtype(call.q_BHTD.dtype) for name in ("out", "dq", "dk", "dv")}
    types |= {"lse": number, "dsinks": number}
    if call.bias_gradient:
        types["dbias"] = call.options["bias"].dtype
    right, d = _exact(call)
    naives = list(_naives(call, number, d.visible_BHTS, types, _orders(right)))

    def allowed(name: str, values: Array) -> Array:
        return _allowed(values, [naive[name] for naive in naives], types[name])

    made = {name: Expected(values, types[name], allowed(name, values)) for name, values in right.items()}
    if call.dout_BHTE is None:
        return made
    inherited = _inherited(call, d, allowed("lse", d.lse_BHT))
    return {
        name: dataclasses.replace(want, allowed=want.allowed + inherited[name]) for name, want in made.items()
    }


def _inherited(call: Call, d: Dense, lse_allowed: Array) -> dict[str, float]:
    """The largest change of each gradient that is made from an lse as far from what is right as an lse may be."""
    how = Naive(np.dtype(np.float64))
    seen = arithmetic.forward(call, how, d.visible_BHTS)
    near, far = (
        arithmetic.backward(call, how, seen.again(d.lse_BHT + moved), delta_from=d.out_BHTE)
        for moved in (0, lse_allowed)
    )
    with np.errstate(invalid="ignore"):
        changes = {name: np.abs(far[name] - values) for name, values in near.items()}
    return {name: float(np.where(np.isfinite(by), by, 0).max(initial=0)) for name, by in changes.items()}


def exact(call: Call) -> dict[str, Array]:
    """The results by the reference, all in float64."""
    return _exact(call)[0]


def _exact(call: Call) -> tuple[dict[str, Array], Dense]:
    """The results by the reference, and all that its forward pass made."""
    problem = arithmetic.checked(call, np.float64)
    d = reference.dense(problem)
    if call.dout_BHTE is None:
        return {"out": d.out_BHTE, **({"lse": d.lse_BHT} if call.lse else {})}, d
    dlse = None if call.dlse_BHT is None else call.dlse_BHT.astype(np.float64)
    dout = call.dout_BHTE.astype(np.float64)
    made = reference.backward(problem, d.out_BHTE, d.lse_BHT, dout, dlse, call.bias_gradient)
    if call.bias_gradient:
        made["dbias"] = made["dbias"].reshape(call.options["bias"].shape)
    return made, d


def _orders(right: dict[str, Array]) -> range:
    """As many orders as it takes to see about `ROWS` errors of the result that has the fewest rows.

    The numbers of one row share the errors of its scores, so that rows are what counts.
    """
    fewest = min(max(1, _rows(values)) for values in right.values())
    return range(max(ORDERS, min(MOST_ORDERS, ROWS // fewest)))


def _rows(values: Array) -> int:
    known = np.isfinite(values) & (values != 0)
    return int(np.count_nonzero(known.any(axis=-1) if values.ndim == 4 else known))


def _naives(
    call: Call, number: np.dtype[Any], visible: Array, types: dict[str, np.dtype[Any]], orders: range
) -> Iterator[dict[str, Array]]:
    """Naive results in several orders of summation, rounded to the types that results have."""
    for order in orders:
        how = Naive(number, order or None)
        seen = arithmetic.forward(call, how, visible)
        made = _rounded({"out": seen.out_BHTE, "lse": seen.lse_BHT}, types)
        if call.dout_BHTE is None:
            yield made
            continue
        made_lse = {"lse": made["lse"]}
        # Automatic differentiation has the weights at hand. Kernels make them again from lse, and δ from the output,
        # both rounded as the forward pass gave them.
        yield made_lse | _rounded(arithmetic.backward(call, how, seen), types)
        again = seen.again(made["lse"])
        yield made_lse | _rounded(arithmetic.backward(call, how, again, delta_from=made["out"]), types)


def _rounded(made: dict[str, Array], types: dict[str, np.dtype[Any]]) -> dict[str, Array]:
    with np.errstate(over="ignore"):
        return {name: values.astype(types[name]) for name, values in made.items()}


def _allowed(right: Array, naives: list[Array], dtype: np.dtype[Any]) -> Array:
    """Twice the largest naive error, and half a unit in the last place of each element; 0 where it is not finite."""
    finite = np.isfinite(right)
    if not finite.any():
        return np.zeros(right.shape)
    with np.errstate(invalid="ignore"):
        errors = [np.abs(naive.astype(np.float64) - right)[finite] for naive in naives]
    # An order of summation that overflows says nothing about the error of those that do not.
    largest = max((error.max() for error in errors if np.isfinite(error).all()), default=0.0)
    return np.where(finite, 2 * largest + unit(dtype) * np.abs(np.where(finite, right, 0)), 0)


def unit(dtype: np.dtype[Any]) -> float:
    """The largest relative error of rounding to a type."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps) / 2
    return 2.0**-8  # bfloat16, which NumPy does not know by itself
