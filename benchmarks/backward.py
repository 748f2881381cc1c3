"""A step of training through causal attention, forward and backward, beside torch's and the machine's peak.

    python -m benchmarks.backward [--rounds N] [--peers torch,...] [--cases SUBSTRING] [--json]

All run in this process, by turns, on the same arrays. Before anything is timed, the gradients of one key/value head
are compared with their values in float64, by the definition. An error is relative to a gradient's largest number; the
budget is that of the definition in float32, from an output in the input's type. Times are medians of a forward and a
backward pass together. FLOPs are counted over visible pairs: two products forward, five backward. It refuses to print
a time for a wrong answer.

Shape legend: B batch, H query heads, G key/value heads, T queries and keys, D width; R query heads of one key/value
head, N queries at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import regardant
from benchmarks import answers, peers, report, timing
from benchmarks.report import Case, Mark, Row, Setting
from benchmarks.timing import Contender

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.answers import Array, Work

PRODUCTS = 7  # of which `Work.flops` counts the forward pass's two
AT_ONCE = 512  # queries
ABSENT = "not run: torch alone, for comparison"


class Truth(NamedTuple):
    """The gradients of one key/value head and of the query heads that read it, exactly.

    Attributes:
        place: (b, g) of the head. `exact`: dq (R, T, D), dk (T, D) and dv (T, D), float64.
        budget: the error that is to be expected at most, relative to a gradient's largest number.
    """

    place: tuple[int, int]
    exact: tuple[Array, ...]
    budget: float

    def error_in(self, gradients: tuple[Array, ...]) -> float:
        """Largest error of whole gradients (B, H, T, D), (B, G, T, D), (B, G, T, D); NaN if there is a NaN."""
        b, g = self.place
        R = len(self.exact[0])
        dq, dk, dv = gradients
        ours = (dq[b, g * R : (g + 1) * R], dk[b, g], dv[b, g])
        return answers.largest(map(answers.relative, ours, self.exact))


def truth(work: Work, dout_BHTD: Array, place: tuple[int, int]) -> Truth:
    """One head's gradients, and how far the definition in float32 is from them."""
    exact = by_definition(work, dout_BHTD, place, np.float64)
    naive = answers.largest(
        answers.relative(array.astype(work.dtype), true)
        for order in range(answers.ORDERS)
        for array, true in zip(by_definition(work, dout_BHTD, place, np.float32, order), exact, strict=True)
    )
    return Truth(place, exact, answers.budget(naive, work.dtype))


