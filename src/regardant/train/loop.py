"""The loop: a batch, its loss and gradients, an update; and at intervals a validation, the heads, a checkpoint.

A step is a function of the parameters, the optimiser's state and the number of the step, and of nothing else: so a
run that goes on from a checkpoint has, on the same machine, the very losses that it would have had.

Refused: a loss or a gradient that is not finite. It stops the run before it reaches the weights.

Shape legend: B rows, T positions, N = B·T, C width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regardant.errors import UserError
from regardant.lm import model
from regardant.train import checkpoint, heads, report
from regardant.train.data import IGNORED, Batch, Tokens
from regardant.train.loss import cross_entropy
from regardant.train.optimiser import clip, learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regardant.lm.config import Config
    from regardant.train.run import Training
    from regardant.train.settings import Settings


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a step came to, for whoever shows it; `valid` is the last validation, nats a label and nats a byte."""

    step: int
    steps: int
    loss: float
    valid: tuple[float, float] | None
    tokens_per_s: float
    seconds_left: float
    measured: bool


def batch_loss(
    weights: Mapping[str, torch.Tensor], config: Config, chosen: Settings, batch: Batch
) -> torch.Tensor:
    """The sum of the losses of a batch's labels, in nats. Memory: see `cross_entropy` and `lm.model.forward`."""
    ids_BT, segments_BT, labels_BT = (
        torch.from_numpy(array).to(chosen.device)
        for array in (batch.ids_BT, batch.segments_BT, batch.labels_BT)
    )
    # Where every row is of one document there is nothing to hide, and nothing to be asked tile by tile.
    packed = bool((batch.segments_BT != batch.segments_BT[:, :1]).any())
    segments = segments_BT if packed else None
    hidden_BTC = model.forward(ids_BT, weights, config, segments_BT=segments, call=_layer_by_layer(chosen))
    out_VC = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    return cross_entropy(hidden_BTC.reshape(-1, config.width), out_VC, labels_BT.reshape(-1), IGNORED)


def _layer_by_layer(chosen: Settings) -> Callable[..., torch.Tensor]:
    """How `forward` is to run its layers: as they are, compiled, or to be computed again on the way back."""
    learning = torch.is_grad_enabled()
    run = _run_compiled if chosen.compile and learning else _run
    if chosen.recompute and learning:
        return functools.partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False)
    return run


