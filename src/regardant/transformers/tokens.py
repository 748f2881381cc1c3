"""Token ids as text: a readable piece for each token, and which characters of the whole it stands for.

Any tokenizer of transformers will do, as it is asked for nothing but to decode; without one, tokens are numbers and
the text is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regardant.names import readable
from regardant.runs import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens in front of a token that may decide how it is decoded: a space, say, or none at a text's beginning.
BEFORE = 6
# A character has at most four bytes, and so at most as many tokens: with more, its bytes are no character.
LONGEST = 4


def tokens_of(ids: Sequence[int], tokenizer: Any | None) -> tuple[str, list[Token]]:
    """The text of some ids, and its tokens. An id below 0 is that of a token that nobody saw.

    Tokens that share a character (its bytes are split among them) all have that character's range. Time and memory
    grow linearly.
    """
    if tokenizer is None or any(number < 0 for number in ids):
        return "", [
            Token(i, number, f"⟨{number}⟩" if number >= 0 else "⟨?⟩", 0, 0) for i, number in enumerate(ids)
        ]
    text, tokens, first = "", [], 0
    for i in range(len(ids)):
        piece = _text_between(ids, first, i + 1, tokenizer)
        if piece.endswith("\ufffd") and i + 1 - first < LONGEST and i + 1 < len(ids):
            continue  # the rest of the character may follow
        span = len(text), len(text) + len(piece)
        for j in range(first, i + 1):
            shown = piece if first == i else str(tokenizer.convert_ids_to_tokens(ids[j]))
            tokens.append(Token(j, ids[j], readable(shown) or f"⟨{ids[j]}⟩", *span))
        text, first = text + piece, i + 1
    return text, tokens


def _text_between(ids: Sequence[int], first: int, stop: int, tokenizer: Any) -> str:
    """What tokens `first` up to `stop` add to the text of those before them."""
    begin = max(0, first - BEFORE)
    before, whole = (
        tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for end in (first, stop)
    )
    return str(whole[len(before) :])
