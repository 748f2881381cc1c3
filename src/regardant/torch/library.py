"""The operators that torch knows: schema, kernels, shapes without numbers.

    regardant::attention(q, k, v, …) -> (out, lse)
    regardant::look(q, k, v, …, top, received, pooled) -> (out, lse, max_logit, entropy, sink_weight, top_keys,
                                                           top_weights, received, pooled)
    regardant::attention_backward(q, k, v, out, lse, dout, dlse, bias_gradient, …) -> (dq, dk, dv, dsinks, dbias)
    regardant::rows(q, k, v, lse, queries, heads, …) -> weights

On the CPU a kernel hands the tensors' memory to `regardant.ops`, which checks them; on other devices, or where
impl="torch" says so, to `regardant.torch.blocked`. `torch.compile` and `torch.export` see each as one operator: they
run its fake kernel, which refuses shapes and types that do not fit together, and leave the rest to the kernel.
Gradients are in `autograd`, `torch.vmap` in `vmap`.

Shape legend: B batch, H query heads, G key/value heads, T queries, S keys, D query/key width, E value width, top:
the heaviest keys kept; M heads and N queries of rows asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regardant import ops
from regardant import problem as problems
from regardant.torch import blocked
from regardant.torch.memory import as_array, as_tensor, maybe_array
from regardant.torch.options import SCHEMA, Options
from regardant.torch.problem import TensorProblem
from regardant.torch.problem import problem as problem_of

LIBRARY = torch.library.Library("regardant", "DEF")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TORCH = "torch"  # the name of the implementation in `blocked`

# The results of `look`, in the order of its schema.
SEEN = (
    "out", "lse", "max_logit", "entropy", "sink_weight", "top_keys", "top_weights", "received", "pooled",
)  # fmt: skip


def _define(name: str, arguments: str, results: str) -> None:
    LIBRARY.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))


_define("attention", f"Tensor q, Tensor k, Tensor v, {SCHEMA}", "(Tensor, Tensor)")
_define(
    "look",
    f"Tensor q, Tensor k, Tensor v, {SCHEMA}, int top, bool received, SymInt[]? pooled",
    f"({', '.join(['Tensor'] * 9)})",
)
_define(
    "attention_backward",
    f"Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool bias_gradient, {SCHEMA}",
    f"({', '.join(['Tensor'] * 5)})",
)
_define("rows", f"Tensor q, Tensor k, Tensor v, Tensor lse, Tensor queries, Tensor heads, {SCHEMA}", "Tensor")

attention = torch.ops.regardant.attention.default
look = torch.ops.regardant.look.default
attention_backward = torch.ops.regardant.attention_backward.default
rows = torch.ops.regardant.rows.default


# ------------------------------------------------------------------------------------------------ the kernels


def _attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options = Options(*given)
    if options.impl == TORCH:
        return _attention_elsewhere(q, k, v, *given)
    out, lse = ops.attention(as_array(q), as_array(k), as_array(v), **arrays(options), return_lse=True)
    return as_tensor(out), as_tensor(lse)


def _attention_elsewhere(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = _problem("attention", q, k, v, Options(*given))
    seen = blocked.attend(problem)
    return problem.restore(seen["out"]), problem.restore(seen["lse"])


def _backward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, bias_gradient: bool, *given: Any,  # noqa: FBT001 - as the schema has it
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    options = Options(*given)
    if options.impl == TORCH:
        return _backward_elsewhere(q, k, v, out, lse, dout, dlse, bias_gradient, *given)
    made = ops.attention_backward(
        *map(as_array, (q, k, v, out, lse, dout)),
        dlse=maybe_array(dlse),
        bias_gradient=bias_gradient,
        **arrays(options),
    )
    return tuple(_nothing(q) if array is None else as_tensor(array) for array in made)


def _backward_elsewhere(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, bias_gradient: bool, *given: Any,  # noqa: FBT001 - as the schema has it
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    options = Options(*given)
    problem = _problem("attention_backward", q, k, v, options)
    B, H, _, T, _, _, E = problem.sizes
    bias = options.bias if bias_gradient else None
    made = blocked.backward(
        problem,
        out.reshape(B, H, T, E),
        lse.reshape(B, H, T),
        dout.reshape(B, H, T, E),
        None if dlse is None else dlse.reshape(B, H, T),
        bias,
    )
    dq, dk, dv = map(problem.restore, made[:3])
    return dq, dk, dv, *(_nothing(q) if tensor is None else tensor for tensor in made[3:])


def _look_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    options, top, received, pooled = Options(*given[:-3]), *given[-3:]
    if options.impl == TORCH:
        return _look_elsewhere(q, k, v, *given)
    pooled = None if pooled is None else tuple(pooled)
    seen = ops.look(
        as_array(q), as_array(k), as_array(v), **arrays(options), top=top, received=received, pooled=pooled
    )
    parts = (getattr(seen, name) for name in SEEN)
    return tuple(_nothing(q) if array is None else as_tensor(array) for array in parts)


def _look_elsewhere(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    options, top, received, pooled = Options(*given[:-3]), *given[-3:]
    pooled = None if pooled is None else tuple(pooled)
    problem = _problem("look", q, k, v, options)
    seen = blocked.attend(problem, problems.watch("look", top=top, received=received, pooled=pooled))
    return tuple(problem.restore(seen[name]) if name in seen else _nothing(q) for name in SEEN)


def _rows_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor,
    heads: torch.Tensor, *given: Any,
) -> torch.Tensor:  # fmt: skip
    options = Options(*given)
    if options.impl == TORCH:
        return _rows_elsewhere(q, k, v, lse, queries, heads, *given)
    named = arrays(options)
    chosen = ops.implementation("rows", named.pop("impl"))
    problem = problems.problem("rows", as_array(q), as_array(k), as_array(v), **named)
    B, H, _, T, *_ = problem.sizes
    lse_BHT = np.ascontiguousarray(as_array(lse)).reshape(B, H, T)
    return as_tensor(problem.restore(chosen.rows(problem, lse_BHT, as_array(queries), as_array(heads))))


def _rows_elsewhere(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor,
    heads: torch.Tensor, *given: Any,
) -> torch.Tensor:  # fmt: skip
    problem = _problem("rows", q, k, v, Options(*given))
    B, H, _, T, *_ = problem.sizes
    return problem.restore(blocked.rows(problem, lse.reshape(B, H, T), queries, heads))


def arrays(options: Options) -> dict[str, Any]:
    """An operator's options as `regardant.ops` takes them, on the tensors' own memory."""
    named = options.keywords()
    for name, given in named.items():
        if isinstance(given, torch.Tensor):
            named[name] = as_array(given)
    if named["segments"] is not None:
        named["segments"] = tuple(map(as_array, named["segments"]))
    return named


def _problem(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> TensorProblem:
    if options.impl not in {"auto", TORCH}:
        where = "'auto', 'torch', 'native', 'blocked' or 'reference'" if q.is_cpu else "'auto' or 'torch'"
        raise ValueError(f"{op}: impl must be {where} for tensors on {q.device}; got {options.impl!r}")
    return problem_of(op, q, k, v, options)


# ---------------------------------------------------------------------------------------- shapes without numbers


def accumulator(q: torch.Tensor) -> torch.dtype:
    """The type of scores, sums and statistics: float64 for float64 input, float32 for all else."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def check(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse types and shapes of q, k and v that do not fit together, in the words that NumPy's arrays get."""
    check_types(op, q, k, v)
    problems.check_shapes(op, tuple(q.shape), tuple(k.shape), tuple(v.shape))


