"""Masks that are told rather than made: what each query sees, as a few numbers instead of T × S truth values.

transformers describes a mask by a function of positions, and lets every implementation turn it into what it needs.
`mask` reads the description: the order of time, a window, chunks, packed documents and padding become `Visible`,
whose memory grows with T + S. It travels through a model as a `LazyMask`, a boolean (B, 1, T, S) tensor without
contents, which makes them if anything but regardant reads them.

What has no such description (a function of the caller's own, blocks that look both ways) and whatever is being traced
for a graph becomes the dense boolean mask, T × S bytes for each batch row. A mask is refused to a model that adds it
to scores or turns it into numbers: such a model computes attention by itself, where this mask would be wrong.

Shape legend: B batch, T queries, S keys.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Ids = tuple[torch.Tensor, torch.Tensor]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, eq=False)
class Visible:
    """What each query sees, in the words of `regardant.attention` (which see).

    Attributes:
        shape: B, T, S. `device`: where a tensor made of it would lie.
        causal, offset, window: as there. `starts_B`, `lengths_B`: bounds of the keys, or None.
        segments: ids of queries (B, T) and keys (B, S), or None.
    """

    shape: tuple[int, int, int]
    device: torch.device
    causal: bool
    offset: int
    window: int | None = None
    starts_B: torch.Tensor | None = None
    lengths_B: torch.Tensor | None = None
    segments: Ids | None = None

    def options(self) -> dict[str, Any]:
        """The same as arguments of `regardant.torch.attention`; only those that say something."""
        maybe = (
            ("window", self.window),
            ("starts", self.starts_B),
            ("lengths", self.lengths_B),
            ("segments", self.segments),
        )
        said = {name: value for name, value in maybe if value is not None}
        return {"causal": self.causal, "offset": self.offset, **said}

    def dense(self) -> torch.Tensor:
        """The same as a boolean tensor (B, 1, T, S), True = visible."""
        B, T, S = self.shape
        p_T1 = self.offset + torch.arange(T, device=self.device)[:, None]
        j_S = torch.arange(S, device=self.device)
        seen_BTS = torch.ones((B, T, S), dtype=torch.bool, device=self.device)
        if self.causal:
            seen_BTS &= j_S <= p_T1
        if self.window is not None:
            seen_BTS &= p_T1 - j_S < self.window
        if self.starts_B is not None:
            seen_BTS &= j_S >= self.starts_B[:, None, None]
        if self.lengths_B is not None:
            seen_BTS &= j_S < self.lengths_B[:, None, None]
        if self.segments is not None:
            seen_BTS &= self.segments[0][:, :, None] == self.segments[1][:, None, :]
        return seen_BTS[:, None]

    def part(self, axis: int, first: int, stop: int) -> Visible:
        """Queries (axis 2) or keys (axis 3) from `first` up to `stop` alone."""
        B, T, S = self.shape
        if axis == 2:
            pair = None if self.segments is None else (self.segments[0][:, first:stop], self.segments[1])
            return dataclasses.replace(
                self, shape=(B, stop - first, S), offset=self.offset + first, segments=pair
            )
        size = stop - first
        pair = None if self.segments is None else (self.segments[0], self.segments[1][:, first:stop])
        return dataclasses.replace(
            self,
            shape=(B, T, size),
            offset=self.offset - first,
            starts_B=None if self.starts_B is None else (self.starts_B - first).clamp(0, size),
            lengths_B=None if self.lengths_B is None else (self.lengths_B - first).clamp(0, size),
            segments=pair,
        )


class LazyMask(torch.Tensor):  # type: ignore[misc]  # torch is not typed here
    """A boolean mask (B, 1, T, S), True = visible, whose contents exist only while something else reads them.

    Slices of queries or of keys stay what it is; every other operation gets the dense tensor. Adding it to anything
    and turning it into numbers are refused (see the module).
    """

    visible: Visible

    def __new__(cls, visible: Visible) -> Self:
        """Make the mask that `visible` tells of, without contents."""
        B, T, S = visible.shape
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's way to make such tensors
            cls, (B, 1, T, S), dtype=torch.bool, device=visible.device
        )
        made.visible = visible
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyMask({self.visible})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what can be answered from the description, refuse what would be wrong, make the rest."""
        options = dict(kwargs or {})
        if func in {aten.detach.default, aten.alias.default}:
            return cls(args[0].visible)
        if func is aten.slice.Tensor:
            part = _sliced(*args, **options)
            if part is not None:
                return part
        if func in _ADDITIONS or (func is aten._to_copy.default and _is_number(options.get("dtype"))):  # noqa: SLF001
            # A TypeError would be taken to say that the two cannot be added.
            raise ValueError(
                "this model computes attention by itself, not through transformers' attention interface, so it "
                'cannot run with attn_implementation="regardant"; load it with "eager"'
            )
        return func(*tree_map(_made, args), **tree_map(_made, options))


