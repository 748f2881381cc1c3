"""One text, read once by a model, and what every head looked at: makes a `regardant.runs.Run`.

`look` runs the model with the attention that looks. It refuses an empty text, one longer than the model's context,
and weights that are no NumPy arrays.

Shape legend: H query heads, G key/value heads, T tokens (as queries), S tokens (as keys), D head width, C width of
the residual stream.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant import ops
from regardant.errors import UserError
from regardant.lm import generate, model
from regardant.runs import Layer, Run, Token, check_layers, check_top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regardant.lm.language_model import LanguageModel
    from regardant.looks import Look
    from regardant.problem import Array
    from regardant.runs import Progress


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
        A `Run`. No logits are made, and no matrix of weights. It holds, per token and layer looked at,
        (heads + 2·kv_heads)·head_width numbers of 4 bytes for queries, keys and values, 12·top·heads bytes for the
        top keys and 20·heads for the rest; with SmolLM2 and top=8 about 5 kB, which is 150 kB a token for its 30
        layers.

    Raises:
        UserError: an empty text, no chat template, a layer that is not there, a `top` below 1.
        ContextError: a text longer than the model's context.
        TypeError: weights that are no NumPy arrays.
    """
    config = language_model.config
    if not isinstance(next(iter(language_model.weights.values())), np.ndarray):
        raise TypeError("look: the model's weights must be NumPy arrays")
    check_top(top)
    wanted = check_layers(layers, config.layers)
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
    # The output is as large as the queries, and the model has used it up: it is not kept.
    small = dataclasses.replace(seen, out=seen.out[:, :, :0].copy(), top_keys=seen.top_keys[..., :0].copy())
    return Layer(
        number=number,
        lse_HT=seen.lse[0],
        max_logit_HT=seen.max_logit[0],
        entropy_HT=seen.entropy[0],
        sink_weight_HT=seen.sink_weight[0],
        top_keys_HTK=seen.top_keys[0].astype(np.int32),
        top_weights_HTK=seen.top_weights[0],
        written_HS=written_HS,
        _rows=functools.partial(_rows, small),
    )


def _rows(seen: Look, tokens_n: Array, heads_H: Array | None) -> Array:
    weights_HnS: Array = seen.rows(tokens_n, heads_H)[0]
    return weights_HnS
