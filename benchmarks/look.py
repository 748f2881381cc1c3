"""What looking costs: `look` beside plain `attention`, and beside the naive way with the whole matrix, in torch.

    python -m benchmarks.look [--rounds N] [--peers torch,...] [--cases SUBSTRING] [--json]

All run in this process, by turns, on the same arrays. Before anything is timed, `look.out` is compared with
attention's bits, and weights, keys, entropies and sums with their values in float64, in rows drawn at random.
Times are medians. FLOPs are those of attention, whatever else is computed. It refuses to print a time for a wrong
answer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

import regardant
from benchmarks import answers, peers, report, timing
from benchmarks.report import Case, Mark, Row, Setting
from benchmarks.timing import Contender

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.answers import Array, Sample, Work

SIZES = (1, 8, 8, 4096, 64)
TOP = answers.HEAVIEST
QUERIES = 64
ABSENT = {
    "flex": "not offered: gives no weights",
    "onnxruntime": "not run: gives the whole matrix, as torch does here",
    "openvino": "not offered: gives no weights",
    "jax": "not offered: gives no weights",
}


class Truth:
    """A work's exact statistics at a sample of places, to hold what looked at it against."""

    def __init__(self, work: Work) -> None:
        self.out = answers.sample(work)
        places = self.out.places
        self.weights = answers.sample(work, answers.weights, places=places)
        heaviest = answers.sample(work, answers.heaviest, places=places)
        self.samples = {
            "out": self.out,
            "top_weights": heaviest,
            "entropy": answers.sample(work, answers.entropy, places=places),
            "received": received(work),
        }

    def worst(self, seen: dict[str, Array]) -> tuple[float, float]:
        """Error of the statistic that comes nearest to its budget, or goes farthest beyond, and that budget."""
        pairs = [
            (self.samples[name].error_in(array), self.samples[name].budget)
            for name, array in seen.items()
            if name != "top_keys"
        ]
        # The keys must have the weights: in the exact rows, what stands at the keys is the heaviest there is.
        # A key of -1, where a row has fewer than that, reads the last key's weight, which is 0 in such a row.
        heaviest = self.samples["top_weights"]
        named = [
            row[seen["top_keys"][at]] for row, at in zip(self.weights.exact, self.out.places, strict=True)
        ]
        pairs.append((heaviest.error(named), heaviest.budget))
        return pairs[int(np.argmax([error / budget for error, budget in pairs]))]


def received(work: Work) -> Sample:
    """Column sums of one head, exactly; the naive computation is that of the whole matrix in float32."""
    _, H, G, T, S, *_ = work.sizes
    h = H // 2
    g = h // (H // G)

    def sums(wide: type[np.floating[Any]]) -> Array:
        s_TS = work.q_BHTD[0, h].astype(wide) @ work.k_BGSD[0, g].astype(wide).T * wide(scale(work))
        s_TS[~answers.visible(T, S)] = -np.inf
        e_TS = np.exp(s_TS - s_TS.max(axis=-1, keepdims=True))
        return np.asarray((e_TS / e_TS.sum(axis=-1, keepdims=True)).sum(axis=0))

    exact = sums(np.float64)
    naive = answers.relative(sums(np.float32), exact)
    return answers.Sample([(0, h)], [exact], answers.budget(naive, np.float32))


def scale(work: Work) -> float:
    """The factor on the dot products."""
    return 1 / math.sqrt(work.q_BHTD.shape[-1])


def eager(work: Work, threads: int, *, received: bool) -> Callable[[], dict[str, Any]]:
    """The naive way in torch: the matrix, its softmax, the heaviest of each row and, perhaps, the column sums."""
    import torch

    torch.set_num_threads(threads)
    q, k, v = map(peers.tensor, work[:3])
    hidden = peers.tensor(~answers.visible(*work.sizes[3:5]))

    @torch.inference_mode()
    def call() -> dict[str, Any]:
        scores = q @ k.mT
        scores *= scale(work)
        scores.masked_fill_(hidden, -math.inf)
        a = scores.softmax(-1)
        heaviest, keys = a.topk(TOP)
        seen = {"out": a @ v, "top_weights": heaviest, "top_keys": keys}
        return seen | {"received": a.sum(-2)} if received else seen

    return call


