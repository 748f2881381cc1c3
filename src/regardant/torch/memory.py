"""CPU tensors as NumPy arrays and back: the same memory under the other library's name, never a copy.

It refuses nothing: only tensors that lie on the CPU come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import torch

if TYPE_CHECKING:
    from regardant.problem import Array

BFLOAT16 = ml_dtypes.bfloat16


def as_array(tensor: torch.Tensor) -> Array:
    """The tensor's memory as a NumPy array, whether or not its gradient is wanted."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if (
        tensor.dtype == torch.bfloat16
    ):  # NumPy has no such type of its own: the same bits under ml_dtypes' name
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    array: Array = tensor.numpy()
    return array


def as_tensor(array: Array) -> torch.Tensor:
    """The array's memory as a tensor."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def maybe_array(tensor: torch.Tensor | None) -> Array | None:
    """As `as_array`, and None for none."""
    return None if tensor is None else as_array(tensor)
