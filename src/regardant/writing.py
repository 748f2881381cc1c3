"""Writing a file that a person named: whole or not at all.

Refused, in one sentence: a path that cannot be written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from regardant.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_device(target: Path) -> bool:
    return target.exists() and not target.is_file()


def reason(error: OSError) -> str:
    """Why the system refused, in its own words."""
    return (error.strerror or str(error)).lower()
