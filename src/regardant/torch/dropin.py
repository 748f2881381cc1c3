"""`scaled_dot_product_attention` with torch's own signature and meaning, on regardant's attention.

What differs from torch's is what torch's gets wrong or leaves open: rows that see nothing give 0 with gradient 0,
hidden values are never read, and no n × n matrix is ever held. Refused: dropout, whose random numbers no kernel here
draws.

Shape legend: N any batch axes, H query heads, G key/value heads, L queries, S keys, E query/key width, V value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from regardant import problem as problems
from regardant.torch.options import in_autocast, same_device, tensor

_OP = "scaled_dot_product_attention"


def arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001 - torch's signature
    scale: float | None,
    enable_gqa: bool,  # noqa: FBT001
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any], tuple[int, ...]]:
    """Torch's arguments as those of `attention`: q, k and v, options, and the shape that the output should have.

    Raises:
        TypeError, ValueError: an argument that torch's function does not take either. NotImplementedError: dropout.
    """
    query, key, value = in_autocast(query, key, value)
    _check(query, key, value, attn_mask, dropout_p, is_causal=is_causal)
    H, G = query.shape[-3:-2], key.shape[-3:-2]
    batch = _batch(query, key, value, enable_gqa=enable_gqa)
    if enable_gqa:
        shared = [(*batch, *heads) for heads in (H, G, G)]
    else:
        one_head = key.shape[-3:-2] == value.shape[-3:-2] == (1,)  # shared by all query heads, as it lies
        kv = (*batch[:-1], 1) if one_head else batch
        shared = [batch, kv, kv]
    rows = query.shape[-2]
    out = (*shared[0], rows, value.shape[-1])
    q, k, v = (
        _four(x.expand(*lead, *x.shape[-2:])) for x, lead in zip((query, key, value), shared, strict=True)
    )
    options: dict[str, Any] = {"causal": is_causal, "offset": 0, "scale": scale}
    if attn_mask is not None:
        mask = _mask(attn_mask, (*shared[0], rows, key.shape[-2]))
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = mask
    return (q, k, v), options, out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    *,
    is_causal: bool,
) -> None:
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        same_device(_OP, name, tensor(_OP, name, x), query.device, "query")
        if x.dtype != query.dtype:
            raise TypeError(f"{_OP}: {name} must be {query.dtype} to match query; got {x.dtype}")
        if x.ndim < 2:
            raise ValueError(f"{_OP}: {name} must have at least 2 axes; got {tuple(x.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"{_OP}: key must be {query.shape[-1]} wide to match query; got {tuple(key.shape)}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"{_OP}: value must have key's {key.shape[-2]} positions; got {tuple(value.shape)}")
    if problems.number(_OP, "dropout_p", dropout_p) != 0:
        raise NotImplementedError(
            f"{_OP}: dropout_p must be 0, dropout is not computed here; got {dropout_p}"
        )
    problems.flag(_OP, "is_causal", is_causal)
    if attn_mask is not None:
        same_device(_OP, "attn_mask", tensor(_OP, "attn_mask", attn_mask), query.device, "query")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"{_OP}: attn_mask must be boolean or floating; got {attn_mask.dtype}")


def _batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool
) -> tuple[int, ...]:
    """The batch axes that all three share; the last of them counts the heads, unless those are `enable_gqa`'s."""
    if enable_gqa:
        if min(query.ndim, key.ndim, value.ndim) < 3:
            raise ValueError(f"{_OP}: query, key and value must have an axis of heads for enable_gqa=True")
        H, G, V = query.shape[-3], key.shape[-3], value.shape[-3]
        if G != V or (H % G if G else H):
            raise ValueError(
                f"{_OP}: query's heads must be a multiple of key's and value's for enable_gqa=True; "
                f"got {H}, {G} and {V}"
            )
    last = -3 if enable_gqa else -2
    leads = [tuple(x.shape[:last]) for x in (query, key, value)]
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ValueError(
            f"{_OP}: the batch axes of query, key and value must broadcast; "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
            + ("" if enable_gqa else " (enable_gqa=True lets query heads share keys)")
        ) from None


def _four(x: torch.Tensor) -> torch.Tensor:
    """At most four axes: of more, all before the heads become one."""
    return x if x.ndim <= 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _mask(attn_mask: torch.Tensor, full: tuple[int, ...]) -> torch.Tensor:
    """The mask in at most four axes, broadcastable to the scores of what `_four` gives."""
    shape = tuple(attn_mask.shape)
    if len(shape) > len(full) or any(
        have not in {1, want} for have, want in zip(shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"{_OP}: attn_mask must broadcast to {full}; got {shape}")
    if len(full) <= 4:
        return attn_mask
    shape = (1,) * (len(full) - len(shape)) + shape
    lead = shape[:-3] if math.prod(shape[:-3]) == 1 else full[:-3]
    return attn_mask.reshape(shape).expand(*lead, *shape[-3:]).reshape(math.prod(lead), *shape[-3:])
