"""What goes to the terminal: text, tables, JSON, and bars for work that takes time.

Results go to the standard output, everything about them to the standard error. Token text comes from models and
files and may hold anything; nothing of it reaches a terminal as a control sequence.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import unicodedata
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

    from regardant.lm.language_model import LanguageModel

# Work that is done sooner shows no bar.
PATIENCE_S = 0.5

_UNBOUNDED = 10_000

# Unicode categories of characters that act instead of showing: controls, format characters (among them those
# that turn the direction of writing), surrogates, and the separators of lines and paragraphs.
_ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def say(text: str) -> None:
    """Write to the standard output, now."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say_json(data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write one JSON document to the standard output: one line, in ASCII, so that any encoding carries it."""
    say(json.dumps(data, allow_nan=False) + "\n")


def show(renderable: RenderableType) -> None:
    """Write something of rich's to the standard output: in colour on a terminal, plain elsewhere.

    It is drawn first and written after, so that a reader who went away is our business and not rich's.
    """
    console = console_for(sys.stdout)
    with console.capture() as drawn:
        console.print(renderable)
    say("".join(line.rstrip(" ") for line in drawn.get().splitlines(keepends=True)))


def note(text: str) -> None:
    """Say something by the way, on the standard error, if a person is there to read it."""
    if sys.stderr.isatty():
        console_for(sys.stderr).print(text, style="dim", markup=False, highlight=False)


def console_for(stream: TextIO) -> Console:
    """A rich console that guesses nothing from the text. What is no terminal has no width to fold lines at."""
    from rich.console import Console

    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def inert(text: str, keep: str = "") -> str:
    """`text` with every acting character, but those in `keep`, spelt out as ⟨U+001B⟩."""
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or unicodedata.category(c) not in _ACTING else f"⟨U+{ord(c):04X}⟩" for c in text
    )


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def bar(title: str) -> Iterator[Callable[..., None]]:
    """A progress bar on the standard error, seen only on a terminal and only if the work takes time.

    Yields:
        What to call with (done, total) or (done, total, what is being done); a total of 0 is an unknown one.
    """
    if not sys.stderr.isatty():
        yield _ignore
        return
    shown = _Bar(title)
    try:
        yield shown.report
    finally:
        shown.close()


def _ignore(*_: object) -> None:
    """Take a report of progress that nobody sees."""


class _Bar:
    def __init__(self, title: str) -> None:
        self._title, self._began = title, time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def report(self, done: int, total: int, what: str | None = None) -> None:
        if self._progress is None:
            is_over = 0 < total <= done
            if is_over or time.monotonic() - self._began < PATIENCE_S:
                return
            self._progress = _progress()
            self._task = self._progress.add_task(self._title)
            self._progress.start()
        assert self._task is not None  # noqa: S101 - made together with the bar
        self._progress.update(
            self._task,
            completed=done,
            total=total or None,
            description=inert(self._title if what is None else what),
        )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress() -> Progress:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console_for(sys.stderr),
        transient=True,
    )


def open_model(name: str, *, engine: str = "numpy", dtype: str = "float32") -> LanguageModel:
    """Load a model by name, folder or file, with a bar while that takes time."""
    from regardant.lm.load import load

    with bar(f"Loading {name}") as report:
        return load(name, engine=engine, dtype=dtype, progress=report)


def is_unicode(stream: TextIO) -> bool:
    """Whether the stream can carry the blocks that bars are drawn with."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")
