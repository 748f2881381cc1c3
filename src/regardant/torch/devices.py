"""Which implementation serves a call on tensors: one visible table, and the two of torch's own that stand in it.

On the CPU it is ours. On a CUDA device it is torch's scaled_dot_product_attention or FlexAttention, if that honours
everything that the call asks for without the T × S matrix; on any device, ours block by block in plain torch. A name
that the caller gives is used or refused with the reason. torch's two multiply hidden values by 0, so there, and only
there, a hidden NaN or infinity can show; impl="torch" leaves them out.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regardant.torch.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.torch.options import Options
    from regardant.torch.problem import TensorProblem

BLOCK = 128  # queries and keys of a block of FlexAttention's masks
AMPERE = (8, 0)  # the oldest CUDA capability that has flash attention's kernels


class Call(NamedTuple):
    """What a call asks for, as plain data.

    Attributes:
        device: the tensors' kind of device. `capability`: a CUDA device's, else (0, 0).
        dtype: the tensors' type. `sizes`: B, H, G, T, S, D, E.
        causal, offset: as given, offset with its default filled in.
        options: the other options that were given. `gradients`: those among them that need a gradient.
        lse: whether lse is to be returned. `compiling`: whether torch.compile or torch.export is tracing the call.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    sizes: tuple[int, int, int, int, int, int, int]
    causal: bool
    offset: int
    options: frozenset[str]
    gradients: frozenset[str]
    lse: bool
    compiling: bool


def sdpa_cannot(call: Call) -> str | None:
    """Why scaled_dot_product_attention cannot serve a call in O(n) memory, or None if it can."""
    _, H, G, T, S, D, E = call.sizes
    reasons = {
        f"it is for CUDA devices, not {call.device}": call.device != "cuda",
        "its kernels need a device of capability 8.0": call.capability < AMPERE,
        "it gives no lse": call.lse,
        f"it has no {', '.join(sorted(call.options - {'scale'}))}": bool(call.options - {"scale"}),
        "its causal mask is for as many queries as keys, with offset 0": (
            call.causal and call.offset < S - 1 and (T != S or call.offset != 0)
        ),
        f"it has no kernel for {call.dtype}": call.dtype == torch.float64,
        "its kernel for float32 shares no key/value heads": call.dtype == torch.float32 and H != G,
        "its kernels take one width of at most 256 that is a multiple of 8": D != E or D > 256 or bool(D % 8),
        "there is nothing to attend to": 0 in call.sizes,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def flex_cannot(call: Call) -> str | None:
    """Why FlexAttention cannot serve a call in O(n) memory, or None if it can."""
    _, H, G, _, _, D, E = call.sizes
    shared = H // G if G else 0
    reasons = {
        f"it is for CUDA devices, not {call.device}": call.device != "cuda",
        "its kernels need a device of capability 8.0": call.capability < AMPERE,
        "it is compiled by itself, not inside another compilation": call.compiling,
        f"it has no gradient of {', '.join(sorted(call.gradients))} here": bool(call.gradients),
        f"it has no kernel for {call.dtype}": call.dtype == torch.float64,
        "it shares a key/value head among 1, 2, 4, … query heads": bool(shared & (shared - 1)),
        "its kernels take widths from 16 to 256": not (16 <= D <= 256 and 16 <= E <= 256),
        "there is nothing to attend to": 0 in call.sizes,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _native_cannot(call: Call) -> str | None:
    return (
        None if call.device in {"cpu", "meta"} else f"the compiled kernels are for the CPU, not {call.device}"
    )


def _torch_cannot(_call: Call) -> str | None:
    return None


# The first that can is chosen.
TABLE: dict[str, Callable[[Call], str | None]] = {
    "native": _native_cannot,
    "sdpa": sdpa_cannot,
    "flex": flex_cannot,
    "torch": _torch_cannot,
}


def choose(call: Call, impl: str = "auto") -> str:
    """The name of the implementation that serves a call.

    Raises:
        ValueError: `impl` names one that cannot, or none.
    """
    if impl == "auto":
        return next(name for name, cannot in TABLE.items() if cannot(call) is None)
    if impl in {"blocked", "reference"}:
        cannot: Callable[[Call], str | None] | None = _native_cannot
    else:
        cannot = TABLE.get(impl)
    if cannot is None:
        known = ", ".join(map(repr, ("auto", "blocked", "reference", *TABLE)))
        raise ValueError(f"attention: impl must be one of {known}; got {impl!r}")
    reason = cannot(call)
    if reason is not None:
        raise ValueError(f"attention: impl={impl!r} cannot serve this call: {reason}")
    return impl


def describe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, *, lse: bool) -> Call:
    """A call as plain data."""
    B, H, T, D = (1, 1, *q.shape)[-4:]
    S = k.shape[-2]
    given = {name: o for name, o in options._asdict().items() if o is not None and name not in _NOT_LISTED}
    named = {"segments" if name.endswith("_segments") else name for name in given}
    needing = {name for name, o in given.items() if isinstance(o, torch.Tensor) and o.requires_grad}
    cuda = q.device.type == "cuda"
    return Call(
        device=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if cuda else (0, 0),
        dtype=q.dtype,
        sizes=(B, H, (1, *k.shape)[-3], T, S, D, v.shape[-1]),
        causal=options.causal,
        offset=S - T if options.offset is None else options.offset,
        options=frozenset(named),
        gradients=frozenset(needing if torch.is_grad_enabled() else ()),
        lse=lse,
        compiling=torch.compiler.is_compiling(),
    )


_NOT_LISTED = {"causal", "offset", "impl"}


# ------------------------------------------------------------------------------------------ torch's own


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Attention by torch's scaled_dot_product_attention, of a call that it can serve; never by its n² kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    four = [x[(None,) * (4 - x.ndim)] for x in (q, k, v)]
    square = options.causal and (q.shape[-2] > 1 or k.shape[-2] > 1)
    late = options.offset is not None and options.offset >= k.shape[-2] - 1  # every query sees every key
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    ):
        out_BHTE = torch.nn.functional.scaled_dot_product_attention(
            *four,
            is_causal=square and not late and q.shape[-2] > 1,
            scale=options.scale,
            enable_gqa=four[0].shape[1] != four[1].shape[1],
        )
    return out_BHTE.reshape(*q.shape[:-1], v.shape[-1])


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    attend: Callable[..., Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and lse by torch's FlexAttention, of a call that it can serve.

    Args:
        q, k, v, options: the call.
        attend: FlexAttention itself; compiled by default, as only then it does without the T × S matrix.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    p = problem("attention", q, k, v, options)
    out_BHTE, seen = (attend or _compiled_flex())(
        p.q_BHTD,
        p.k_BGSD,
        p.v_BGSE,
        score_mod=_score_mod(p),
        block_mask=block_mask(p),
        scale=p.scale,
        enable_gqa=p.sizes[1] != p.sizes[2],
        return_aux=AuxRequest(lse=True),
    )
    lse_BHT = seen.lse
    if p.sinks_H is not None:  # a sink joins the denominator, and no value comes with it
        live_BHT = lse_BHT != -torch.inf
        safe_BHT = torch.where(live_BHT, lse_BHT, 0)
        whole_BHT = torch.logaddexp(safe_BHT, p.sinks_H[:, None])
        out_BHTE = (out_BHTE * torch.exp(safe_BHT - whole_BHT)[..., None]).to(q.dtype)
        lse_BHT = torch.where(live_BHT, whole_BHT, -torch.inf)
    return p.restore(out_BHTE), p.restore(lse_BHT)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


def _score_mod(p: TensorProblem) -> Callable[..., torch.Tensor] | None:
    """What happens to a score: softcap, bias, ALiBi, in the order of the definition."""
    softcap, bias, alibi, offset, wide = p.softcap, p.bias_BHTS, p.alibi_H, p.offset, p.accumulator
    if softcap is None and bias is None and alibi is None:
        return None

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b, h, i, j].to(wide)
        if alibi is not None:
            score = score - alibi[h] * (offset + i - j)
        return score

    return score_mod


