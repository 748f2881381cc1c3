"""AdamW with decoupled weight decay (Loshchilov & Hutter 2019) on matrices only, and the learning rate of each step.

The update is torch's own, in its fused form. The schedule is a function of the step and of nothing else, so that a
run that goes on needs no more than its number. Refused: nothing; `settings` has checked the values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from regardant.train.parameters import Parameters
    from regardant.train.settings import Settings

LOWEST = 0.1  # of the highest learning rate: where cosine ends
DECAY = 0.2  # of the steps: the trapezoid's last side, down to nothing (Zhai et al. 2022; Hu et al. 2024)


def adamw(parameters: Parameters, chosen: Settings) -> torch.optim.AdamW:
    """The optimiser of these parameters; matrices, the embedding among them, decay, gains do not."""
    leaves = list(parameters.leaves.values())
    groups = [
        {"params": [leaf for leaf in leaves if leaf.ndim > 1], "weight_decay": chosen.weight_decay},
        {"params": [leaf for leaf in leaves if leaf.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=(0.9, chosen.beta2), eps=1e-8, fused=True)


def learning_rate(step: int, chosen: Settings) -> float:
    """The rate of update number `step`, counted from 0: up in a line, then along a cosine or a trapezoid."""
    if step < chosen.warmup:
        return chosen.lr * (step + 1) / chosen.warmup
    left = chosen.steps - step
    if chosen.schedule == "trapezoid":
        return chosen.lr * min(1.0, left / max(1.0, DECAY * chosen.steps))
    done = (step - chosen.warmup) / max(1, chosen.steps - chosen.warmup)
    return chosen.lr * (LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def clip(parameters: Parameters, longest: float) -> float:
    """Shorten the gradient to `longest`, if that is not 0, and say how long it was (Pascanu et al. 2013)."""
    leaves = list(parameters.leaves.values())
    bound = longest if longest > 0 else math.inf
    return float(torch.nn.utils.clip_grad_norm_(leaves, bound, foreach=True))
