"""Put a case to a target and say whether what comes is right; if not, one line that says what came and why.

Every call is answered before any answer is looked at, so that a target that reuses its buffers is found out, and the
inputs are compared with what they were.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.conformance import diagnosis
from regardant.conformance.budget import Expected, expected
from regardant.conformance.case import Call, Case, Mismatch, NotOffered
from regardant.conformance.target import Target, as_target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regardant.problem import Array


def judge(
    case: Case, given: Target | Callable[..., Any], answered: Callable[[], None] = lambda: None
) -> None:
    """Check one case; `answered` is called when the target has given all answers. See `Case.check`."""
    target = as_target(given)
    if case.views and not target.views:
        raise NotOffered("reading views without a copy")
    calls = case.calls()
    for call in calls:
        target.decline(call)
    answers = _at_once(target, calls) if case.at_once else [_answer(case, target, call) for call in calls]
    answered()
    if case.join is not None and case.whole is not None:
        whole = case.whole(np.random.default_rng(case.seed))
        _compare(case, [whole], [case.join(answers)])
        return
    _compare(case, calls, answers)
    if case.same_bits:
        _compare_bits(case, answers)


def _answer(case: Case, target: Target, call: Call) -> dict[str, Array]:
    """What the target gives, after a look at whether it left its inputs as they were."""
    before = [] if case.views else [(name, array, array.copy()) for name, array in _arrays(call)]
    answer = target.answer(call)
    _compare_inputs(before)
    return answer


def _at_once(target: Target, calls: Sequence[Call]) -> list[dict[str, Array]]:
    """All answers, asked for by one Python thread each."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(target.answer, calls))


def _arrays(call: Call) -> list[tuple[str, Array]]:
    """All arrays of a call, by the names that a caller knows."""
    given: dict[str, Any] = {"q": call.q_BHTD, "k": call.k_BGSD, "v": call.v_BGSE} | dict(call.options)
    given |= {"dout": call.dout_BHTE, "dlse": call.dlse_BHT}
    for number, ids in enumerate(call.options.get("segments", ())):
        given[f"segments[{number}]"] = ids
    return [(name, array) for name, array in given.items() if isinstance(array, np.ndarray)]


def _compare_inputs(before: Sequence[tuple[str, Array, Array]]) -> None:
    for name, array, was in before:
        if array.tobytes() != was.tobytes():
            raise Mismatch(f"{name} was changed by the call", "writes into its inputs")


def _compare(case: Case, calls: Sequence[Call], answers: Sequence[Mapping[str, Array]]) -> None:
    right: dict[str, Expected] = {}
    for number, (call, answer) in enumerate(zip(calls, answers, strict=True)):
        if number == 0 or not _same(call, calls[number - 1]):
            right = (case.expect or expected)(call)
        for name, want in right.items():
            where = f"call {number + 1} of {len(calls)}: {name}" if len(calls) > 1 else name
            _compare_form(where, name, answer[name], want)
            got = answer[name].astype(np.float64)
            wrong = is_wrong(got, want)
            if wrong.any():
                detail = diagnosis.detail(where, got, want, wrong)
                raise Mismatch(detail, *diagnosis.causes(case, call, calls[:number], name, answer, want))


def _same(call: Call, other: Call) -> bool:
    """Whether two calls ask for the same of the very same arrays, so that one expectation serves both."""
    mine, theirs = (vars(c) | {"threads": None, "instead": None} for c in (call, other))
    return call.instead is None and all(mine[name] is theirs[name] for name in mine)


def _compare_form(where: str, name: str, got: Array, want: Expected) -> None:
    if got.shape != want.exact.shape:
        raise Mismatch(
            f"{where} has shape {got.shape}, right is {want.exact.shape}", f"{name} of another shape"
        )
    if got.dtype != want.dtype:
        raise Mismatch(
            f"{where} has type {got.dtype.name}, right is {want.dtype.name}", f"{name} of another type"
        )


def is_wrong(got: Array, want: Expected) -> Array:
    """Which elements are farther from what is right than allowed; what is not finite must agree exactly."""
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want.exact) <= want.allowed
    same = (got == want.exact) | (np.isnan(got) & np.isnan(want.exact))
    wrong: Array = ~np.where(np.isfinite(want.exact), near, same)
    return wrong


def _compare_bits(case: Case, answers: Sequence[Mapping[str, Array]]) -> None:
    first = answers[0]
    for number, answer in enumerate(answers[1:], start=2):
        for name, array in first.items():
            if array.tobytes() != answer[name].tobytes():
                differ = array != answer[name]
                at = tuple(int(i) for i in np.argwhere(differ)[0]) if differ.any() else ()
                raise Mismatch(
                    f"{name} of call {number} differs in its bits from that of call 1, "
                    f"first at {list(at)}: {diagnosis.number(answer[name][at])} after "
                    f"{diagnosis.number(array[at])}",
                    case.usual or "the same call gives other bits",
                )
