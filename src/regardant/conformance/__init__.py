"""A conformance kit for any attention function: named cases, each with the right answer and why it is right.

    import pytest
    from regardant.conformance import cases

    @pytest.mark.parametrize("case", cases, ids=str)
    def test_attention(case):
        case.check(my_attention)        # what it does not offer is skipped, and says so

`my_attention(q, k, v, *, causal=True, scale=None, …)` takes and gives NumPy arrays; what it offers is what its
keywords name (`target`). From the command line: `regardant check my_module:my_attention`. Needs NumPy alone;
adapters of other libraries import those when they are named. It refuses nothing: what is wrong is reported.
"""

from regardant.conformance.case import Call, Case, Mismatch, NotOffered
from regardant.conformance.catalogue import CASES as cases  # noqa: N811 - a plain tuple, to be iterated over
from regardant.conformance.target import Convention, Target, adapter

__all__ = ["Call", "Case", "Convention", "Mismatch", "NotOffered", "Target", "adapter", "cases", "select"]


def select(patterns: str) -> tuple[Case, ...]:
    """The cases whose names fit one of several patterns, separated by commas: `dead-rows/*,gradients/*`.

    A family's name alone stands for all of it.

    Raises:
        ValueError: a pattern that no case fits.
    """
    from fnmatch import fnmatchcase

    fitting = {
        pattern.strip(): {
            case.name
            for case in cases
            if pattern.strip() == case.family or fnmatchcase(case.name, pattern.strip())
        }
        for pattern in patterns.split(",")
    }
    for pattern, names in fitting.items():
        if not names:
            raise ValueError(f"no case is named {pattern!r}")
    wanted = set().union(*fitting.values())
    return tuple(case for case in cases if case.name in wanted)
