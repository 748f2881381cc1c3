"""A text as a model read it, and what every head looked at: where each token drew its information from.

A `Run` is made by whoever ran the model (`LanguageModel.look`, `regardant.transformers.watch`). It keeps what grows
linearly with the text, and its answers are exact: the row of weights of any token is computed again when it is asked
for. Parts of the text can be given names, which answers are then summed over. It refuses tokens, layers, heads and
names that are not there.

Two measures of "where from", both shares that add up to one over the tokens:

- weight: the attention weights a_ij, averaged over heads and layers; where a head has a learned sink, its share is
  missing from the sum;
- written: each weight times the length of what it moved, ‖a_ij v_j W_O‖, the value through the head's own part of
  the output projection (Kobayashi et al. 2020), added over heads and layers and divided by the sum. A head that
  rests on a token with next to no value writes next to nothing, and counts for as much.

Shape legend: L layers looked at, H query heads, T tokens (as queries), S tokens (as keys), K top keys, n tokens of
one piece of work, M sources kept.
"""

from __future__ import annotations

import dataclasses
import operator
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.errors import UserError
from regardant.page import export
from regardant.problem import indices
from regardant.writing import replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from regardant.problem import Array

    Progress = Callable[[int, int], None]
    # Exact weights (H', n, S) of the tokens (n,) and heads, or all heads, that it is given.
    Rows = Callable[[Array, Array | None], Array]

# Sources kept on a page for all heads together, and for each layer.
PAGE_SOURCES = 16
# A page larger than this is slow to open: of a long text it keeps fewer sources for each single head.
PAGE_BYTES = 64 << 20
# Numbers in the largest array of weights that is made at a time.
PIECE = 2**22


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of the text.

    Attributes:
        index: its position. `id`: its number in the vocabulary.
        text: a readable piece, bytes that are no whole character and control characters shown by name.
        start: the first character of the text that it stands for. `end`: one after the last.
    """

    index: int
    id: int
    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Share:
    """How much was drawn from some place, by both measures (see the module)."""

    weight: float
    written: float


@dataclasses.dataclass(frozen=True)
class Source:
    """A token that was drawn from, and its share by both measures (see the module)."""

    token: Token
    weight: float
    written: float


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where one token drew from.

    Attributes:
        token: the token that was asked.
        items: the heaviest sources by weight, heaviest first.
        sink: the first token's share by weight, listed or not: heads that look for nothing rest there.
        sink_written: the same by what was written.
        rest: the share by weight of all tokens that are not listed. `rest_written`: by what was written.
        spans: the share of each part of the text that has a name, by name; names may overlap.
    """

    token: Token
    items: list[Source]
    sink: float
    sink_written: float
    rest: float
    rest_written: float
    spans: dict[str, Share] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """What one layer's heads looked at.

    Attributes:
        number: which layer of the model.
        lse_HT, max_logit_HT, entropy_HT, sink_weight_HT, top_keys_HTK, top_weights_HTK: as in `regardant.Look`.
        written_HS: ‖v_j W_O‖, how much each token's value would add to the residual stream at weight 1.
    """

    number: int
    lse_HT: Array
    max_logit_HT: Array
    entropy_HT: Array
    sink_weight_HT: Array
    top_keys_HTK: Array
    top_weights_HTK: Array
    written_HS: Array
    _rows: Rows = dataclasses.field(repr=False)

    def rows(
        self, tokens: int | Sequence[int] | Array, heads: int | Sequence[int] | Array | None = None
    ) -> Array:
        """Exact weights (H', n, S) of chosen tokens over all tokens, of chosen heads or all.

        Raises:
            ValueError: a token or head that is not there.
        """
        H, T = self.lse_HT.shape
        chosen_H = None if heads is None else indices("rows", "heads", heads, H)
        return self._rows(indices("rows", "queries", tokens, T), chosen_H)


