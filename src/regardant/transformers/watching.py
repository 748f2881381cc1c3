"""`watch`: what every head of a Hugging Face decoder looks at, while the model runs as it always does.

    with watch(model, tokenizer=tokenizer) as w:
        model.generate(**inputs)
    w.layers[3].entropy; w.sources(-1); w.received("question"); w.save("page.html")

While it is open, each forward of the model (a whole text, a piece of one, one more token) leaves for each layer,
beside the very same output, what was looked at: nothing is computed eagerly and no T × S matrix is made. What is kept
grows linearly with the text: per token and layer, for each head watched

    16 + 8·top bytes                    lse, largest score, entropy, sink's weight; the heaviest keys
    4 (and 4 with `received`)           what the token's value writes at weight 1; what it gave in all
    D numbers of the model's type       its query, of which `keep_rows` may keep fewer

and G·D numbers of the model's type for the keys: with SmolLM2 and top=8 3.8 kB in float32, 115 kB a token for
its 30 layers, and 69 kB in bfloat16. A mask that has no description (see `regardant.transformers.masks`) is kept too.

A forward whose first token does not stand behind the last one seen begins anew (a new text, an unrelated batch), or
goes on from where it stands (a cache that was cropped): what stood there is dropped. Refused: models that were loaded
with another implementation or that compute attention by themselves, caches whose rows change places (beam search) or
whose keys change (quantised ones), `torch.compile(fullgraph=True)`, two attentions in a layer (encoder-decoders), a
second watch of the same model.

Shape legend: B batch, H query heads that are watched, T queries, S keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from regardant import problem as problems
from regardant import runs
from regardant.errors import UserError
from regardant.transformers.interface import WATCHED
from regardant.transformers.keeping import OUTPUTS, Forward, Layer, LayerLook, Settings
from regardant.transformers.masks import LazyMask
from regardant.transformers.tokens import tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from regardant.problem import Array


class _Looks(Mapping[int, LayerLook]):
    def __init__(self, layers: dict[int, Layer]) -> None:
        self._layers = layers

    def __getitem__(self, number: int) -> LayerLook:
        if number not in self._layers:
            raise runs.MissingLayerError(number, self._layers)
        return self._layers[number].look()

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


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
        self._modules: list[torch.nn.Module] = []
        self._was_open = False

    def __repr__(self) -> str:
        return f"Watch({_name(self._model)!r}, {'open' if self._hooks else 'closed'})"

    # --------------------------------------------------------------------------------------------- open and closed

    def __enter__(self) -> Self:
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
            WATCHED[id(module)] = Layer(_layer_of(module), module, self.settings, self._arrived)
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
        given: dict[str, Any] = (
            dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        )
        ids_BT, embedded = given.get("input_ids"), given.get("inputs_embeds")
        if ids_BT is None:
            if embedded is None:
                return  # the model says what is missing
            ids_BT = torch.full(embedded.shape[:2], -1, device=embedded.device)
        caches = [given[name] for name in ("cache", "past_key_values") if given.get(name) is not None]
        self._forward = Forward(int(caches[0].get_seq_length()) if caches else 0, ids_BT.shape[1])
        if self._forward.past == 0:
            self._layers = {}
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

    def _arrived(self, layer: Layer) -> Forward | None:
        """The forward that a layer's attention belongs to; None where it is computed again for gradients."""
        forward = self._forward
        if forward is None:
            return None
        other = self._layers.setdefault(layer.number, layer)
        if other is not layer or layer.number in forward.seen:
            raise UserError(f"watch: layer {layer.number} has two attentions; only decoders can be watched")
        forward.seen.add(layer.number)
        return forward if layer.number in self.settings.layers else None

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
            name: such as "question"; one that is there already is given to the new part.
            text: the part itself, which the prompt must hold once. `characters`, `tokens`: its first and one after
                its last.
            row: the row of the batch that it is in; None for every row.
        """
        # The later word counts: what has the same name in the same row is no longer asked for.
        self._spans = [span for span in self._spans if span[1] != name or row not in {None, span[0]}]
        self._spans.append((row, name, {"text": text, "characters": characters, "tokens": tokens}))
        self._made = {}

    @property
    def layers(self) -> Mapping[int, LayerLook]:
        """What each layer watched has looked at so far, by number; each is put together when it is asked for.

        Raises:
            UserError: nothing has been seen.
        """
        return _Looks({layer.number: layer for layer in self._watched()})

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
        been read. Heads are counted among those watched.
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
            raise UserError(
                f"watch: nothing has been seen yet; call {_name(self._model)} while the watch is open"
            )
        return layers


def _real(mask: Any, before: torch.Tensor | None, shape: torch.Size, forward: Forward) -> torch.Tensor:
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
        weights_MnS: Array = a_BMNS[0, ..., first:stop].cpu().numpy()
        return weights_MnS

    keys = of_queries(look.top_keys, -1)
    return runs.Layer(
        number=layer.number,
        **{
            f"{name}_HT": of_queries(getattr(look, name), np.nan)
            for name in ("lse", "max_logit", "entropy", "sink_weight")
        },
        top_keys_HTK=np.where(keys >= first, keys - first, -1).astype(np.int32),
        top_weights_HTK=of_queries(look.top_weights, 0),
        written_HS=look.written[row, :, first:stop].cpu().numpy(),
        _rows=rows,
    )


def _layer_of(module: torch.nn.Module) -> Any:
    """The number of the layer that a module of transformers says it belongs to; None if it says nothing."""
    return getattr(module, "layer_idx", None)


def _name(model: PreTrainedModel) -> str:
    """What the model was loaded as; of a folder, its last name, as a page is for others to read too."""
    name: str = model.config.name_or_path
    return (Path(name).name if Path(name).is_absolute() else name) or type(model).__name__


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
        keep_rows: of how many queries, the last ones of each forward, exact rows can be asked for; None for all, 1
            for the end of a prompt and each generated token.

    Returns:
        A `Watch`, to be used in a `with` statement. While that is open the model's outputs have the very bits that
        they have without it. Memory: see the module.

    Raises:
        TypeError: a model that is none of transformers, or a setting of the wrong kind.
        UserError: an encoder with a decoder, or a model that was loaded with another implementation; a layer or head
            that is not there; later on, what the module says is refused.
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
