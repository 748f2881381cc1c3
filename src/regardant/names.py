"""How the text of a token is shown: what would not be seen, or would turn its neighbours about, by its name."""

from __future__ import annotations

import unicodedata

_SHOWN_AS = {"\n": "⏎", "\r": "␍", "\t": "⇥"}

# Unicode categories that do not show or that change how their neighbours do.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def readable(text: str) -> str:
    """Name a token readably: spaces stay, "⏎" is a line's end, "⇥" a tab, "⟨U+202E⟩" what does not show.

    A byte that is no character, which a lone surrogate stands for as in Python's "surrogateescape", is "⟨E2⟩".
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    point = ord(character)
    if 0xDC80 <= point <= 0xDCFF:
        return f"⟨{point - 0xDC00:02X}⟩"
    if character in _SHOWN_AS:
        return _SHOWN_AS[character]
    return f"⟨U+{point:04X}⟩" if unicodedata.category(character) in _INVISIBLE else character
