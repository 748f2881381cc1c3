"""`watch`: what every head of a Hugging Face decoder looks at, while the model runs as it always does.

    with watch(model, tokenizer=tokenizer) as w:
        model.generate(**inputs)
    w.layers[3].entropy; w.sources(-1); w.received("question"); w.save("page.html")

While it is open, each forward of the model (a whole text, a piece of one, one more token) leaves for each layer, beside
the very same output, what was looked at: nothing is computed eagerly and no T × S matrix is made. What is kept grows
linearly with the text: per token and layer, for each head watched

    16 + 8·top bytes                    lse, largest score, entropy, sink's weight; the heaviest keys
    4 (and 4 with `received`)           what the token's value writes at weight 1; what it gave in all
    D numbers of the model's type       its query, of which `keep_rows` may keep fewer

and G·D numbers of the model's type for the keys: with SmolLM2 in float32 and top=8 4 kB, so 120 kB a token for 30 layers;
in bfloat16 72 kB.

A forward whose first token does not stand behind the last one seen begins anew (a new text, an unrelated batch), or
goes on from where it stands (a cache that was cropped): what stood there is dropped. Refused: models that were loaded
with another implementation or that compute attention by themselves, caches whose rows change places (beam search) or
whose keys change (quantised ones), `torch.compile`, two attentions in a layer (encoder-decoders), a second watch of the
same model.

Shape legend: B batch, H query heads that are watched, G key/value heads, T queries, S keys, D head width, E value width,
C width of the residual stream, K top keys, n queries of one piece of work.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from regardant import problem as problems
from regardant import runs
from regardant import torch as rt
from regardant.errors import UserError
from regardant.looks import Look
from regardant.transformers.interface import WATCHED
from regardant.transformers.masks import LazyMask
from regardant.transformers.tokens import tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

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
            self._tail = more.new_empty((*more.shape[:2], max(n, BLOCK if self._blocks else n), *more.shape[3:]))
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
        options: attention's, for all of them; None if they are not kept.
    """

    first: int
    stop: int
    key: int
    kept: int
    options: Options | None


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

    def __init__(self, watch: Watch, number: int, module: torch.nn.Module) -> None:
        self.number = number
        self.module = module
        self._watch = watch
        self._settings = watch.settings
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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Attention's output (B, H, T, E), and what is to be kept of it on the side."""
        if torch.compiler.is_compiling():
            raise UserError("watch: what torch.compile runs cannot be watched; watch the model that it was given")
        forward = self._watch.arrived(self)
        if forward is None or self.number not in self._settings.layers:
            out: torch.Tensor = rt.attention(query, key, value, **options)
            return out
        seen = rt.look(
            query, key, value, **options, top=self._settings.top, received=self._settings.received
        )
        # Whatever mode the model runs in, what is kept are plain tensors of the types that they have.
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch.autocast(query.device.type, enabled=False),
        ):
            self._choose_heads(query.shape[1])
            self._place(forward, query.shape[2], key)
            self._keep_keys(forward, key, value)
            self._keep_queries(forward, query, key.shape[2], seen, options)
        return seen.out

    def _choose_heads(self, H: int) -> None:
        asked = self._settings.heads
        if asked is not None and max(asked) >= H:
            raise UserError(f"watch: heads must lie between 0 and {H - 1} in layer {self.number}; got {max(asked)}")
        self._query_heads, self._heads = H, list(range(H)) if asked is None else asked

    def _place(self, forward: Forward, T: int, key: torch.Tensor) -> None:
        """Drop what stood where this forward's tokens stand, and all of it if they do not go on from there."""
        first, first_key = forward.stop - T, max(0, forward.stop - key.shape[2])
        if forward.past == 0 or self.first_key + self._keys.length < max(first_key, forward.past):
            self._begin_keys(first_key)
        self._keys.truncate(forward.past - self.first_key)
        self._written.truncate(forward.past - self.first_key)
        if self._keys.length and not _same(self._keys.last(), key[:, :, forward.past - 1 - first_key]):
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
        self, forward: Forward, query: torch.Tensor, S: int, seen: rt.Look, options: Options
    ) -> None:
        T, heads, key = query.shape[2], self._heads, max(0, forward.stop - S)
        keep = T if self._settings.keep_rows is None else min(T, self._settings.keep_rows)
        for name, kept in self._statistics.items():
            statistic = getattr(seen, name)[:, heads]
            if name == "top_keys":
                statistic = torch.where(statistic >= 0, statistic + key, -1).to(torch.int32)
            kept.append(statistic)
        if keep:
            self._queries.append(query[:, heads, T - keep :])
        piece = Piece(forward.stop - T, forward.stop, key, keep, self._own(options) if keep else None)
        self._pieces.append(piece)
        if self._is_received:
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
            _rows=_rows_of,
            number=self.number,
            first=self.first,
            written=self._written.whole(),
        )

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H watched, G, T, S, D, E, where E is not known any more."""
        lse_BHT, k_BGSD = self._statistics["lse"].whole(), self._keys.whole()
        return (*lse_BHT.shape[:2], k_BGSD.shape[1], lse_BHT.shape[2], *k_BGSD.shape[2:], 0)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is: models have all four axes."""
        return tensor

    def rows(
        self, queries_N: Array, heads_M: Array, batch: slice = slice(None)
    ) -> torch.Tensor:
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
                a_BMnS = look.rows(np.arange(stop - first))
            a_BMNS[:, :, done : done + stop - first, begin : piece.stop] = a_BMnS
        return a_BMNS

    def _runs(self, queries_N: Array) -> Iterator[tuple[int, int, int, Piece, int]]:
        """Queries that lie side by side in one piece: which of those asked for, positions, piece, place among kept."""
        firsts = np.array([piece.first for piece in self._pieces])
        kept = np.cumsum([0, *(piece.kept for piece in self._pieces)])
        positions_N = queries_N + self.first
        at_N = np.searchsorted(firsts, positions_N, side="right") - 1
        cuts = np.flatnonzero((np.diff(positions_N) != 1) | (np.diff(at_N) != 0)) + 1
        for done, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(queries_N)], strict=True):
            if done == end:
                continue
            piece, first = self._pieces[at_N[done]], int(positions_N[done])
            if first < piece.stop - piece.kept or piece.options is None:
                raise UserError(
                    f"watch: the query of token {first} was not kept in layer {self.number}: {self._why(piece)}"
                )
            place = int(kept[at_N[done]]) + first - (piece.stop - piece.kept)
            yield done, first, first + end - done, piece, place

    def _why(self, piece: Piece) -> str:
        if piece.kept:
            return f"keep_rows={self._settings.keep_rows} kept those from {piece.stop - piece.kept} on"
        return f"keep_rows was {self._settings.keep_rows}"


