"""SmolLM2 under transformers: regardant's attention beside torch's, and watching beside eager attention's matrices.

    python -m benchmarks.transformers [--rounds N] [--cases SUBSTRING] [--json]

Prefill and decoding run in this process, on the same model and weights, by turns; before anything is timed, the
logits of both are compared with each other or, in bfloat16, with those of float32. What looking costs is measured in
a process of its own for each way of doing it (`--alone WAY TOKENS`, which prints JSON): the time of one forward and
of what is asked of it, and the memory beyond the loaded model at its peak. Both ways must tell the same. A bound
that is missed is shown as missed; it refuses to print a time for answers that disagree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

import regardant.transformers
from benchmarks import lm, memory, report
from regardant.lm.load import load

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], np.ndarray]

CONTEXT = 4096
LOOKED_AT = 2048
FAR = 16384
TOP = 8
IMPLEMENTATIONS = ("regardant", "sdpa")
# What, in which type, how many calls a turn, and by how much regardant is to be faster.
CASES = {
    "bf16 decode": ("decode", torch.bfloat16, 3, 3.0),
    "bf16 prefill": ("prefill", torch.bfloat16, 1, 1.4),
    "f32 prefill": ("prefill", torch.float32, 1, 1.15),
    "f32 decode": ("decode", torch.float32, 3, 1.0),
}
WATCH = "watch against eager"
# By how much watching is to be shorter and smaller than eager attention.
MARKS = {"seconds": 4.0, "bytes": 2.0}
FAR_CASE = "watch at 16384"


def tokens(count: int) -> torch.Tensor:
    """Token ids of the benchmark's text, (1, count)."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 49152, (1, count)))


