"""transformers' attention functions, eager and sdpa, with the masks that its own mask functions make.

Eager is Llama's function; with a softcap Gemma 2's, with sinks GPT-OSS's. Masks are made as the models make them:
causal, window, padding, packed documents. Not offered: a mask of one's own, windows without causality, ALiBi, lse,
documents with other numbers of queries and keys; softcap and sinks with sdpa, a bias with eager, softcap and sinks
together.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_with_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_with_sinks
from transformers.models.llama.modeling_llama import eager_attention_forward as plain_eager

from regardant.conformance.adapters import tensors
from regardant.conformance.case import NotOffered
from regardant.conformance.target import Target, adapter

if TYPE_CHECKING:
    from regardant.problem import Array


def _mask(make: Any, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
    """The mask that transformers makes for these options."""
    (B, _, T, _), S = q.shape, k.shape[2]
    causal, offset, window = (options[name] for name in ("causal", "offset", "window"))
    function = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    if window is not None:
        if not causal:
            raise NotOffered("a window without causality")
        function = masking_utils.sliding_window_causal_mask_function(window)
    if options["segments"] is not None:
        of_queries, of_keys = options["segments"]
        if T != S or offset not in {None, 0} or not torch.equal(of_queries, of_keys):
            raise NotOffered("documents with other numbers of queries and keys")
        packed = masking_utils.packed_sequence_mask_function(of_queries)
        function = masking_utils.and_masks(function, packed)
    made: torch.Tensor | None = make(
        batch_size=B,
        q_length=T,
        kv_length=S,
        q_offset=S - T if offset is None else offset,
        mask_function=function,
        attention_mask=_padding(options, B, S),
        local_size=window,
        dtype=q.dtype,
        # As in the models: a mask is left out where is_causal says the same.
        allow_is_causal_skip=causal and options["segments"] is None and offset is None,
        allow_is_bidirectional_skip=not causal and options["segments"] is None,
    )
    return made


def _padding(options: dict[str, Any], B: int, S: int) -> torch.Tensor | None:
    """The two-dimensional mask of a tokenizer: True where there is a token."""
    starts, lengths = options["starts"], options["lengths"]
    if starts is None and lengths is None:
        return None
    j = torch.arange(S)
    there = torch.ones(B, S, dtype=torch.bool)
    if starts is not None:
        there &= j >= starts[:, None]
    if lengths is not None:
        there &= j < lengths[:, None]
    return there


def _attend(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    make = masking_utils.eager_mask if kind == "eager" else masking_utils.sdpa_mask
    mask = _mask(make, q, k, options)
    softcap, sinks, scale, bias = (options.get(name) for name in ("softcap", "sinks", "scale", "bias"))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    module = types.SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1] if k.shape[1] else 1,
        training=False,
        is_causal=options["causal"],
        sinks=sinks,
    )
    if softcap is not None and sinks is not None:
        raise NotOffered("softcap and sinks together")
    if kind == "sdpa":
        if bias is not None:
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=scale, position_bias=bias)
    elif sinks is not None:
        out, _ = eager_with_sinks(module, q, k, v, mask, scaling=scale)
    elif softcap is not None:
        out, _ = eager_with_softcap(module, q, k, v, mask, scaling=scale, softcap=softcap)
    else:
        out, _ = plain_eager(module, q, k, v, mask, scaling=scale)
    return out.transpose(1, 2)


COMMON = ("causal", "offset", "window", "starts", "lengths", "segments", "scale", "dout", "threads")


def _made(kind: str, own: tuple[str, ...]) -> Target:
    @adapter(types=tensors.TYPES, keywords=(*COMMON, *own), packages=("transformers", "torch"))
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = True,
        offset: int | None = None,
        window: int | None = None,
        starts: Array | None = None,
        lengths: Array | None = None,
        segments: tuple[Array, Array] | None = None,
        dout: Array | None = None,
        bias_gradient: bool = False,
        threads: int | None = None,
        **others: Any,
    ) -> Any:
        options = {
            "causal": causal, "offset": offset, "window": window, "starts": starts, "lengths": lengths,
            "segments": None if segments is None else tuple(np.asarray(ids) for ids in segments), **others,
        }  # fmt: skip
        learned = ("sinks" if "sinks" in others else "", "bias" if bias_gradient else "")

        def compute(*arrays: torch.Tensor, **given: Any) -> torch.Tensor:
            return _attend(kind, *arrays, **given)

        return tensors.answer(
            compute,
            q,
            k,
            v,
            options=options,
            learned=() if dout is None else learned,
            dout=dout,
            threads=threads,
        )

    return attention


eager = _made("eager", ("softcap", "sinks"))
sdpa = _made("sdpa", ("bias", "bias_gradient"))
