"""`regardant train`: learn a language model from plain text, and go on with one that was interrupted.

JSON, when it ends: an object with `run`, `step`, `steps`, `parameters`, `seconds`, `last_loss`, `last_valid_loss`,
`last_valid_nats_per_byte` (the last validation on the way), `last_tokens` (positions learned from), `valid_loss` and
`valid_nats_per_byte` (over all that was set aside, once the last step is made), `induction` and `previous` (the four
best heads: `layer`, `head`, `score`), `page`, and `notes`. With --estimate: `parameters`, `parameter_bytes`,
`memory`, `tokens_per_s`, `tokens`, `hours`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regardant.cli import terminal
from regardant.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regardant.train.loop import Progress

_DEVICES = ("cpu", "cuda")


def train(
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT…", help="More texts, as a shell's pattern gives them.", show_default=False
        ),
    ] = None,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="TEXT", help="A UTF-8 file, a folder of .txt files, or a pattern."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The folder that the run is kept in.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint, where there is one.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it would take, and stop before anything starts.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Stop after so many minutes; --resume goes on.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json to use instead of making one.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="NAME", help="nano (the default), micro, small, medium or base.")
    ] = None,
    width: Annotated[int | None, typer.Option(metavar="N", help="Width of the residual stream.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N")] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="Key/value heads.")] = None,
    ffn: Annotated[int | None, typer.Option(metavar="N", help="Width inside the feed-forward.")] = None,
    context: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a row.")] = None,
    window: Annotated[int | None, typer.Option(metavar="N", help="Keys a query reaches back over.")] = None,
    qk_norm: Annotated[bool | None, typer.Option("--qk-norm", help="Norm queries and keys.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of the tokenizer: 4096.")
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Rows at a time.")] = None,
    accumulate: Annotated[int | None, typer.Option(metavar="N", help="Batches of one step: 1.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps in all: 1000.")] = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="The highest learning rate.")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="cosine (the default) or trapezoid.")
    ] = None,
    warmup: Annotated[int | None, typer.Option(metavar="N", help="Steps of linear rise.")] = None,
    weight_decay: Annotated[float | None, typer.Option(metavar="X", help="On matrices only: 0.1.")] = None,
    clip: Annotated[
        float | None, typer.Option(metavar="X", help="The longest gradient: 1; 0 for any.")
    ] = None,
    beta2: Annotated[float | None, typer.Option(metavar="X", help="AdamW's second average: 0.95.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of weights and order: 0.")] = None,
    valid_share: Annotated[
        float | None, typer.Option(metavar="X", help="Documents set aside for validation: 0.05.")
    ] = None,
    repeats: Annotated[
        float | None, typer.Option(metavar="X", help="Rows of repeated random tokens instead of text: 0.")
    ] = None,
    repeat_steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps, at first, with half the rows of that kind: 0."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="float32 (the default) or bfloat16.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, or cuda where there is one.")
    ] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute", help="Compute activations again instead of keeping them.")
    ] = None,
    compile_: Annotated[
        bool | None, typer.Option("--compile", help="Have torch compile the model; takes a C++ compiler.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps between validations: 100.")
    ] = None,
    eval_rows: Annotated[int | None, typer.Option(metavar="N", help="Rows of each: 64.")] = None,
    heads_every: Annotated[int | None, typer.Option(metavar="N", help="Between looks at heads.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(metavar="N", help="Between checkpoints.")] = None,
    keep: Annotated[int | None, typer.Option(metavar="N", help="Checkpoints that stay: 2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON at the end.")] = False,
) -> None:
    """Train a language model from plain text.

    The run folder is a Hugging Face model at any time, for `regardant generate --model RUN` and `look` too.
    Interrupted, or killed, it goes on with the same command and --resume, with the losses that it would have had.

        regardant train --data shakespeare.txt --out run --minutes 2
    """
    named = {
        "width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "context": context,
        "window": window, "qk_norm": qk_norm, "vocab_size": vocab_size, "batch": batch, "accumulate": accumulate,
        "steps": steps, "lr": lr, "schedule": schedule, "warmup": warmup, "weight_decay": weight_decay, "clip": clip,
        "beta2": beta2, "seed": seed, "valid_share": valid_share, "repeats": repeats,
        "repeat_steps": repeat_steps, "dtype": dtype,
        "device": device, "recompute": recompute, "compile": compile_, "eval_every": eval_every,
        "eval_rows": eval_rows, "heads_every": heads_every, "checkpoint_every": checkpoint_every, "keep": keep,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None}
    texts = [*(data or []), *(more or [])]
    _require_torch()
    if device is not None:
        _check_device(device)
    if minutes is not None and not minutes > 0:
        raise UserError(f"--minutes must be greater than 0; got {minutes}")
    if estimate:
        _say_estimate(size, given, as_json=as_json)
        return
    if out is None:
        raise UserError("nowhere to keep the run: give --out a folder")
    _train(out, texts, tokenizer, size, given, resume=resume, minutes=minutes, as_json=as_json)


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "training takes torch, which is not installed: python -m pip install 'regardant[lm,torch]'"
        )


def _check_device(name: str) -> None:
    import torch

    kind = name.partition(":")[0]
    if kind not in _DEVICES:
        raise UserError(f"--device must be one of {', '.join(_DEVICES)}; got {name}")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):  # torch raises either, by what it was built with
        raise UserError(f"--device {name}: this machine, or this torch, has none") from None


def _say_estimate(size: str | None, given: dict[str, Any], *, as_json: bool) -> None:
    from regardant.train import estimate, settings

    chosen = settings.settings(size, given)
    made = estimate.estimate(chosen, chosen.vocab_size)
    if as_json:
        terminal.say_json(vars(made))
        return
    memory = f"{made.memory / 1e9:.2f} GB at the peak" if made.memory else "not told by this system"
    terminal.say(
        f"parameters  {made.parameters:,}\n"
        f"memory      {memory}; {made.parameter_bytes / 1e6:,.0f} MB of it weights, gradients and averages\n"
        f"speed       {made.tokens_per_s:,.0f} tokens/s, measured on random tokens\n"
        f"time        {made.hours:,.2f} hours for {terminal.count(chosen.steps, 'step')} of "
        f"{chosen.tokens_a_step:,} tokens, {made.tokens / 1e6:,.1f} million in all\n"
    )


def _train(
    out: Path,
    texts: list[str],
    tokenizer: Path | None,
    size: str | None,
    given: dict[str, Any],
    *,
    resume: bool,
    minutes: float | None,
    as_json: bool,
) -> None:
    from regardant.train import loop, run

    run.refuse_what_is_no_run(out)
    quiet = as_json or sys.stderr.isatty()
    with run.locked(out):
        with terminal.bar("Reading the texts") as report:
            training = run.open_run(out, texts, tokenizer, size, given, resume=resume, report=report)
        if not quiet:
            terminal.say(_beginning(training))
        with terminal.bar("Training") as report, _stopping(minutes) as stop:
            outcome = loop.train(training, stop, _shown(report, quiet=quiet))
    outcome |= {"page": str(out / "report.html"), "notes": training.notes}
    if as_json:
        terminal.say_json(outcome)
    else:
        terminal.say(plain_report(outcome))


def _beginning(training: Any) -> str:
    facts = training.facts
    return (
        f"{terminal.inert(str(training.folder))}: {training.parameters.count:,} parameters, "
        f"{facts['train']['tokens']:,} tokens to learn from, {facts['valid']['tokens']:,} set aside; "
        f"step {training.step:,} of {training.chosen.steps:,}\n"
    )


def _shown(report: Callable[..., None], *, quiet: bool) -> Callable[[Progress], None]:
    """A bar where a person looks on; else a line for each validation."""

    def show(now: Progress) -> None:
        valid = "" if now.valid is None else f", validation {now.valid[0]:.3f}"
        line = f"loss {now.loss:.3f}{valid}, {now.tokens_per_s:,.0f} tokens/s"
        report(now.step, now.steps, line)
        if now.measured and not quiet:
            terminal.say(f"step {now.step:,}: {line}, {now.seconds_left / 60:,.0f} min left\n")

    return show


@contextlib.contextmanager
def _stopping(minutes: float | None) -> Iterator[Callable[[], bool]]:
    """Stop between two steps when the time is up, or at the first interruption; the second interrupts at once."""
    asked, began = False, time.monotonic()

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, ask) for kind in kinds}
    try:
        yield lambda: asked or (minutes is not None and time.monotonic() - began >= 60 * minutes)
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


def plain_report(outcome: dict[str, Any]) -> str:
    """What a training has come to, in a few lines."""
    lines = [
        (
            f"{terminal.inert(outcome['run'])}: step {outcome['step']:,} of {outcome['steps']:,}, "
            f"{outcome['seconds'] / 60:,.1f} minutes"
        )
    ]
    if "last_loss" in outcome:
        lines.append(f"training loss {outcome['last_loss']:.4f} nats a token")
    if "valid_loss" in outcome:
        lines.append(
            f"validation {outcome['valid_loss']:.4f} nats a token, {outcome['valid_nats_per_byte']:.4f} nats a byte, "
            "over all that was set aside"
        )
    elif "last_valid_loss" in outcome:
        lines.append(
            f"validation {outcome['last_valid_loss']:.4f} nats a token, "
            f"{outcome['last_valid_nats_per_byte']:.4f} nats a byte, at the last check"
        )
    for name in ("induction", "previous"):
        if name in outcome:
            best = ", ".join(f"{head['layer']}.{head['head']} {head['score']:.2f}" for head in outcome[name])
            lines.append(f"best heads by {name} score (layer.head): {best}")
    lines += [terminal.inert(note) for note in outcome["notes"]]
    lines.append(f"plots: {terminal.inert(outcome['page'])}")
    if outcome["step"] < outcome["steps"]:
        lines.append("the same command with --resume goes on")
    return "\n".join(lines) + "\n"
