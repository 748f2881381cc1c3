"""The options of attention on tensors: what a caller may write, made into the plain list that an operator takes.

What an operator's schema could not carry, or would report in words of its own, is refused here: things that are no
tensors, tensors on different devices, numbers that are no numbers. Everything else (shapes, types, ranges) is
checked where it is for NumPy arrays, in `regardant.problem`, by whichever kernel the operator runs.

Shape legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from regardant import problem as problems


class Options(NamedTuple):
    """An operator's arguments behind q, k and v, in the order of its schema."""

    starts: torch.Tensor | None
    lengths: torch.Tensor | None
    q_segments: torch.Tensor | None
    k_segments: torch.Tensor | None
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    alibi: torch.Tensor | None
    sinks: torch.Tensor | None
    causal: bool
    offset: int | None
    window: int | None
    softcap: float | None
    scale: float | None
    impl: str

    def keywords(self) -> dict[str, Any]:
        """The options as `regardant.ops` takes them, segments as one pair; tensors as they are."""
        named = self._asdict()
        q_ids, k_ids = named.pop("q_segments"), named.pop("k_segments")
        return named | {"segments": None if q_ids is None else (q_ids, k_ids)}


SCHEMA = (
    "Tensor? starts, Tensor? lengths, Tensor? q_segments, Tensor? k_segments, Tensor? mask, Tensor? bias, "
    "Tensor? alibi, Tensor? sinks, bool causal, SymInt? offset, SymInt? window, float? softcap, float? scale, "
    "str impl"
)
TENSORS = 8  # of the options, those that are tensors: the first


def checked(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    offset: int | None,
    window: int | None,
    starts: Any,
    lengths: Any,
    segments: Any,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    alibi: Any,
    softcap: float | None,
    sinks: Any,
    scale: float | None,
    impl: str,
) -> Options:
    """Check what a schema cannot, for the public function `op`.

    Raises:
        TypeError: an argument of the wrong kind. `ValueError`: a tensor on another device than q.
    """
    device = tensor(op, "q", q).device
    same_device(op, "k", tensor(op, "k", k), device)
    same_device(op, "v", tensor(op, "v", v), device)
    q_segments, k_segments = (None, None) if segments is None else problems.pair(op, segments)
    if mask is not None:
        same_device(op, "mask", tensor(op, "mask", mask), device)
    if bias is not None:
        same_device(op, "bias", tensor(op, "bias", bias), device)
    if not isinstance(causal, bool):
        causal = problems.flag(op, "causal", causal)
    if not isinstance(impl, str):
        raise TypeError(f"{op}: impl must be a name; got {problems.kind(impl)}")
    return Options(
        starts=_listed(op, "starts", starts, device),
        lengths=_listed(op, "lengths", lengths, device),
        q_segments=_listed(op, "segments of the queries", q_segments, device),
        k_segments=_listed(op, "segments of the keys", k_segments, device),
        mask=mask,
        bias=bias,
        alibi=_listed(op, "alibi", alibi, device),
        sinks=_listed(op, "sinks", sinks, device),
        causal=causal,
        offset=_integer(op, "offset", offset),
        window=_integer(op, "window", window),
        softcap=_number(op, "softcap", softcap),
        scale=_number(op, "scale", scale),
        impl=impl,
    )


def tensor(op: str, name: str, given: Any) -> torch.Tensor:
    """What was given, if it is a tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch tensor; got {problems.kind(given)}")
    return given


def same_device(op: str, name: str, given: torch.Tensor, device: torch.device, q: str = "q") -> None:
    """Refuse a tensor that lies elsewhere than the queries, called `q`.

    Raises:
        ValueError: it does.
    """
    if given.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as {q} is; got a tensor on {given.device}")


def _listed(op: str, name: str, given: Any, device: torch.device) -> torch.Tensor | None:
    """One number per row, head or position: a tensor, or a list or array that becomes one."""
    if given is None:
        return None
    if isinstance(given, torch.Tensor):
        same_device(op, name, given, device)
        return given
    try:
        made = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{op}: {name} must be a tensor or a list of numbers; got {problems.kind(given)} ({error})"
        ) from None
    return made.to(device)


def _integer(op: str, name: str, given: Any) -> int | None:
    """A whole number that a schema has room for; farther than every key is as far as any."""
    if (
        given is None
        or isinstance(given, torch.SymInt)
        or (type(given) is int and abs(given) < problems.FARTHEST)
    ):
        return given
    return min(problems.integer(op, name, given), problems.FARTHEST)


def _number(op: str, name: str, given: Any) -> float | None:
    if given is None or type(given) is float:
        return given
    return problems.number(op, name, given)
