"""torch's FlexAttention, uncompiled: every condition as a `mask_mod`, everything that is added as a `score_mod`.

Uncompiled it is torch's own definition of what its compiled kernels compute; compiling takes many seconds for every
new set of options. Not offered: sinks, for which it has no place, and gradients, which it refuses on the CPU.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import flex_attention as flex

from regardant.conformance.adapters import tensors
from regardant.conformance.target import adapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.problem import Array


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Any) -> Any:
    """One call of FlexAttention."""
    B, H, T, _ = q.shape
    S = k.shape[2]
    offset = options.get("offset")
    offset = S - T if offset is None else offset
    blocks = None
    conditions = list(_conditions(options, offset, (B, H, T, S)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is uncompiled is what the adapter's note says
        if conditions:
            blocks = flex.create_block_mask(flex.and_masks(*conditions), B, H, T, S, device="cpu")
        result = flex.flex_attention(
            q,
            k,
            v,
            score_mod=_score_mod(options, offset, (B, H, T, S)),
            block_mask=blocks,
            scale=options.get("scale"),
            enable_gqa=k.shape[1] != H,
            return_aux=flex.AuxRequest(lse=True) if return_lse else None,
        )
    return (result[0], result[1].lse) if return_lse else result


def _conditions(options: dict[str, Any], offset: int, sizes: tuple[int, ...]) -> Any:
    """What must hold for a key to be seen, as FlexAttention asks it."""
    if options["causal"]:
        yield lambda _b, _h, i, j: j <= i + offset
    if options.get("window") is not None:
        window = options["window"]
        yield lambda _b, _h, i, j: i + offset - j < window
    if options.get("starts") is not None:
        starts = options["starts"]
        yield lambda b, _h, _i, j: j >= starts[b]
    if options.get("lengths") is not None:
        lengths = options["lengths"]
        yield lambda b, _h, _i, j: j < lengths[b]
    if options.get("segments") is not None:
        of_queries, of_keys = options["segments"]
        yield lambda b, _h, i, j: of_queries[b, i] == of_keys[b, j]
    if options.get("mask") is not None:
        mask = options["mask"].expand(sizes)
        yield lambda b, h, i, j: mask[b, h, i, j]


def _score_mod(options: dict[str, Any], offset: int, sizes: tuple[int, ...]) -> Callable[..., Any] | None:
    """Softcap, bias and ALiBi, in the definition's order."""
    softcap, bias, alibi = (options.get(name) for name in ("softcap", "bias", "alibi"))
    if softcap is None and bias is None and alibi is None:
        return None
    if bias is not None:
        bias = bias.expand(sizes)

    def modified(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b, h, i, j]
        if alibi is not None:
            score = score - alibi[h] * (i + offset - j)
        return score

    return modified


@adapter(
    types=tensors.TYPES,
    packages=("torch",),
    note="uncompiled: torch's own definition of what its compiled kernels compute; on the CPU it has no gradients",
)
def target(
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
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    threads: int | None = None,
) -> Any:
    """`flex_attention`."""
    options = {
        "causal": causal, "offset": offset, "window": window, "starts": starts, "lengths": lengths, "mask": mask,
        "segments": None if segments is None else tuple(np.asarray(ids) for ids in segments), "bias": bias,
        "alibi": alibi, "softcap": softcap, "scale": scale, "return_lse": return_lse,
    }  # fmt: skip
    return tensors.answer(attend, q, k, v, options=options, threads=threads)
