"""An operator's arguments on tensors of any device, checked and put into one form.

The checks are those of `regardant.problem`, made on arrays without memory that have the tensors' shapes and types, so
that every device gets the same sentences. What only the numbers can tell (that `starts` lie inside the keys, that
`sinks` are finite) is checked where reading them is free, on the CPU; elsewhere a start before the first key or a
length beyond the last hides nothing, as the definition reads.

Shape legend: B batch, H query heads, G key/value heads, R = H/G, T queries, S keys, D query/key width, E value width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regardant import problem as problems
from regardant.torch.memory import as_array

if TYPE_CHECKING:
    from regardant.problem import Array, Problem
    from regardant.torch.options import Options


@dataclasses.dataclass(frozen=True, eq=False)
class TensorProblem:
    """As `regardant.problem.Problem`, on tensors; here bounds that were not given are None too."""

    q_BHTD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSE: torch.Tensor
    rank: int
    causal: bool
    offset: int
    window: int | None
    starts_B: torch.Tensor | None
    lengths_B: torch.Tensor | None
    segments: tuple[torch.Tensor, torch.Tensor] | None
    mask_BHTS: torch.Tensor | None
    bias_BHTS: torch.Tensor | None
    alibi_H: torch.Tensor | None
    sinks_H: torch.Tensor | None
    softcap: float | None
    scale: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        B, H, T, D = self.q_BHTD.shape
        _, G, S, E = self.v_BGSE.shape
        return B, H, G, T, S, D, E

    @property
    def accumulator(self) -> torch.dtype:
        """The type of scores, sums and statistics: float64 for float64 input, float32 for all else."""
        return torch.float64 if self.q_BHTD.dtype == torch.float64 else torch.float32

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a result with leading axes B and H the rank that the caller's tensors had."""
        return tensor.reshape(tensor.shape[4 - self.rank :])


def problem(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> TensorProblem:
    """Check the arguments of the operator `op`.

    Raises:
        TypeError, ValueError: as `regardant.problem.problem`.
    """
    named = options.keywords()
    del named["impl"]
    checked = problems.problem(
        op, _array(q), _array(k), _array(v), **{n: _array(o) for n, o in named.items()}
    )
    return _on_tensors(q, k, v, options, checked)


def _on_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, checked: Problem
) -> TensorProblem:
    B, H, _, T, S, _, _ = checked.sizes
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    ids = options.q_segments, options.k_segments
    return TensorProblem(
        q_BHTD=q.reshape(checked.q_BHTD.shape),
        k_BGSD=k.reshape(checked.k_BGSD.shape),
        v_BGSE=v.reshape(checked.v_BGSE.shape),
        rank=checked.rank,
        causal=checked.causal,
        offset=checked.offset,
        window=checked.window,
        starts_B=options.starts,
        lengths_B=options.lengths,
        segments=None if ids[0] is None or ids[1] is None else (ids[0].reshape(B, T), ids[1].reshape(B, S)),
        mask_BHTS=None if options.mask is None else options.mask.expand(B, H, T, S),
        bias_BHTS=None if options.bias is None else options.bias.expand(B, H, T, S),
        alibi_H=None if options.alibi is None else options.alibi.to(wide),
        sinks_H=None if options.sinks is None else options.sinks.to(wide),
        softcap=checked.softcap,
        scale=checked.scale,
    )


def _array(given: Any) -> Any:
    """A tensor's own memory on the CPU, elsewhere an array of its shape and type that takes none."""
    if isinstance(given, tuple):
        return tuple(_array(part) for part in given)
    if not isinstance(given, torch.Tensor):
        return given
    if given.device.type == "cpu":
        return as_array(given)
    return np.broadcast_to(_zero(given.dtype), tuple(given.shape))


@functools.cache
def _zero(dtype: torch.dtype) -> Array:
    return as_array(torch.zeros((), dtype=dtype))
