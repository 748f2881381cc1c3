"""The same op on torch tensors: `attention` and `look`, with the shapes, options, results and errors of NumPy's.

CPU tensors go to the compiled kernels with the memory that they have, nothing is copied; `torch.compile` and
`torch.export` see one operator (`regardant::attention`).

Refused: tensors on different devices, mixed types, and whatever `regardant.attention` refuses.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch

from regardant import problem as problems
from regardant.looks import Look
from regardant.torch import autograd, library
from regardant.torch.options import Options, checked

__all__ = ["attention", "look"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: Any = None,
    lengths: Any = None,
    segments: Any = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    scale: float | None = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Any:
    """`regardant.attention` on tensors: the same shapes, options, results and errors, tensors in and out.

    Args:
        q: queries (B, H, T, D), float64, float32, float16 or bfloat16.
        k: keys (B, G, S, D). `v`: values (B, G, S, E). Any strides; rank 3 and 2 as there.
        causal, offset, window, starts, lengths, segments, mask, bias, alibi, softcap, sinks, scale: as there, what
            is an array there as a tensor on q's device; one number per row or head may be a list too.
        impl: "auto", "native", "blocked" or "reference".
        return_lse: also return lse.

    Returns:
        out (B, H, T, E) in q's type; with `return_lse` also lse (B, H, T), float32 (float64 for float64).

    Raises:
        TypeError, ValueError: as `regardant.attention`; also tensors on different devices.
    """
    options = checked(
        "attention", q, k, v, causal=causal, offset=offset, window=window, starts=starts, lengths=lengths,
        segments=segments, mask=mask, bias=bias, alibi=alibi, softcap=softcap, sinks=sinks, scale=scale, impl=impl,
    )  # fmt: skip
    out, lse = autograd.attention(q, k, v, *options)
    return (out, lse) if return_lse else out


def look(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: Any = None,
    lengths: Any = None,
    segments: Any = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    scale: float | None = None,
    impl: str = "auto",
    top: int = 8,
    received: bool = False,
    pooled: tuple[int, int] | None = None,
) -> Look:
    """`regardant.look` on tensors: attention, and where each query drew its information, as tensors.

    Args:
        q: queries. `k`: keys. `v`: values. They, and the options up to `impl`, are as in `attention`.
        top: how many of the heaviest keys to keep per row. `received`: also sum each key's weight over all queries.
        pooled: (R, C): also sum the weights over R blocks of queries by C blocks of keys.

    Returns:
        A `regardant.Look` of tensors, `rows()` included; its `out` has the same bits as `attention` gives. Memory:
        as `regardant.look`.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    watch = problems.watch("look", top=top, received=received, pooled=pooled)
    options = checked(
        "look", q, k, v, causal=causal, offset=offset, window=window, starts=starts, lengths=lengths,
        segments=segments, mask=mask, bias=bias, alibi=alibi, softcap=softcap, sinks=sinks, scale=scale, impl=impl,
    )  # fmt: skip
    seen = autograd.look(q, k, v, *options, watch.top, watch.received, watch.pooled)
    out, lse, max_logit, entropy, sink_weight, top_keys, top_weights, columns, mass = seen
    return Look(
        out, lse, max_logit, entropy, sink_weight, top_keys, top_weights, _Source(q, k, v, options), _weights,
        columns if watch.received else None, None if watch.pooled is None else mass,
    )  # fmt: skip


class _Source:
    """What a `Look` of tensors keeps to compute rows from: references, no copies."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> None:
        self.tensors = q, k, v
        self.options = options

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        q, k, v = self.tensors
        B, H, T, D = (1, 1, *q.shape)[-4:]
        G = (1, *k.shape)[-3]
        return B, H, G, T, k.shape[-2], D, v.shape[-1]

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """The operator gives back the rank that it was given."""
        return tensor


def _weights(source: _Source, lse_BHT: torch.Tensor, queries_N: Any, heads_M: Any) -> torch.Tensor:
    q, k, v = source.tensors
    return library.rows(
        q, k, v, lse_BHT, torch.as_tensor(queries_N, device=q.device), torch.as_tensor(heads_M, device=q.device),
        *source.options,
    )  # fmt: skip
