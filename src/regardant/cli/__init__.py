"""The command line, `regardant`: one module per subcommand, and here what they share on the way out.

Exit codes: 0 done; 1 the output could not be written; 2 a mistake that the person can put right, said in one
sentence; 130 interrupted; 141 the reader of a pipe went away, which is no error. Anything else that is raised is
a bug and shows its traceback. Nothing heavy is imported here: each command brings in what it needs.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED_OUTPUT, MISTAKE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

# What only a write can run into.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` if None) and return the exit code."""
    _prepare_streams()
    try:
        from regardant.cli.app import run
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "regardant":
            raise
        complain(
            f"the command line needs {error.name}, which the extra brings: python -m pip install 'regardant[lm]'"
        )
        return MISTAKE
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _abandon_output()
        complain(f"the output could not be written: {os.strerror(error.errno).lower()}")
        return FAILED_OUTPUT
    return code


def complain(sentence: str) -> None:
    """Say one sentence, on one line of the standard error, whatever names of files it quotes."""
    from regardant.cli.terminal import inert

    sys.stderr.write(f"regardant: {inert(sentence)}\n")
    sys.stderr.flush()


def _prepare_streams() -> None:
    """Make writing safe: a closed stream swallows, and a character that an encoding lacks is spelt out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - stays open
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _abandon_output() -> None:
    """Send what is still buffered nowhere, or Python would try once more, and complain, when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
