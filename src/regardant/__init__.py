"""Causal attention that you can see: exact, fast, from one NumPy head to a whole language model.

Importing this package imports nothing yet: a name brings in its module when it is first used, NumPy at the most.
`load` brings in what language models need (extra `lm`) when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regardant.cache import KVCache
    from regardant.lm.language_model import LanguageModel
    from regardant.looks import Look
    from regardant.native import capabilities
    from regardant.ops import Gradients, attention, attention_backward, look
    from regardant.reference import causal_attention, multi_head_attention
    from regardant.threads import set_num_threads

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "KVCache",
    "Look",
    "attention",
    "attention_backward",
    "capabilities",
    "causal_attention",
    "load",
    "look",
    "multi_head_attention",
    "set_num_threads",
]

_HOMES = {
    "Gradients": "ops",
    "KVCache": "cache",
    "Look": "looks",
    "attention": "ops",
    "attention_backward": "ops",
    "capabilities": "native",
    "causal_attention": "reference",
    "look": "ops",
    "multi_head_attention": "reference",
    "set_num_threads": "threads",
}


def load(name: str, *, engine: str = "numpy", dtype: str = "float32") -> LanguageModel:
    """Load a language model: a name (`smollm2`), a Hugging Face folder or repository, or a .gguf file.

    See `regardant.lm.load.load`, which this calls; it needs the extra `lm`.
    """
    from regardant.lm import load as loading

    return loading.load(name, engine=engine, dtype=dtype)


def __getattr__(name: str) -> Any:
    """Bring in a public name from its module (PEP 562), so that `regardant --help` need not wait for NumPy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
