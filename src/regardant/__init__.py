"""Causal attention that you can see: exact, fast, from one NumPy head to a whole language model.

Importing this package imports NumPy alone; `load` brings in what language models need (extra `lm`) when it
is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regardant.cache import KVCache
from regardant.looks import Look
from regardant.ops import attention, look
from regardant.reference import causal_attention, multi_head_attention
from regardant.threads import set_num_threads

if TYPE_CHECKING:
    from regardant.lm.language_model import LanguageModel

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "Look",
    "attention",
    "causal_attention",
    "load",
    "look",
    "multi_head_attention",
    "set_num_threads",
]


def load(name: str, *, dtype: str = "float32") -> LanguageModel:
    """Load a language model: a name (`smollm2`), a Hugging Face folder or repository, or a .gguf file.

    See `regardant.lm.load.load`, which this calls; it needs the extra `lm`.
    """
    from regardant.lm import load as loading

    return loading.load(name, dtype=dtype)