_ADDITIONS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}


def _is_number(dtype: torch.dtype | None) -> bool:
    return dtype not in {None, torch.bool}


def _made(value: Any) -> Any:
    return value.visible.dense() if isinstance(value, LazyMask) else value


def _sliced(
    mask: LazyMask, axis: int = 0, first: int | None = None, stop: int | None = None, step: int = 1
) -> LazyMask | None:
    """A slice of queries or keys; None for what must be made."""
    axis %= 4
    if axis < 2 or step != 1:
        return None
    begin, end, _ = slice(first, stop).indices(mask.shape[axis])
    return LazyMask(mask.visible.part(axis, begin, max(begin, end)))


# --- from transformers' description ----------------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor:
    """Make transformers' mask for regardant: registered with `AttentionMaskInterface`, called by models.

    Args:
        batch_size: B. `q_length`: T. `kv_length`: S.
        q_offset: the first query's position. `kv_offset`: the first key's.
        mask_function: of (batch row, head, query's position, key's position): whether the one sees the other.
        attention_mask: (B, positions) boolean, False where there is padding; None for none.
        device: where the mask is to lie.
        options: what else transformers tells its implementations.

    Returns:
        (B, 1, T, S), True = visible; a `LazyMask` unless the function is none that is known, or a graph is traced.
        It is never None, from which an implementation would have to guess where the queries are.
    """
    told = attention_mask is None or attention_mask.ndim == 2
    if told and not is_tracing(attention_mask):
        pattern = _pattern(mask_function)
        if pattern is not None:
            where = torch.device(device)
            offsets = int(q_offset), int(kv_offset)
            visible = _visible(pattern, (batch_size, q_length, kv_length), offsets, attention_mask, where)
            if visible is not None:
                return LazyMask(visible)
    made: torch.Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return made


@dataclasses.dataclass(frozen=True, eq=False)
class _Pattern:
    """A mask function taken apart into conditions that hold together.

    Attributes:
        causal, window: as in `Visible`.
        ids: functions of (batch rows (B, 1), positions (N,)) to ids (B, N); who looks has the id of what is seen.
        moved: positions (B, N) that stand for the plain ones in the order of time and the window.
        packed: documents (B, N) among `ids`.
    """

    causal: bool = False
    window: int | None = None
    ids: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = ()
    moved: torch.Tensor | None = None
    packed: torch.Tensor | None = None

    def also(self, other: _Pattern) -> _Pattern:
        windows = [window for window in (self.window, other.window) if window is not None]
        return _Pattern(
            self.causal or other.causal,
            min(windows, default=None),
            self.ids + other.ids,
            other.moved if self.moved is None else self.moved,
            other.packed if self.packed is None else self.packed,
        )


# Functions that transformers makes are known by their code, which all that come from one maker share.
_CODE = {
    maker: maker(*arguments).__code__
    for maker, arguments in (
        (masking_utils.and_masks, ()),
        (masking_utils.sliding_window_overlay, (1,)),
        (masking_utils.chunked_overlay, (1, None)),
        (masking_utils.packed_sequence_mask_function, (None,)),
        (masking_utils.remap_positions_for_packed_sequence, (None, None)),
    )
}


