"""Where a command's text comes from and where its page goes: files that a person named, read and written whole.

Refused, in one sentence: what cannot be read or written, and text that is not UTF-8 (the byte is named).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from regardant.lm.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Longer than any model's context by far; a device that never ends is not read for ever.
LARGEST = 64 << 20


def read_text(argument: str | None, file: Path | None) -> str | None:
    """The text that a command was given: the argument itself, standard input for "-", or a file's contents.

    One line break at the end of a file or of standard input is left out, as a shell's $(...) does.

    Returns:
        The text, or None if neither was given.

    Raises:
        UserError: both were given, the file cannot be read, or the bytes are not UTF-8.
    """
    if argument is not None and file is not None:
        raise UserError("give the text itself or --file, not both")
    if argument == "-" or file == Path("-"):
        return _without_last_break(_decoded(_standard_input(), "standard input"))
    if argument is not None:
        return _decoded(os.fsencode(argument), "the text")
    if file is None:
        return None
    try:
        with file.open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise UserError(f"cannot read {file}: {_reason(error)}") from error
    return _without_last_break(_decoded(data, str(file)))


def check_writable(path: Path) -> None:
    """Find out before any work whether `path` can be written, leaving everything as it is.

    Raises:
        UserError: it cannot.
    """
    with _beside(path):
        pass


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; once that is done it takes the place of `path`, in one step.

    If the body fails or is interrupted, `path` is what it was, and nothing is left over.

    Raises:
        UserError: `path` cannot be written.
    """
    with _beside(path) as temporary:
        yield temporary
        target = path.resolve()
        if _is_device(target):
            target.write_bytes(temporary.read_bytes())
        else:
            temporary.replace(target)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """An empty temporary file in the folder of `path`, gone afterwards if it is still there."""
    target = path.resolve()
    if target.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    # Renaming over a device would destroy it, so what goes there is put together elsewhere.
    folder = Path(tempfile.gettempdir()) if _is_device(target) else target.parent
    temporary = folder / f".regardant-{secrets.token_hex(8)}.tmp"
    try:
        if target.exists() and not os.access(target, os.W_OK):
            raise UserError(f"cannot write {path}: permission denied")
        temporary.touch(exist_ok=False)
        yield temporary
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise UserError("cannot read standard input: it is closed")
    try:
        return sys.stdin.buffer.read(LARGEST + 1)
    except OSError as error:
        raise UserError(f"cannot read standard input: {_reason(error)}") from error


def _is_device(target: Path) -> bool:
    return target.exists() and not target.is_file()


def _decoded(data: bytes, source: str) -> str:
    if len(data) > LARGEST:
        raise UserError(f"{source} holds more than {LARGEST >> 20} MiB, more than any model reads")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}"
        ) from error


def _without_last_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
