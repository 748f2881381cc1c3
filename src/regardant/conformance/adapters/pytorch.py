"""torch's `scaled_dot_product_attention`: causal, a boolean or an additive mask, a scale, grouped heads, gradients.

Not offered: offsets other than 0 and S − T, windows, lengths, documents, ALiBi, softcap, sinks, lse; and, as it
refuses them itself, a mask or bias together with causality, and both together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from regardant.conformance.adapters import tensors
from regardant.conformance.case import NotOffered
from regardant.conformance.target import Convention, adapter

if TYPE_CHECKING:
    import torch

    from regardant.problem import Array

TOP_LEFT = Convention(
    "causal mask aligned top-left",
    "is_causal aligns top-left where there are other numbers of queries and keys; "
    "torch.nn.attention.bias.causal_lower_right is there for the other alignment",
    "documentation of torch.nn.functional.scaled_dot_product_attention",
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    offset: int | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """One call of torch's function."""
    if mask is not None and bias is not None:
        raise NotOffered("mask and bias together")
    added: Any = bias if mask is None else mask
    if causal and added is not None:
        raise NotOffered("causality together with a mask or bias")
    if causal and offset not in {None, 0}:
        if offset != k.shape[2] - q.shape[2]:
            raise NotOffered(f"offset {offset}")
        causal, added = False, causal_lower_right(q.shape[2], k.shape[2])
    if added is not None and added.ndim < 2:
        added = added.expand(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(
        q, k, v, attn_mask=added, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@adapter(types=tensors.TYPES, packages=("torch",), conventions=(TOP_LEFT,))
def target(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    offset: int | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    dout: Array | None = None,
    bias_gradient: bool = False,
    threads: int | None = None,
) -> Any:
    """`scaled_dot_product_attention`; what is causal by default is its `is_causal`."""
    options = {"causal": causal, "offset": offset, "mask": mask, "bias": bias, "scale": scale}
    learned = ("", "bias") if bias_gradient else ()
    return tensors.answer(attend, q, k, v, options=options, learned=learned, dout=dout, threads=threads)
