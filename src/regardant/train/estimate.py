"""What a training will take, before it starts: parameters, memory, tokens per second, hours.

The speed and the memory are measured, by a few real steps on random tokens; nothing is written. Refused: what
this machine has not the memory for.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from regardant.lm.config import Config
from regardant.train import data, loop, settings
from regardant.train.optimiser import adamw, clip
from regardant.train.parameters import BYTES_A_PARAMETER, Parameters, require_memory

if TYPE_CHECKING:
    from regardant.train.settings import Settings


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Numbers for a person: `memory` is the whole process's peak in bytes, 0 where the system does not tell."""

    parameters: int
    parameter_bytes: int
    memory: int
    tokens_per_s: float
    tokens: int
    hours: float


def estimate(chosen: Settings, vocab_size: int, seconds: float = 5.0) -> Estimate:
    """Run micro-batches of random tokens for about so many seconds, two at least, and reckon from them.

    The first does not count: it makes the optimiser's averages, and compiles, where that is asked for.
    """
    config = Config.from_hugging_face(settings.hugging_face_config(chosen, vocab_size, 0, 0))
    require_memory(config, chosen)
    parameters = Parameters(config, chosen.device)
    parameters.begin(chosen.seed, chosen.layers)
    optimiser = adamw(parameters, chosen)
    random = np.random.Generator(np.random.PCG64(chosen.seed))
    times: list[float] = []
    began = math.inf
    while len(times) < 2 or time.monotonic() - began < seconds:
        ids_BT = random.integers(0, vocab_size, (chosen.batch, chosen.context + 1))
        batch = data.Batch(ids_BT[:, :-1], np.zeros_like(ids_BT[:, :-1]), ids_BT[:, 1:])
        since = time.monotonic()
        loss = loop.batch_loss(parameters.weights(loop.dtype_of(chosen)), config, chosen, batch)
        (loss / batch.counted).backward()
        clip(parameters, chosen.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        times.append(time.monotonic() - since)
        began = min(began, time.monotonic())
    speed = chosen.batch * chosen.context / min(times[1:])
    tokens = chosen.steps * chosen.tokens_a_step
    return Estimate(
        parameters=parameters.count,
        parameter_bytes=parameters.count * BYTES_A_PARAMETER,
        memory=_peak(),
        tokens_per_s=speed,
        tokens=tokens,
        hours=tokens / speed / 3600,
    )


def _peak() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
