"""Which library computes a model, and in which type: weights as NumPy arrays, or as torch tensors.

The model's file is the same for both; it follows its weights. Refused: an engine or a type that there is none of, and
torch where it is not installed.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from regardant.lm.errors import UserError
from regardant.lm.weights import float_type

if TYPE_CHECKING:
    from regardant.lm.weights import Weights

# What each engine computes in, and what a checkpoint is widened to on the way.
ENGINES: dict[str, dict[str, str]] = {
    "numpy": {"float32": "float32", "float64": "float64"},
    "torch": {"float32": "float32", "float64": "float64", "bfloat16": "float32"},
}


def check(engine: object, dtype: object) -> None:
    """Refuse an engine or a type before anything is loaded for it.

    Raises:
        UserError: with the names that there are.
    """
    if not isinstance(engine, str) or engine not in ENGINES:
        raise UserError(f"load: engine must be {_names(ENGINES)}; got {engine!r}")
    if engine == "numpy":
        if isinstance(dtype, str) and dtype in ENGINES["torch"] and dtype not in ENGINES["numpy"]:
            raise UserError(
                f'load: dtype must be {_names(ENGINES["numpy"])}, or engine "torch"; got {dtype!r}'
            )
        float_type(dtype)
        return
    if not isinstance(dtype, str) or dtype not in ENGINES[engine]:
        raise UserError(f"load: dtype must be {_names(ENGINES[engine])}; got {dtype!r}")
    _torch()


def stored_type(engine: str, dtype: object) -> Any:
    """The NumPy type that a checkpoint is read in."""
    return float_type(ENGINES[engine][dtype] if isinstance(dtype, str) else dtype)


def convert(weights: Weights, engine: str, dtype: object) -> dict[str, Any]:
    """Give the weights to an engine, under the same names.

    NumPy's stay as they are. torch's share their memory, unless they are rounded to bfloat16: then each array is let
    go as its tensor is made, `weights` being emptied.
    """
    if engine == "numpy":
        return dict(weights)
    torch = _torch()
    made = {}
    for name in list(weights):
        with warnings.catch_warnings():
            # Weights that lie in a mapped file cannot be written to, and nothing here does.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            tensor = torch.from_numpy(weights.pop(name))
        made[name] = tensor.to(getattr(torch, str(dtype)))
    return made


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError('load: engine "torch" needs torch: pip install "regardant[torch]"') from None
    return torch


def _names(known: dict[str, Any]) -> str:
    *most, last = (f'"{name}"' for name in known)
    return f"{', '.join(most)} or {last}" if most else last