def _rows_of(layer: Layer, _lse: torch.Tensor, queries_N: Array, heads_M: Array) -> torch.Tensor:
    return layer.rows(queries_N, heads_M)


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """What differs when a parameter is another or has changed."""
    return parameter.data_ptr(), parameter._version  # noqa: SLF001 - torch's own count of changes


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether these are the same keys, but for how some models compute them anew from a compressed cache.

    Half of a number's digits is far more than another order of summation can change, and less than two tokens share.
    """
    if one.shape != other.shape:
        return False
    allowed = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((((one - other).abs() <= allowed) | (one.isnan() & other.isnan())).all())


def _part(
    options: Options, *, rows: slice, heads: list[int], queries: slice, keys: slice
) -> Options:
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


class Watch:
    """What a model looked at while the watch was open. Made by `watch`.

    Questions can be asked while it is open and afterwards. Tokens are counted in each row of a batch from its first
    one that is no padding; `row` says which row.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings, tokenizer: Any | None) -> None:
        self.settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._layers: dict[int, Layer] = {}
        self._hooks: list[Any] = []
        self._forward: Forward | None = None
        self._ids_BS: torch.Tensor | None = None
        self._real_BS: torch.Tensor | None = None
        self._prompt = 0
        self._spans: list[tuple[int | None, str, dict[str, Any]]] = []
        self._made: dict[int, runs.Run] = {}
        self._was_open = False

    def __repr__(self) -> str:
        return f"Watch({_name(self._model)!r}, {'open' if self._hooks else 'closed'})"

    # --------------------------------------------------------------------------------------------- open and closed

    def __enter__(self) -> Watch:
        """Begin to watch.

        Raises:
            UserError: it was open before, or the model is being watched already.
        """
        if self._was_open:
            raise UserError("watch: a watch is opened once; call watch(model) for a new one")
        modules = [module for module in self._model.modules() if isinstance(_layer_of(module), int)]
        if any(id(module) in WATCHED for module in modules):
            raise UserError(f"watch: {_name(self._model)} is being watched already; close that watch first")
        self._was_open = True
        for module in modules:
            WATCHED[id(module)] = Layer(self, _layer_of(module), module)
        self._modules = modules
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            WATCHED.pop(id(module), None)
        self._hooks, self._modules = [], []

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        ids_BT, embedded = given.get("input_ids"), given.get("inputs_embeds")
        if ids_BT is None:
            ids_BT = torch.full(embedded.shape[:2], -1, device=embedded.device)
        caches = [given[name] for name in ("cache", "past_key_values") if given.get(name) is not None]
        self._forward = Forward(int(caches[0].get_seq_length()) if caches else 0, ids_BT.shape[1])
        self._read(self._forward, ids_BT, given.get("attention_mask"))

    def _read(self, forward: Forward, ids_BT: torch.Tensor, mask: Any) -> None:
        """Note the forward's tokens and where there is padding."""
        past, stop = forward.past, forward.stop
        known = ids_BT[:, :0] if self._ids_BS is None or past == 0 else self._ids_BS[:, :past]
        unknown = torch.full((len(ids_BT), past - known.shape[1]), -1, device=ids_BT.device)
        self._ids_BS = torch.cat([known, unknown, ids_BT], dim=1)
        if past == 0 or forward.length > 1 or not self._prompt:
            self._prompt = stop
        self._prompt = min(self._prompt, stop)
        before = None if self._real_BS is None else self._real_BS[:, :past]
        self._real_BS = _real(mask, before, self._ids_BS.shape, forward)
        self._made = {}

    def _after(self, _model: torch.nn.Module, _args: Any, output: Any) -> None:
        forward, self._forward = self._forward, None
        if output is not None and forward is not None and not forward.seen:
            raise UserError(
                f"watch: {_name(self._model)} computes attention by itself, not through transformers' attention "
                "interface, so there is nothing to see"
            )

    def arrived(self, layer: Layer) -> Forward | None:
        """The forward that a layer's attention belongs to; None where it is computed again for gradients."""
        forward = self._forward
        if forward is None:
            return None
        other = self._layers.setdefault(layer.number, layer)
        if other is not layer or layer.number in forward.seen:
            raise UserError(f"watch: layer {layer.number} has two attentions; only decoders can be watched")
        forward.seen.add(layer.number)
        return forward

    # --------------------------------------------------------------------------------------------------- questions

    def name_span(
        self,
        name: str,
        *,
        text: str | None = None,
        characters: tuple[int, int] | None = None,
        tokens: tuple[int, int] | None = None,
        row: int | None = None,
    ) -> None:
        """Give a part of the text a name; see `regardant.runs.Run.name_span`.

        It is looked for when a question is asked, so it may be named before the model has run.

        Args:
            name: such as "question".
            text: the part itself, which must be there once. `characters`, `tokens`: its first and one after its last.
            row: the row of the batch that it is in; None for every row.
        """
        self._spans.append((row, name, {"text": text, "characters": characters, "tokens": tokens}))
        self._made = {}

    @property
    def layers(self) -> dict[int, LayerLook]:
        """What each layer watched has looked at so far, by number.

        Raises:
            UserError: nothing has been seen.
        """
        return {layer.number: layer.look() for layer in self._watched()}

    def sources(
        self,
        token: int = -1,
        top: int = 10,
        *,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        row: int = 0,
    ) -> runs.Sources:
        """Where a token drew its information from, by token and by named part; see `regardant.runs.Run.sources`.

        The last token is the last that the model has read; the one that it then wrote, if nothing followed, has not
        been read.
        """
        return self.run(row).sources(token, top, layers=layers, heads=heads)

    def received(
        self,
        span: str,
        *,
        tokens: int | Sequence[int] | None = None,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        measure: str = "weight",
        row: int = 0,
    ) -> Array:
        """How much a named part gave to each generated token; see `regardant.runs.Run.received`.

        Where the prompt ends is told from the last forward of several tokens.
        """
        return self.run(row).received(span, tokens=tokens, layers=layers, heads=heads, measure=measure)

    def save(
        self, path: str | Path, *, row: int = 0, focus: int = -1, progress: runs.Progress | None = None
    ) -> None:
        """Write the page on which every token can be asked; see `regardant.runs.Run.save`.

        Raises:
            UserError: queries that were not kept, heads that were left out, or a path that cannot be written.
        """
        if self.settings.heads is not None:
            raise UserError("watch: the page shows every head; watch with heads=None to save one")
        run = self.run(row)
        for layer in run.layers.values():
            if np.isnan(layer.written_HS).any():
                kind = type(self._layers[layer.number].module).__name__
                raise UserError(
                    f"watch: the page needs what is written, and no output projection of {kind} is known: it is "
                    f"none of {', '.join(OUTPUTS)}"
                )
        run.save(path, focus=focus, progress=progress)

    def run(self, row: int = 0) -> runs.Run:
        """One row of the batch as a `regardant.runs.Run`, without its padding."""
        watched, ids_BS, real_BS = self._watched(), self._ids_BS, self._real_BS
        assert ids_BS is not None  # noqa: S101 - what was watched has been read
        assert real_BS is not None  # noqa: S101
        if not -len(ids_BS) <= row < len(ids_BS):
            raise UserError(f"watch: row must lie between {-len(ids_BS)} and {len(ids_BS) - 1}; got {row}")
        row %= len(ids_BS)
        if row not in self._made:
            places = real_BS[row].nonzero()[:, 0].tolist() or [0]
            first, stop = places[0], places[-1] + 1
            text, tokens = tokens_of(ids_BS[row, first:stop].tolist(), self._tokenizer)
            layers = {layer.number: _layer_of_run(layer, row, first, stop) for layer in watched}
            run = runs.Run(_name(self._model), text, tokens, layers, prompt=min(self._prompt, stop) - first)
            for only, name, where in self._spans:
                if only is None or only % len(ids_BS) == row:
                    run.name_span(name, **where)
            self._made[row] = run
        return self._made[row]

    def _watched(self) -> list[Layer]:
        layers = [layer for number, layer in sorted(self._layers.items()) if layer.stop > layer.first]
        if not layers:
            raise UserError(f"watch: nothing has been seen yet; call {_name(self._model)} while the watch is open")
        return layers


