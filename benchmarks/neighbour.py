"""Attention between torch's matrix products, in one process: does either take the other's cores?

    python -m benchmarks.neighbour [--json] [--rounds N]

After a product torch's OpenMP workers go on spinning for a while on the cores that attention wants, and attention's
own helpers must be asleep again when the next product begins. Each is timed alone and between calls of the other;
1.00 is no harm at all. The answer of attention is checked first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TYPE_CHECKING

import torch

import regardant
from benchmarks import answers
from benchmarks.timing import once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What stands beside one layer's attention in a model as wide: rows, inputs, outputs.
PRODUCT = (1024, 1024, 4096)
SHAPES = {
    "prefill, 16 heads, T 1024, D 64": (16, 1024, 1024),
    "decode, 16 heads, S 8192, D 64": (16, 1, 8192),
}


def alone_and_between(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[float, float, float, float]:
    """Median seconds of `first` and of `second`: each alone, then by turns without a pause."""
    alone = [statistics.median(once(run) for _ in range(rounds)) for run in (first, second)]
    both = [(once(first), once(second)) for _ in range(rounds)]
    between = [statistics.median(times) for times in zip(*both, strict=True)]
    return alone[0], alone[1], between[0], between[1]


def measure(rounds: int) -> list[dict[str, object]]:
    """Every shape's times, in seconds, after its answer was checked."""
    rows, inputs, outputs = PRODUCT
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    found: list[dict[str, object]] = []
    for name, (heads, queries, keys) in SHAPES.items():
        work = answers.random_work(1, heads, heads, keys, 64)
        q_BHTD = work.q_BHTD[:, :, -queries:]

        def attend(work: answers.Work = work, q_BHTD: answers.Array = q_BHTD) -> answers.Array:
            return regardant.attention(q_BHTD, work.k_BGSD, work.v_BGSE)

        sample = answers.sample(work._replace(q_BHTD=q_BHTD), count=16)
        error = sample.error_in(attend())
        if not answers.right(error, sample.budget):
            raise SystemExit(f"{name}: wrong answer, error {error:.1e}, allowed {sample.budget:.1e}")
        times = alone_and_between(attend, lambda: torch.nn.functional.linear(x, weight), rounds)
        keys_of_times = ("attention_alone", "product_alone", "attention_between", "product_between")
        found.append({"work": name, "error": error, **dict(zip(keys_of_times, times, strict=True))})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=60, help="calls of each, alone and between")
    chosen = parser.parse_args(arguments)
    found = measure(chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'':32} {'alone':>10} {'between':>10} {'ratio':>6}")
    for row in found:
        for part in ("attention", "product"):
            alone, between = float(str(row[f"{part}_alone"])), float(str(row[f"{part}_between"]))
            name = row["work"] if part == "attention" else "  torch's product beside it"
            print(f"{name:32} {alone * 1e3:7.2f} ms {between * 1e3:7.2f} ms {between / alone:6.2f}")


if __name__ == "__main__":
    main()