def check_types(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The part of `check` that looks at types."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} must be one of {', '.join(problems.FLOATS)}; got {_name(tensor)}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must be {_name(q)} to match q; got {_name(tensor)}")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """What stands for a result that was not asked for: an operator has to return a tensor."""
    return like.new_empty((0,), dtype=accumulator(like))


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check("attention", q, k, v)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=accumulator(q))


def _backward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _out: torch.Tensor, _lse: torch.Tensor, _dout: torch.Tensor,
    _dlse: torch.Tensor | None, bias_gradient: bool, *given: Any,  # noqa: FBT001
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    options = Options(*given)
    dsinks = _nothing(q) if options.sinks is None else q.new_empty(options.sinks.shape, dtype=accumulator(q))
    bias = options.bias if bias_gradient else None
    dbias = _nothing(q) if bias is None else bias.new_empty(bias.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks, dbias


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


def _rows_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _lse: torch.Tensor, queries: torch.Tensor,
    heads: torch.Tensor, *_options: Any,
) -> torch.Tensor:  # fmt: skip
    check("rows", q, k, v)
    H = () if q.ndim == 2 else (heads.shape[0],)
    return q.new_empty((*q.shape[:-3], *H, queries.shape[0], k.shape[-2]), dtype=accumulator(q))


KERNELS = {  # of each operator: on the CPU, elsewhere, without numbers
    "attention": (_attention_cpu, _attention_elsewhere, _attention_fake),
    "attention_backward": (_backward_cpu, _backward_elsewhere, _backward_fake),
    "look": (_look_cpu, _look_elsewhere, _look_fake),
    "rows": (_rows_cpu, _rows_elsewhere, _rows_fake),
}
for _operator, (_on_cpu, _elsewhere, _fake) in KERNELS.items():
    LIBRARY.impl(_operator, _on_cpu, "CPU")
    LIBRARY.impl(_operator, _elsewhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"regardant::{_operator}", _fake, lib=LIBRARY)
