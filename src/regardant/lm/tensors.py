"""What the model does in another way on torch tensors, because gradients have to come back through it.

torch keeps, and makes anew on the way back, an array for nearly every step of a formula; memory for them costs more
than the arithmetic. Here a formula and its derivative are one step of the graph each. Refused: nothing.

Shape legend: ... rows of any rank, N of them, C width.
"""

from __future__ import annotations

from typing import Any

import torch


class _RMSNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain_C: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        shrink = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, gain_C, shrink)
        return (wide * shrink).to(x.dtype) * gain_C

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With r = 1/√(mean(x²) + eps) and n = x·r:  dgain = Σ dy·n  and  dx = r·(dy·gain − n·mean(dy·gain·n)).
        x, gain_C, shrink = ctx.saved_tensors
        normed, dy = _wide(x) * shrink, _wide(dy)
        product_NC = (dy * normed).reshape(-1, x.shape[-1])
        dgain_C = product_NC.sum(dim=0)
        wide_gain_C = _wide(gain_C)
        share = (product_NC @ wide_gain_C).reshape(shrink.shape) / x.shape[-1]
        dx = torch.addcmul(dy * wide_gain_C, normed, share, value=-1) * shrink
        return dx.to(x.dtype), dgain_C.to(gain_C.dtype), None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in {torch.float32, torch.float64} else x.float()


def rms_norm(x: torch.Tensor, gain_C: torch.Tensor, eps: float) -> torch.Tensor:
    """As `regardant.lm.model.rms_norm`. Memory for gradients: x, and one number a row."""
    if torch.compiler.is_compiling():  # it makes one step of the formula, and of its derivative, by itself
        wide = _wide(x)
        return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * gain_C
    y: torch.Tensor = _RMSNorm.apply(x, gain_C, eps)
    return y