def eager_rows(work: Work, threads: int, queries: Array) -> Callable[[], Any]:
    """Some rows of weights in torch; `queries` of every head."""
    import torch

    torch.set_num_threads(threads)
    q, k, _ = map(peers.tensor, work[:3])
    chosen = torch.from_numpy(queries)
    hidden = peers.tensor(~answers.visible(*work.sizes[3:5])[queries])

    @torch.inference_mode()
    def call() -> Any:
        scores = q[:, :, chosen] @ k.mT
        scores *= scale(work)
        return scores.masked_fill_(hidden, -math.inf).softmax(-1)

    return call


def absent(names: list[str]) -> dict[str, Contender | str]:
    """Why the other peers that were named do not take part."""
    return {name: ABSENT[name] for name in names if name != "torch"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looking(Case):
    """`look`, beside `attention` and the naive way."""

    received: bool = False

    def measure(self, setting: Setting) -> Row:
        """By turns, if the look's output has attention's bits."""
        work = answers.random_work(*SIZES)
        truth = Truth(work)

        def look() -> regardant.Look:
            return regardant.look(*work[:3], top=TOP, received=self.received)

        def plain() -> Array:
            return regardant.attention(*work[:3])

        looked, out = look(), plain()
        names = ("out", "top_keys", "top_weights", "entropy", *["received"] * self.received)
        error, budget = truth.worst({name: getattr(looked, name) for name in names})
        contenders: dict[str, Contender | str] = {
            "regardant": Contender(look, error if np.array_equal(looked.out, out) else math.inf, budget),
            "attention": Contender(plain, truth.out.error_in(out), truth.out.budget),
        }
        if "torch" in setting.peers:
            naive = eager(work, setting.threads, received=self.received)
            error, budget = truth.worst({name: array.numpy() for name, array in naive().items()})
            contenders["torch"] = Contender(naive, error, budget, "eager, whole matrix")
        outcomes = timing.contest(contenders | absent(setting.peers), setting.rounds)
        mine, other = outcomes["regardant"].seconds, outcomes["attention"].seconds
        figures = {"look / attention": mine / other} if mine and other else {}
        return Row(
            outcomes, work.flops, figures=figures, remark="error: of the statistic nearest to its budget"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Case):
    """Exact rows of weights on demand, of a look that is there."""

    def measure(self, setting: Setting) -> Row:
        """By turns with the same rows in torch."""
        work = answers.random_work(*SIZES)
        _, H, _, T, *_ = work.sizes
        queries = np.random.default_rng(1).choice(T, QUERIES, replace=False)
        places = [(0, n % H, int(query)) for n, query in enumerate(queries)]
        sample = answers.sample(work, answers.weights, places=places)
        look = regardant.look(*work[:3], top=0)

        def rows() -> Array:
            return look.rows(queries)

        def error(rows_BHNS: Array) -> float:
            return sample.error(rows_BHNS[0, n % H, n] for n in range(QUERIES))

        contenders: dict[str, Contender | str] = {"regardant": Contender(rows, error(rows()), sample.budget)}
        if "torch" in setting.peers:
            naive = eager_rows(work, setting.threads, queries)
            budget = sample.budget
            contenders["torch"] = Contender(naive, error(naive().numpy()), budget, "eager, these rows alone")
        return Row(timing.contest(contenders | absent(setting.peers), setting.rounds))


CASES: tuple[Case, ...] = (
    Looking(label="look(top=8)", marks=(Mark("look / attention", 1.15, most=True),)),
    Looking(
        label="look(top=8, received=True)", received=True, marks=(Mark("look / attention", 1.8, most=True),)
    ),
    Rows(label=f"rows() of {QUERIES} queries, 8 heads"),
)

if __name__ == "__main__":
    report.run(__doc__, CASES, timing.MultiplyAdds)
