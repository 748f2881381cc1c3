"""Cross-entropy without the logits: a block of rows at a time, forward and backward in one go.

All logits of a batch would be rows × vocabulary numbers, and their gradients as many again. Here a block's logits are
made, turned into the loss and into their own gradient in place, multiplied on into what the gradients of the hidden
states and of the matrix take from it, and forgotten (Hsu et al. 2024, Liger Kernel). What is left for the backward
pass is a product with one number. What is made of logits is float32 at least, whatever the type of the hidden states.

Shape legend: N rows, C width, V vocabulary, n rows of one block.
"""

from __future__ import annotations

from typing import Any

import torch

# Logits of one block, in numbers: 4 MB of float32 stay in a processor's cache from one step to the next.
BLOCK = 1 << 20


def block_rows(vocabulary: int) -> int:
    """How many rows have their logits in memory at a time."""
    return max(16, BLOCK // vocabulary)


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: torch.Tensor, out_VC: torch.Tensor, labels_N: torch.Tensor, ignored: int
    ) -> torch.Tensor:
        wants_hidden, wants_out = ctx.needs_input_grad[:2]
        dhidden_NC = torch.empty_like(hidden_NC) if wants_hidden else None
        dout_VC = torch.zeros(out_VC.shape, dtype=_wide(out_VC), device=out_VC.device) if wants_out else None
        total = hidden_NC.new_zeros((), dtype=torch.float64)
        rows, all_count = block_rows(out_VC.shape[0]), bool((labels_N != ignored).all())
        for first in range(0, hidden_NC.shape[0], rows):
            h_nC, labels_n = hidden_NC[first : first + rows], labels_N[first : first + rows]
            counts_n1 = (labels_n != ignored)[:, None]
            targets_n1 = labels_n.clamp(min=0)[:, None]
            logp_nV = torch.log_softmax((h_nC @ out_VC.T).to(_wide(out_VC)), dim=-1)
            total -= torch.where(counts_n1, logp_nV.gather(1, targets_n1), 0.0).sum(dtype=torch.float64)
            if not (wants_hidden or wants_out):
                continue
            ds_nV = logp_nV.exp_()
            ds_nV.scatter_add_(1, targets_n1, ds_nV.new_full(targets_n1.shape, -1.0))
            ds_nV = (ds_nV if all_count else ds_nV.mul_(counts_n1)).to(h_nC.dtype)
            if dhidden_NC is not None:
                torch.mm(ds_nV, out_VC, out=dhidden_NC[first : first + rows])
            if dout_VC is not None:
                _add_product(dout_VC, ds_nV, h_nC)
        ctx.save_for_backward(dhidden_NC, dout_VC)
        ctx.out_type = out_VC.dtype
        return total.to(_wide(out_VC))

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dhidden_NC, dout_VC = ctx.saved_tensors
        return (
            None if dhidden_NC is None else dhidden_NC * dtotal.to(dhidden_NC.dtype),
            None if dout_VC is None else (dout_VC * dtotal).to(ctx.out_type),
            None,
            None,
        )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _add_product(total_VC: torch.Tensor, ds_nV: torch.Tensor, h_nC: torch.Tensor) -> None:
    if total_VC.dtype == h_nC.dtype:
        total_VC.addmm_(ds_nV.T, h_nC)
    else:
        total_VC.add_(ds_nV.T @ h_nC)


def cross_entropy(
    hidden_NC: torch.Tensor, out_VC: torch.Tensor, labels_N: torch.Tensor, ignored: int = -1
) -> torch.Tensor:
    """The sum over rows of −log softmax(hidden · outᵀ)[label], in nats; rows labelled `ignored` count nothing.

    Args:
        hidden_NC: the stream after the final norm. `out_VC`: the output matrix. `labels_N`: the ids that come next.
        ignored: a negative number.

    Memory: `BLOCK` logits, and with gradients a copy of `hidden_NC` and of `out_VC`.

    Returns:
        A number, float32 (float64 for float64), with gradients for `hidden_NC` and `out_VC`.
    """
    total: torch.Tensor = _CrossEntropy.apply(hidden_NC, out_VC, labels_N, ignored)
    return total