def _real(
    mask: Any, before: torch.Tensor | None, shape: torch.Size, forward: Forward
) -> torch.Tensor:
    """Which tokens are no padding, (B, S), by the forward's mask and what was known of earlier ones."""
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= forward.stop:
        return mask[:, : forward.stop].to(torch.bool)
    if isinstance(mask, dict):
        mask = next((one for one in mask.values() if isinstance(one, LazyMask)), None)
    real_BS = torch.ones(shape, dtype=torch.bool)
    if before is not None and before.shape == (shape[0], forward.past):
        real_BS[:, : forward.past] = before
    if isinstance(mask, LazyMask):
        seen = mask.visible
        at = torch.arange(forward.past, forward.stop, device=seen.device) - (forward.past - seen.offset)
        new_BT = real_BS[:, forward.past :].to(seen.device)
        if seen.starts_B is not None:
            new_BT &= at >= seen.starts_B[:, None]
        if seen.lengths_B is not None:
            new_BT &= at < seen.lengths_B[:, None]
        real_BS[:, forward.past :] = new_BT
    return real_BS


def _layer_of_run(layer: Layer, row: int, first: int, stop: int) -> runs.Layer:
    """One row of what a layer looked at, its padding left out, in NumPy."""
    look = layer.look()
    begin = max(first, look.first)

    def of_queries(statistic: torch.Tensor, missing: float) -> Array:
        """Statistics (H, T, …) of the tokens; of those that came before the watch was opened, `missing`."""
        seen = statistic[row, :, begin - look.first : stop - look.first].cpu().numpy()
        whole = np.full((seen.shape[0], stop - first, *seen.shape[2:]), missing, seen.dtype)
        whole[:, begin - first :] = seen
        return whole

    def rows(tokens_n: Array, heads_M: Array | None) -> Array:
        heads = np.arange(look.lse.shape[1]) if heads_M is None else heads_M
        missing = tokens_n[tokens_n + first < look.first]
        if missing.size:
            raise UserError(f"watch: token {missing[0]} was read before the watch was opened")
        a_BMNS = layer.rows(tokens_n + first - look.first, heads, slice(row, row + 1))
        return a_BMNS[0, ..., first:stop].cpu().numpy()

    keys = of_queries(look.top_keys, -1)
    written_HS = np.zeros((look.lse.shape[1], stop), np.float32)
    written_HS[:, layer.first_key :] = look.written[row, :, : stop - layer.first_key].cpu().numpy()
    return runs.Layer(
        number=layer.number,
        **{
            f"{name}_HT": of_queries(getattr(look, name), np.nan)
            for name in ("lse", "max_logit", "entropy", "sink_weight")
        },
        top_keys_HTK=np.where(keys >= first, keys - first, -1).astype(np.int32),
        top_weights_HTK=of_queries(look.top_weights, 0),
        written_HS=written_HS[:, first:],
        _rows=rows,
    )


