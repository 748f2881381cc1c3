"""What is kept of one layer's attention while it is watched: statistics, keys, queries; rows are made again.

Keys, queries and statistics of later forwards are put behind the earlier ones; of a forward that begins further back,
what stood there is dropped. It refuses a past that is not the one that was seen, and rows of queries that were not
kept.

Positions are counted from the first token that the model was given, padding included.

Shape legend: B batch, H query heads that are watched, G key/value heads, T queries, S keys, D head width, E value
width, C width of the residual stream, I = H·E; M heads, N queries and n neighbouring queries of rows asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from regardant import torch as rt
from regardant.errors import UserError
from regardant.looks import Look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regardant.problem import Array

    Options = dict[str, Any]

# Names of the projection that takes heads' outputs back to the residual stream.
OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# Later tokens come one by one; so many are kept together.
BLOCK = 256
STATISTICS = ("lse", "max_logit", "entropy", "sink_weight", "top_keys", "top_weights")


class Growing:
    """A tensor that grows along its third axis; what is there is not copied when more comes."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._tail: torch.Tensor | None = None  # the last block, where it still has room
        self._used = 0
        self.length = 0

    def append(self, more: torch.Tensor) -> None:
        """Put a copy of (B, H, n, …) behind the rest."""
        n = more.shape[2]
        if self._tail is None or self._used + n > self._tail.shape[2]:
            self._close()
            self._tail = more.new_empty(
                (*more.shape[:2], max(n, BLOCK if self._blocks else n), *more.shape[3:])
            )
        self._tail[:, :, self._used : self._used + n] = more
        self._used += n
        self.length += n

    def _close(self) -> None:
        if self._tail is not None and self._used:
            self._blocks.append(self._tail[:, :, : self._used])
        self._tail, self._used = None, 0

    def whole(self) -> torch.Tensor:
        """All of it as one tensor, which is what it is from now on."""
        self._close()
        if len(self._blocks) > 1:
            self._blocks = [torch.cat(self._blocks, dim=2)]
        return self._blocks[0]

    def last(self) -> torch.Tensor:
        """The last entry, (B, H, …)."""
        if self._tail is not None and self._used:
            return self._tail[:, :, self._used - 1]
        return self._blocks[-1][:, :, -1]

    def truncate(self, length: int) -> None:
        """Forget everything from entry `length` on."""
        gone = max(0, self.length - length)
        self.length -= gone
        if gone <= self._used:
            self._used -= gone
        elif gone:
            self._blocks = [self.whole()[:, :, : self.length]] if self.length else []


@dataclasses.dataclass(frozen=True)
class Piece:
    """The queries of one forward.

    Attributes:
        first: the position of the first. `stop`: one after the last.
        key: the position of the first key that attention was given.
        kept: how many of the queries, the last ones, were kept.
        options: attention's, for all of them. `is_biased`: they had a position bias, which is not among them.
    """

    first: int
    stop: int
    key: int
    kept: int
    options: Options
    is_biased: bool


