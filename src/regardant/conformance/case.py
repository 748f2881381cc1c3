"""A case: one thing that attention can get wrong, with inputs, the right answer, and how far from it is still right.

A case is looked at by itself, without any target: which calls it makes, what must come out of each, and why. What is
expected comes from the float64 reference, how much error is allowed from `budget`. It refuses nothing; what a
target cannot do is told apart by `NotOffered`, which pytest and unittest report as skipped.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
import unittest
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regardant.conformance.budget import Expected
    from regardant.conformance.target import Target
    from regardant.problem import Array

DEFAULTS: dict[str, Any] = {
    "causal": True, "offset": None, "window": None, "starts": None, "lengths": None, "segments": None,
    "mask": None, "bias": None, "alibi": None, "softcap": None, "sinks": None, "scale": None,
}  # fmt: skip


class NotOffered(unittest.SkipTest):
    """What a case asks for is not among what a target offers; the text says what."""


class Mismatch(AssertionError):  # noqa: N818 - what came does not match what is right
    """A target gave something else than what is right.

    Attributes:
        detail: what came, what was right, and where first.
        causes: the likely mistake, or those that give the same numbers; none if it cannot be told.
        cause: the same as one text, or "".
    """

    def __init__(self, detail: str, *causes: str) -> None:
        cause = ", or: ".join(causes)
        super().__init__(f"{detail}; likely cause: {cause}" if cause else detail)
        self.detail, self.causes, self.cause = detail, causes, cause


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a target.

    Attributes:
        q_BHTD: queries. `k_BGSD`: keys. `v_BGSE`: values.
        options: those of `regardant.attention` that are not left at their defaults.
        lse: also ask for lse. `dout_BHTE`: ask for gradients instead, from this one arriving at out.
        dlse_BHT: the gradient arriving at lse, or None. `bias_gradient`: also ask for the bias's gradient.
        threads: how many threads to use, or None for as many as the target likes.
        instead: a smaller call that has the same answer, where this one is too large for the reference.
    """

    q_BHTD: Array
    k_BGSD: Array
    v_BGSE: Array
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lse: bool = False
    dout_BHTE: Array | None = None
    dlse_BHT: Array | None = None
    bias_gradient: bool = False
    threads: int | None = None
    instead: Call | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        B, H, T, D = self.q_BHTD.shape
        _, G, S, E = self.v_BGSE.shape
        return B, H, G, T, S, D, E

    @property
    def asks(self) -> tuple[str, ...]:
        """The keyword arguments that a target must take to be asked this."""
        extra = {
            "return_lse": self.lse,
            "dout": self.dout_BHTE is not None,
            "dlse": self.dlse_BHT is not None,
            "bias_gradient": self.bias_gradient,
            "threads": self.threads is not None,
        }
        return (*self.options, *(name for name, asked in extra.items() if asked))

    def but(self, **changes: Any) -> Call:
        """The same call with other options: None leaves one at its default."""
        options = {name: given for name, given in (dict(self.options) | changes).items() if given is not None}
        return dataclasses.replace(self, options=options)

    def describe(self) -> str:
        """Shapes, type and options, on one line."""
        B, H, G, T, S, D, E = self.sizes
        shapes = f"B {B}, heads {H}/{G}, queries {T}, keys {S}, D {D}" + (f", E {E}" if E != D else "")
        told = [f"{name}={_shown(given)}" for name, given in self.options.items()]
        told += [name for name in self.asks if name not in self.options]
        return f"{self.q_BHTD.dtype.name}: {shapes}" + (f"; {', '.join(told)}" if told else "")


def _shown(given: Any) -> str:
    """An option's value in few characters."""
    if isinstance(given, np.ndarray) and given.size > 4:
        return f"{given.dtype.name}{given.shape}".replace(" ", "")
    if isinstance(given, np.ndarray):
        return str(given.tolist())
    if isinstance(given, tuple):
        return "ids"
    return f"{given:g}" if isinstance(given, float) else str(given)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One named thing that attention can get wrong.

    Attributes:
        name: family/what. `tests`: what is tested, in one sentence.
        right: what must come out, with the reason.
        make: the calls, from a random generator.
        report: where somebody met it in public, or "".
        usual: what a failure usually means where the numbers alone do not tell, or "".
        raising: what an exception usually means, or "".
        same_bits: all calls must give the very same bits.
        at_once: the calls are made from as many Python threads at the same time.
        join: makes one result of those of all calls; it must then equal that of `whole`, made from a generator of the
            same seed, and the single results are not looked at.
        expect: what must come out of a call, where it does not come from the reference and the budget.
        views: needs a target that reads views as they are: a copy of the inputs would not fit into memory.
        seed: where the inputs come from; the name's own checksum.
    """

    name: str
    tests: str
    right: str
    make: Callable[[np.random.Generator], Sequence[Call]]
    report: str = ""
    usual: str = ""
    raising: str = ""
    same_bits: bool = False
    at_once: bool = False
    join: Callable[[Sequence[Mapping[str, Array]]], Mapping[str, Array]] | None = None
    whole: Callable[[np.random.Generator], Call] | None = None
    expect: Callable[[Call], dict[str, Expected]] | None = None
    views: bool = False

    @property
    def family(self) -> str:
        """What comes before the slash in the name."""
        return self.name.partition("/")[0]

    @property
    def seed(self) -> int:
        """The name's checksum: the same everywhere and at all times."""
        return zlib.crc32(self.name.encode())

    def calls(self) -> tuple[Call, ...]:
        """The calls, made anew."""
        return tuple(self.make(np.random.default_rng(self.seed)))

    def check(self, target: Target | Callable[..., Any]) -> None:
        """Put the case to a target: a function as `regardant.conformance.adapter` describes it.

        Raises:
            NotOffered: the target does not claim what is asked for; pytest reports it as skipped.
            Mismatch: something else came than what is right; an AssertionError.
            Exception: whatever the target raises.
        """
        from regardant.conformance import judge

        judge.judge(self, target)

    def __str__(self) -> str:
        return self.name
