"""Attention on torch tensors that lie on the CPU: the same op, on the same memory, without a copy.

It refuses tensors on other devices and tensors whose gradient is wanted, since no backward pass is there to
give it; nothing is moved or detached silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import torch

from regardant import ops

if TYPE_CHECKING:
    from regardant.problem import Array


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`regardant.attention` on tensors: the same shapes, options, results and errors, tensors in and out.

    Args:
        q: queries (B, H, T, D), float64, float32, float16 or bfloat16, on the CPU.
        k: keys (B, G, S, D). `v`: values (B, G, S, E). Any strides.
        options: those of `regardant.attention`; array-valued ones as tensors.

    Returns:
        out (B, H, T, E) in q's type; with `return_lse=True` also lse (B, H, T).

    Raises:
        TypeError, ValueError: as `regardant.attention`; also a tensor on another device, or one whose gradient
            is wanted.
    """
    named = {"q": q, "k": k, "v": v} | options
    arrays = {name: _array(name, given) for name, given in named.items()}
    result = ops.attention(**arrays)
    return tuple(map(_tensor, result)) if isinstance(result, tuple) else _tensor(result)


def _array(name: str, given: Any) -> Any:
    """The tensor's own memory as a NumPy array; pairs of tensors by part, all else as it is."""
    if isinstance(given, tuple | list):
        return tuple(_array(name, part) for part in given)
    if not isinstance(given, torch.Tensor):
        return given
    if given.device.type != "cpu":
        raise ValueError(f"attention: {name} must be a CPU tensor; got one on {given.device}")
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"attention: {name} must not require a gradient, there is no backward pass here; "
            "use torch.no_grad() or detach it"
        )
    plain = given.detach()
    if (
        plain.dtype == torch.bfloat16
    ):  # NumPy has no such type of its own: the same bits under ml_dtypes' name
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def _tensor(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
