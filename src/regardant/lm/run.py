"""One text, read once by a model, and what every head looked at: where each token drew its information from.

`look` runs the model with the attention that looks. What it keeps grows linearly with the text, and answers are
exact: the row of weights of any token is computed again from the kept queries, keys and lse when it is asked for.
It refuses an empty text, one longer than the model's context, and weights that are no NumPy arrays.

Two measures of "where from", both shares that add up to one over the tokens:

- weight: the attention weights a_ij, averaged over heads and layers;
- written: each weight times the length of what it moved, ‖a_ij v_j W_O‖, the value through the head's own part of
  the output projection (Kobayashi et al. 2020), added over heads and layers and divided by the sum. A head that
  rests on a token with next to no value writes next to nothing, and counts for as much.

Shape legend: L layers looked at, H query heads, G key/value heads, T tokens (as queries), S tokens (as keys),
D head width, C width of the residual stream, K top keys, n tokens of one piece of work, M sources kept.
"""

from __future__ import annotations

import dataclasses
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant import ops
from regardant.lm import generate, model
from regardant.lm.errors import UserError
from regardant.lm.writing import replacing
from regardant.page import export
from regardant.problem import indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regardant.lm.language_model import LanguageModel
    from regardant.looks import Look
    from regardant.problem import Array

    Progress = Callable[[int, int], None]

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
    """

    token: Token
    items: list[Source]
    sink: float
    sink_written: float
    rest: float
    rest_written: float


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
    _look: Look = dataclasses.field(repr=False)

    def rows(
        self, tokens: int | Sequence[int] | Array, heads: int | Sequence[int] | Array | None = None
    ) -> Array:
        """Exact weights (H', n, S) of chosen tokens over all tokens, of chosen heads or all."""
        weights_HnS: Array = self._look.rows(tokens, heads)[0]
        return weights_HnS


class Run:
    """A text as a model read it. Made by `LanguageModel.look`.

    Attributes:
        text: the text, with the chat template's words if there were any.
        tokens: its tokens.
        layers: the layers that were looked at, by number, in rising order.
        model_name: the model's name.

    Memory, per token and layer looked at: (heads + 2·kv_heads)·head_width numbers of 4 bytes for queries, keys and
    values, 12·top·heads bytes for the top keys and 20·heads for the rest; with SmolLM2 and top=8 about 5 kB, which
    is 150 kB a token for its 30 layers.
    """

    def __init__(self, model_name: str, text: str, tokens: list[Token], layers: dict[int, Layer]) -> None:
        self.model_name = model_name
        self.text = text
        self.tokens = tokens
        self.layers = layers

    def __repr__(self) -> str:
        return f"Run({self.model_name!r}, {len(self.tokens)} tokens, {len(self.layers)} layers)"

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
        _check_top(top)
        chosen = self._chosen(layers)
        weight_S = np.zeros(len(self.tokens))
        written_S = np.zeros(len(self.tokens))
        for layer in chosen:
            try:
                a_HS = layer.rows(at, heads)[:, 0].astype(np.float64)
            except ValueError as error:
                raise UserError(str(error).removeprefix("rows: ")) from error
            moved_HS = layer.written_HS if heads is None else layer.written_HS[np.atleast_1d(heads)]
            weight_S += a_HS.mean(axis=0) / len(chosen)
            written_S += (a_HS * moved_HS).sum(axis=0)
        written_S /= written_S.sum() or 1
        listed = [int(j) for j in np.argsort(-weight_S, kind="stable")[:top] if weight_S[j] > 0]
        return Sources(
            token=self.tokens[at],
            items=[Source(self.tokens[j], float(weight_S[j]), float(written_S[j])) for j in listed],
            sink=float(weight_S[0]),
            sink_written=float(written_S[0]),
            rest=_rest(weight_S, listed),
            rest_written=_rest(written_S, listed),
        )

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
            UserError: a focus that is no token.
        """
        layers = list(self.layers.values())
        keep = self._sources_per_head()
        weight, written, by_layer = self._summed(progress)
        return {
            "title": _shortened(self.text),
            "model": self.model_name,
            "focus": _one_of("focus", focus, len(self.tokens)),
            "tokens": [{"text": token.text, "id": token.id} for token in self.tokens],
            "layers": [layer.number for layer in layers],
            "heads": len(layers[0].lse_HT),
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
        numbers = [int(number) for number in np.atleast_1d(layers)]
        if not numbers:
            raise UserError("layers must name at least one layer")
        for number in numbers:
            if number not in self.layers:
                raise UserError(
                    f"layers must be among those looked at, {_ranges(list(self.layers))}; got {number}"
                )
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
            total_n1 = written_nS.sum(axis=-1, keepdims=True)
            written.keep((t,), written_nS / np.where(total_n1 > 0, total_n1, 1))
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
        self.found["rest"][at] = np.clip(weights_nS.sum(axis=-1) - heaviest_nM.sum(axis=-1), 0, 1)
        self.found["sink"][at] = weights_nS[:, 0]


def look(
    language_model: LanguageModel,
    text: str,
    *,
    layers: int | Sequence[int] | None = None,
    top: int = 8,
    chat: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Run a text through a model once and keep what every head looked at.

    Args:
        language_model: with NumPy weights.
        text: what to read; with `chat`, what a user says, put into the model's chat template.
        layers: numbers of the layers to keep; None for all. Fewer layers take less memory.
        top: how many of each head's heaviest keys to keep for every token.
        chat: use the chat template.
        progress: called with (layers done, layers in all).

    Returns:
        A `Run`; it tells how much memory it holds. No logits are made, and no matrix of weights.

    Raises:
        UserError: an empty text, no chat template, a layer that is not there, a `top` below 1.
        ContextError: a text longer than the model's context.
        TypeError: weights that are no NumPy arrays.
    """
    config = language_model.config
    if not isinstance(next(iter(language_model.weights.values())), np.ndarray):
        raise TypeError("look: the model's weights must be NumPy arrays")
    _check_top(top)
    wanted = range(config.layers) if layers is None else sorted(_layer_numbers(layers, config.layers))
    if chat:
        text = language_model.chat_text(text)
    ids, spans = language_model.tokenizer.spans(text, special=not chat)
    if not text or not ids:
        raise UserError("the text is empty: there is nothing to look at")
    generate.check_context(language_model, len(ids), "text")
    kept: dict[int, Layer] = {}

    def attend(layer: int, q_BHTD: Array, k_BGSD: Array, v_BGSD: Array, **options: Any) -> Array:
        if layer in wanted:
            seen = ops.look(q_BHTD, k_BGSD, v_BGSD, top=min(top, len(ids)), **options)
            wo_HDC = model.output_projection(layer, language_model.weights, config)
            kept[layer] = _layer(layer, seen, written_norms(v_BGSD[0], wo_HDC))
            out_BHTD = seen.out
        else:
            out_BHTD = ops.attention(q_BHTD, k_BGSD, v_BGSD, **options)
        if progress is not None:
            progress(layer + 1, config.layers)
        return out_BHTD

    model.forward(np.asarray([ids]), language_model.weights, config, attend=attend)
    pieces = language_model.tokenizer.pieces(ids)
    tokens = [
        Token(index, number, piece, *span)
        for index, (number, piece, span) in enumerate(zip(ids, pieces, spans, strict=True))
    ]
    return Run(language_model.name, text, tokens, kept)


def written_norms(v_GSD: Array, wo_HDC: Array) -> Array:
    """‖v_j W_O‖ for each head and token, (H, S): with W_Oᵀ = QR the length of v_j W_O is that of v_j Rᵀ.

    The triangle R is D wide where W_O is C wide, so this costs C/D times less and no accuracy.
    """
    r_HDD = np.linalg.qr(wo_HDC.swapaxes(-1, -2), mode="r")
    group = len(wo_HDC) // len(v_GSD)
    return np.stack([np.linalg.norm(v_GSD[h // group] @ r_DD.T, axis=-1) for h, r_DD in enumerate(r_HDD)])


def _layer(number: int, seen: Look, written_HS: Array) -> Layer:
    return Layer(
        number=number,
        lse_HT=seen.lse[0],
        max_logit_HT=seen.max_logit[0],
        entropy_HT=seen.entropy[0],
        sink_weight_HT=seen.sink_weight[0],
        top_keys_HTK=seen.top_keys[0].astype(np.int32),
        top_weights_HTK=seen.top_weights[0],
        written_HS=written_HS,
        # The output is as large as the queries, and the model has used it up: it is not kept.
        _look=dataclasses.replace(
            seen, out=seen.out[:, :, :0].copy(), top_keys=seen.top_keys[..., :0].copy()
        ),
    )


def _check_top(top: int) -> None:
    if not isinstance(top, int) or isinstance(top, bool):
        raise TypeError(f"top must be an integer; got {top!r}")
    if top < 1:
        raise UserError(f"top must be at least 1; got {top}")


def _layer_numbers(layers: int | Sequence[int], count: int) -> set[int]:
    if isinstance(layers, str) or not all(
        isinstance(number, int | np.integer) for number in np.atleast_1d(layers)
    ):
        raise TypeError(f"layers must be integers; got {layers!r}")
    numbers = {int(number) for number in np.atleast_1d(layers)}
    if not numbers or not numbers <= set(range(count)):
        raise UserError(f"layers must lie between 0 and {count - 1}, and be at least one; got {layers}")
    return numbers


def _one_of(name: str, index: int, count: int) -> int:
    try:
        at: Array = indices("look", name, index, count)
    except ValueError as error:
        raise UserError(str(error).removeprefix("look: ")) from error
    return int(at[0])


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