@dataclasses.dataclass
class Forward:
    """One forward of the model.

    Attributes:
        past: how many tokens came before it. `length`: how many are in it.
        seen: the layers whose attention has been computed.
    """

    past: int
    length: int
    seen: set[int] = dataclasses.field(default_factory=set)

    @property
    def stop(self) -> int:
        """One after the position of the last token."""
        return self.past + self.length


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is watched: the numbers of the layers and heads (None for all), and what `watch` was asked to keep."""

    layers: list[int]
    heads: list[int] | None
    top: int
    received: bool
    keep_rows: int | None


class Layer:
    """One layer's attention while it is watched: it computes, keeps, and makes a `LayerLook` of what it kept."""

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        settings: Settings,
        arrived: Callable[[Layer], Forward | None],
    ) -> None:
        """Take the layer's number, its attention, what to keep, and whom to tell that it is computed.

        `arrived` answers with the forward that it is computed for, or None if nothing is to be kept of it.
        """
        self.number = number
        self.module = module
        self._settings = settings
        self._arrived = arrived
        self._triangle: tuple[tuple[int, int], torch.Tensor] | None = None
        self._sinks: tuple[tuple[int, int], torch.Tensor] | None = None
        self._query_heads = 0
        self._heads: list[int] = []
        self._begin(0)
        self._begin_keys(0)

    @property
    def stop(self) -> int:
        """One after the position of the last query."""
        return self._pieces[-1].stop if self._pieces else self.first

    def _begin(self, first: int) -> None:
        self.first = first  # the first query's position
        self._pieces: list[Piece] = []
        self._statistics = {name: Growing() for name in STATISTICS}
        self._queries = Growing()

    def _begin_keys(self, first: int) -> None:
        self.first_key = first
        self._keys, self._written = Growing(), Growing()
        self._received: torch.Tensor | None = None
        self._is_received = self._settings.received  # until queries that are summed in it are dropped

    # ------------------------------------------------------------------------------------------- while it runs

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        again: Options | None,
    ) -> torch.Tensor:
        """Attention's output (B, H, T, E), and what is to be kept of it on the side.

        Args:
            query: (B, H, T, D). `key`: (B, G, S, D). `value`: (B, G, S, E).
            options: attention's.
            again: the same, fit to be kept for rows; None if they cannot be kept.
        """
        if torch.compiler.is_compiling():
            raise UserError(
                "watch: what torch.compile runs cannot be watched; watch the model that it was given"
            )
        forward = self._arrived(self)
        if forward is None:
            return rt.attention(query, key, value, **options)
        seen = rt.look(query, key, value, **options, top=self._settings.top, received=self._settings.received)
        # Whatever mode the model runs in, what is kept are plain tensors of the types that they have.
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch.autocast(query.device.type, enabled=False),
        ):
            self._choose_heads(query.shape[1])
            self._place(forward, query.shape[2], key)
            self._keep_keys(forward, key, value)
            self._keep_queries(forward, query, key.shape[2], seen, again)
        if query.device.type == "cpu":
            return seen.out  # has attention's bits
        # Elsewhere attention may be served by torch's own, which looks at nothing.
        return rt.attention(query, key, value, **options)

    def _choose_heads(self, H: int) -> None:
        asked = self._settings.heads
        if asked is not None and max(asked) >= H:
            raise UserError(
                f"watch: heads must lie between 0 and {H - 1} in layer {self.number}; got {max(asked)}"
            )
        self._query_heads, self._heads = H, list(range(H)) if asked is None else asked

    def _place(self, forward: Forward, T: int, key: torch.Tensor) -> None:
        """Drop what stood where this forward's tokens stand, and all of it if they do not go on from there."""
        first, first_key = forward.stop - T, max(0, forward.stop - key.shape[2])
        if forward.past == 0 or self.first_key + self._keys.length < max(first_key, forward.past):
            self._begin_keys(first_key)
        self._keys.truncate(forward.past - self.first_key)
        self._written.truncate(forward.past - self.first_key)
        last = forward.past - 1 - first_key
        if self._keys.length and last >= 0 and not _same(self._keys.last(), key[:, :, last]):
            raise UserError(
                "watch: the cache's past is not what was seen: beam search and quantised caches cannot be watched"
            )
        if not self.first <= first <= self.stop or forward.past == 0:
            self._is_received &= not self._pieces or forward.past == 0
            self._begin(first)
        while self._pieces and self.stop > first:
            self._drop(first)

    def _drop(self, first: int) -> None:
        """Forget the last piece's queries from position `first` on."""
        piece = self._pieces.pop()
        gone = piece.stop - max(first, piece.first)
        self._is_received = False
        for kept in self._statistics.values():
            kept.truncate(kept.length - gone)
        self._queries.truncate(self._queries.length - min(gone, piece.kept))
        if gone < piece.stop - piece.first:
            kept_count = max(0, piece.kept - gone)
            self._pieces.append(dataclasses.replace(piece, stop=piece.stop - gone, kept=kept_count))

    def _keep_keys(self, forward: Forward, key: torch.Tensor, value: torch.Tensor) -> None:
        first_key = max(0, forward.stop - key.shape[2])
        new = slice(self.first_key + self._keys.length - first_key, forward.stop - first_key)
        self._keys.append(key[:, :, new])
        self._written.append(self._norms(value[:, :, new]))

    def _keep_queries(
        self, forward: Forward, query: torch.Tensor, S: int, seen: Look, again: Options | None
    ) -> None:
        T, key = query.shape[2], max(0, forward.stop - S)
        heads: Any = slice(None) if self._settings.heads is None else self._heads
        keep = T if self._settings.keep_rows is None else min(T, self._settings.keep_rows)
        for name, kept in self._statistics.items():
            statistic = getattr(seen, name)[:, heads]
            if name == "top_keys":
                statistic = torch.where(statistic >= 0, statistic + key, -1).to(torch.int32)
            kept.append(statistic)
        if keep:
            self._queries.append(query[:, heads, T - keep :])
        self._pieces.append(
            Piece(forward.stop - T, forward.stop, key, keep, self._own(again or {}), is_biased=again is None)
        )
        if self._is_received and seen.received is not None:
            self._add_received(seen.received[:, heads, : forward.stop - key], key)

    def _own(self, options: Options) -> Options:
        """Attention's options with sinks that training does not change."""
        sinks = options.get("sinks")
        if sinks is None:
            return options
        mark = _mark(sinks)
        if self._sinks is None or self._sinks[0] != mark:
            self._sinks = mark, sinks.detach().clone()
        return options | {"sinks": self._sinks[1]}

    def _add_received(self, more_BHS: torch.Tensor, key: int) -> None:
        size = key + more_BHS.shape[-1]
        total = more_BHS.new_zeros((*more_BHS.shape[:2], size))
        if self._received is not None:
            total[..., : self._received.shape[-1]] = self._received
        total[..., key:] += more_BHS
        self._received = total

    def _norms(self, v_BGSE: torch.Tensor) -> torch.Tensor:
        """‖v_j W_O‖ for each watched head and key, (B, H', S): with W_Oᵀ = QR, the length of v_j Rᵀ."""
        B, G, S, E = v_BGSE.shape
        H, heads = self._query_heads, self._heads
        r_HEE = self._triangles(H, E)
        if r_HEE is None:
            return torch.full((B, len(heads), S), torch.nan, device=v_BGSE.device)
        v_BHSE = v_BGSE[:, [h // (H // G) for h in heads]].to(r_HEE.dtype)
        norms: torch.Tensor = torch.linalg.vector_norm(v_BHSE @ r_HEE[heads].mT, dim=-1)
        return norms

    def _triangles(self, H: int, E: int) -> torch.Tensor | None:
        """R of each head's part of the output projection, (H, E, E); None if there is none of a known name."""
        found = next((child for name, child in self.module.named_children() if name in OUTPUTS), None)
        matrix = getattr(found, "weight", None)
        if not isinstance(matrix, torch.Tensor) or not matrix.is_floating_point() or matrix.ndim != 2:
            return None
        wo_IC = matrix if isinstance(found, Conv1D) else matrix.T
        if wo_IC.shape[0] != H * E:
            return None
        mark = _mark(matrix)
        if self._triangle is None or self._triangle[0] != mark:
            wide_HEC = wo_IC.to(torch.promote_types(wo_IC.dtype, torch.float32)).unflatten(0, (H, E))
            self._triangle = mark, torch.linalg.qr(wide_HEC.mT, mode="r").R
        return self._triangle[1]

    # ------------------------------------------------------------------------------------------------ afterwards

    def look(self) -> LayerLook:
        """What was kept, as a look."""
        kept = {name: growing.whole() for name, growing in self._statistics.items()}
        kept["top_keys"] = kept["top_keys"].long()
        lse_BHT = kept["lse"]
        return LayerLook(
            **kept,
            out=lse_BHT.new_empty((*lse_BHT.shape, 0)),
            received=self._received if self._is_received else None,
            _problem=self,  # type: ignore[arg-type]  # what a look asks of a problem, this has
            _rows=_rows_of,  # type: ignore[arg-type]  # likewise, with tensors
            number=self.number,
            first=self.first,
            written=torch.nn.functional.pad(self._written.whole(), (self.first_key, 0)),
        )

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H watched, G, T, S, D, E, where E is not known any more."""
        lse_BHT, k_BGSD = self._statistics["lse"].whole(), self._keys.whole()
        return (*lse_BHT.shape[:2], k_BGSD.shape[1], lse_BHT.shape[2], *k_BGSD.shape[2:], 0)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is: models have all four axes."""
        return tensor

    def rows(self, queries_N: Array, heads_M: Array, batch: slice = slice(None)) -> torch.Tensor:
        """Exact weights (B', M, N, S) of some queries of some watched heads over all keys.

        Raises:
            UserError: a query that was not kept.
        """
        k_BGSD = self._keys.whole()
        B, S = len(range(k_BGSD.shape[0])[batch]), self.first_key + k_BGSD.shape[2]
        dtype = torch.promote_types(k_BGSD.dtype, torch.float32)
        a_BMNS = k_BGSD.new_zeros((B, len(heads_M), len(queries_N), S), dtype=dtype)
        heads = [self._heads[m] for m in heads_M.tolist()]
        kv_heads = [h // (self._query_heads // k_BGSD.shape[1]) for h in heads]
        for done, first, stop, piece, place in self._runs(queries_N):
            q_BMnD = self._queries.whole()[batch, :, place : place + stop - first][:, heads_M]
            begin = max(piece.key, self.first_key)
            k_BMsD = k_BGSD[batch, :, begin - self.first_key : piece.stop - self.first_key][:, kv_heads]
            options = _part(
                piece.options,
                rows=batch,
                heads=heads,
                queries=slice(first - piece.first, stop - piece.first),
                keys=slice(begin - piece.key, piece.stop - piece.key),
            )
            # A value that is one number wide: the output is not asked for.
            with torch.no_grad():
                look = rt.look(q_BMnD, k_BMsD, k_BMsD[..., :1], **options, top=0)
                a_BMnS = torch.as_tensor(look.rows(np.arange(stop - first)))
                # Scores of one query are rounded otherwise in lse than in rows: that is a factor common to the row.
                total_BMn = a_BMnS.sum(dim=-1) + look.sink_weight
                a_BMnS /= torch.where(total_BMn == 0, 1, total_BMn)[..., None]
            a_BMNS[:, :, done : done + stop - first, begin : piece.stop] = a_BMnS
        return a_BMNS

    def _runs(self, queries_N: Array) -> Iterator[tuple[int, int, int, Piece, int]]:
        """Queries that lie side by side in one piece: which of those asked for, positions, piece, place."""
        firsts = np.array([piece.first for piece in self._pieces])
        kept = np.cumsum([0, *(piece.kept for piece in self._pieces)])
        positions_N = queries_N + self.first
        at_N = np.searchsorted(firsts, positions_N, side="right") - 1
        cuts = np.flatnonzero((np.diff(positions_N) != 1) | (np.diff(at_N) != 0)) + 1
        for done, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(queries_N)], strict=True):
            if done == end:
                continue
            piece, first = self._pieces[at_N[done]], int(positions_N[done])
            if first < piece.stop - piece.kept or piece.is_biased:
                raise UserError(
                    f"watch: the query of token {first} was not kept in layer {self.number}: {self._why(piece)}"
                )
            place = int(kept[at_N[done]]) + first - (piece.stop - piece.kept)
            yield done, first, first + end - done, piece, place

    def _why(self, piece: Piece) -> str:
        if piece.is_biased:
            return "its position bias is not kept, which would take T × S numbers"
        if piece.kept:
            return f"keep_rows={self._settings.keep_rows} kept those from {piece.stop - piece.kept} on"
        return f"keep_rows was {self._settings.keep_rows}"


def _rows_of(layer: Layer, _lse: torch.Tensor, queries_N: Array, heads_M: Array) -> torch.Tensor:
    return layer.rows(queries_N, heads_M)


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """What differs when a parameter is another or has changed."""
    # Torch's own count of changes, which it does not keep for what was made in inference mode.
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version  # noqa: SLF001


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether these are the same keys, but for how some models compute them anew from a compressed cache.

    Half of a number's digits is far more than another order of summation can change, and less than two tokens share.
    """
    if one.shape != other.shape:
        return False
    allowed = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((((one - other).abs() <= allowed) | (one.isnan() & other.isnan())).all())


def _part(options: Options, *, rows: slice, heads: list[int], queries: slice, keys: slice) -> Options:
    """Attention's options for some batch rows, heads, and neighbouring queries and keys."""
    part = dict(options)
    if "offset" in part:
        part["offset"] += queries.start - keys.start
    for name in ("starts", "lengths"):
        if name in part:
            part[name] = (part[name][rows] - keys.start).clamp(0, keys.stop - keys.start)
    if "segments" in part:
        part["segments"] = part["segments"][0][rows, queries], part["segments"][1][rows, keys]
    for name in ("mask", "bias"):
        if name in part:
            whole = part[name][(None,) * (4 - part[name].ndim)]
            for axis, some in enumerate((rows, heads, queries, keys)):
                if whole.shape[axis] > 1:
                    whole = whole[(slice(None),) * axis + (some,)]
            part[name] = whole
    if "sinks" in part:
        part["sinks"] = part["sinks"][heads]
    return part


@dataclasses.dataclass(frozen=True, eq=False)
class LayerLook(Look):
    """What one layer looked at: a `regardant.Look` of tensors, of all queries so far, without their outputs.

    Keys are counted from the text's first token, padding included; so are queries, but for `first`. Heads are counted
    among those watched.

    Attributes:
        number: which layer of the model.
        first: the position of the first query: 0, unless the watch was opened upon a cache that was filled already.
        written: (B, H, S), ‖v_j W_O‖, how much each token's value would add to the residual stream at weight 1; nan
            where no output projection of a known name takes up the heads' outputs.
        received: (B, H, S); None if it was not asked for, or if queries that were summed in it have been dropped.
            Queries of padding on the right count; those of padding on the left see nothing.
    """

    number: int = 0
    first: int = 0
    written: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
