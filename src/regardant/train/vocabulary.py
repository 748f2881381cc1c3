"""The tokenizer of a run: byte-level BPE made from the texts, or a given `tokenizer.json`.

Every byte is a token of its own to begin with, so that no text is ever out of vocabulary. The `tokenizers` library
does the work. Text is cut as GPT-2's is before merging, which GGUF knows by name. Refused: a file that is no
tokenizer that `regardant.lm.tokenizer` knows.

The one special token, `END`, stands before every document and so behind every one too: a model learns from it that a
text begins, and that one ends.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

END = "<|end|>"


def learn(texts: Iterable[str], size: int) -> Any:  # a tokenizers.Tokenizer
    """Make a tokenizer of at most `size` tokens. Memory grows with the number of different words alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return made


def settings(made: Any) -> dict[str, Any]:
    """What stands beside a tokenizer made here, in its `tokenizer_config.json`."""
    special = END if made.token_to_id(END) == 0 else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special,
        "eos_token": special,
        "clean_up_tokenization_spaces": False,
    }


def given(path: Path) -> tuple[Any, dict[str, Any]]:
    """A tokenizer from a file: what cuts and merges, and the settings that say how its texts begin and end.

    Raises:
        LoadError: it is missing, damaged, or of a kind that is not implemented.
    """
    from tokenizers import Tokenizer as Backend

    from regardant.lm.tokenizer import Tokenizer

    known = Tokenizer.from_file(path)
    made = Backend.from_file(str(path))
    beside = path.with_name("tokenizer_config.json")
    extra = (
        json.loads(beside.read_bytes())
        if beside.is_file()
        else {"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    eos = min(known.eos, default=None)
    for role, index in (("bos_token", known.bos), ("eos_token", eos)):
        if index is not None:
            extra[role] = made.id_to_token(index)
    return made, extra