def _layer_of(module: torch.nn.Module) -> Any:
    """The number of the layer that a module of transformers says it belongs to; None if it says nothing."""
    return getattr(module, "layer_idx", None)


def _name(model: PreTrainedModel) -> str:
    return model.config.name_or_path or type(model).__name__


def watch(
    model: PreTrainedModel,
    *,
    tokenizer: Any | None = None,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    top: int = 8,
    received: bool = False,
    keep_rows: int | None = None,
) -> Watch:
    """Watch what a model's heads look at, while it runs as it always does.

    Args:
        model: a decoder of transformers, loaded with attn_implementation="regardant".
        tokenizer: turns its tokens into text, for pages and for parts that are named by their text.
        layers: numbers of the layers to watch; None for all. `heads`: of the heads in each.
        top: how many of the heaviest keys to keep of each query and head.
        received: also sum what each key gave to all queries (one more pass over the scores).
        keep_rows: of how many queries, the last ones of each forward, exact rows can be asked for; None for all, 1 for
            the end of a prompt and each generated token.

    Returns:
        A `Watch`, to be used in a `with` statement. While that is open the model's outputs have the very bits that
        they have without it. Memory: see the module.

    Raises:
        TypeError: a model that is none of transformers, or a setting of the wrong kind.
        UserError: a model that is no decoder, or was loaded with another implementation; a layer or head that is not
            there; later on, what the module says is refused.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"watch: model must be a model of transformers; got {type(model).__name__}")
    config = model.config.get_text_config()
    if config._attn_implementation != "regardant":  # noqa: SLF001 - transformers has no other place for it
        raise UserError(
            'watch: the model must be loaded with attn_implementation="regardant", or changed by '
            f'model.set_attn_implementation("regardant"); this one has "{config._attn_implementation}"'  # noqa: SLF001
        )
    if model.config.is_encoder_decoder:
        raise UserError(f"watch: only decoders can be watched; {_name(model)} is an encoder and a decoder")
    kept = problems.watch("watch", top=top, received=received, pooled=None)
    return Watch(
        model,
        Settings(
            layers=runs.check_layers(layers, config.num_hidden_layers),
            heads=None if heads is None else sorted(set(_checked_heads(heads, config.num_attention_heads))),
            top=kept.top,
            received=kept.received,
            keep_rows=None if keep_rows is None else problems.integer("watch", "keep_rows", keep_rows, low=0),
        ),
        tokenizer,
    )


def _checked_heads(heads: int | Sequence[int], count: int) -> list[int]:
    try:
        chosen: list[int] = problems.indices("watch", "heads", heads, count).tolist()
    except ValueError as error:
        raise UserError(str(error)) from None
    if not chosen:
        raise UserError("watch: heads must name at least one head")
    return chosen