def _pattern(function: Any) -> _Pattern | None:
    """The conditions that a mask function is made of, or None if it is made of something else too."""
    if function is masking_utils.causal_mask_function:
        return _Pattern(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    code = getattr(function, "__code__", None)
    maker = next((maker for maker, known in _CODE.items() if known is code), None)
    if maker is None:
        return None
    held = [cell.cell_contents for cell in function.__closure__]
    return _READERS[maker](**dict(zip(function.__code__.co_freevars, held, strict=True)))


def _read_and(mask_functions: tuple[Any, ...]) -> _Pattern | None:
    whole = _Pattern()
    for function in mask_functions:
        part = _pattern(function)
        if part is None:
            return None
        whole = whole.also(part)
    return whole


def _read_window(sliding_window: int) -> _Pattern:
    return _Pattern(window=int(sliding_window))


def _read_chunks(chunk_size: int, left_padding: torch.Tensor) -> _Pattern:
    return _Pattern(ids=(lambda b_B1, at: (at - left_padding[b_B1]) // chunk_size,))


def _read_packed(packed_sequence_mask: torch.Tensor) -> _Pattern:
    return _Pattern(ids=(lambda b_B1, at_N: packed_sequence_mask[b_B1, at_N],), packed=packed_sequence_mask)


def _read_moved(mask_function: Any, position_ids: torch.Tensor) -> _Pattern | None:
    inner = _pattern(mask_function)
    if inner is None or inner.moved is not None or inner.packed is not None:
        return None
    ids = tuple(_at_positions(given, position_ids) for given in inner.ids)
    return dataclasses.replace(inner, ids=ids, moved=position_ids)


def _at_positions(given: Callable[..., torch.Tensor], position_ids: torch.Tensor) -> Any:
    return lambda b_B1, at_N: given(b_B1, position_ids[b_B1, at_N])


_READERS: dict[Any, Callable[..., _Pattern | None]] = {
    masking_utils.and_masks: _read_and,
    masking_utils.sliding_window_overlay: _read_window,
    masking_utils.chunked_overlay: _read_chunks,
    masking_utils.packed_sequence_mask_function: _read_packed,
    masking_utils.remap_positions_for_packed_sequence: _read_moved,
}


def _visible(
    pattern: _Pattern,
    shape: tuple[int, int, int],
    offsets: tuple[int, int],
    attention_mask: torch.Tensor | None,
    device: torch.device,
) -> Visible | None:
    if pattern.moved is not None and not _moves_documents(pattern):
        return None
    B, T, S = shape
    q_offset, kv_offset = offsets
    segments: Ids | None = None
    if pattern.ids:
        b_B1 = torch.arange(B, device=device)[:, None]
        q_T, k_S = (
            offset + torch.arange(size, device=device) for offset, size in ((q_offset, T), (kv_offset, S))
        )
        for ids in pattern.ids:
            pair = ids(b_B1, q_T).expand(B, T), ids(b_B1, k_S).expand(B, S)
            segments = pair if segments is None else both(segments, pair)
    starts_B, lengths_B, segments = _padding(attention_mask, kv_offset, shape, segments)
    return Visible(
        shape,
        device,
        pattern.causal,
        q_offset - kv_offset,
        pattern.window,
        starts_B,
        lengths_B,
        segments,
    )


def _moves_documents(pattern: _Pattern) -> bool:
    """Whether positions go up one by one within each packed document: then earlier and nearer mean what they did."""
    moved, packed = pattern.moved, pattern.packed
    if moved is None or packed is None:
        return False
    return bool(((moved.diff(dim=-1) == 1) | (packed.diff(dim=-1) != 0)).all())


def both(one: Ids, other: Ids) -> Ids:
    """Ids that are equal where both pairs are."""
    low = min(int(ids.min()) for ids in other)
    count = max(int(ids.max()) for ids in other) - low + 1
    return one[0] * count + (other[0] - low), one[1] * count + (other[1] - low)


def _padding(
    attention_mask: torch.Tensor | None, kv_offset: int, shape: tuple[int, int, int], segments: Ids | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, Ids | None]:
    """Padding as bounds where every row's keys are one run, else as keys of a segment that no query is in."""
    if attention_mask is None:
        return None, None, segments
    B, T, S = shape
    real_BS = attention_mask[:, kv_offset : kv_offset + S].to(torch.bool)
    missing = S - real_BS.shape[1]  # a static cache has room for tokens that the mask does not know of
    count_B = real_BS.sum(dim=-1)
    if not missing and int(count_B.sum()) == B * S:
        return None, None, segments
    first_B = real_BS.to(torch.uint8).argmax(dim=-1) if real_BS.shape[1] else torch.zeros_like(count_B)
    at_S = torch.arange(real_BS.shape[1], device=real_BS.device)
    run_BS = (at_S >= first_B[:, None]) & (at_S < (first_B + count_B)[:, None])
    if torch.equal(run_BS, real_BS):
        stop_B = first_B + count_B
        return (
            first_B if bool(first_B.any()) else None,
            stop_B if bool((stop_B < S).any()) else None,
            segments,
        )
    if missing:
        real_BS = torch.nn.functional.pad(real_BS, (0, missing))
    if segments is None:
        zero_B1 = torch.zeros((B, 1), dtype=torch.int64, device=real_BS.device)
        segments = zero_B1.expand(B, T), zero_B1.expand(B, S)
    none = min(int(ids.min()) for ids in segments) - 1
    return None, None, (segments[0], torch.where(real_BS, segments[1], none))
