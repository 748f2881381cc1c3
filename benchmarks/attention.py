"""Causal attention over whole sequences, beside other libraries' and the machine's peak.

    python -m benchmarks.attention [--rounds N] [--peers torch,flex,...] [--cases SUBSTRING] [--json]

All run in this process, by turns, on the same arrays; but one case forces AVX2 on regardant and torch, and one
measures memory: those have processes of their own. (ATEN_CPU_CAPABILITY binds torch's own code, not the matrix
products that it calls MKL for.) Before anything is timed, rows drawn at random are compared with their values in
float64. Times are medians. FLOPs are counted over visible pairs. It refuses to print a time for a wrong answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import regardant
from benchmarks import answers, peers, report, timing
from benchmarks.report import Case, Finished, Mark, Row, Setting
from benchmarks.timing import Contender, Outcome

if TYPE_CHECKING:
    from benchmarks.answers import Sample, Work

MEGABYTE = 10**6


def ours(work: Work, sample: Sample) -> Contender:
    """Attention by regardant, having answered once."""

    def call() -> answers.Array:
        return regardant.attention(*work[:3], window=work.window)

    return Contender(call, sample.error_in(call()), sample.budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(Case):
    """As many queries as keys, B H G T D of them; `window` keys are seen, or all before."""

    sizes: tuple[int, int, int, int, int]
    dtype: str = "float32"
    window: int | None = None

    def measure(self, setting: Setting) -> Row | Finished:
        """By turns with the peers."""
        return self.compare(setting)

    def compare(self, setting: Setting) -> Row:
        """By turns with the peers, in this process."""
        work = answers.random_work(*self.sizes, dtype=self.dtype, window=self.window)
        sample = answers.sample(work)
        contenders: dict[str, Contender | str] = {"regardant": ours(work, sample), **self.variants(work)}
        contenders |= peers.contenders(setting.peers, [work], sample, setting.threads)
        outcomes = timing.contest(contenders, setting.rounds)
        # What is measured is the peak of float32; other types may have another.
        return Row(outcomes, work.flops, self.dtype == "float32", self.figures(work, outcomes))

    def variants(self, _work: Work) -> dict[str, Contender]:
        """Other calls of regardant to be timed beside the one in question."""
        return {}

    def figures(self, _work: Work, _outcomes: dict[str, Outcome]) -> dict[str, float]:
        """What else there is to be said of the times."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windowed(Whole):
    """A window, beside the same call with all keys: its time should shrink as its pairs do."""

    def variants(self, work: Work) -> dict[str, Contender]:
        """The call with all keys."""
        whole = work._replace(window=None)
        return {"all keys": ours(whole, answers.sample(whole))}

    def figures(self, work: Work, outcomes: dict[str, Outcome]) -> dict[str, float]:
        """The share of the time, over the share of the pairs."""
        part, whole = outcomes["regardant"].seconds, outcomes["all keys"].seconds
        if not part or not whole:
            return {}
        return {"time / ideal": part / whole / (work.pairs / work._replace(window=None).pairs)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced(Whole):
    """The same in a process of its own, where instruction sets are forced by the environment."""

    instruction_set: str
    environment: dict[str, str]
    forced: tuple[str, ...]

    def measure(self, setting: Setting) -> Row | Finished:
        """In the right environment, as any case; elsewhere by a child that runs this case."""
        if self.environment.items() <= os.environ.items():
            row = self.compare(
                dataclasses.replace(setting, peers=[name for name in setting.peers if name in self.forced])
            )
            for name in setting.peers:
                row.outcomes.setdefault(
                    name, Outcome(reason=f"not run: {', '.join(self.environment)} do not bind it")
                )
            return row
        if self.instruction_set not in regardant.capabilities().present:
            reason = f"this machine has no {self.instruction_set}"
            return Row({"regardant": Outcome(reason=reason)})
        names = ",".join(setting.peers) or "none"
        options = ["--json", "--cases", self.label, "--rounds", str(setting.rounds), "--peers", names]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.attention", *options],
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            check=False,  # it ends with 1 after a wrong answer, which its row tells
            text=True,
        )
        if not done.stdout:
            raise SystemExit(f"the process of {self.label!r} ended with {done.returncode}")
        finished: Finished = json.loads(done.stdout)["cases"][0]
        return finished


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Case):
    """One call in a process of its own: memory at the peak, beyond inputs and output."""

    heads: int
    tokens: int
    width: int
    measured: tuple[str, ...] = ("torch",)

    def measure(self, setting: Setting) -> Row:
        """One call of regardant and, for comparison, of the peers that are `measured`."""
        mine = self.child("regardant")
        outcomes = {"regardant": outcome(mine)}
        for name in setting.peers:
            if name in self.measured:
                outcomes[name] = outcome(self.child(name))
            else:
                outcomes[name] = Outcome(reason=f"not run: {', '.join(self.measured)} alone, for comparison")
        beyond = {"MB beyond": mine["beyond"] / MEGABYTE}
        flops = answers.visible_pairs(self.tokens, self.tokens) * self.heads * 4 * self.width
        return Row(outcomes, flops, figures=beyond, remark="one call of a new process")

    def child(self, name: str) -> dict[str, float]:
        """One call in a new process."""
        sizes = map(str, (self.heads, self.tokens, self.width))
        command = [sys.executable, "-m", "benchmarks.memory", name, *sizes]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured: dict[str, float] = json.loads(done.stdout)
        return measured


