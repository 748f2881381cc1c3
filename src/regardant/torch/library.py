"""The operators that torch knows: schema, kernels, shapes without numbers.

    regardant::attention(q, k, v, …) -> (out, lse)
    regardant::look(q, k, v, …, top, received, pooled) -> (out, lse, max_logit, entropy, sink_weight, top_keys,
                                                           top_weights, received, pooled)
    regardant::rows(q, k, v, lse, queries, heads, …) -> weights

On the CPU a kernel hands the tensors' memory to `regardant.ops`, which checks them. `torch.compile` and
`torch.export` see each as one operator: they run its fake kernel, which refuses shapes and types that do not fit
together, and leave the rest to the kernel.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width, top:
the heaviest keys kept; M heads and N queries of rows asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regardant import ops
from regardant import problem as problems
from regardant.torch.memory import as_array, as_tensor, maybe_array
from regardant.torch.options import SCHEMA, Options

LIBRARY = torch.library.Library("regardant", "DEF")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TENSORS = 8  # of the options, those that are tensors: the first


def _define(name: str, arguments: str, results: str) -> None:
    LIBRARY.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))


_define("attention", f"Tensor q, Tensor k, Tensor v, {SCHEMA}", "(Tensor, Tensor)")
_define(
    "look",
    f"Tensor q, Tensor k, Tensor v, {SCHEMA}, int top, bool received, SymInt[]? pooled",
    f"({', '.join(['Tensor'] * 9)})",
)
_define("rows", f"Tensor q, Tensor k, Tensor v, Tensor lse, Tensor queries, Tensor heads, {SCHEMA}", "Tensor")

attention = torch.ops.regardant.attention.default
look = torch.ops.regardant.look.default
rows = torch.ops.regardant.rows.default


# ---------------------------------------------------------------------------------------------- on the CPU


def arrays(given: tuple[Any, ...]) -> dict[str, Any]:
    """An operator's options as `regardant.ops` takes them, on the tensors' own memory."""
    return Options(*map(maybe_array, given[:_TENSORS]), *given[_TENSORS:]).keywords()


@torch.library.impl(LIBRARY, "attention", "CPU")
def _attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = ops.attention(as_array(q), as_array(k), as_array(v), **arrays(options), return_lse=True)
    return as_tensor(out), as_tensor(lse)


@torch.library.impl(LIBRARY, "look", "CPU")
def _look_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    *options, top, received, pooled = given
    seen = ops.look(
        as_array(q), as_array(k), as_array(v), **arrays(tuple(options)), top=top, received=received,
        pooled=None if pooled is None else tuple(pooled),
    )  # fmt: skip
    kept = (
        seen.out, seen.lse, seen.max_logit, seen.entropy, seen.sink_weight, seen.top_keys, seen.top_weights,
    )  # fmt: skip
    sums = (_nothing(q) if array is None else as_tensor(array) for array in (seen.received, seen.pooled))
    return (*map(as_tensor, kept), *sums)


@torch.library.impl(LIBRARY, "rows", "CPU")
def _rows_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor,
    heads: torch.Tensor, *options: Any,
) -> torch.Tensor:  # fmt: skip
    named = arrays(options)
    chosen = ops.implementation("rows", named.pop("impl"))
    problem = problems.problem("rows", as_array(q), as_array(k), as_array(v), **named)
    B, H, _, T, *_ = problem.sizes
    lse_BHT = np.ascontiguousarray(as_array(lse)).reshape(B, H, T)
    return as_tensor(problem.restore(chosen.rows(problem, lse_BHT, as_array(queries), as_array(heads))))


# ---------------------------------------------------------------------------------------- shapes without numbers


def accumulator(q: torch.Tensor) -> torch.dtype:
    """The type of scores, sums and statistics: float64 for float64 input, float32 for all else."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def check(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse types and shapes of q, k and v that do not fit together, in the words that NumPy's arrays get."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} must be one of {', '.join(problems.FLOATS)}; got {_name(tensor)}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must be {_name(q)} to match q; got {_name(tensor)}")
    problems.check_shapes(op, tuple(q.shape), tuple(k.shape), tuple(v.shape))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """What stands for a result that was not asked for: an operator has to return a tensor."""
    return like.new_empty((0,), dtype=accumulator(like))


@torch.library.register_fake("regardant::attention", lib=LIBRARY)
def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check("attention", q, k, v)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=accumulator(q))


@torch.library.register_fake("regardant::look", lib=LIBRARY)
def _look_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    *_, top, received, pooled = given
    check("look", q, k, v)
    rows, dtype = q.shape[:-1], accumulator(q)
    return (
        q.new_empty((*rows, v.shape[-1])),
        *(q.new_empty(rows, dtype=dtype) for _ in ("lse", "max_logit", "entropy", "sink_weight")),
        q.new_empty((*rows, top), dtype=torch.int64),
        q.new_empty((*rows, top), dtype=dtype),
        q.new_empty((*rows[:-1], k.shape[-2]), dtype=dtype) if received else _nothing(q),
        _nothing(q) if pooled is None else q.new_empty((*rows[:-1], *pooled), dtype=dtype),
    )


@torch.library.register_fake("regardant::rows", lib=LIBRARY)
def _rows_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _lse: torch.Tensor, queries: torch.Tensor,
    heads: torch.Tensor, *_options: Any,
) -> torch.Tensor:  # fmt: skip
    check("rows", q, k, v)
    H = () if q.ndim == 2 else (heads.shape[0],)
    return q.new_empty((*q.shape[:-3], *H, queries.shape[0], k.shape[-2]), dtype=accumulator(q))


def _no_backward(_ctx: Any, *_gradients: Any) -> Any:
    raise NotImplementedError("attention: there is no backward pass yet")


torch.library.register_autograd("regardant::attention", _no_backward, lib=LIBRARY)
torch.library.register_autograd("regardant::look", _no_backward, lib=LIBRARY)
