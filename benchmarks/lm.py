"""SmolLM2 in NumPy beside transformers in torch: prefill, decode, and the first logits of a cold process.

    python -m benchmarks.lm [--rounds N] [--json]

Both run in this process, on the same weights (float32, the CPU), by turns. Before anything is timed their logits
are compared. Times are medians. It refuses to print a time for answers that disagree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from regardant.lm import model as calculation
from regardant.lm.load import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.lm.language_model import LanguageModel

PREFILL = 1024
CONTEXT = 64
AGREE = 1e-4
COLD = """
from regardant.lm.load import load
model = load("smollm2")
print(int(model.logits("The capital of France is")[0, -1].argmax()))
"""


def twin(model: LanguageModel) -> transformers.PreTrainedModel:
    """Build transformers' model of the same sizes and the same weights, with its scaled-dot-product attention."""
    config = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_width,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    ).eval()
    weights = {name: torch.asarray(array, copy=True) for name, array in model.weights.items()}
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return theirs


def our_steps(
    model: LanguageModel, ids: np.ndarray
) -> tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]:
    """Two functions: prefill of all of `ids`, and one more token behind the first `CONTEXT` of them."""

    def step(part: np.ndarray, cache: Any) -> np.ndarray:
        hidden = calculation.forward(part, model.weights, model.config, cache=cache, last=1)
        return calculation.logits(hidden, model.weights, model.config)[0, -1]

    def prefill() -> np.ndarray:
        return step(ids, model.new_cache(1, ids.shape[1]))

    cache = model.new_cache(1, CONTEXT + 1)
    step(ids[:, :CONTEXT], cache)
    cache.advance(CONTEXT)
    return prefill, lambda: step(
        ids[:, CONTEXT : CONTEXT + 1], cache
    )  # never advanced: each call is the same


def their_steps(
    theirs: transformers.PreTrainedModel, ids: np.ndarray
) -> tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]:
    """The same two functions in transformers."""
    tokens = torch.asarray(ids)

    def step(part: torch.Tensor, cache: transformers.DynamicCache) -> np.ndarray:
        with torch.inference_mode():
            return theirs(part, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].numpy()

    def prefill() -> np.ndarray:
        return step(tokens, transformers.DynamicCache(config=theirs.config))

    cache = transformers.DynamicCache(config=theirs.config)
    step(tokens[:, :CONTEXT], cache)

    def decode() -> np.ndarray:
        scores = step(tokens[:, CONTEXT : CONTEXT + 1], cache)
        cache.crop(-1)
        return scores

    return prefill, decode


def by_turns(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, each: int
) -> tuple[float, float]:
    """Median seconds of both, A B A B ..., `each` calls a turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, seconds in zip((ours, theirs), times, strict=True):
            time.sleep(0.3)  # the other library's threads go on spinning for a moment
            run()
            for _ in range(each):
                begin = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference of two rows of logits, relative to the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def cold_start(rounds: int) -> float:
    """Median seconds from starting a Python process to its first logits of a sentence."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", COLD], check=True, capture_output=True, text=True)
        times.append(time.perf_counter() - begin)
        if done.stdout.strip() != "7042":
            raise SystemExit(f"a cold process answered {done.stdout.strip()!r}, not 7042 (Paris)")
    return statistics.median(times)


def measure(rounds: int) -> dict[str, Any]:
    """Load, compare, time."""
    model = load("smollm2")
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, PREFILL))
    ours, theirs = our_steps(model, ids), their_steps(twin(model), ids)
    errors = [relative_error(mine(), other()) for mine, other in zip(ours, theirs, strict=True)]
    if max(errors) > AGREE:
        raise SystemExit(f"the logits disagree: relative errors {errors}, allowed {AGREE}")
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "torch_threads": torch.get_num_threads(),
    }
    cases = (("prefill", PREFILL, 2), ("decode", 1, 10))
    for (name, tokens, each), error, mine, other in zip(cases, errors, ours, theirs, strict=True):
        our_seconds, their_seconds = by_turns(mine, other, rounds, each)
        result[name] = {
            "relative_error": error,
            "regardant_tokens_per_s": tokens / our_seconds,
            "transformers_tokens_per_s": tokens / their_seconds,
            "ratio": their_seconds / our_seconds,
        }
    result["cold_first_logits_s"] = cold_start(3)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each library (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    result = measure(chosen.rounds)
    if chosen.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"SmolLM2-135M, float32, {result['torch_threads']} threads; torch {result['torch']}, "
        f"transformers {result['transformers']}, numpy {result['numpy']}"
    )
    for name, what in (
        ("prefill", f"prefill of {PREFILL} tokens"),
        ("decode", f"decode at context {CONTEXT}"),
    ):
        case = result[name]
        print(
            f"{what:24} regardant {case['regardant_tokens_per_s']:8.1f} tokens/s   "
            f"transformers {case['transformers_tokens_per_s']:8.1f} tokens/s   "
            f"ratio {case['ratio']:.2f}   relative error {case['relative_error']:.1e}"
        )
    print(f"{'first logits, cold':24} regardant {result['cold_first_logits_s']:8.2f} s")


if __name__ == "__main__":
    main()
