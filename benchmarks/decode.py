"""One new token over a long cache: keys and values are read once, so the bound is the bandwidth of memory.

    python -m benchmarks.decode [--rounds N] [--peers torch,flex,...] [--cases SUBSTRING] [--json]

Keys and values are slices of a longer `KVCache`, read in place. The calls go through the layers of that cache in
turn, so many that together they exceed the processor's last cache by far: a call finds none of its own there. All
run in this process, by turns, on the same cache; peers that read no slices are given copies made beforehand. Before
anything is timed, the rows are compared with their values in float64. Times are medians. GB/s are those of keys and
values, each counted once. It refuses to print a time for a wrong answer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

import regardant
from benchmarks import answers, peers, report, timing
from benchmarks.answers import Work
from benchmarks.report import Case, Mark, Row, Setting
from benchmarks.timing import Contender

LEAST = 2**29  # bytes of all layers
SPARE = 256  # positions of the cache that are still free


def layers_of(H: int, G: int, S: int, D: int, dtype: str) -> list[Work]:
    """One query over each layer of a cache; all layers together exceed the last cache by far."""
    rng = np.random.default_rng(0)
    q_BHTD = answers.normal(rng, (1, H, 1, D), dtype)
    layer_bytes = 2 * G * S * D * q_BHTD.dtype.itemsize
    layers = -(-max(LEAST, 2 * timing.last_level_cache()) // layer_bytes)
    cache = regardant.KVCache(layers, 1, G, S + SPARE, D, like=q_BHTD)
    shape = (1, G, S, D)
    return [
        Work(
            q_BHTD, *cache.write(layer, answers.normal(rng, shape, dtype), answers.normal(rng, shape, dtype))
        )
        for layer in range(layers)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Case):
    """One query of H heads over S keys of G heads."""

    sizes: tuple[int, int, int, int]
    dtype: str = "float32"

    def measure(self, setting: Setting) -> Row:
        """By turns with the peers."""
        works = layers_of(*self.sizes, self.dtype)
        sample = answers.sample(works[0])
        run = peers.in_turn(regardant.attention, [work[:3] for work in works])
        contenders: dict[str, Contender | str] = {
            "regardant": Contender(run, sample.error_in(run()), sample.budget)
        }
        contenders |= peers.contenders(setting.peers, works, sample, setting.threads)
        size = works[0].k_BGSD.nbytes + works[0].v_BGSE.nbytes
        remark = f"{len(works)} layers in turn, {len(works) * size / 1e6:.0f} MB"
        return Row(timing.contest(contenders, setting.rounds), size, remark=remark)


F32, BF16 = (Mark("share", 0.85),), (Mark("share", 0.75),)

CASES: tuple[Case, ...] = (
    Decode(label="f32 H32/8 S8192 D128", sizes=(32, 8, 8192, 128), marks=F32),
    Decode(label="f32 H9/3 S32768 D64", sizes=(9, 3, 32768, 64), marks=F32),
    Decode(label="bf16 H32/8 S8192 D128", sizes=(32, 8, 8192, 128), dtype="bfloat16", marks=BF16),
    Decode(label="bf16 H9/3 S32768 D64", sizes=(9, 3, 32768, 64), dtype="bfloat16", marks=BF16),
    Decode(label="f16 H32/8 S8192 D128", sizes=(32, 8, 8192, 128), dtype="float16"),
    Decode(label="f16 H9/3 S32768 D64", sizes=(9, 3, 32768, 64), dtype="float16"),
)

if __name__ == "__main__":
    report.run(__doc__, CASES, timing.Reads)
