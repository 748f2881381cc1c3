"""The op on tensors, as a caller sees it: the shapes, options, results and errors of `regardant`'s own.

CPU tensors go to the compiled kernels with the memory that they have, nothing is copied; `torch.compile` and
`torch.export` see one operator. Other devices: `regardant.torch.devices`.

Refused: tensors on different devices, mixed types, and whatever `regardant.attention` refuses.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch

from regardant import problem as problems
from regardant import threads
from regardant.looks import Look
from regardant.torch import autograd, devices, dropin, library
from regardant.torch.options import Options, checked

# torch's own setting counts on tensors, and elsewhere too, unless `regardant.set_num_threads` says otherwise.
threads.follow(torch.get_num_threads)

_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})
_ON_CPU = frozenset({"auto", "native", "blocked", "reference", "torch"})


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
        impl: on the CPU "native" (compiled, the default), "blocked" or "reference" (NumPy); on CUDA devices "sdpa" or
            "flex" (torch's own); anywhere "torch" (block by block). "auto" takes the first that can serve the call.
        return_lse: also return lse.

    Returns:
        out (B, H, T, E) in q's type; with `return_lse` also lse (B, H, T), float32 (float64 for float64). Both pass
        gradients on to q, k, v, bias and sinks. Under `torch.autocast` q, k and v are cast as torch's own would be.
        Memory beyond results: as `regardant.attention`; for gradients, out and lse are kept, and no weights.

    Raises:
        TypeError, ValueError: as `regardant.attention`; also tensors on different devices, and an `impl` that cannot
            serve the call. NotImplementedError: a derivative that is not computed here (see `autograd`).
    """
    options = checked(
        "attention", q, k, v, causal=causal, offset=offset, window=window, starts=starts, lengths=lengths,
        segments=segments, mask=mask, bias=bias, alibi=alibi, softcap=softcap, sinks=sinks, scale=scale, impl=impl,
    )  # fmt: skip
    if not isinstance(return_lse, bool):
        problems.flag("attention", "return_lse", return_lse)
    q, k, v = _typed("attention", q, k, v)
    if not (q.is_cpu and options.impl in _ON_CPU):
        name = devices.choose(devices.describe(q, k, v, options, lse=return_lse), options.impl)
        if name == "sdpa":
            return devices.sdpa(q, k, v, options)
        if name == "flex":
            out, lse = devices.flex(q, k, v, options)
            return (out, lse) if return_lse else out
        options = options._replace(impl=name)
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
        A `regardant.Look` of tensors, `rows()` included; its `out` has the same bits as `attention` gives, and passes
        gradients on, which the statistics do not. Memory: as `regardant.look`.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    watch = problems.watch("look", top=top, received=received, pooled=pooled)
    options = checked(
        "look", q, k, v, causal=causal, offset=offset, window=window, starts=starts, lengths=lengths,
        segments=segments, mask=mask, bias=bias, alibi=alibi, softcap=softcap, sinks=sinks, scale=scale, impl=impl,
    )  # fmt: skip
    q, k, v = _typed("look", q, k, v)
    seen = autograd.look(q, k, v, *options, watch.top, watch.received, watch.pooled)
    out, lse, max_logit, entropy, sink_weight, top_keys, top_weights, columns, mass = seen
    source: Any = _Source(q, k, v, options)
    weights: Any = _weights
    return Look(
        out, lse, max_logit, entropy, sink_weight, top_keys, top_weights, source, weights,
        columns if watch.received else None, None if watch.pooled is None else mass,
    )  # fmt: skip


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, to be used in its place.

    Args:
        query: (…, H, L, E). `key`: (…, G, S, E). `value`: (…, G, S, V). Batch axes broadcast, as there.
        attn_mask: boolean, True = visible, or floating, added to the scores; broadcastable to (…, H, L, S).
        dropout_p: must be 0.
        is_causal: query i sees keys 0 to i (the upper left triangle, whatever L and S are).
        scale: factor on the dot products. Default 1/√E.
        enable_gqa: H may be a multiple of G.

    Returns:
        (…, H, L, V). A row that sees nothing gives 0. Gradients reach query, key, value and a floating attn_mask.

    Raises:
        TypeError, ValueError: an argument that torch's function does not take either.
        NotImplementedError: dropout.
    """
    tensors, options, shape = dropin.arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    out: torch.Tensor = attention(*tensors, **options)
    return out.reshape(shape)


def _typed(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Under `torch.autocast`, cast as torch does for its own attention; then refuse types that do not fit."""
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(dtype) if x.dtype in _CAST else x for x in (q, k, v))
    if not (q.dtype == k.dtype == v.dtype and q.dtype in library.FLOATS):
        library.check_types(op, q, k, v)
    return q, k, v


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
    with torch.no_grad():
        return library.rows(
        q, k, v, lse_BHT, torch.as_tensor(queries_N, device=q.device), torch.as_tensor(heads_M, device=q.device),
        *source.options,
    )  # fmt: skip
