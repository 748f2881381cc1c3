"""Gradients of the operators, and torch's transforms of functions.

`regardant::attention_backward` computes gradients from what the forward pass saved: q, k, v, out and lse. Of
`attention`, out and lse have them, of `look` only out; they reach q, k, v, bias and sinks. `torch.vmap` runs one call
after another; `torch.func.grad` and its like go the same way as plain gradients.

Refused: a gradient of the ALiBi slopes, gradients of gradients, and forward-mode derivatives, none of which a kernel
here computes and all of which would otherwise be silently 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from regardant.torch import library
from regardant.torch.options import TENSORS, Options

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONS = len(Options._fields)
_ALIBI, _BIAS, _SINKS = (3 + Options._fields.index(name) for name in ("alibi", "bias", "sinks"))


def attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`regardant::attention`, whatever transform of torch's it is called under."""
    chosen: Callable[..., Any] = library.attention if _plain(arguments) else _Attention.apply
    out, lse = chosen(*arguments)
    return out, lse


def look(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """`regardant::look`, whatever transform of torch's it is called under."""
    chosen: Callable[..., Any] = library.look if _plain(arguments) else _Look.apply
    seen: tuple[torch.Tensor, ...] = chosen(*arguments)
    return seen


def _backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    chosen: Callable[..., Any] = library.attention_backward if _plain(arguments) else _Backward.apply
    made: tuple[torch.Tensor, ...] = chosen(*arguments)
    return made


def _plain(arguments: tuple[Any, ...]) -> bool:
    """Whether no transform of `torch.func` is at work, which the operator by itself would not notice."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - torch offers no public name
        return False
    if forward_ad._current_level >= 0:  # noqa: SLF001 - likewise
        for given in arguments:
            if isinstance(given, torch.Tensor) and forward_ad.unpack_dual(given).tangent is not None:
                _no_forward_mode()
    return True


def _no_forward_mode() -> None:
    raise NotImplementedError(
        "attention: forward-mode derivatives are not computed here; use reverse mode, backward() or torch.func.grad"
    )


# --------------------------------------------------------------------------------------------- the formulas


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save what the backward pass begins from; results that take no part in a loss are told apart by None."""
    q, k, v, *options = inputs[: 3 + _OPTIONS]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output[:2], *options[:TENSORS])
    ctx.settings = tuple(options[TENSORS:])


def _keep_look(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
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
    dq, dk, dv, dsinks, dbias = _backward(q, k, v, out, lse, dout, dlse, needed[_BIAS], *options)
    made[:3] = [d if n else None for d, n in zip((dq, dk, dv), needed, strict=False)]
    if needed[_BIAS]:
        made[_BIAS] = dbias
    if needed[_SINKS] and options.sinks is not None:
        made[_SINKS] = dsinks.to(options.sinks.dtype)
    return tuple(made)


def _look_gradients(
    ctx: Any, dout: torch.Tensor | None, *_statistics: Any
) -> tuple[torch.Tensor | None, ...]:
    return *_gradients(ctx, dout, None), None, None, None


def _no_second(_ctx: Any, *_gradients: Any) -> Any:
    raise NotImplementedError(
        "attention: gradients of its gradients are not computed here; "
        "use torch's scaled_dot_product_attention with its math backend for them"
    )


# ------------------------------------------------------------------------------------------- under transforms


def _one_by_one(operator: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """A rule for `torch.vmap` that runs `operator` for one element after another."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        calls = [
            operator(
                *(
                    given.select(dim, i) if isinstance(dim, int) else given
                    for given, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        results = tuple(map(torch.stack, zip(*calls, strict=True)))
        return results, (0,) * len(results)

    return rule


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    forward = staticmethod(library.attention)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)
    vmap = staticmethod(_one_by_one(attention))
    jvp = staticmethod(lambda *_: _no_forward_mode())


class _Look(torch.autograd.Function):  # type: ignore[misc]
    forward = staticmethod(library.look)
    setup_context = staticmethod(_keep_look)
    backward = staticmethod(_look_gradients)
    vmap = staticmethod(_one_by_one(look))
    jvp = staticmethod(lambda *_: _no_forward_mode())


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    forward = staticmethod(library.attention_backward)
    setup_context = staticmethod(lambda _ctx, _inputs, _output: None)
    backward = staticmethod(_no_second)
    vmap = staticmethod(_one_by_one(_backward))
    jvp = staticmethod(lambda *_: _no_forward_mode())


_registered = {
    "attention": (_gradients, _keep, library.attention),
    "look": (_look_gradients, _keep_look, library.look),
    "attention_backward": (_no_second, None, library.attention_backward),
}
for _name, (_formula, _save, _operator) in _registered.items():
    torch.library.register_autograd(f"regardant::{_name}", _formula, setup_context=_save, lib=library.LIBRARY)
    torch.library.register_vmap(f"regardant::{_name}", _one_by_one(_operator), lib=library.LIBRARY)
