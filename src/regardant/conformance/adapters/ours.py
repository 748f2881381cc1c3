"""regardant's own attention on NumPy arrays, in each implementation: every option, gradients, any views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regardant import ops
from regardant.conformance.case import DEFAULTS
from regardant.conformance.target import EXTRAS, Target, adapter
from regardant.threads import using

if TYPE_CHECKING:
    from regardant.problem import Array

TYPES = ("float64", "float32", "float16", "bfloat16")


def _made(impl: str) -> Target:
    # The definition holds the T × S matrix: what needs views does not fit into memory.
    @adapter(
        types=TYPES, keywords=(*DEFAULTS, *EXTRAS), views=impl != "reference", packages=("numpy", "regardant")
    )
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        return_lse: bool = False,
        dout: Array | None = None,
        dlse: Array | None = None,
        bias_gradient: bool = False,
        threads: int | None = None,
        **options: Any,
    ) -> Any:
        with using(threads):
            out, lse = ops.attention(q, k, v, impl=impl, return_lse=True, **options)
            if dout is None:
                return (out, lse) if return_lse else out
            return ops.attention_backward(
                q, k, v, out, lse, dout, dlse=dlse, bias_gradient=bias_gradient, impl=impl, **options
            )

    return attention


auto, native, blocked, reference = (_made(impl) for impl in ("auto", "native", "blocked", "reference"))
