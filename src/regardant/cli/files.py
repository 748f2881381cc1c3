"""Where a command's text comes from: the argument, standard input, or a file that a person named, read whole.

Refused, in one sentence: what cannot be read, and text that is not UTF-8 (the byte is named).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from regardant.lm.errors import UserError
from regardant.writing import reason

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
        raise UserError(f"cannot read {file}: {reason(error)}") from error
    return _without_last_break(_decoded(data, str(file)))


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise UserError("cannot read standard input: it is closed")
    try:
        return sys.stdin.buffer.read(LARGEST + 1)
    except OSError as error:
        raise UserError(f"cannot read standard input: {reason(error)}") from error


def _decoded(data: bytes, source: str) -> str:
    if len(data) > LARGEST:
        raise UserError(f"{source} holds more than {LARGEST >> 20} MiB, more than any model reads")
    try:
        return data.decode().removeprefix("\ufeff")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}"
        ) from error


def _without_last_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
