"""regardant's attention on torch tensors, gradients by automatic differentiation: every option."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import regardant.torch as rt
from regardant.conformance.adapters import tensors
from regardant.conformance.case import DEFAULTS
from regardant.conformance.target import EXTRAS, adapter
from regardant.threads import using

if TYPE_CHECKING:
    from regardant.problem import Array


@adapter(types=tensors.TYPES, keywords=(*DEFAULTS, *EXTRAS), packages=("regardant", "torch"))
def target(
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
    """`regardant.torch.attention`."""
    learned = ("sinks" if "sinks" in options else "", "bias" if bias_gradient else "")
    with using(threads):
        return tensors.answer(
            rt.attention,
            q,
            k,
            v,
            options=options | {"return_lse": return_lse or dlse is not None},
            learned=() if dout is None else learned,
            dout=dout,
            dlse=dlse,
        )
