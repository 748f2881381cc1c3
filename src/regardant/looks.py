"""What looking saw: a `Look` holds the statistics of one attention and gives exact rows of weights on demand.

It keeps references to the queries and keys it was made from, not copies: rows asked for after they were
overwritten would be rows of something else. It refuses indices that are not there.

Shape legend: B batch, H query heads, T queries, S keys, E value width.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from regardant.problem import indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regardant.problem import Array, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Look:
    """What one attention drew from where. Leading axes B and H are there as the caller's arrays had them.

    Statistics are float32 (float64 for float64 input). A row that sees nothing has out 0, lse and max_logit −∞,
    entropy 0 and weights 0.

    Attributes:
        out: the output (B, H, T, E), the very bits that `attention` gives.
        lse: (B, H, T), natural log of each row's denominator.
        max_logit: (B, H, T), the largest visible score.
        entropy: (B, H, T), nats, of the row's weights; a sink counts as one more outcome.
        sink_weight: (B, H, T), the share that the learned sink took; 0 without `sinks`.
        top_keys: (B, H, T, top), the heaviest keys, heaviest first, the earlier among equals; −1 where fewer.
        top_weights: (B, H, T, top), their weights; 0 where fewer.
        received: (B, H, S), what each key gave in all (column sums), or None if it was not asked for.
        pooled: (B, H, R, C), the mass in each block of queries T·r//R … T·(r+1)//R by keys S·c//C … S·(c+1)//C,
            or None if it was not asked for.
    """

    out: Array
    lse: Array
    max_logit: Array
    entropy: Array
    sink_weight: Array
    top_keys: Array
    top_weights: Array
    _problem: Problem = dataclasses.field(repr=False)
    _rows: Callable[[Problem, Array, Array, Array], Array] = dataclasses.field(repr=False)
    received: Array | None = None
    pooled: Array | None = None

    def rows(
        self, queries: int | Sequence[int] | Array, heads: int | Sequence[int] | Array | None = None
    ) -> Array:
        """Exact weights of chosen queries over all keys, computed now from q, k and lse.

        Args:
            queries: indices of queries; negative ones count from the end.
            heads: indices of query heads; None for all.

        Returns:
            (B, H', n, S) with the chosen heads H' and queries n (an axis stays for a single index); leading axes
            as in the caller's arrays. Memory: the result.

        Raises:
            TypeError, ValueError: an index that is no integer or lies outside.
        """
        B, H, _, T, *_ = self._problem.sizes
        queries_N = indices("rows", "queries", queries, T)
        heads_M = np.arange(H) if heads is None else indices("rows", "heads", heads, H)
        lse_BHT = self.lse.reshape(B, H, T)
        return self._problem.restore(self._rows(self._problem, lse_BHT, queries_N, heads_M))
