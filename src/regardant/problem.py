"""Every check of attention's shapes, types and options, made once, before an implementation is chosen.

`problem` turns what a caller passed into a frozen `Problem` that every implementation can trust: four axes
everywhere, options broadcast (as views, never copied), defaults filled in. It refuses what the definition gives
no meaning to, in one sentence that names the argument, what was expected and what came.

Shape legend: B batch, H query heads, G key/value heads (H a multiple of G), T queries, S keys,
D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, DTypeLike

Array: TypeAlias = np.ndarray[Any, Any]

FLOATS = ("float64", "float32", "float16", "bfloat16")

# Positions are int64 in the arithmetic of masks; sums of a position and an offset must stay inside it.
FARTHEST = 2**62

# Longest axis of a result that a caller may ask for.
LONGEST = 2**31 - 1

# Bits from which on an integer in an error is told by its length.
WORDY = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Attention's arguments, checked and put into one form. Make one with `problem`.

    Attributes:
        q_BHTD: queries. `k_BGSD`: keys. `v_BGSE`: values. All of one floating type, any strides.
        rank: how many axes the caller's arrays had (2, 3 or 4); results go back in that rank.
        causal: whether key j is hidden from query i unless j <= offset + i.
        offset: the position of the first query among the keys.
        window: how many keys, its own included, a query reaches back over; None for all.
        starts_B: first visible key per batch row. `lengths_B`: first invisible one after it.
        segments: document ids of queries (B, T) and keys (B, S), or None.
        mask_BHTS: boolean view, True = visible, or None. `bias_BHTS`: additive view, or None.
        bias_sizes: the bias's own axes, filled up to four: 1 where `bias_BHTS` repeats it.
        alibi_H: slopes, or None. `sinks_H`: logits, or None. Both in the accumulation type.
        softcap: bound on the scores, or None. `scale`: factor on q·k.
    """

    q_BHTD: Array
    k_BGSD: Array
    v_BGSE: Array
    rank: int
    causal: bool
    offset: int
    window: int | None
    starts_B: Array
    lengths_B: Array
    segments: tuple[Array, Array] | None
    mask_BHTS: Array | None
    bias_BHTS: Array | None
    bias_sizes: tuple[int, ...]
    alibi_H: Array | None
    softcap: float | None
    sinks_H: Array | None
    scale: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        B, H, T, D = self.q_BHTD.shape
        _, G, S, E = self.v_BGSE.shape
        return B, H, G, T, S, D, E

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The type of scores, sums and statistics: float64 for float64 input, float32 for all else."""
        return np.dtype(np.float64 if self.q_BHTD.dtype == np.float64 else np.float32)

    def head(self, h: int) -> Problem:
        """The problem of query head h alone, with the key/value head that it reads; views only."""
        _, H, G, *_ = self.sizes
        return self._only(slice(h, h + 1), h // (H // G))

    def group(self, g: int) -> Problem:
        """The problem of key/value head g alone, with the query heads that read it; views only."""
        _, H, G, *_ = self.sizes
        return self._only(slice(g * (H // G), (g + 1) * (H // G)), g)

    def _only(self, heads: slice, g: int) -> Problem:
        return dataclasses.replace(
            self,
            q_BHTD=self.q_BHTD[:, heads],
            k_BGSD=self.k_BGSD[:, g : g + 1],
            v_BGSE=self.v_BGSE[:, g : g + 1],
            mask_BHTS=None if self.mask_BHTS is None else self.mask_BHTS[:, heads],
            bias_BHTS=None if self.bias_BHTS is None else self.bias_BHTS[:, heads],
            alibi_H=None if self.alibi_H is None else self.alibi_H[heads],
            sinks_H=None if self.sinks_H is None else self.sinks_H[heads],
        )

    def restore(self, array: Array) -> Array:
        """Give a result with leading axes B and H the rank that the caller's arrays had."""
        return array.reshape(array.shape[4 - self.rank :])