class MissingLayerError(UserError, KeyError):
    """A layer that was not looked at. It is a KeyError as well, as a mapping's own methods expect."""

    __str__ = UserError.__str__  # a KeyError shows its sentence in quotes

    def __init__(self, number: object, there: Iterable[int]) -> None:
        super().__init__(f"layers must be among those looked at, {_ranges(sorted(there))}; got {number!r}")


class Layers(dict[int, Layer]):
    """Layers by number; one that is missing is refused in a sentence."""

    def __missing__(self, number: object) -> Layer:
        raise MissingLayerError(number, self)


class Run:
    """A text as a model read it.

    Attributes:
        model_name: the model's name.
        text: the text, with the chat template's words if there were any.
        tokens: its tokens.
        layers: the layers that were looked at, by number, in rising order.
        prompt: how many of the tokens were given; those after them the model wrote.
        spans: the tokens of each part of the text that has a name.

    Memory: what the layers hold, which whoever made them tells.
    """

    def __init__(
        self,
        model_name: str,
        text: str,
        tokens: list[Token],
        layers: dict[int, Layer],
        *,
        prompt: int | None = None,
    ) -> None:
        self.model_name = model_name
        self.text = text
        self.tokens = tokens
        self.layers = Layers(layers)
        self.prompt = len(tokens) if prompt is None else prompt
        self.spans: dict[str, range] = {}

    def __repr__(self) -> str:
        return f"Run({self.model_name!r}, {len(self.tokens)} tokens, {len(self.layers)} layers)"

    # ----------------------------------------------------------------------------------------- parts of the text

    def name_span(
        self,
        name: str,
        *,
        text: str | None = None,
        characters: tuple[int, int] | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        """Give a part of the text a name, over which `sources` and `received` then sum. Names may overlap.

        Args:
            name: such as "question"; one that is there already is given to the new part.
            text: the part itself, which the prompt must hold exactly once: that the model said it again does no harm.
                If the prompt does not hold it, the whole text must, exactly once.
            characters: its first character and one after its last; every token that has one of them belongs to it.
            tokens: its first token and one after its last; negative ones count from the end.

        Raises:
            UserError: not exactly one of the three, or a part that is not there.
        """
        given = {"text": text, "characters": characters, "tokens": tokens}
        if sum(value is not None for value in given.values()) != 1:
            raise UserError(f"span {name!r}: give one of text, characters and tokens")
        if text is not None:
            characters = self._find(name, text)
        if characters is not None:
            span = self._within(name, *_pair(name, "characters", characters, len(self.text)))
        else:
            span = range(*_pair(name, "tokens", tokens, len(self.tokens)))
        self.spans[name] = span

    def _find(self, name: str, part: str) -> tuple[int, int]:
        prompt = self.text[: self.tokens[self.prompt - 1].end] if self.prompt else ""
        where, searched = ("prompt", prompt) if part and part in prompt else ("text", self.text)
        count = searched.count(part) if part else 0
        if count != 1:
            told = f"{part!r}" if len(part) <= 60 else f"{part[:59]!r}…"
            raise UserError(
                f"span {name!r}: the {where} must hold {told} once; it does so "
                f"{'not at all' if count == 0 else f'{count} times, so give its characters'}"
            )
        start = searched.index(part)
        return start, start + len(part)

    def _within(self, name: str, start: int, end: int) -> range:
        found = [token.index for token in self.tokens if token.start < end and token.end > start]
        if not found:
            raise UserError(f"span {name!r}: characters {start} to {end} belong to no token")
        return range(found[0], found[-1] + 1)

    def _span(self, name: str) -> range:
        if name not in self.spans:
            known = ", ".join(map(repr, self.spans)) or "none; name_span gives one"
            raise UserError(f"span must be one that has a name ({known}); got {name!r}")
        return self.spans[name]

    # ------------------------------------------------------------------------------------------------- questions

    def sources(
        self,
        token: int = -1,
        top: int = 10,
        *,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
    ) -> Sources:
        """Where a token drew its information from, over the chosen layers and heads; all of them by default.

        Args:
            token: its position; negative ones count from the end.
            top: how many sources to list.
            layers: numbers of layers, among those looked at. `heads`: numbers of heads.

        Raises:
            UserError: a token, layer or head that is not there, or a `top` below 1.
        """
        at = _one_of("token", token, len(self.tokens))
        check_top(top)
        ((_, weight_1S, written_1S),) = self._shares(np.array([at]), self._chosen(layers), heads)
        weight_S, written_S = weight_1S[0], written_1S[0]
        listed = [int(j) for j in np.argsort(-weight_S, kind="stable")[:top] if weight_S[j] > 0]
        return Sources(
            token=self.tokens[at],
            items=[Source(self.tokens[j], float(weight_S[j]), float(written_S[j])) for j in listed],
            sink=float(weight_S[0]),
            sink_written=float(written_S[0]),
            rest=_rest(weight_S, listed),
            rest_written=_rest(written_S, listed),
            spans={
                name: Share(float(weight_S[span].sum()), float(written_S[span].sum()))
                for name, span in self.spans.items()
            },
        )

    def received(
        self,
        span: str,
        *,
        tokens: int | Sequence[int] | None = None,
        layers: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
        measure: str = "weight",
    ) -> Array:
        """How much a named part of the text gave to each of some tokens: its share of what they drew.

        Args:
            span: the part's name.
            tokens: who drew; by default the prompt's last token and every later one. Each generated token was
                chosen after the token before it had drawn, so these are, one for one, what they were written from.
            layers, heads: as in `sources`.
            measure: "weight" or "written" (see the module).

        Returns:
            Shares (n,), one for each of the tokens.

        Raises:
            UserError: something that is not there.
        """
        if measure not in {"weight", "written"}:
            raise UserError(f'measure must be "weight" or "written"; got {measure!r}')
        part = self._span(span)
        last = len(self.tokens)
        chosen_n = np.arange(self.prompt - 1, last) if tokens is None else _some_of("tokens", tokens, last)
        shares_n = np.zeros(len(chosen_n))
        for at, weight_nS, written_nS in self._shares(chosen_n, self._chosen(layers), heads):
            shares_n[at] = (weight_nS if measure == "weight" else written_nS)[:, part].sum(axis=-1)
        return shares_n

    def _shares(
        self, tokens_n: Array, layers: list[Layer], heads: int | Sequence[int] | None
    ) -> Iterator[tuple[slice, Array, Array]]:
        """Both measures of some tokens at a time, (n, S) each, and which of `tokens_n` they are."""
        S, H = len(self.tokens), max(len(layer.lse_HT) for layer in layers)
        step = max(1, PIECE // (H * S))
        for first in range(0, len(tokens_n), step):
            at = slice(first, min(first + step, len(tokens_n)))
            weight_nS, written_nS = (np.zeros((at.stop - first, S)) for _ in range(2))
            for layer in layers:
                try:
                    a_HnS = layer.rows(tokens_n[at], heads).astype(np.float64)
                except ValueError as error:
                    raise UserError(str(error).removeprefix("rows: ")) from error
                moved_HS = layer.written_HS if heads is None else layer.written_HS[np.atleast_1d(heads)]
                weight_nS += a_HnS.mean(axis=0) / len(layers)
                written_nS += np.einsum("hns,hs->ns", a_HnS, moved_HS)
            yield at, weight_nS, _of_one(written_nS)

    # -------------------------------------------------------------------------------------------------- the page

    def save(self, path: str | Path, *, focus: int = -1, progress: Progress | None = None) -> None:
        """Write one self-contained page, which opens without a network: every token can be asked on it.

        A file that was there is replaced in one step, or left as it was if anything fails.

        Args:
            path: where to. `focus`: the token selected at first.
            progress: called with (tokens done, tokens in all).

        Raises:
            UserError: the path cannot be written, or the focus is no token.
        """
        page = export.render(self.page_data(focus=focus, progress=progress))
        with replacing(Path(path)) as temporary:
            temporary.write_text(page, encoding="ascii")

    def show(self, *, focus: int = -1) -> Path:
        """Write the page into a new file of the temporary folder, open it in the browser, and return its path."""
        with tempfile.NamedTemporaryFile(prefix="regardant-", suffix=".html", delete=False) as file:
            path = Path(file.name)
        self.save(path, focus=focus)
        webbrowser.open(path.as_uri())
        return path

    def page_data(self, *, focus: int = -1, progress: Progress | None = None) -> dict[str, Any]:
        """What `regardant.page.export.render` draws: for every token its sources, over all heads and by each.

        All weights are computed again, some tokens at a time: time grows with T², memory with T.

        Raises:
            UserError: a focus that is no token, or layers of different numbers of heads.
        """
        layers = list(self.layers.values())
        heads = sorted({len(layer.lse_HT) for layer in layers})
        if len(heads) > 1:
            raise UserError(
                f"the page needs layers with one number of heads; these have {heads}: choose some"
            )
        keep = self._sources_per_head()
        weight, written, by_layer = self._summed(progress)
        return {
            "title": _shortened(self.text),
            "model": self.model_name,
            "focus": _one_of("focus", focus, len(self.tokens)),
            "tokens": [{"text": token.text, "id": token.id} for token in self.tokens],
            "layers": [layer.number for layer in layers],
            "heads": heads[0],
            "all": {"weight": weight, "written": written},
            "per_layer": by_layer,
            "heads_top": {
                "keys": np.stack([layer.top_keys_HTK[..., :keep] for layer in layers]),
                "weights": np.stack([layer.top_weights_HTK[..., :keep] for layer in layers]),
                "entropy": np.stack([layer.entropy_HT for layer in layers]),
            },
        }

    def _chosen(self, layers: int | Sequence[int] | None) -> list[Layer]:
        if layers is None:
            return list(self.layers.values())
        numbers = [number.item() for number in np.atleast_1d(layers)]
        if not numbers:
            raise UserError("layers must name at least one layer")
        return [self.layers[number] for number in numbers]

    def _sources_per_head(self) -> int:
        """As many of the top keys as a page of bearable size has room for, and at least one."""
        T, L = len(self.tokens), len(self.layers)
        H, _, K = next(iter(self.layers.values())).top_keys_HTK.shape
        each = 4 / 3 * (4 if T < 65535 else 6)  # a key and a weight, in the page's letters
        room = PAGE_BYTES - T * each * PAGE_SOURCES * (L + 2)
        return max(1, min(int(K), int(room / (T * each * L * H))))

    def _summed(
        self, progress: Progress | None
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """The heaviest sources of every token, by weight, by what was written, and by weight in each layer."""
        layers, T = list(self.layers.values()), len(self.tokens)
        H = len(layers[0].lse_HT)
        M = min(PAGE_SOURCES, T)
        weight, written, by_layer = _Heaviest((T,), M), _Heaviest((T,), M), _Heaviest((len(layers), T), M)
        n = max(1, PIECE // (H * T))
        for first in range(0, T, n):
            t = slice(first, min(first + n, T))
            weight_nS, written_nS = np.zeros((t.stop - first, T)), np.zeros((t.stop - first, T))
            for i, layer in enumerate(layers):
                a_HnS = layer.rows(np.arange(first, t.stop))
                mean_nS = a_HnS.mean(axis=0)
                by_layer.keep((i, t), mean_nS)
                weight_nS += mean_nS
                written_nS += np.einsum("hns,hs->ns", a_HnS, layer.written_HS)
            weight.keep((t,), weight_nS / len(layers))
            written.keep((t,), _of_one(written_nS))
            if progress is not None:
                progress(t.stop, T)
        sinks = ("keys", "weights", "rest")
        return weight.found, written.found, {name: by_layer.found[name] for name in sinks}


class _Heaviest:
    """The M heaviest sources of each row, heaviest first, what is not among them, and the first token's share."""

    def __init__(self, shape: tuple[int, ...], M: int) -> None:
        self.found = {
            "keys": np.full((*shape, M), -1, np.int64),
            "weights": np.zeros((*shape, M)),
            "rest": np.zeros(shape),
            "sink": np.zeros(shape),
        }

    def keep(self, at: tuple[Any, ...], weights_nS: Array) -> None:
        M = self.found["keys"].shape[-1]
        # Partitioning first: sorting whole rows would cost more than computing them did.
        some_nM = np.sort(np.argpartition(-weights_nS, M - 1, axis=-1)[:, :M], axis=-1)
        order_nM = np.argsort(-np.take_along_axis(weights_nS, some_nM, axis=-1), axis=-1, kind="stable")
        keys_nM = np.take_along_axis(some_nM, order_nM, axis=-1)
        heaviest_nM = np.take_along_axis(weights_nS, keys_nM, axis=-1)
        self.found["keys"][at] = np.where(heaviest_nM > 0, keys_nM, -1)
        self.found["weights"][at] = heaviest_nM
        # Of a row that sums to less than 1 the learned sinks have the rest.
        self.found["rest"][at] = np.clip(1 - heaviest_nM.sum(axis=-1), 0, 1)
        self.found["sink"][at] = weights_nS[:, 0]


def check_top(top: int) -> None:
    """Refuse a number of sources that is none.

    Raises:
        TypeError: no whole number. UserError: less than 1.
    """
    if not isinstance(top, int) or isinstance(top, bool):
        raise TypeError(f"top must be an integer; got {top!r}")
    if top < 1:
        raise UserError(f"top must be at least 1; got {top}")


def check_layers(layers: int | Sequence[int] | None, count: int) -> list[int]:
    """Numbers of layers of a model that has `count`, in rising order, each once; None for all.

    Raises:
        TypeError: no whole numbers. UserError: none at all, or one that is not there.
    """
    if layers is None:
        return list(range(count))
    if isinstance(layers, str) or not all(
        isinstance(number, int | np.integer) for number in np.atleast_1d(layers)
    ):
        raise TypeError(f"layers must be integers; got {layers!r}")
    numbers = {int(number) for number in np.atleast_1d(layers)}
    if not numbers or not numbers <= set(range(count)):
        raise UserError(f"layers must lie between 0 and {count - 1}, and be at least one; got {layers}")
    return sorted(numbers)


def _some_of(name: str, given: int | Sequence[int], count: int) -> Array:
    try:
        return indices("look", name, given, count)
    except ValueError as error:
        raise UserError(str(error).removeprefix("look: ")) from error


def _one_of(name: str, index: int, count: int) -> int:
    return int(_some_of(name, index, count)[0])


def _pair(name: str, what: str, given: Any, count: int) -> tuple[int, int]:
    """The first and one after the last of a part, both counted from the beginning."""
    try:
        first, stop = (operator.index(number) + (count if number < 0 else 0) for number in given)
    except (TypeError, ValueError):
        raise UserError(f"span {name!r}: {what} must be two whole numbers; got {given!r}") from None
    if not 0 <= first < stop <= count:
        raise UserError(f"span {name!r}: {what} must lie between 0 and {count}, first to last; got {given}")
    return first, stop


def _of_one(written_nS: Array) -> Array:
    """Rows divided by their sums; what is all zero stays so."""
    total_n1 = written_nS.sum(axis=-1, keepdims=True)
    divided: Array = written_nS / np.where(total_n1 > 0, total_n1, 1)
    return divided


def _rest(shares_S: Array, listed: list[int]) -> float:
    """What the unlisted tokens have, summed over themselves: a difference would leave rounding where nothing is."""
    return float(np.delete(shares_S, listed).sum())


def _shortened(text: str, most: int = 60) -> str:
    """The beginning of a text on one line, to know a page by."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers in few words: "0-5, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
