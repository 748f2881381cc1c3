"""Attention as transformers calls it: what a model says, in the words of `regardant.torch.attention`, or refused.

Honoured: masks told or dense, boolean (True = visible) or added to scores, a window, softcap, learned sinks, a
position bias, packed documents by `cu_seq_lens_q`, any scale, grouped heads, values of another width than keys,
autocast. Refused, each in one sentence: dropout, attention weights as an output, sparse attention by indices, sinks
that differ from query to query, paged caches. Nothing is ignored and nothing falls back to another implementation.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regardant import torch as rt
from regardant.torch.options import in_autocast
from regardant.transformers.masks import LazyMask, both

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regardant.transformers.keeping import Layer

# The layers that are being watched, by the id of their attention module; `watch` holds the modules.
WATCHED: dict[int, Layer] = {}

# What some models hand to kernels of their own, each with what it is.
_REFUSED = {
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks of keys",
    "sinks": "sinks that differ from query to query",
}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for a layer of a transformers model; registered with `AttentionInterface`.

    Args:
        module: the layer's attention.
        query: (B, H, T, D), or (1, H, T, D) for the same queries in every row. `key`: (B, G, S, D).
        value: (B, G, S, E).
        attention_mask: (·, ·, T, S), a `LazyMask`, boolean, or added to the scores; None: see `is_causal`.
        dropout: must be 0 in training.
        scaling: factor on the scores; None for 1/√D.
        is_causal: without a mask, whether several queries see no later key, the first query standing at the first
            key; by default as the module says.
        sliding_window: without a mask, the window; a mask has it in it.
        softcap: as in `regardant.attention`. `s_aux`: sinks, one for each head. `position_bias`: (·, ·, T, S).
        more: what models pass along; what would change the result is honoured or refused.

    Returns:
        (B, T, H, E), and None for the weights, which are never there at once.

    Raises:
        ValueError: an option that is refused (see the module), or shapes that do not fit.
        TypeError: a mask that is no tensor.
    """
    _refuse(dropout if module.training else 0.0, more)
    query, key, value = in_autocast(query, key, value)
    B, T, S = key.shape[0], query.shape[2], key.shape[2]
    if query.shape[0] == 1 != B:
        query = query.expand(B, -1, -1, -1)
    options: dict[str, Any]
    if attention_mask is None:
        causal = T > 1 and _is_causal(module, is_causal=is_causal)
        options = _without_mask(T, S, sliding_window, causal=causal)
    else:
        options = _with_mask(attention_mask, (T, S))
    if position_bias is not None:
        options["bias"] = position_bias if "bias" not in options else position_bias + options["bias"]
    if more.get("cu_seq_lens_q") is not None:
        options["segments"] = _documents(more, options.get("segments"), (B, T, S))
    options |= {
        name: given
        for name, given in (("softcap", softcap), ("scale", scaling), ("sinks", s_aux))
        if given is not None
    }
    if s_aux is not None:
        options["sinks"] = s_aux.reshape(-1)
    watched = WATCHED.get(id(module))
    if watched is None:
        out_BHTE = rt.attention(query, key, value, **options)
    else:
        # What is kept for later is the mask that the layers share, not what was made of it, and no position bias.
        again = None if position_bias is not None else options | _shared_bias(attention_mask, options)
        out_BHTE = watched.attend(query, key, value, options, again)
    return out_BHTE.transpose(1, 2).contiguous(), None


def _shared_bias(mask: torch.Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    return {"bias": mask} if "bias" in options else {}


def _refuse(dropout: float, more: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"regardant: attention dropout must be 0; got {dropout}: set it to 0 in the model's configuration, or "
            "call model.eval()"
        )
    if more.get("output_attentions"):
        raise ValueError(
            "regardant: output_attentions is refused, as the weights are never there at once; "
            "open regardant.transformers.watch(model) instead"
        )
    for name, what in _REFUSED.items():
        if more.get(name) is not None:
            raise ValueError(f'regardant: {what} ({name}=) is not implemented; load the model with "sdpa"')


def _is_causal(module: torch.nn.Module, *, is_causal: bool | None) -> bool:
    # Modules that say nothing are causal, as for transformers' own implementations.
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _without_mask(T: int, S: int, window: int | None, *, causal: bool) -> dict[str, Any]:
    """What a missing mask means: all keys, or those up to the query when queries and keys begin together."""
    if window is None or window >= S:
        return {"causal": True, "offset": 0} if causal else {"causal": False}
    if not causal:
        raise ValueError(
            f"regardant: sliding_window needs a mask unless queries and keys begin together; got {window} for "
            f"{T} queries and {S} keys without one"
        )
    return {"causal": True, "offset": 0, "window": window}


def _with_mask(mask: Any, shape: tuple[int, int]) -> dict[str, Any]:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"regardant: attention_mask must be a tensor; got {type(mask).__name__}")
    if isinstance(mask, LazyMask):
        if mask.visible.shape[1:] != shape:
            raise ValueError(
                f"regardant: attention_mask was made for {mask.visible.shape[1:]} queries and keys; got {shape}"
            )
        return mask.visible.options()
    if mask.dtype == torch.bool:
        return {"causal": False, "mask": mask}
    # The least number of the type is how additive masks write −∞: nothing is to be seen there, in no row.
    return {"causal": False, "bias": mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)}


def _documents(more: Mapping[str, Any], segments: Any, shape: tuple[int, int, int]) -> Any:
    """Packed documents by their bounds, as flash attention takes them, joined with those that are there."""
    B, T, S = shape
    bounds = more["cu_seq_lens_q"]
    keys = more.get("cu_seq_lens_k")
    if B != 1 or T != S or (keys is not None and not torch.equal(keys, bounds)) or int(bounds[-1]) != T:
        raise ValueError(
            "regardant: cu_seq_lens_q must divide one row of as many queries as keys, and cu_seq_lens_k be the "
            f"same; got {B} rows of {T} queries and {S} keys"
        )
    at_T = torch.arange(T, device=bounds.device)
    ids_1T = torch.searchsorted(bounds, at_T, right=True)[None]
    return (ids_1T, ids_1T) if segments is None else both(segments, (ids_1T, ids_1T))