def problem(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    offset: int | None,
    window: int | None,
    starts: ArrayLike | None,
    lengths: ArrayLike | None,
    segments: tuple[ArrayLike, ArrayLike] | None,
    mask: Array | None,
    bias: Array | None,
    alibi: ArrayLike | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    scale: float | None,
) -> Problem:
    """Check the arguments of the public function `op` and return them as a `Problem`.

    Raises:
        TypeError: an argument of the wrong kind or type.
        ValueError: a shape or a value that does not fit; both name the argument and what was expected.
    """
    rank = _check_tensors(op, q, k, v)
    if rank == 4:
        q_BHTD, k_BGSD, v_BGSE = q, k, v
    else:
        fill = (None,) * (4 - rank)
        q_BHTD, k_BGSD, v_BGSE = q[fill], k[fill], v[fill]
    B, H, T, D = q_BHTD.shape
    S = k_BGSD.shape[2]
    accumulator = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    return Problem(
        q_BHTD=q_BHTD,
        k_BGSD=k_BGSD,
        v_BGSE=v_BGSE,
        rank=rank,
        causal=flag(op, "causal", causal),
        # Farther away than every key is as far as any: clipped, so that positions stay within int64.
        offset=S - T if offset is None else min(integer(op, "offset", offset), FARTHEST),
        window=None if window is None else min(integer(op, "window", window, low=1), FARTHEST),
        starts_B=_bounds(op, "starts", starts, B, S, default=0),
        lengths_B=_bounds(op, "lengths", lengths, B, S, default=S),
        segments=None if segments is None else _segments(op, segments, rank, (B, T), (B, S)),
        mask_BHTS=None if mask is None else _mask(op, mask, (B, H, T, S)),
        bias_BHTS=None if bias is None else _bias(op, bias, (B, H, T, S)),
        bias_sizes=() if bias is None else (1,) * (4 - bias.ndim) + bias.shape,
        alibi_H=None if alibi is None else _per_head(op, "alibi", alibi, H, accumulator),
        softcap=None if softcap is None else _softcap(op, softcap, accumulator),
        sinks_H=None if sinks is None else _per_head(op, "sinks", sinks, H, accumulator),
        scale=1 / math.sqrt(D)
        if scale is None
        else _inside(op, "scale", number(op, "scale", scale), accumulator),
    )


def _check_tensors(op: str, q: Array, k: Array, v: Array) -> int:
    """Check q, k and v, each and against each other, and return their rank."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _check_array(op, name, array)
        if not _is_float(array.dtype):
            raise TypeError(f"{op}: {name} must be one of {', '.join(FLOATS)}; got {array.dtype}")
        if array.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must be {q.dtype} to match q; got {array.dtype}")
    check_shapes(op, q.shape, k.shape, v.shape)
    return q.ndim


def _check_array(op: str, name: str, array: Array) -> None:
    # A masked array would lose its mask without a word, and a matrix has two axes whatever is done to it.
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{op}: {name} must be a NumPy array; got {kind(array)}")


@functools.cache
def _is_float(dtype: np.dtype[Any]) -> bool:
    """Whether scores can be made of this type; remembered, because a dtype takes long to say its name."""
    return dtype.name in FLOATS and dtype.isnative


def check_shapes(op: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Check the shapes of q, k and v, whatever library they come from, each and against each other.

    Raises:
        ValueError: one that does not fit.
    """
    rank = len(q)
    if rank not in {2, 3, 4}:
        raise ValueError(f"{op}: q must be (B, H, T, D), (H, T, D) or (T, D); got {q}")
    width, batch = q[-1], q[:-3]
    if width == 0 or (v and v[-1] == 0):
        raise ValueError(f"{op}: q and v must be at least 1 wide; got {q} and {v}")
    if len(k) != rank or k[-1] != width or k[:-3] != batch:
        wanted = ", ".join([*map(str, batch), *(["G"] if rank > 2 else []), "S", str(width)])
        raise ValueError(f"{op}: k must be ({wanted}) to match q {q}; got {k}")
    if len(v) != rank or v[:-1] != k[:-1]:
        wanted = ", ".join([*map(str, k[:-1]), "E"])
        raise ValueError(f"{op}: v must be ({wanted}) to match k {k}; got {v}")
    if rank > 2:
        heads, kv_heads = q[-3], k[-3]
        if heads % kv_heads if kv_heads else heads:
            raise ValueError(f"{op}: q's heads must be a multiple of k's; got {heads} and {kv_heads}")


def _bounds(op: str, name: str, given: ArrayLike | None, B: int, S: int, *, default: int) -> Array:
    if given is None:
        return _same_bound(B, default)
    bounds = _integers(op, name, given)
    if bounds.shape != (B,):
        raise ValueError(f"{op}: {name} must be ({B},), one number per batch row; got {bounds.shape}")
    outside = bounds[(bounds < 0) | (bounds > S)]
    if outside.size:
        raise ValueError(f"{op}: {name} must lie between 0 and the {S} keys; got {outside[0]}")
    return bounds.astype(np.int64)


@functools.lru_cache(maxsize=64)
def _same_bound(B: int, bound: int) -> Array:
    """One bound for every batch row; kept, because every layer of a decoding step asks for the same."""
    bounds = np.full(B, bound, np.int64)
    bounds.flags.writeable = False
    return bounds