def _mask_mod(p: TensorProblem) -> Callable[..., torch.Tensor]:
    """Whether a key is visible to a query: every condition of the definition."""
    conditions: list[Callable[..., torch.Tensor]] = []
    offset, window, starts, lengths = p.offset, p.window, p.starts_B, p.lengths_B
    mask, bias, segments, wide = p.mask_BHTS, p.bias_BHTS, p.segments, p.accumulator
    if p.causal:
        conditions.append(lambda _b, _h, i, j: j <= offset + i)
    if window is not None:
        conditions.append(lambda _b, _h, i, j: offset + i - j < window)
    if starts is not None:
        conditions.append(lambda b, _h, _i, j: j >= starts[b])
    if lengths is not None:
        conditions.append(lambda b, _h, _i, j: j < lengths[b])
    if segments is not None:
        q_BT, k_BS = segments
        conditions.append(lambda b, _h, i, j: q_BT[b, i] == k_BS[b, j])
    if mask is not None:
        conditions.append(lambda b, h, i, j: mask[b, h, i, j])
    if bias is not None:  # a bias of −∞ hides a key as a mask does
        conditions.append(lambda b, h, i, j: bias[b, h, i, j].to(wide) != -torch.inf)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        visible = j >= 0
        for condition in conditions:
            visible = visible & condition(b, h, i, j)
        return visible

    return mask_mod


def block_mask(p: TensorProblem) -> Any:
    """FlexAttention's list of the blocks that queries may see anything of, from causality and window alone.

    torch's own way to it makes the T × S mask first. Memory: (T/128) · (S/128) integers.
    """
    from torch.nn.attention.flex_attention import BlockMask

    _, _, _, T, S, *_ = p.sizes
    like = {"dtype": torch.int32, "device": p.q_BHTD.device}
    rows, columns = -(-T // BLOCK), -(-S // BLOCK)
    first_R = p.offset + BLOCK * torch.arange(rows, dtype=torch.int64, device=like["device"])
    last_R = torch.clamp(first_R + BLOCK - 1, max=p.offset + T - 1)
    high_R = torch.full_like(first_R, S) if not p.causal else torch.clamp(last_R + 1, 0, S)
    low_R = torch.zeros_like(first_R) if p.window is None else torch.clamp(first_R - p.window + 1, 0, S)
    begin_R = low_R // BLOCK
    count_R = torch.clamp((high_R + BLOCK - 1) // BLOCK - begin_R, min=0)
    order_RC = (
        begin_R[:, None] + torch.arange(columns, device=like["device"])
    ) % columns  # all blocks, those first
    return BlockMask.from_kv_blocks(
        count_R.to(**like)[None, None],
        order_RC.to(**like)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(p),
        seq_lengths=(T, S),
    )