def by_definition(
    work: Work, dout_BHTD: Array, place: tuple[int, int], wide: type[np.floating[Any]], order: int = 0
) -> tuple[Array, ...]:
    """dq, dk and dv of one key/value head, computed in the type `wide`, some queries at a time.

    `order` other than 0 sums over widths, queries and keys in another order, which is neither more nor less naive.
    """
    b, g = place
    _, H, G, T, _, D, _ = work.sizes
    heads = slice(g * (H // G), (g + 1) * (H // G))
    rng = np.random.default_rng(order)
    d, i, j = (rng.permutation(n) if order else np.arange(n) for n in (D, T, T))
    q_RTD, dout_RTD = (array[b, heads][:, i][..., d].astype(wide) for array in (work.q_BHTD, dout_BHTD))
    k_TD, v_TD = (array[b, g][j][:, d].astype(wide) for array in (work.k_BGSD, work.v_BGSE))
    scale = wide(1 / math.sqrt(D))
    dq_RTD, dk_TD, dv_TD = (np.zeros(array.shape, wide) for array in (q_RTD, k_TD, v_TD))
    for r, start in np.ndindex(H // G, -(-T // AT_ONCE)):
        some = slice(start * AT_ONCE, (start + 1) * AT_ONCE)
        q_ND, dout_ND = q_RTD[r, some], dout_RTD[r, some]
        s_NT = np.where(i[some, None] >= j, scale * (q_ND @ k_TD.T), -np.inf)
        e_NT = np.exp(s_NT - s_NT.max(axis=1, keepdims=True))
        a_NT = e_NT / e_NT.sum(axis=1, keepdims=True)
        out_ND = a_NT @ v_TD
        if wide is not np.float64:
            out_ND = out_ND.astype(work.dtype).astype(wide)
        delta_N = (dout_ND * out_ND).sum(axis=1)
        ds_NT = a_NT * (dout_ND @ v_TD.T - delta_N[:, None])
        dq_RTD[r, some] = scale * (ds_NT @ k_TD)
        dk_TD += scale * (ds_NT.T @ q_ND)
        dv_TD += a_NT.T @ dout_ND
    i, j, d = (np.argsort(places) for places in (i, j, d))
    return dq_RTD[:, i][..., d], dk_TD[j][:, d], dv_TD[j][:, d]


def ours(work: Work, dout_BHTD: Array) -> Callable[[], Any]:
    """One step by regardant, on NumPy's arrays."""

    def call() -> Any:
        out_BHTD, lse_BHT = regardant.attention(*work[:3], return_lse=True)
        return regardant.attention_backward(*work[:3], out_BHTD, lse_BHT, dout_BHTD)

    return call


def pytorch(work: Work, dout_BHTD: Array, threads: int) -> Callable[[], Any]:
    """One step by torch's `scaled_dot_product_attention` and autograd."""
    import torch

    torch.set_num_threads(threads)
    _, H, G, *_ = work.sizes
    q, k, v = (peers.tensor(array).requires_grad_() for array in work[:3])
    dout = peers.tensor(dout_BHTD)

    def call() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)
        return torch.autograd.grad(out, (q, k, v), dout)

    return call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Case):
    """As many queries as keys, B H G T D of them."""

    sizes: tuple[int, int, int, int, int]
    dtype: str = "float32"

    def measure(self, setting: Setting) -> Row:
        """By turns with torch."""
        work = answers.random_work(*self.sizes, dtype=self.dtype)
        dout_BHTD = answers.normal(np.random.default_rng(2), work.q_BHTD.shape, self.dtype)
        B, _, G, *_ = work.sizes
        exact = truth(work, dout_BHTD, (B - 1, G - 1))
        run = ours(work, dout_BHTD)
        contenders: dict[str, Contender | str] = {
            "regardant": Contender(run, exact.error_in(run()[:3]), exact.budget)
        }
        contenders |= self.others(run, contenders["regardant"], setting)
        for name in setting.peers:
            contenders[name] = ABSENT
        if "torch" in setting.peers:
            step = pytorch(work, dout_BHTD, setting.threads)
            gradients = tuple(map(peers.read_tensor, step()))
            contenders["torch"] = Contender(step, exact.error_in(gradients), exact.budget)
        outcomes = timing.contest(contenders, setting.rounds)
        # What is measured is the peak of float32; other types may have another.
        return Row(outcomes, work.flops // 2 * PRODUCTS, self.dtype == "float32")

    def others(self, _run: Callable[[], Any], _first: Any, _setting: Setting) -> dict[str, Contender | str]:
        """Other calls of regardant to be timed beside the one in question."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(Step):
    """The same beside one thread, for a shape that leaves few heads to share out."""

    def others(self, run: Callable[[], Any], first: Any, setting: Setting) -> dict[str, Contender | str]:
        """The call on one thread; its bits are the same, so that its error is."""
        if setting.threads == 1:
            return {"one thread": "not run: there is one thread"}

        def alone() -> None:
            regardant.set_num_threads(1)
            run()
            regardant.set_num_threads(setting.threads)

        return {"one thread": first._replace(run=alone)}


CASES: tuple[Case, ...] = (
    Step(label="f32 H8 T2048 D64", sizes=(1, 8, 8, 2048, 64), marks=(Mark("torch", 1.6),)),
    Step(label="f32 H8 T2048 D128", sizes=(1, 8, 8, 2048, 128)),
    Step(label="f32 H32/8 T1024 D64", sizes=(1, 32, 8, 1024, 64)),
    Step(label="f32 B32 H12 T128 D64", sizes=(32, 12, 12, 128, 64)),
    Step(
        label="bf16 H8 T2048 D64",
        sizes=(1, 8, 8, 2048, 64),
        dtype="bfloat16",
        marks=(Mark("torch", 2),),
    ),
    Step(label="bf16 H8 T2048 D128", sizes=(1, 8, 8, 2048, 128), dtype="bfloat16", marks=(Mark("torch", 2),)),
    Step(label="f16 H8 T2048 D64", sizes=(1, 8, 8, 2048, 64), dtype="float16"),
    Scaling(label="f32 H1 T4096 D64", sizes=(1, 1, 1, 4096, 64), marks=(Mark("one thread", 1.7),)),
    Scaling(
        label="bf16 H1 T4096 D64",
        sizes=(1, 1, 1, 4096, 64),
        dtype="bfloat16",
        marks=(Mark("one thread", 1.7),),
    ),
)

if __name__ == "__main__":
    report.run(__doc__, CASES, timing.MultiplyAdds)