def _segments(
    op: str,
    given: tuple[ArrayLike, ArrayLike],
    rank: int,
    q_shape: tuple[int, int],
    k_shape: tuple[int, int],
) -> tuple[Array, Array]:
    checked = []
    q_ids, k_ids = pair(op, given)
    for name, ids, shape in (("queries", q_ids, q_shape), ("keys", k_ids, k_shape)):
        array = _integers(op, f"segments of the {name}", ids)
        if array.shape != shape and not (rank < 4 and array.shape == shape[1:]):
            raise ValueError(f"{op}: segments of the {name} must be {shape}; got {array.shape}")
        checked.append(array.reshape(shape))
    return checked[0], checked[1]


def _mask(op: str, given: Array, shape: tuple[int, int, int, int]) -> Array:
    if not isinstance(given, np.ndarray) or given.dtype != np.bool:
        raise TypeError(f"{op}: mask must be a boolean NumPy array, True = visible; got {kind(given)}")
    return _broadcast(op, "mask", given, shape)


def _bias(op: str, given: Array, shape: tuple[int, int, int, int]) -> Array:
    if not isinstance(given, np.ndarray) or not _is_float(given.dtype):
        raise TypeError(f"{op}: bias must be a floating NumPy array, added to the scores; got {kind(given)}")
    return _broadcast(op, "bias", given, shape)


