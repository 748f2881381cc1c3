"""`jax.nn.dot_product_attention` on the CPU (XLA): causal, window, lengths, mask, bias, scale, lse, gradients.

float64 is switched on. Not offered: offsets other than 0, starts, documents, ALiBi, softcap, sinks, a gradient
through lse, which it stops, and values of another width than the keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from regardant.conformance.case import NotOffered
from regardant.conformance.target import Convention, adapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.problem import Array

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

CONVENTIONS = (
    Convention(
        "partly computed in float32",
        "softmax is always carried out in float32, whatever the inputs",
        "a comment in jax/_src/nn/functions.py",
    ),
)


@adapter(
    types=("float64", "float32", "float16", "bfloat16"),
    packages=("jax", "jaxlib"),
    conventions=CONVENTIONS,
    note="its documentation does not say how other numbers of queries than of keys are aligned; its code lets both "
    "begin at position 0",
)
def target(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    lengths: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    dout: Array | None = None,
    bias_gradient: bool = False,
) -> Any:
    """`dot_product_attention`; what is causal by default is its `is_causal`."""
    if causal and offset not in {None, 0}:
        raise NotOffered(f"offset {offset}")
    if v.shape[-1] != k.shape[-1]:
        raise NotOffered("values of another width")
    T, S = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "implementation": "xla"}
    if lengths is not None:
        options["key_value_seq_lengths"] = jnp.asarray(lengths, jnp.int32)
    if window is not None:
        # Its window is (keys before, keys after), a query's own key not counted.
        options["local_window_size"] = (window - 1, 0 if causal else T + S)
    if mask is not None:
        options["mask"] = jnp.asarray(_four(mask))

    def compute(q: Any, k: Any, v: Any, bias: Any) -> Any:
        turned = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
        result: Any = jax.nn.dot_product_attention(*turned, bias=bias, return_residual=return_lse, **options)
        if return_lse:
            return jnp.swapaxes(result[0], 1, 2), jnp.swapaxes(result[1], 1, 2)
        return jnp.swapaxes(result, 1, 2)

    given: list[Any] = [jnp.asarray(array) for array in (q, k, v)]
    given.append(None if bias is None else jnp.asarray(_four(bias)))
    if dout is None:
        result = compute(*given)
        return tuple(map(np.asarray, result)) if return_lse else np.asarray(result)
    return _gradients(compute, given, dout, bias if bias_gradient else None)


def _gradients(
    compute: Callable[..., Any], given: list[Any], dout: Array, bias: Array | None
) -> tuple[Any, ...]:
    _, pull = jax.vjp(compute, *given)
    dq, dk, dv, dbias = pull(jnp.asarray(dout))
    return (
        *map(np.asarray, (dq, dk, dv)),
        None,
        None if bias is None else np.asarray(dbias).reshape(bias.shape),
    )


def _four(array: Array) -> Array:
    """With all four axes, as it wants them."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
