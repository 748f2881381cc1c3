"""Causal self-attention as a layer: projections, optional norms and rotary positions, a key/value cache.

The parameters have the names of Hugging Face's Llama layers, q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, so that
such a checkpoint's tensors fit. Refused: sizes that do not divide, and a cache where gradients are wanted, since a
cache is overwritten.

Shape legend: B batch, T new tokens, S keys (the past and T), C width of the stream, H query heads, G key/value heads,
D head width, P = D/2 rotated pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regardant.torch.front import attention

if TYPE_CHECKING:
    from regardant.cache import KVCache


class CausalSelfAttention(torch.nn.Module):  # type: ignore[misc]
    """Each token mixes what the tokens up to it hold: out = o_proj(attention(q_proj(x), k_proj(x), v_proj(x))).

    Attributes:
        q_proj, k_proj, v_proj, o_proj: `torch.nn.Linear`. `q_norm`, `k_norm`: `torch.nn.RMSNorm`, or None.
        sinks: (heads,) learned logits, or None.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        window: int | None = None,
        rope_theta: float | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        sinks: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        layer: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer.

        Args:
            width: C, of the tokens. `heads`: H. `kv_heads`: G, a divisor of H; as many as `heads` if None.
            head_width: D; width // heads if None.
            window: how many tokens, itself included, a token sees; None for all before it.
            rope_theta: base of the rotary positions (Su et al. 2021), such as 10000.0; None for none.
            qk_norm: whether queries and keys are normed per head (RMSNorm) before they are turned.
            bias: whether the projections have one. `sinks`: whether heads have a learned sink.
            softcap, scale: as in `attention`.
            layer: which layer of a cache this one writes to.
            device, dtype: of the parameters.

        Raises:
            ValueError: sizes below 1 or that do not divide; an odd head width with `rope_theta`.
        """
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        head_width = _head_width(width, heads, kv_heads, head_width, rope=rope_theta is not None)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.window, self.softcap, self.scale, self.layer = window, softcap, scale, layer
        self.rope_theta = rope_theta
        self.q_proj = torch.nn.Linear(width, heads * head_width, bias=bias, **made)
        self.k_proj = torch.nn.Linear(width, kv_heads * head_width, bias=bias, **made)
        self.v_proj = torch.nn.Linear(width, kv_heads * head_width, bias=bias, **made)
        self.o_proj = torch.nn.Linear(heads * head_width, width, bias=bias, **made)
        self.q_norm = torch.nn.RMSNorm(head_width, **made) if qk_norm else None
        self.k_norm = torch.nn.RMSNorm(head_width, **made) if qk_norm else None
        self.sinks = torch.nn.Parameter(torch.zeros(heads, **made)) if sinks else None

    def extra_repr(self) -> str:
        """The settings that are no parameters."""
        shown = f"heads={self.heads}, kv_heads={self.kv_heads}, head_width={self.head_width}"
        for name in ("window", "rope_theta", "softcap", "scale"):
            value = getattr(self, name)
            shown += "" if value is None else f", {name}={value}"
        return shown

    def forward(
        self,
        x_BTC: torch.Tensor,
        *,
        cache: KVCache | None = None,
        starts: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            x_BTC: the new tokens.
            cache: the past; the new keys and values are written to its layer `self.layer`, and it is the caller who
                advances it, once every layer has written.
            starts: (B,) first real position of rows that are padded on the left; positions count from it.
            segments: (B, T) document ids of packed documents; without a cache.

        Returns:
            out_BTC. Memory: the projections, never T · S.

        Raises:
            ValueError: x of another shape; a cache while gradients are recorded, or together with segments.
        """
        C = self.q_proj.in_features
        if x_BTC.ndim != 3 or x_BTC.shape[-1] != C:
            raise ValueError(f"CausalSelfAttention: x must be (B, T, {C}); got {tuple(x_BTC.shape)}")
        past = 0 if cache is None else cache.length
        q_BHTD, k_BGTD, v_BGTD = self._project(x_BTC, past, starts)
        k_BGSD, v_BGSD = k_BGTD, v_BGTD
        if cache is not None:
            self._check_cache(k_BGTD, segments)
            k_BGSD, v_BGSD = cache.write(self.layer, k_BGTD, v_BGTD)
            # A row may begin beyond what the cache holds so far; until then it sees nothing.
            starts = None if starts is None else starts.clamp(max=k_BGSD.shape[2])
        out_BHTD = attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            offset=past,
            window=self.window,
            starts=starts,
            segments=None if segments is None else (segments, segments),
            softcap=self.softcap,
            sinks=self.sinks,
            scale=self.scale,
        )
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))

    def _project(
        self, x_BTC: torch.Tensor, past: int, starts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        split = (*x_BTC.shape[:2], -1, self.head_width)
        q_BTHD, k_BTGD, v_BTGD = (p(x_BTC).reshape(split) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTGD = _normed(q_BTHD, self.q_norm), _normed(k_BTGD, self.k_norm)
        if self.rope_theta is not None:
            turn = rotary_tables(x_BTC, past, starts, self.head_width, self.rope_theta)
            q_BTHD, k_BTGD = rotate(q_BTHD, *turn), rotate(k_BTGD, *turn)
        return q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2)

    @staticmethod
    def _check_cache(k_BGTD: torch.Tensor, segments: torch.Tensor | None) -> None:
        if segments is not None:
            raise ValueError("CausalSelfAttention: segments must be None with a cache; got both")
        if k_BGTD.requires_grad:
            raise ValueError(
                "CausalSelfAttention: cache must be None where gradients are recorded; use torch.no_grad() with it"
            )


def _normed(x: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
    """Norm in the type of the gains, which `torch.autocast` leaves wide, and round to that of x."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def rotary_tables(
    x_BTC: torch.Tensor, past: int, starts: torch.Tensor | None, head_width: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of position · theta^(−2i/D) for each new token, (B or 1, T, 1, P), float32 at least."""
    device = x_BTC.device
    wide = torch.float64 if x_BTC.dtype == torch.float64 else torch.float32
    exponents_P = torch.arange(0, head_width, 2, device=device, dtype=wide) / head_width
    positions_1T = torch.arange(past, past + x_BTC.shape[1], device=device)[None]
    if starts is not None:
        positions_1T = (positions_1T - starts[:, None]).clamp(min=0)
    angles_BT1P = (positions_1T.to(wide)[..., None] * theta**-exponents_P)[:, :, None]
    return angles_BT1P.cos(), angles_BT1P.sin()


def rotate(x_BTHD: torch.Tensor, cos_BT1P: torch.Tensor, sin_BT1P: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its position's angle (Su et al. 2021), in float32 at least."""
    a, b = x_BTHD.to(cos_BT1P.dtype).chunk(2, dim=-1)
    turned = torch.cat([a * cos_BT1P - b * sin_BT1P, b * cos_BT1P + a * sin_BT1P], dim=-1)
    return turned.to(x_BTHD.dtype)


def _head_width(width: int, heads: int, kv_heads: int, head_width: int | None, *, rope: bool) -> int:
    sizes = {"width": width, "heads": heads, "kv_heads": kv_heads}
    if head_width is not None:
        sizes["head_width"] = head_width
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"CausalSelfAttention: {name} must be a whole number of at least 1; got {size!r}"
            )
    if heads % kv_heads:
        raise ValueError(
            f"CausalSelfAttention: heads must be a multiple of kv_heads; got {heads} and {kv_heads}"
        )
    if head_width is None:
        if width % heads:
            raise ValueError(
                f"CausalSelfAttention: width must divide into {heads} heads, or head_width be given; got {width}"
            )
        head_width = width // heads
    if rope and head_width % 2:
        raise ValueError(
            f"CausalSelfAttention: head_width must be even, as rope_theta turns pairs; got {head_width}"
        )
    return head_width