def _run(layer: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    return layer(*arguments)


def _run_compiled(
    layer: Callable[..., torch.Tensor],
    x_NC: torch.Tensor,
    number: int,
    weights: Mapping[str, torch.Tensor],
    *rest: Any,
) -> torch.Tensor:
    """Run every layer as if it were the first, so that one compilation serves all: they differ in weights alone."""
    own, first = f"model.layers.{number}.", "model.layers.0."
    mine = {first + name[len(own) :]: tensor for name, tensor in weights.items() if name.startswith(own)}
    return _compiled(layer)(x_NC, 0, mine, *rest)


@functools.cache
def _compiled(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(layer, dynamic=False, fullgraph=True)
    return compiled


def dtype_of(chosen: Settings) -> torch.dtype:
    """What is computed in; weights and averages stay float32."""
    return torch.bfloat16 if chosen.dtype == "bfloat16" else torch.float32


def gradients(training: Training, step: int) -> tuple[float, float]:
    """Leave the gradient of one step in the leaves, clipped, and give its loss (nats a label) and its length.

    Raises:
        UserError: the loss or the gradient is not finite.
    """
    chosen, parameters = training.chosen, training.parameters
    first = step * chosen.batch * chosen.accumulate
    batches = [training.feed.batch(first + i * chosen.batch, chosen.batch) for i in range(chosen.accumulate)]
    count = max(1, sum(batch.counted for batch in batches))
    dtype = dtype_of(chosen)
    total = 0.0
    for batch in batches:
        loss = batch_loss(parameters.weights(dtype), training.config, chosen, batch) / count
        loss.backward()
        total += float(loss.detach())
    _require_finite(total, "loss", step + 1)
    length = clip(parameters, chosen.clip)
    _require_finite(length, "gradient's length", step + 1)
    return total, length


def _require_finite(number: float, what: str, step: int) -> None:
    if not math.isfinite(number):
        raise DivergedError(f"the {what} is {number} at step {step}")


class DivergedError(UserError):
    """A training fell apart; the caller completes the sentence."""


def update(training: Training) -> tuple[float, float]:
    """Make one step, and give its loss and the length of its gradient."""
    chosen, optimiser = training.chosen, training.optimiser
    loss, length = gradients(training, training.step)
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(training.step, chosen)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    training.step += 1
    return loss, length


def evaluate(training: Training, tokens: Tokens, rows: int | None = None) -> float:
    """The mean loss over a file's tokens, in nats a label.

    With `rows`, over so many rows at most, evenly spread, each for itself. Without, over the whole file, rows half
    overlapping, so that all but the first row's labels have at least half a context before them.
    """
    chosen, T = training.chosen, training.chosen.context
    stride = T if rows is not None else max(1, T // 2)
    firsts = np.arange(0, max(1, len(tokens) - 1), stride)
    if rows is not None and len(firsts) > rows:
        firsts = firsts[np.linspace(0, len(firsts) - 1, rows).astype(np.int64)]
    total, count = 0.0, 0
    with torch.no_grad():
        weights = training.parameters.weights(dtype_of(chosen))
        for at in range(0, len(firsts), chosen.batch):
            batch = tokens.rows(firsts[at : at + chosen.batch], T)
            if rows is None:
                later = np.flatnonzero(firsts[at : at + chosen.batch] > 0)
                batch.labels_BT[later, : T - stride] = IGNORED
            total += float(batch_loss(weights, training.config, chosen, batch))
            count += batch.counted
    return total / max(1, count)


def per_byte(loss: float, tokens: Tokens) -> float:
    """Nats a byte of text from nats a label, by how many bytes a token of this file stands for."""
    return loss * len(tokens) / max(1, tokens.bytes)


def train(training: Training, stop: Callable[[], bool], show: Callable[[Progress], None]) -> dict[str, Any]:
    """Train to the last step, or until `stop` says so between two steps, and give the numbers of the final report.

    Raises:
        UserError: the loss is not finite, or something cannot be written; the last good checkpoint stays.
    """
    chosen = training.chosen
    probe = _probe(training)
    before, began, valid = training.seconds, time.monotonic(), None
    if not checkpoint.folders(training.folder):
        valid = _measure(training, probe, every=None)
        training.save()
    while training.step < chosen.steps and not stop():
        since = time.monotonic()
        try:
            loss, length = update(training)
        except DivergedError as error:
            report.write(training.folder)
            raise UserError(
                f"{error}; {_last_good(training)}; a lower --lr or a longer --warmup may help"
            ) from None
        now = time.monotonic()
        training.seconds = before + now - began
        speed = chosen.tokens_a_step / max(now - since, 1e-9)
        training.log(
            {
                "step": training.step,
                "loss": loss,
                "gradient": length,
                "lr": learning_rate(training.step - 1, chosen),
                "tokens": training.step * chosen.tokens_a_step,
                "seconds": training.seconds,
                "tokens_per_s": speed,
            }
        )
        last = training.step == chosen.steps
        measured = _measure(training, probe, every=None if last else chosen.eval_every)
        valid = measured or valid
        if last or training.step % chosen.checkpoint_every == 0:
            _save(training)
            report.write(training.folder)
        left = (chosen.steps - training.step) * chosen.tokens_a_step / speed
        show(Progress(training.step, chosen.steps, loss, valid, speed, left, measured is not None))
    _save(training)
    return _outcome(training)


def _save(training: Training) -> None:
    """Write a checkpoint, unless the last update has spoilt the weights: the one before is the good one."""
    for name, tensor in training.parameters.named():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{name} is not finite after step {training.step}; {_last_good(training)}")
    training.save()


def _last_good(training: Training) -> str:
    return f"the last good checkpoint is {checkpoint.folders(training.folder)[-1]}"


def _probe(training: Training) -> heads.Probe:
    """Rows from documents' beginnings, set aside if there are any, and repeated random tokens."""
    tokens = training.valid if len(training.valid) > 1 else training.train
    T = training.chosen.context
    ends = np.append(tokens.starts_D[1:], len(tokens))
    lengths = ends - tokens.starts_D
    width = int(min(T, lengths.max()))
    firsts = tokens.starts_D[lengths >= width][: heads.ROWS]
    return heads.probe(
        tokens.rows(firsts, width).ids_BT,
        training.feed.vocabulary,
        training.begin_token,
        T,
        training.chosen.seed,
    )


def _measure(training: Training, probe: heads.Probe, every: int | None) -> tuple[float, float] | None:
    """Validate and measure heads where a step asks for it; `every` None is always."""
    chosen, result = training.chosen, None
    if (every is None or training.step % every == 0) and len(training.valid) > 1:
        loss = evaluate(training, training.valid, chosen.eval_rows)
        result = loss, per_byte(loss, training.valid)
        training.log({"step": training.step, "valid_loss": loss, "valid_nats_per_byte": result[1]})
    if every is None or training.step % chosen.heads_every == 0:
        weights = {name: tensor.detach() for name, tensor in training.parameters.weights().items()}
        training.log({"step": training.step, "heads": heads.measure(weights, training.config, probe)})
    return result


def _outcome(training: Training) -> dict[str, Any]:
    """What the plain report says: the loss over all that was set aside, and the heads as they are now."""
    outcome: dict[str, Any] = {
        "step": training.step,
        "steps": training.chosen.steps,
        "seconds": training.seconds,
        "parameters": training.parameters.count,
        "run": str(training.folder),
    }
    if training.step == training.chosen.steps and len(training.valid) > 1:
        loss = evaluate(training, training.valid)
        outcome |= {"valid_loss": loss, "valid_nats_per_byte": per_byte(loss, training.valid)}
    report.write(training.folder, outcome)
    return outcome | report.summary(training.folder)
