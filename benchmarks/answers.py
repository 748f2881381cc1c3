"""Whether a fast answer is a right one: rows of attention drawn at random, computed exactly in float64.

The budget is derived (DESIGN.md, section 2): at most twice the error of the naive computation in the same input type,
plus one rounding of the output. Up to `WRONG` times that is imprecise, and a mark that is missed; more is wrong. An
error is that of a whole row, relative to the row's largest number, so that late rows, whose outputs are small, are
held to the same standard as early ones.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width; N rows
of the sample.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Array: TypeAlias = np.ndarray[Any, Any]
Quantity: TypeAlias = "Callable[[Array, Array], Array]"

ORDERS = 4  # of summation: how large an error is to be expected is not for one of them to say
HEAVIEST = 8
WRONG = 4  # times the budget; other libraries have no budget of ours to keep, but must be right


class Work(NamedTuple):
    """One call of causal attention: the last query stands at the last key; `window` keys are seen, or all.

    There are as many queries as keys, or one query: so the libraries that count positions from the first key and
    those that count from the last mean the same.
    """

    q_BHTD: Array
    k_BGSD: Array
    v_BGSE: Array
    window: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        B, H, T, D = self.q_BHTD.shape
        _, G, S, E = self.v_BGSE.shape
        return B, H, G, T, S, D, E

    @property
    def dtype(self) -> str:
        """The inputs' type by name."""
        return str(self.q_BHTD.dtype.name)

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key, in all heads and batch rows."""
        B, H, _, T, S, *_ = self.sizes
        return B * H * visible_pairs(T, S, self.window)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, over visible pairs alone."""
        *_, D, E = self.sizes
        return 2 * self.pairs * (D + E)


def visible_pairs(T: int, S: int, window: int | None = None) -> int:
    """How many pairs of a query and a key one head sees, the last query standing at the last key."""
    seen_T = np.arange(S - T + 1, S + 1).clip(0, S if window is None else window)
    return int(seen_T.sum())


def visible(T: int, S: int, window: int | None = None) -> Array:
    """Those pairs as a boolean matrix (T, S), True = visible."""
    back_TS = np.arange(S - T, S)[:, None] - np.arange(S)
    return (back_TS >= 0) & (back_TS < (S if window is None else window))


def random_work(
    B: int,
    H: int,
    G: int,
    T: int,
    D: int,
    *,
    dtype: str = "float32",
    window: int | None = None,
    seed: int = 0,
) -> Work:
    """Normal queries, keys and values, T of each, in the type named."""
    rng = np.random.default_rng(seed)
    q, k, v = (normal(rng, (B, heads, T, D), dtype) for heads in (H, G, G))
    return Work(q, k, v, window)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Normal numbers in any of the four types."""
    return rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.finfo(dtype).dtype, copy=False)


def row(
    work: Work, place: Sequence[int], wide: type[np.floating[Any]], order: int = 0
) -> tuple[Array, Array]:
    """Weights over all S keys and output of one row (b, h, i), by the definition, computed in the type `wide`.

    The weights go by way of lse, as those do that are told after the fact; the output does not.
    `order` other than 0 sums over widths and keys in another order, which is neither more nor less naive.
    """
    b, h, i = place
    _, H, G, T, S, D, _ = work.sizes
    end = S - T + i + 1
    begin = 0 if work.window is None else max(0, end - work.window)
    g = h // (H // G)
    q_D = work.q_BHTD[b, h, i].astype(wide)
    k_JD, v_JE = (array[b, g, begin:end].astype(wide) for array in (work.k_BGSD, work.v_BGSE))
    keys_J = np.arange(begin, end)
    if order:
        rng = np.random.default_rng(order)
        d, j = rng.permutation(D), rng.permutation(end - begin)
        q_D, k_JD, v_JE, keys_J = q_D[d], k_JD[j][:, d], v_JE[j], keys_J[j]
    s_J = (k_JD @ q_D) * wide(1 / math.sqrt(D))
    e_J = np.exp(s_J - s_J.max())
    a_S = np.zeros(S, wide)
    a_S[keys_J] = np.exp(s_J - (s_J.max() + np.log(e_J.sum())))
    return a_S, (e_J / e_J.sum()) @ v_JE


def output(_a_S: Array, out_E: Array) -> Array:
    """Of a row, what `attention` gives."""
    return out_E


def heaviest(a_S: Array, _out_E: Array) -> Array:
    """Of a row, its largest weights, the largest first."""
    return np.sort(a_S)[::-1][:HEAVIEST]


def entropy(a_S: Array, _out_E: Array) -> Array:
    """Of a row, the entropy of its weights in nats, as an array of one number."""
    some = a_S[a_S > 0]
    return -(some * np.log(some)).sum(keepdims=True)


def weights(a_S: Array, _out_E: Array) -> Array:
    """Of a row, all of its weights."""
    return a_S


class Sample(NamedTuple):
    """One quantity of N rows, exactly, and how far from it an answer may be.

    Attributes:
        places: (b, h, i) of each row, or the place of whatever else was computed.
        exact: each row's numbers, float64.
        budget: the error that is to be expected at most, relative to a row's largest number.
    """

    places: list[tuple[int, ...]]
    exact: list[Array]
    budget: float

    def error(self, rows: Iterable[Array]) -> float:
        """Largest error of these rows; NaN if there is a NaN."""
        return largest(map(relative, rows, self.exact))

    def error_in(self, whole_BHTE: Array) -> float:
        """Largest error of the sampled rows of a whole answer."""
        return self.error(whole_BHTE[place] for place in self.places)


def sample(
    work: Work, quantity: Quantity = output, *, count: int = 48, seed: int = 1, places: Any = None
) -> Sample:
    """Compute `count` rows of `work`, drawn at random without repetition (or those at `places`), exactly."""
    if places is None:
        B, H, _, T, *_ = work.sizes
        drawn = np.random.default_rng(seed).choice(B * H * T, min(count, B * H * T), replace=False)
        places = [tuple(map(int, np.unravel_index(at, (B, H, T)))) for at in drawn]
    exact = [quantity(*row(work, place, np.float64)) for place in places]
    result = work.q_BHTD.dtype if quantity is output else np.dtype(np.float32)  # statistics are float32
    naive = largest(
        relative(quantity(*row(work, place, np.float32, order)).astype(result), true)
        for place, true in zip(places, exact, strict=True)
        for order in range(ORDERS)
    )
    return Sample(places, exact, budget(naive, result))


def budget(naive: float, dtype: Any) -> float:
    """Twice the naive computation's error, plus one rounding to `dtype`."""
    return 2 * naive + float(ml_dtypes.finfo(dtype).eps)


def relative(got: Array, exact: Array) -> float:
    """Largest difference, relative to the largest exact number."""
    return float(np.abs(got.astype(np.float64) - exact).max() / np.abs(exact).max())


def largest(errors: Iterable[float]) -> float:
    """Largest of some errors; NaN if one is NaN, which Python's `max` may overlook."""
    return float(np.max(np.fromiter(errors, np.float64)))


def right(error: float, budget: float) -> bool:
    """Whether an answer with this error is right, if perhaps imprecise; one with NaN never is."""
    return error <= WRONG * budget
