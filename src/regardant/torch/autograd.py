"""Gradients of the operators: `regardant::attention_backward` from what the forward pass saved, q, k, v, out and lse.

Of `attention`, out and lse have gradients, of `look` only out. They reach q, k, v, bias and sinks. Refused: a gradient
of the ALiBi slopes, and gradients of gradients, which no kernel here computes.
"""

from __future__ import annotations

from typing import Any

import torch

from regardant.torch import library
from regardant.torch.options import TENSORS, Options

_OPTIONS = len(Options._fields)
_ALIBI, _BIAS, _SINKS = (3 + Options._fields.index(name) for name in ("alibi", "bias", "sinks"))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save what the backward pass begins from; results that take no part in a loss are told apart by None."""
    q, k, v, *options = inputs[: 3 + _OPTIONS]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output[:2], *options[:TENSORS])
    ctx.settings = tuple(options[TENSORS:])


def _keep_look(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """One for each of q, k, v and the options, None where there is none or none is needed."""
    needed = ctx.needs_input_grad
    if needed[_ALIBI]:
        raise NotImplementedError(
            "attention: alibi has no gradient here; detach it, or add the slopes times the distances as a bias"
        )
    made: list[torch.Tensor | None] = [None] * (3 + _OPTIONS)
    if dout is None and dlse is None:
        return tuple(made)
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.settings)
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks, dbias = library.attention_backward(q, k, v, out, lse, dout, dlse, needed[_BIAS], *options)
    made[:3] = [d if n else None for d, n in zip((dq, dk, dv), needed, strict=False)]
    if needed[_BIAS]:
        made[_BIAS] = dbias
    if needed[_SINKS] and options.sinks is not None:
        made[_SINKS] = dsinks.to(options.sinks.dtype)
    return tuple(made)


def _look_gradients(ctx: Any, dout: torch.Tensor | None, *_statistics: Any) -> tuple[torch.Tensor | None, ...]:
    return *_gradients(ctx, dout, None), None, None, None


def _no_second(_ctx: Any, *_gradients: Any) -> Any:
    raise NotImplementedError(
        "attention: gradients of its gradients are not computed here; "
        "use torch's scaled_dot_product_attention with its math backend for them"
    )


torch.library.register_autograd("regardant::attention", _gradients, setup_context=_keep, lib=library.LIBRARY)
torch.library.register_autograd(
    "regardant::look", _look_gradients, setup_context=_keep_look, lib=library.LIBRARY
)
torch.library.register_autograd("regardant::attention_backward", _no_second, lib=library.LIBRARY)
