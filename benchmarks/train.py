"""Training steps of this package's loop beside the same model in plain torch, on the CPU, from the same weights.

    python -m benchmarks.train [--cases short long packed] [--rounds N] [--json]

The other side is written here, as nanoGPT is: modules, `scaled_dot_product_attention`, one projection for queries,
keys and values, all logits, `cross_entropy`, AdamW. Both take the same batches, by turns, and their losses must agree
step by step or nothing is timed. Peak memory is measured in a process of its own for each side. `packed` has rows of
several documents that do not see each other, as the loop trains on: the other side is told so by a mask.
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
from torch import nn
from torch.nn import functional

from benchmarks.memory import forget_peak, memory
from regardant.lm.config import Config
from regardant.train import data, loop, optimiser, settings
from regardant.train.parameters import Parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from regardant.train.settings import Settings

VOCABULARY = 4096
# Rows of a batch at each context, 4,096 tokens a step in all.
CASES = {"short": (256, 16), "long": (2048, 2), "packed": (2048, 2)}
WANTED = {"short": 1.15, "long": 1.5}
PACKED = (64, 1024)  # tokens of a document among several of a row: from, to, drawn evenly
# Losses of two orders of summing in float32 drift apart as the steps multiply; these are of about 8 nats.
AGREE = 2e-4
CHECKED = 3


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary positions."""

    def __init__(self, chosen: Settings) -> None:
        super().__init__()
        self.heads, self.kv_heads = chosen.heads, chosen.kv_heads
        self.head_width = chosen.width // chosen.heads
        outputs = (chosen.heads + 2 * chosen.kv_heads) * self.head_width
        self.qkv = nn.Linear(chosen.width, outputs, bias=False)
        self.out = nn.Linear(chosen.width, chosen.width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Mix the values, (B, T, C) to (B, T, C); what a mask says, (B, 1, T, T), or all that came before."""
        B, T, _ = x.shape
        sizes = [n * self.head_width for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(B, T, -1, self.head_width).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=2)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of halves."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, chosen: Settings) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(chosen.width, eps=1e-5) for _ in range(2))
        self.attention = Attention(chosen)
        self.gate_up = nn.Linear(chosen.width, 2 * chosen.ffn, bias=False)
        self.down = nn.Linear(chosen.ffn, chosen.width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One layer."""
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Plain(nn.Module):
    """The whole model, the embedding tied to the head."""

    def __init__(self, chosen: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, chosen.width)
        self.blocks = nn.ModuleList(Block(chosen) for _ in range(chosen.layers))
        self.norm = nn.RMSNorm(chosen.width, eps=1e-5)
        self.head = nn.Linear(chosen.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        width = chosen.width // chosen.heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(chosen.context)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The mean loss of a batch."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, mask)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(
            logits.view(-1, VOCABULARY), labels.reshape(-1), ignore_index=data.IGNORED
        )


def plain_step(chosen: Settings, weights: dict[str, torch.Tensor]) -> Callable[[data.Batch], float]:
    """A step of the model in plain torch, from these weights."""
    model = Plain(chosen)
    pairs = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for layer in range(chosen.layers):
        theirs, ours = f"blocks.{layer}", f"model.layers.{layer}"
        pairs |= {
            f"{theirs}.norm1.weight": f"{ours}.input_layernorm.weight",
            f"{theirs}.norm2.weight": f"{ours}.post_attention_layernorm.weight",
            f"{theirs}.attention.out.weight": f"{ours}.self_attn.o_proj.weight",
            f"{theirs}.down.weight": f"{ours}.mlp.down_proj.weight",
        }
    with torch.no_grad():
        named = dict(model.named_parameters())
        for theirs, ours in pairs.items():
            named[theirs].copy_(weights[ours])
        for layer, block in enumerate(model.blocks):
            name = f"model.layers.{layer}"
            block.attention.qkv.weight.copy_(
                torch.cat([weights[f"{name}.self_attn.{p}_proj.weight"] for p in "qkv"])
            )
            block.gate_up.weight.copy_(
                torch.cat([weights[f"{name}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
            )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": chosen.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=chosen.lr, betas=(0.9, chosen.beta2), eps=1e-8)

    def step(batch: data.Batch) -> float:
        segments = torch.from_numpy(batch.segments_BT)
        mask = None
        if bool((segments != segments[:, :1]).any()):
            mask = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
        loss = model(torch.from_numpy(batch.ids_BT), torch.from_numpy(batch.labels_BT), mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def our_step(chosen: Settings) -> tuple[Callable[[data.Batch], float], dict[str, torch.Tensor]]:
    """A step as the loop makes it, and a copy of the weights that it begins with."""
    config = Config.from_hugging_face(settings.hugging_face_config(chosen, VOCABULARY, 0, 0))
    parameters = Parameters(config)
    parameters.begin(chosen.seed, chosen.layers)
    adamw = optimiser.adamw(parameters, chosen)

    def step(batch: data.Batch) -> float:
        loss = loop.batch_loss(parameters.weights(), config, chosen, batch) / batch.counted
        loss.backward()
        optimiser.clip(parameters, chosen.clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, {name: tensor.clone() for name, tensor in parameters.named()}


def batches(chosen: Settings, count: int, documents: tuple[int, int] | None = None) -> list[data.Batch]:
    """Batches of random tokens: one document a row, or as many as fit, of so many tokens to so many."""
    random = np.random.Generator(np.random.PCG64(7))
    made = []
    for _ in range(count):
        ids = random.integers(0, VOCABULARY, (chosen.batch, chosen.context + 1))
        segments = np.zeros_like(ids)
        if documents:
            for row in segments:
                begins = np.cumsum(random.integers(*documents, len(row) // documents[0] + 1))
                row[begins[begins < len(row)]] = 1
            segments = segments.cumsum(1)
        labels = np.where(segments[:, 1:] == segments[:, :-1], ids[:, 1:], data.IGNORED)
        made.append(data.Batch(ids[:, :-1].copy(), segments[:, :-1].copy(), labels))
    return made


def sides(chosen: Settings) -> dict[str, Callable[[data.Batch], float]]:
    """Both steps, from one set of weights."""
    ours, weights = our_step(chosen)
    return {"regardant": ours, "torch": plain_step(chosen, weights)}


def choose(case: str) -> tuple[Settings, tuple[int, int] | None]:
    """The settings of a case, and how long its documents are if there are several in a row."""
    context, batch = CASES[case]
    chosen = settings.settings("micro", {"context": context, "batch": batch, "lr": 1e-3})
    return chosen, PACKED if case == "packed" else None


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Compare the losses, then time by turns, then ask two processes for their peaks."""
    chosen, documents = choose(case)
    steps = sides(chosen)
    losses = {
        name: [step(batch) for batch in batches(chosen, CHECKED, documents)] for name, step in steps.items()
    }
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if difference > AGREE:
        raise SystemExit(f"{case}: the losses disagree by {difference}: {losses}")
    (batch,) = batches(chosen, 1, documents)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            time.sleep(0.2)  # the other side's threads go on spinning for a moment
            begin = time.perf_counter()
            step(batch)
            times[name].append(time.perf_counter() - begin)
    speeds = {name: chosen.tokens_a_step / statistics.median(taken) for name, taken in times.items()}
    peaks = {name: _peak(case, name) for name in steps}
    return {
        "case": case,
        "context": chosen.context,
        "batch": chosen.batch,
        "loss_difference": difference,
        **{f"{name}_tokens_per_s": speed for name, speed in speeds.items()},
        "ratio": speeds["regardant"] / speeds["torch"],
        "wanted": WANTED.get(case),
        **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
    }


def _peak(case: str, name: str) -> int:
    command = [sys.executable, "-m", "benchmarks.train", "--peak", case, name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(case: str, name: str) -> int:
    """Bytes that two steps of one side take beyond what the process held before them."""
    chosen, documents = choose(case)
    step = sides(chosen)[name]
    (batch,) = batches(chosen, 1, documents)
    forget_peak()
    before = memory("VmRSS")
    for _ in range(2):
        step(batch)
    return memory("VmHWM") - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        print(peak(*asked.peak))
        return
    results = [measure(case, asked.rounds) for case in asked.cases]
    if asked.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        print(json.dumps(facts | {"cases": results}, indent=2))
        return
    print(f"micro, float32, {torch.get_num_threads()} threads; torch {torch.__version__}")
    for r in results:
        wanted = "" if r["wanted"] is None else f" (wanted {r['wanted']:.2f})"
        print(
            f"{r['case']:6} {r['context']:5}: regardant {r['regardant_tokens_per_s']:8,.0f} tokens/s, "
            f"torch {r['torch_tokens_per_s']:8,.0f}, ratio {r['ratio']:.2f}{wanted}; losses "
            f"within {r['loss_difference']:.1e}; peak {r['regardant_peak_bytes'] / 1e6:,.0f} MB, "
            f"torch {r['torch_peak_bytes'] / 1e6:,.0f} MB"
        )


if __name__ == "__main__":
    main()
