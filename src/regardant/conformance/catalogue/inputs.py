"""Inputs that the cases share: calls drawn from a random generator, and options of the right shapes.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.conformance.case import Call, NotOffered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regardant.problem import Array


def kind(name: str) -> np.dtype[Any]:
    """An element type by name.

    Raises:
        NotOffered: bfloat16 without the package that brings it to NumPy.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise NotOffered("bfloat16 without the package ml_dtypes") from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def draw(
    rng: np.random.Generator,
    *,
    B: int = 2,
    H: int = 4,
    G: int = 2,
    T: int = 9,
    S: int = 9,
    D: int = 8,
    E: int | None = None,
    dtype: str = "float32",
    spread: float = 2.0,
    lse: bool = False,
    **options: Any,
) -> Call:
    """A call of normal numbers, with scores spread widely enough that a wrong mask, scale or head shows."""
    number = kind(dtype)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, D if E is None else E))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    given = {name: option for name, option in options.items() if option is not None}
    return Call((spread * q).astype(number), k.astype(number), v.astype(number), given, lse=lse)


def backwards(rng: np.random.Generator, call: Call, *, dlse: bool = False, bias: bool = False) -> Call:
    """The same call, asked for its gradients."""
    B, H, _, T, _, _, E = call.sizes
    dtype = call.q_BHTD.dtype
    accumulator = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return dataclasses.replace(
        call,
        lse=False,
        dout_BHTE=rng.standard_normal((B, H, T, E)).astype(dtype),
        dlse_BHT=rng.standard_normal((B, H, T)).astype(accumulator) if dlse else None,
        bias_gradient=bias,
    )


def with_arrays(call: Call, **changes: Array) -> Call:
    """The same call with other arrays: `q`, `k`, `v`."""
    names = {"q": "q_BHTD", "k": "k_BGSD", "v": "v_BGSE"}
    arrays: dict[str, Any] = {names[name]: array for name, array in changes.items()}
    return dataclasses.replace(call, **arrays)


def some_mask(rng: np.random.Generator, *shape: int) -> Array:
    """A mask that shows 60 % of the keys, and to every row at least one."""
    mask = rng.random(shape) < 0.6
    mask[..., rng.integers(shape[-1])] = True
    return mask


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Array:
    """Normal numbers of a type."""
    return rng.standard_normal(shape).astype(kind(dtype))


def spoil(call: Call, unseen: Any, bad: float, where: str = "kv") -> Call:
    """Put a bad number wherever `unseen`, (B, S) or (S,), says that no query of the batch row sees the key."""
    B, _, G, _, S, *_ = call.sizes
    at = np.broadcast_to(unseen.reshape((-1, 1, S)), (B, G, S))
    arrays = {"k": call.k_BGSD.copy(), "v": call.v_BGSE.copy()}
    for name in where:
        arrays[name][at] = bad
    return with_arrays(call, **arrays)


def documents(B: int, *lengths: int) -> Array:
    """Ids of documents packed side by side, (B, Σ lengths)."""
    return np.tile(np.repeat(np.arange(len(lengths)), lengths), (B, 1))


def paper_slopes(H: int) -> Array:
    """ALiBi's slopes by the paper's own rule: for other than powers of two, every other one of the next power's."""
    whole = 2 ** int(math.log2(H))
    slopes = [2.0 ** (-8 * (h + 1) / whole) for h in range(whole)]
    slopes += [2.0 ** (-8 * (h + 1) / (2 * whole)) for h in range(0, 2 * (H - whole), 2)]
    return np.array(slopes, np.float32)


def every_option(rng: np.random.Generator, B: int, H: int, T: int, S: int) -> Mapping[str, Any]:
    """All options together."""
    return {
        "offset": S - T + 1,
        "window": max(2, 3 * S // 4),
        "starts": rng.integers(0, S // 4 + 1, B),
        "lengths": rng.integers(3 * S // 4, S + 1, B),
        "segments": (np.sort(rng.integers(0, 2, (B, T)), -1), np.sort(rng.integers(0, 2, (B, S)), -1)),
        "mask": rng.random((B, 1, T, S)) < 0.7,
        "bias": normal(rng, H, T, S),
        "alibi": paper_slopes(H),
        "softcap": 3.0,
        "sinks": normal(rng, H),
        "scale": 0.5,
    }
