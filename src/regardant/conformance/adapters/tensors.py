"""What torch's adapters share: NumPy arrays as tensors and back, and gradients by automatic differentiation.

Refused: element types that torch does not have, and what torch cannot take as a view is copied, as its users would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regardant.problem import Array

TYPES = ("float64", "float32", "float16", "bfloat16")


def tensor(array: Array) -> torch.Tensor:
    """The array as a tensor. torch has neither negative strides nor read-only memory: such arrays are copied."""
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: torch.Tensor) -> Array:
    """The tensor as an array."""
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        import ml_dtypes

        bits: Array = plain.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    numbers: Array = plain.numpy()
    return numbers


def answer(
    compute: Callable[..., Any],
    q: Array,
    k: Array,
    v: Array,
    *,
    options: Mapping[str, Any],
    learned: tuple[str, ...] = (),
    dout: Array | None = None,
    dlse: Array | None = None,
    threads: int | None = None,
) -> Any:
    """What `compute(q, k, v, **options)` gives on tensors: its results or, with `dout`, gradients.

    Args:
        compute: a function of tensors that gives out, or (out, lse).
        q, k, v: arrays. `options`: passed on, arrays among them as tensors.
        learned: the options whose gradients are wanted as well, in the order of dsinks and dbias, or "" for none
        there.
        dout: the gradient arriving at out. `dlse`: at lse. `threads`: how many torch may use.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        tensors = [tensor(given).requires_grad_(dout is not None) for given in (q, k, v)]
        given = {name: _option(option) for name, option in options.items()}
        leaves = [*tensors, *(given[name].requires_grad_() for name in learned if name)]
        result = compute(*tensors, **given)
        if dout is None:
            return tuple(map(array, result)) if isinstance(result, tuple) else array(result)
        out, *rest = result if isinstance(result, tuple) else (result,)
        ends, arriving = [out], [tensor(dout)]
        if dlse is not None:
            ends, arriving = [out, *rest], [tensor(dout), tensor(dlse)]
        made = iter(torch.autograd.grad(ends, leaves, arriving, allow_unused=True, materialize_grads=True))
        gradients = [array(next(made)) for _ in tensors]
        return (*gradients, *(array(next(made)) if name else None for name in learned))
    finally:
        if threads is not None:
            torch.set_num_threads(before)


def _option(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(_option(part) for part in given)
    return tensor(given) if isinstance(given, np.ndarray) else given
