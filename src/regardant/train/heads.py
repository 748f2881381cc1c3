"""What each head has become, in five numbers, measured on rows of text and on repeated random tokens.

    entropy     nats, the mean over queries: how widely a head looks
    max_logit   the largest score anywhere: what grows before a training falls apart (Dehghani et al. 2023)
    sink        the mean weight on the first token (Xiao et al. 2023)
    previous    the mean weight on the token just before
    induction   on random tokens said twice, the mean weight on the token after the earlier copy of the current one
                (Olsson et al. 2022)

Entropy and logits come from `regardant.torch.look`, which holds no T × T matrix; the others from the exact rows of
weights of the queries that are asked about, a block of them at a time. Refused: nothing; a model that has no token
to begin with is measured without.

Shape legend: B rows, T positions, S keys, H heads, L layers, n queries of a block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import regardant.torch
from regardant.lm import model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from regardant.lm.config import Config

MEASURES = ("entropy", "max_logit", "sink", "previous", "induction")
ROWS, REPEATED, BLOCK, QUERIES = 4, 64, 64, 128


@dataclasses.dataclass(frozen=True)
class Probe:
    """What heads are measured on: rows of one document each (B, T), and random tokens said twice (B, 1 + 2n)."""

    text_BT: NDArray[np.int64]
    repeated_BT: NDArray[np.int64]
    lead: int

    @property
    def period(self) -> int:
        """After how many tokens a random one comes again."""
        return int(self.repeated_BT.shape[1] - self.lead) // 2


def probe(
    text_BT: NDArray[np.int64], vocabulary: NDArray[np.int64], begin: int | None, context: int, seed: int
) -> Probe:
    """Rows to measure on; the random ones come from the seed, and fit the context."""
    random = np.random.Generator(np.random.PCG64([seed, 11]))
    lead = 0 if begin is None else 1
    once = random.choice(vocabulary, (ROWS, max(1, min(REPEATED, (context - lead) // 2))))
    first = np.full((ROWS, lead), -1 if begin is None else begin, np.int64)
    return Probe(text_BT, np.concatenate([first, once, once], axis=1), lead)


def measure(weights: Mapping[str, Any], config: Config, on: Probe) -> dict[str, list[list[float]]]:
    """The five numbers of every head, each a list of layers of lists of heads. Memory: BLOCK rows of weights."""
    text, repeated = _Watcher(previous=1), _Watcher(previous=None, period=on.period, lead=on.lead)
    device = next(iter(weights.values())).device
    with torch.no_grad():
        for watcher, ids_BT in ((text, on.text_BT), (repeated, on.repeated_BT)):
            model.forward(torch.as_tensor(ids_BT, device=device), weights, config, attend=watcher)
    return {**text.means, "induction": repeated.means["induction"]}


class _Watcher:
    """Takes attention's place, gives the same output, and keeps what was seen of each layer."""

    def __init__(self, previous: int | None, period: int = 0, lead: int = 0) -> None:
        self.previous, self.period, self.lead = previous, period, lead
        names = ("entropy", "max_logit", "sink", "previous") if previous else ("induction",)
        self.means: dict[str, list[list[float]]] = {name: [] for name in names}

    def __call__(
        self, _layer: int, q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        seen: Any = regardant.torch.look(q_BHTD, k_BGSD, v_BGSD, top=1, **options)
        T = q_BHTD.shape[2]
        if self.previous:
            self._keep("entropy", seen.entropy.double().mean(dim=(0, 2)))
            self._keep("max_logit", seen.max_logit.amax(dim=(0, 2)))
            # The second token's previous is the first, which is the sink: it would count for both.
            asked = np.unique(np.linspace(min(2, T - 1), T - 1, min(QUERIES, T)).astype(np.int64))
            self._keep("sink", self._weight(seen, asked, np.zeros_like(asked)))
            self._keep("previous", self._weight(seen, asked, np.maximum(asked - 1, 0)))
        else:
            asked = np.arange(self.lead + self.period, T)
            self._keep("induction", self._weight(seen, asked, asked - self.period + 1))
        out: torch.Tensor = seen.out
        return out

    def _keep(self, name: str, values_H: torch.Tensor) -> None:
        self.means[name].append([float(value) for value in values_H])

    @staticmethod
    def _weight(seen: Any, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> torch.Tensor:
        """The mean weight of each head from these queries on these keys, one for each, (H,)."""
        total_H: Any = 0.0
        for first in range(0, len(queries), BLOCK):
            some, at = queries[first : first + BLOCK], torch.as_tensor(keys[first : first + BLOCK])
            rows_BHnS = seen.rows(some)
            at_BHn1 = at.to(rows_BHnS.device)[None, None, :, None].expand(*rows_BHnS.shape[:2], -1, 1)
            total_H = total_H + rows_BHnS.gather(3, at_BHn1).double().sum(dim=(0, 2, 3))
        count = len(queries) * seen.out.shape[0]
        mean_H: torch.Tensor = total_H / count
        return mean_H
