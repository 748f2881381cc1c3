"""Texts as they are found: files, folders and patterns in; documents out, one at a time, whatever the files' size.

A document is a file, or, of a file that is longer than `DOCUMENT` characters, a stretch of it that ends where a
paragraph does. Nothing is changed but a byte order mark left out: the documents of a file, joined, are the file.

Refused, in one sentence: what is not there or cannot be read, a folder without texts, an empty file, a file that is
not UTF-8 or that holds a NUL character, as binary files do.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regardant.errors import UserError
from regardant.writing import reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Characters after which a document ends at the next opportunity; and bytes read at a time.
DOCUMENT = 1 << 14
_BLOCK = 1 << 18

# In a folder, these are texts; a file that is named is one whatever it is called.
_SUFFIXES = {".txt", ".text", ".md"}


def find(named: Sequence[str]) -> list[Path]:
    """The files that a person named: each once, in the order given, those of a folder or a pattern by name.

    Raises:
        UserError: nothing was named, or something that is not there.
    """
    if not named:
        raise UserError("no text to learn from: give --data a file, a folder or a pattern")
    found: dict[Path, Path] = {}
    for name in named:
        for path in _named(name):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _named(name: str) -> list[Path]:
    if not name:
        raise UserError("--data must name a file, a folder or a pattern; got an empty name")
    try:
        return _found(name)
    except (OSError, RuntimeError) as error:  # a name that is too long, or a home that is nobody's
        why = reason(error) if isinstance(error, OSError) else "there is no such user"
        raise UserError(f"cannot read {name}: {why}") from None


def _found(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not inside:
            kinds = ", ".join(sorted(_SUFFIXES))
            raise UserError(f"{name}: holds no texts ({kinds}); give other files by name or by a pattern")
        return inside
    if path.exists():
        if not path.is_file():
            raise UserError(f"{name}: is neither a file nor a folder")
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 - any pattern
    files = [match for match in matches if match.is_file()]
    if not files:
        raise UserError(f"{name}: there is no such file or folder, nor a file that fits it as a pattern")
    return files


def documents(path: Path, digest: Any = None, report: Callable[[int], None] | None = None) -> Iterator[str]:
    """The documents of one file. Memory: some `DOCUMENT` characters.

    Args:
        path: the file. `digest`: of hashlib's, brought up to date with the bytes. `report`: told of bytes read.

    Raises:
        UserError: the file cannot be read, is empty, or is not text.
    """
    decoder, at, pending = codecs.getincrementaldecoder("utf-8")(), 0, ""
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                if digest is not None:
                    digest.update(block)
                pending += _decoded(path, decoder, block, at)
                if at == 0:
                    pending = pending.removeprefix("\ufeff")
                at += len(block)
                if report is not None:
                    report(len(block))
                while len(pending) >= 2 * DOCUMENT:
                    cut = _end(pending)
                    yield pending[:cut]
                    pending = pending[cut:]
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None
    pending += _decoded(path, decoder, b"", at)
    if at <= len(codecs.BOM_UTF8) and not pending:
        raise UserError(f"{path}: is empty")
    if pending:
        yield pending


def _decoded(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, at: int) -> str:
    held = len(decoder.getstate()[0])  # the beginning of a character that the block before ended with
    nul = block.find(0)
    try:
        text = decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        if nul < 0 or error.start - held < nul:
            where = at - held + error.start
            raise UserError(
                f"{path}: is not UTF-8 text: byte 0x{error.object[error.start]:02X} at offset {where}"
            ) from None
    if nul >= 0:
        raise UserError(f"{path}: is not text: it holds a NUL character, at offset {at + nul}")
    return text


def _end(text: str) -> int:
    """Where the document that `text` begins with ends: after a paragraph, a line, a word, or as it comes."""
    for mark in ("\n\n", "\n", " "):
        cut = text.find(mark, DOCUMENT, 2 * DOCUMENT - len(mark))
        if cut >= 0:
            return cut + len(mark)
    return DOCUMENT


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None
