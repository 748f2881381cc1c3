"""Gradients against finite differences: what is expected comes from the forward pass alone, moved a little.

The derivative of Σ dout · out (+ Σ dlse · lse) by each number is taken from four values around it in float64. Half
the step gives the estimate, and how far it lies from that of the whole step is allowed on top of the budget.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.conformance import budget
from regardant.conformance.case import Case
from regardant.conformance.catalogue.inputs import backwards, documents, draw, normal, some_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.conformance.budget import Expected
    from regardant.conformance.case import Call
    from regardant.problem import Array

STEP = 2.0**-6

# Values at −2, −1, 1 and 2 steps, weighted so that the error is of the step's fourth power.
STENCIL = ((-2, 1 / 12), (-1, -8 / 12), (1, 8 / 12), (2, -1 / 12))

NAMES = {"dq": "q_BHTD", "dk": "k_BGSD", "dv": "v_BGSE", "dsinks": "sinks", "dbias": "bias"}


def by_differences(call: Call) -> dict[str, Expected]:
    """What a call for gradients must give, from the forward pass alone."""
    found = {}
    for name, want in budget.expected(call).items():
        coarse, fine = (_derivative(call, NAMES[name], step) for step in (STEP, STEP / 2))
        allowed = want.allowed + np.abs(coarse - fine)
        found[name] = dataclasses.replace(want, exact=fine, allowed=allowed)
    return found


def _derivative(call: Call, name: str, step: float) -> Array:
    given = call.options[name] if name in call.options else vars(call)[name]
    array = np.asarray(given, np.float64)
    derivative = np.zeros(array.shape)
    for at in np.ndindex(array.shape):
        if not np.isfinite(array[at]):
            continue  # what hides a key has no gradient
        for steps, weight in STENCIL:
            moved = array.copy()
            moved[at] += steps * step
            derivative[at] += weight / step * _loss(call, name, moved)
    return derivative


def _loss(call: Call, name: str, moved: Array) -> float:
    options: dict[str, Any] = dict(call.options)
    arrays = {field: vars(call)[field].astype(np.float64) for field in ("q_BHTD", "k_BGSD", "v_BGSE")}
    (options if name in options else arrays)[name] = moved
    wide = dataclasses.replace(call, **arrays, options=options, dout_BHTE=None, dlse_BHT=None, lse=True)
    made = budget.exact(dataclasses.replace(wide, bias_gradient=False))
    assert call.dout_BHTE is not None  # noqa: S101 - cases for gradients have one
    loss = float((call.dout_BHTE.astype(np.float64) * made["out"]).sum())
    if call.dlse_BHT is not None:
        live = np.isfinite(made["lse"])
        loss += float((call.dlse_BHT.astype(np.float64) * np.where(live, made["lse"], 0)).sum())
    return loss


def _case(name: str, tests: str, make: Callable[[np.random.Generator], Call], **asked: bool) -> Case:
    right = "A gradient is what the loss changes by: the forward pass, moved a little, says the same."
    return Case(
        f"gradients/differences-{name}",
        tests,
        right,
        lambda rng: [backwards(rng, make(rng), **asked)],
        expect=by_differences,
    )


def _small(rng: np.random.Generator, **options: Any) -> Call:
    sizes = {"B": 1, "H": 2, "G": 1, "T": 4, "S": 5, "D": 3, "E": 2, "spread": 1.0}
    return draw(rng, **(sizes | options))


CASES = (
    _case(
        "causal",
        "Causal attention's gradients against finite differences.",
        lambda rng: _small(rng, T=5),
    ),
    _case(
        "mask",
        "Gradients through a mask with a dead row against finite differences.",
        lambda rng: _small(rng, causal=False, mask=some_mask(rng, 4, 5) & (np.arange(4) != 2)[:, None]),
    ),
    _case(
        "documents",
        "Gradients of packed documents with a window against finite differences.",
        lambda rng: _small(rng, B=2, S=4, segments=(documents(2, 3, 1),) * 2, window=2),
    ),
    _case(
        "softcap",
        "Gradients through softcap and scale against finite differences.",
        lambda rng: _small(rng, softcap=1.5, scale=0.8),
    ),
    _case(
        "bias",
        "Gradients of a bias of each head against finite differences.",
        lambda rng: _small(rng, bias=normal(rng, 2, 1, 5), softcap=2.0),
        bias=True,
    ),
    _case(
        "sinks",
        "Gradients of sinks against finite differences.",
        lambda rng: _small(rng, sinks=normal(rng, 2)),
    ),
    _case(
        "lse", "Gradients through lse against finite differences.", lambda rng: _small(rng, T=6), dlse=True
    ),
)
