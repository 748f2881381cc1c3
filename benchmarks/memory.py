"""Memory of one call of attention at its peak, beyond inputs and output: a process of its own for every call.

    python -m benchmarks.memory regardant|torch|... HEADS TOKENS WIDTH

It prints JSON: bytes beyond, seconds, error of a sample of rows and the error that is to be expected. The first
call of a process counts everything that an implementation takes for itself. `benchmarks.attention` runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import regardant
from benchmarks import answers, peers

if TYPE_CHECKING:
    from benchmarks.answers import Work

STATUS = Path("/proc/self/status")
FORGET_PEAK = Path("/proc/self/clear_refs")


def memory(what: str) -> int:
    """Bytes of resident memory: now ("VmRSS") or at the peak ("VmHWM"). Where there is no /proc, always the peak."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(what))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Count the peak from now on, where the system can."""
    if FORGET_PEAK.exists():
        FORGET_PEAK.write_text("5", encoding="ascii")


def ready(name: str, work: Work) -> peers.Ready:
    """The contender, set up but not yet called."""
    if name == "regardant":
        regardant.capabilities()  # loads the kernels
        return peers.Ready(lambda: regardant.attention(*work[:3]), lambda out: out)
    return peers.PEERS[name]([work], regardant.capabilities().threads)


def main() -> None:
    """One call, measured; then its answer is checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["regardant", *peers.PEERS])
    for size in ("heads", "tokens", "width"):
        parser.add_argument(size, type=int)
    chosen = parser.parse_args()
    work = answers.random_work(1, chosen.heads, chosen.heads, chosen.tokens, chosen.width)
    contender = ready(chosen.name, work)
    forget_peak()
    before = memory("VmRSS")
    begin = time.perf_counter()
    result = contender.run()
    seconds = time.perf_counter() - begin
    beyond = memory("VmHWM") - before - work.q_BHTD.nbytes  # the output is as large as the queries
    sample = answers.sample(work, count=16)
    told = {
        "beyond": beyond,
        "seconds": seconds,
        "error": sample.error_in(contender.read(result)),
        "budget": sample.budget,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