def steps(model: transformers.PreTrainedModel, what: str) -> dict[str, Step]:
    """For each implementation, one call: all of `CONTEXT` tokens, or one more token behind so many."""
    ids = tokens(CONTEXT + 1)

    def logits(name: str, part: torch.Tensor, cache: transformers.DynamicCache) -> np.ndarray:
        model.set_attn_implementation(name)
        with torch.inference_mode():
            row: np.ndarray = (
                model(part, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float().numpy()
            )
        return row

    def new() -> transformers.DynamicCache:
        return transformers.DynamicCache(config=model.config)

    if what == "prefill":
        return {name: lambda name=name: logits(name, ids[:, :CONTEXT], new()) for name in IMPLEMENTATIONS}
    cache = new()
    logits("regardant", ids[:, :CONTEXT], cache)

    def decode(name: str) -> np.ndarray:
        row = logits(name, ids[:, CONTEXT:], cache)
        cache.crop(-1)
        return row

    return {name: lambda name=name: decode(name) for name in IMPLEMENTATIONS}


def compare(model: transformers.PreTrainedModel, label: str, rounds: int) -> dict[str, Any]:
    """One case by turns, once the logits agree."""
    what, dtype, each, mark = CASES[label]
    ours, theirs = steps(model.to(dtype), what).values()
    rows = ours(), theirs()
    told: dict[str, Any] = {"relative_error": lm.relative_error(*rows)}
    allowed = lm.AGREE
    if dtype != torch.float32:
        exact = steps(model.to(torch.float32), what)["sdpa"]()
        told["relative_error"], their_error = (lm.relative_error(row, exact) for row in rows)
        told["sdpa_relative_error"] = their_error
        allowed = 2 * their_error
        ours, theirs = steps(model.to(dtype), what).values()
    if told["relative_error"] > allowed:
        raise SystemExit(f"{label}: the logits disagree: {told}, allowed {allowed}")
    our_seconds, their_seconds = lm.by_turns(ours, theirs, rounds, each)
    count = CONTEXT if what == "prefill" else 1
    return told | {
        "regardant_tokens_per_s": count / our_seconds,
        "sdpa_tokens_per_s": count / their_seconds,
        "ratio": their_seconds / our_seconds,
        "mark": mark,
    }


# --- in a process of its own -----------------------------------------------------------------------------


def alone(way: str, count: int, keep: Path | None) -> dict[str, float]:
    """One forward that is watched, or with eager attention's matrices and what is made of them."""
    model = lm.twin(load("smollm2"))
    model.set_attn_implementation("regardant" if way == "watch" else "eager")
    ids = tokens(count)
    with torch.inference_mode():
        model(ids[:, :32], logits_to_keep=1)  # what is made once is made now
        memory.forget_peak()
        before, begin = memory.memory("VmRSS"), time.perf_counter()
        seen = watched(model, ids) if way == "watch" else eager(model, ids)
        seconds = time.perf_counter() - begin
    told = {"seconds": seconds, "bytes": memory.memory("VmHWM") - before}
    if keep is not None:
        np.savez(keep, **{name: torch.stack(layers).numpy() for name, layers in seen.items()})
    return told


def watched(model: transformers.PreTrainedModel, ids: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Each layer's heaviest weights, entropies and column sums, by `watch`."""
    received = ids.shape[1] <= LOOKED_AT
    with regardant.transformers.watch(model, top=TOP, received=received) as w:
        model(ids, use_cache=False, logits_to_keep=1)
    names = ("top_weights", "entropy", *["received"] * received)
    looks = list(w.layers.values())
    return {name: [getattr(look, name)[0] for look in looks] for name in names}


def eager(model: transformers.PreTrainedModel, ids: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """The same from the matrices of eager attention."""
    weights = model(ids, use_cache=False, logits_to_keep=1, output_attentions=True).attentions
    seen: dict[str, list[torch.Tensor]] = {"top_weights": [], "entropy": [], "received": []}
    for a_1HTS in weights:
        seen["top_weights"].append(a_1HTS[0].topk(TOP).values)
        seen["entropy"].append(torch.special.entr(a_1HTS[0]).sum(dim=-1))
        seen["received"].append(a_1HTS[0].sum(dim=-2))
    return seen


def in_a_process(way: str, count: int, keep: Path | None = None) -> dict[str, float]:
    """What `alone` tells in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transformers", "--alone", way, str(count)]
    command += [] if keep is None else ["--keep", str(keep)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def looking() -> dict[str, Any]:
    """Watching against eager attention: time, memory, and how far apart the answers are."""
    with tempfile.TemporaryDirectory() as folder:
        told = {}
        for way in ("watch", "eager"):
            told[way] = in_a_process(way, LOOKED_AT, Path(folder) / f"{way}.npz")
        with np.load(Path(folder) / "watch.npz") as ours, np.load(Path(folder) / "eager.npz") as theirs:
            errors = {name: lm.relative_error(ours[name], theirs[name]) for name in theirs}
    if max(errors.values()) > 10 * lm.AGREE:  # thirty layers on, both are float32
        raise SystemExit(f"{WATCH}: the answers disagree: {errors}")
    ratios = {name: told["eager"][name] / told["watch"][name] for name in MARKS}
    return {**told, "relative_errors": errors, "ratios": ratios, "marks": MARKS}


# --- all of it -------------------------------------------------------------------------------------------


def measure(rounds: int, wanted: str) -> dict[str, Any]:
    """Load, compare, time."""
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": torch.get_num_threads(),
        "instruction_set": regardant.capabilities().instruction_set,
    }
    chosen = [label for label in (*CASES, WATCH, FAR_CASE) if wanted in label]
    if not chosen:
        raise SystemExit(f"no case has {wanted!r} in its name: {', '.join((*CASES, WATCH, FAR_CASE))}")
    model = lm.twin(load("smollm2")) if any(label in CASES for label in chosen) else None
    for label in chosen:
        print(f"measuring {label}", file=sys.stderr, flush=True)
        if label in CASES:
            result[label] = compare(model, label, rounds)
        else:
            result[label] = looking() if label == WATCH else in_a_process("watch", FAR)
    return result


def verdict(value: float, mark: float) -> str:
    """A ratio beside its mark."""
    return f"{value:.2f} × ({'met' if value >= mark else 'UNMET'}: {mark:g})"


def show(result: dict[str, Any]) -> None:
    """Print it."""
    print(
        f"SmolLM2-135M, {result['torch_threads']} threads, {result['instruction_set']}; torch {result['torch']}, "
        f"transformers {result['transformers']}"
    )
    for label in CASES:
        if label in result:
            case = result[label]
            print(
                f"{label:13} at {CONTEXT}   regardant {case['regardant_tokens_per_s']:8.1f} tokens/s   "
                f"sdpa {case['sdpa_tokens_per_s']:8.1f} tokens/s   {verdict(case['ratio'], case['mark'])}   "
                f"relative error {case['relative_error']:.1e}"
            )
    if WATCH in result:
        case = result[WATCH]
        for way in ("watch", "eager"):
            told = case[way]
            print(
                f"{way:5} at {LOOKED_AT}   {told['seconds']:6.1f} s   {told['bytes'] / 1e9:5.2f} GB beyond the model"
            )
        print(
            f"eager / watch   time {verdict(case['ratios']['seconds'], MARKS['seconds'])}   "
            f"memory {verdict(case['ratios']['bytes'], MARKS['bytes'])}   "
            f"relative error {max(case['relative_errors'].values()):.1e}"
        )
    if FAR_CASE in result:
        told = result[FAR_CASE]
        print(f"watch at {FAR}   {told['seconds']:6.1f} s   {told['bytes'] / 1e9:5.2f} GB beyond the model")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=report.positive, default=3, help="turns of each (default 3)")
    parser.add_argument(
        "--cases", default="", metavar="SUBSTRING", help="only cases whose name has this in it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--alone", nargs=2, metavar=("WAY", "TOKENS"), help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(alone(chosen.alone[0], int(chosen.alone[1]), chosen.keep)))
        return
    result = measure(chosen.rounds, chosen.cases)
    print(json.dumps(result, indent=2)) if chosen.json else show(result)


if __name__ == "__main__":
    main()