def _broadcast(op: str, name: str, given: Array, shape: tuple[int, int, int, int]) -> Array:
    _check_array(op, name, given)
    fits = given.ndim <= 4 and all(
        have in {1, want} for have, want in zip(given.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{op}: {name} must broadcast to (B, H, T, S) = {shape}; got {given.shape}")
    return np.broadcast_to(given, shape)


def _per_head(op: str, name: str, given: ArrayLike, H: int, dtype: DTypeLike) -> Array:
    array = _listed(op, name, given)
    if array.dtype.kind not in "iu" and array.dtype.name not in FLOATS:
        raise TypeError(f"{op}: {name} must be numbers; got {array.dtype}")
    if array.shape != (H,):
        raise ValueError(f"{op}: {name} must be ({H},), one number per query head; got {array.shape}")
    with np.errstate(over="ignore"):  # looked for below
        numbers_H: Array = array.astype(dtype)
    allowed = np.isfinite(numbers_H) | (name == "sinks") & np.isneginf(array)  # a sink of −∞ is none
    if not allowed.all():
        raise ValueError(
            f"{op}: {name} must be finite in {np.dtype(dtype)}, the type of scores; got {array[~allowed][0]}"
        )
    return numbers_H


def _listed(op: str, name: str, given: ArrayLike) -> Array:
    try:
        return np.asarray(given)
    except ValueError:  # lists of unequal length
        raise ValueError(f"{op}: {name} must be one flat list; got lists of unequal length") from None


def pair(op: str, segments: Any) -> tuple[Any, Any]:
    """Split `segments` into the ids of the queries and those of the keys.

    Raises:
        TypeError: anything but a pair.
    """
    if not isinstance(segments, tuple | list) or len(segments) != 2:
        raise TypeError(
            f"{op}: segments must be a pair, ids of the queries and of the keys; got {kind(segments)}"
        )
    return segments[0], segments[1]


def flag(op: str, name: str, given: Any) -> bool:
    """Check a yes or no.

    Raises:
        TypeError: anything else, 0 and 1 included.
    """
    if not isinstance(given, bool | np.bool):
        raise TypeError(f"{op}: {name} must be True or False; got {kind(given)}")
    return bool(given)


def _softcap(op: str, given: float, accumulator: np.dtype[Any]) -> float:
    softcap = number(op, "softcap", given)
    if softcap <= 0:
        raise ValueError(f"{op}: softcap must be greater than 0, or None for no cap; got {given}")
    return _inside(op, "softcap", softcap, accumulator)


def _inside(op: str, name: str, given: float, accumulator: np.dtype[Any]) -> float:
    """Refuse a number that the type of scores has no room for."""
    if abs(given) > float(np.finfo(accumulator).max):
        raise ValueError(f"{op}: {name} must be finite in {accumulator}, the type of scores; got {given}")
    return given


def number(op: str, name: str, given: Any) -> float:
    """Check a finite number.

    Raises:
        TypeError: it is no number. `ValueError`: it is not finite.
    """
    if not isinstance(given, numbers.Real | np.floating) or isinstance(given, bool):
        raise TypeError(f"{op}: {name} must be a number; got {kind(given)}")
    try:
        value = float(given)
    except OverflowError:  # an integer
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{op}: {name} must be finite; got {kind(given)}")
    return value


def integer(op: str, name: str, given: Any, *, low: int = -FARTHEST, high: int | None = None) -> int:
    """Check a whole number of at least `low` and at most `high`.

    Raises:
        TypeError: it is no whole number. `ValueError`: it is too low or too high.
    """
    if isinstance(given, bool | np.bool):
        raise TypeError(f"{op}: {name} must be an integer; got {kind(given)}")
    try:
        whole = operator.index(given)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer; got {kind(given)}") from None
    if whole < low:
        raise ValueError(f"{op}: {name} must be at least {low}; got {kind(whole)}")
    if high is not None and whole > high:
        raise ValueError(f"{op}: {name} must be at most {high}; got {kind(whole)}")
    return whole


def _integers(op: str, name: str, given: ArrayLike) -> Array:
    array = _listed(op, name, given)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{op}: {name} must be integers of 64 bits at most; got {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{op}: {name} must be at most 2**63 - 1; got {array.max()}")
    return array if array.dtype.kind in "iu" else array.astype(np.int64)


def kind(given: object) -> str:
    """What came, in a few words: an array by type and shape, a plain value by its text, all else by class."""
    if isinstance(given, np.ndarray):
        return f"{type(given).__name__} of {given.dtype} {given.shape}"
    if isinstance(given, int) and given.bit_length() > WORDY:
        return f"an integer of {given.bit_length()} bits"
    if given is None or isinstance(given, str | int | float | bool):
        return repr(given)
    return f"{type(given).__module__}.{type(given).__qualname__}"


def indices(op: str, name: str, given: int | Sequence[int] | Array, count: int) -> Array:
    """Check positions on an axis of `count` entries; negative ones count from its end. Returns them >= 0."""
    array = np.atleast_1d(_integers(op, name, given)).astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"{op}: {name} must be a number or a flat list of them; got shape {array.shape}")
    outside = array[(array < -count) | (array >= count)]
    if outside.size:
        raise ValueError(f"{op}: {name} must lie between {-count} and {count - 1}; got {outside[0]}")
    return np.where(array < 0, array + count, array)


@dataclasses.dataclass(frozen=True)
class Watch:
    """What `look` keeps besides the output: `top` keys per row, column sums, pooled mass. Make it with `watch`."""

    top: int
    received: bool
    pooled: tuple[int, int] | None


def watch(op: str, *, top: int, received: bool, pooled: tuple[int, int] | None) -> Watch:
    """Check what the public function `op` was asked to keep."""
    if pooled is not None:
        if not isinstance(pooled, tuple | list) or len(pooled) != 2:
            raise TypeError(f"{op}: pooled must be a pair (query blocks, key blocks); got {kind(pooled)}")
        pooled = (
            integer(op, "pooled's query blocks", pooled[0], low=1, high=LONGEST),
            integer(op, "pooled's key blocks", pooled[1], low=1, high=LONGEST),
        )
    return Watch(integer(op, "top", top, low=0, high=LONGEST), flag(op, "received", received), pooled)


def arrived(
    op: str, problem: Problem, *, out: Array, lse: Array, dout: Array, dlse: Array | None, bias_gradient: bool
) -> tuple[Array, Array, Array, Array | None]:
    """Check what the public function `op` is to go backward from; returns out, lse, dout and dlse with all axes.

    Raises:
        TypeError, ValueError: as `problem`.
    """
    if flag(op, "bias_gradient", bias_gradient) and problem.bias_BHTS is None:
        raise ValueError(f"{op}: bias must be given for bias_gradient=True; got None")
    B, H, _, T, _, _, E = problem.sizes
    narrow, wide = problem.q_BHTD.dtype, problem.accumulator
    return (
        _result(op, problem, "out", out, narrow, (B, H, T, E)),
        _result(op, problem, "lse", lse, wide, (B, H, T)),
        _result(op, problem, "dout", dout, narrow, (B, H, T, E)),
        None if dlse is None else _result(op, problem, "dlse", dlse, wide, (B, H, T)),
    )


def _result(
    op: str, problem: Problem, name: str, array: Array, dtype: np.dtype[Any], full: tuple[int, ...]
) -> Array:
    """Check one of the forward pass's results, or the gradient arriving at it, and give it all its axes."""
    _check_array(op, name, array)
    q, v = problem.q_BHTD, problem.v_BGSE
    if array.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype} to go with q of {q.dtype}; got {array.dtype}")
    missing = 4 - problem.rank  # axes that the caller's arrays do not have
    shape = full[missing:]
    if array.shape != shape:
        like = f"q {q.shape[missing:]}" + (f" and v {v.shape[missing:]}" if len(full) == 4 else "")
        raise ValueError(f"{op}: {name} must be {shape} to match {like}; got {array.shape}")
    return array.reshape(full)
