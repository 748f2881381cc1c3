"""The weights that are learned: made from a seed, and laid out so that one product serves several projections.

`Parameters` owns the leaves, tensors with gradients; `weights()` gives the mapping that `lm.model.forward` reads,
names of a Hugging Face checkpoint to tensors. Projections of one input (queries, keys and values; gate and up) are
successive rows of one leaf, as the loader lays them out for inference. What goes to disk goes by checkpoint names.

Embeddings begin normal with deviation 1/√width, matrices with half of that, those that write into the residual stream
divided by √(2 · layers) (Radford et al. 2019), gains at 1. All embeddings begin with one more direction in common,
`_COMMON` times as long as they are. It adds the same to all logits, so it predicts nothing, but it gives queries and
keys, which have no biases, something that is the same everywhere, which rotary positions can turn into a place to
look at: heads that look at exactly the token before, on which induction is built. With a weaker one, or with matrices
that begin twice as large, other heads form first, and these late or never (LOG.md, "Training").
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from typing import TYPE_CHECKING

import torch

from regardant.errors import UserError
from regardant.lm.model import expected_weights
from regardant.lm.weights import together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regardant.lm.config import Config
    from regardant.train.settings import Settings

_EMBEDDING = "model.embed_tokens.weight"
_COMMON = 3.0
_MATRICES = 0.5
# AdamW keeps four numbers of four bytes for each that is learned: itself, its gradient, two averages.
BYTES_A_PARAMETER = 16
_INTO_STREAM = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor lies: rows `first` to `last` of a leaf."""

    leaf: str
    first: int
    last: int


class Parameters:
    """The leaves of a model, on one device, float32.

    Attributes:
        leaves: tensors with gradients, by the names of their first part.
        places: for each name of a checkpoint, where it lies.
    """

    def __init__(self, config: Config, device: str = "cpu") -> None:
        shapes = expected_weights(config)
        self.places: dict[str, Place] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        for name in shapes:
            if name in self.places:
                continue
            names = together(name, shapes)
            first = 0
            for part in names:
                self.places[part] = Place(name, first, first + shapes[part][0])
                first += shapes[part][0]
            self.leaves[name] = torch.empty((first, *shapes[name][1:]), device=device).requires_grad_()

    def begin(self, seed: int, layers: int) -> None:
        """Give every weight its first value. They come from the CPU's generator, the same for every device."""
        generator = torch.Generator().manual_seed(seed)
        deviation = self.leaves[_EMBEDDING].shape[1] ** -0.5
        with torch.no_grad():
            for name, tensor in self.named():
                if tensor.ndim == 1:
                    tensor.fill_(1.0)
                    continue
                made = torch.randn(tensor.shape, generator=generator)
                if name == _EMBEDDING:
                    scale = 1.0
                    made += _COMMON * torch.randn(tensor.shape[1], generator=generator)
                else:
                    scale = _MATRICES / math.sqrt(2 * layers) if name.endswith(_INTO_STREAM) else _MATRICES
                tensor.copy_(made * (deviation * scale))

    def weights(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """The mapping that the model reads: views of the leaves, or of their copies in another type."""
        whole = {name: leaf if leaf.dtype == dtype else leaf.to(dtype) for name, leaf in self.leaves.items()}
        return {name: _part(whole[place.leaf], place) for name, place in self.places.items()}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of a checkpoint by its name, without gradients, in one order."""
        for name, place in self.places.items():
            yield name, _part(self.leaves[place.leaf].detach(), place)

    def split(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors that lie like the leaves (an optimiser's averages), by the names of a checkpoint."""
        return {name: _part(whole[place.leaf], place) for name, place in self.places.items()}

    @property
    def count(self) -> int:
        """How many numbers are learned."""
        return sum(leaf.numel() for leaf in self.leaves.values())


def require_memory(config: Config, chosen: Settings) -> None:
    """Refuse what the machine cannot hold, before the system kills for it: weights, and the streams of one batch.

    What a training takes is more; `estimate` measures that. On another device, or where the system does not tell how
    much memory there is, nothing is refused here.

    Raises:
        UserError: they take more than all of this machine's memory.
    """
    if chosen.device != "cpu" or sys.platform == "win32":
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    weights = BYTES_A_PARAMETER * sum(math.prod(shape) for shape in expected_weights(config).values())
    streams = 4 * chosen.batch * chosen.context * chosen.width * chosen.layers
    if weights + streams > there:
        raise UserError(
            f"--width {chosen.width}, --layers {chosen.layers} and --batch {chosen.batch} must fit this machine's "
            f"{there / 1e9:,.0f} GB of memory; weights and averages take {weights / 1e9:,.0f} GB, and one batch's "
            f"streams {streams / 1e9:,.0f} GB"
        )


def _part(whole: torch.Tensor, place: Place) -> torch.Tensor:
    return whole if place.last - place.first == whole.shape[0] else whole[place.first : place.last]