def outcome(told: dict[str, float]) -> Outcome:
    """What a child told, in the form that all contenders have."""
    note = f"{told['beyond'] / MEGABYTE:.1f} MB beyond"
    if not answers.right(told["error"], told["budget"]):
        return Outcome(
            None, told["error"], told["budget"], note, f"{timing.WRONG}: error {told['error']:.1e}"
        )
    return Outcome(told["seconds"], told["error"], told["budget"], note)


PEAK_512 = Mark("share", 0.85, avx512=True)
# Nothing measures the peak of bfloat16 products yet; the mark is shown so that it is not forgotten.
PEAK_BF16 = Mark("share", 0.74, avx512=True)

CASES: tuple[Case, ...] = (
    Whole(label="f32 H8 T4096 D64", sizes=(1, 8, 8, 4096, 64), marks=(PEAK_512, Mark("torch", 1.3))),
    Whole(label="f32 H8 T4096 D128", sizes=(1, 8, 8, 4096, 128), marks=(PEAK_512, Mark("torch", 1.3))),
    Whole(label="f32 H8 T1024 D64", sizes=(1, 8, 8, 1024, 64), marks=(Mark("torch", 1.6),)),
    Whole(label="f32 B32 H12 T128 D64", sizes=(32, 12, 12, 128, 64), marks=(Mark("torch", 1.3),)),
    Whole(label="f32 H32/8 T2048 D128", sizes=(1, 32, 8, 2048, 128), marks=(Mark("torch", 1.3),)),
    *(
        Whole(label=f"f32 H8 T2048 D{width}", sizes=(1, 8, 8, 2048, width), marks=(Mark("torch", 1.2),))
        for width in (32, 80, 96, 256)
    ),
    Whole(
        label="bf16 H8 T4096 D64",
        sizes=(1, 8, 8, 4096, 64),
        dtype="bfloat16",
        marks=(PEAK_BF16, Mark("torch", 2.6)),
    ),
    Whole(
        label="bf16 H8 T4096 D128",
        sizes=(1, 8, 8, 4096, 128),
        dtype="bfloat16",
        marks=(PEAK_BF16, Mark("torch", 2.2)),
    ),
    Whole(
        label="bf16 H32/8 T2048 D128",
        sizes=(1, 32, 8, 2048, 128),
        dtype="bfloat16",
        marks=(Mark("torch", 2.5),),
    ),
    Forced(
        label="f32 H8 T4096 D64, AVX2 forced",
        sizes=(1, 8, 8, 4096, 64),
        marks=(Mark("torch", 1.2),),
        instruction_set="avx2",
        environment={"REGARDANT_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"},
        forced=("torch",),
    ),
    Windowed(
        label="f32 H8 T16384 D64, window 512",
        sizes=(1, 8, 8, 16384, 64),
        window=512,
        marks=(Mark("time / ideal", 1.35, most=True),),
    ),
    Memory(
        label="f32 H2 T65536 D64, memory",
        heads=2,
        tokens=65536,
        width=64,
        marks=(Mark("MB beyond", 64, most=True),),
    ),
)

if __name__ == "__main__":
    report.run(__doc__, CASES, timing.MultiplyAdds)
