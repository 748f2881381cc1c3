"""`regardant look`: run a text through a model once, and show where one of its tokens drew from.

The answer goes to the terminal as a table, and as a page on which every other token can be asked.

JSON: an object with `model`, `text` (as the model read it), `tokens` (a list of `index`, `id`, `text`, `start`,
`end`: the characters it stands for), `token` (the chosen one, in the same form), `sources` (heaviest first: `token`,
`weight`, `written`), `sink` and `rest` (`weight` and `written` of the first token, and of all that is not listed),
and `page` (the path written, or null). Weights are shares: those of all tokens add up to 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path  # the annotations are read by typer
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regardant.cli import files, terminal
from regardant.lm.errors import UserError
from regardant.writing import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from regardant.runs import Run, Sources, Token

# In SmolLM2, "another" draws more on the sheep than on any other word, the first token set aside.
EXAMPLE_TEXT = "The dragon ate one sheep and asked for another"
EXAMPLE_WORD = "another"

# Columns of the terminal that the widest bar takes, and all the rest of the table.
_BAR_WIDTH = 20
_OTHER_WIDTH = 58


def look(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT",
            help="What to look at; - reads standard input. Without it, an example.",
            show_default=False,
        ),
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="PATH", help="Read the text from a file.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", metavar="NAME", help="A model's name, folder, .gguf file or repository."
        ),
    ] = "smollm2",
    token: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The token to ask, counted from 0, or from the end: -1, as if this is not given.",
        ),
    ] = None,
    word: Annotated[
        str | None, typer.Option(metavar="W", help="The word to ask: where it stands last, its last token.")
    ] = None,
    top: Annotated[int, typer.Option(metavar="K", help="List the K tokens that gave most.")] = 10,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Look at these layers alone, as in 0-5,7.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the text to the model as a user's message.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="Where the page goes: look.html, but nowhere with --json, if this does not say.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which earlier words a word drew from.

    Runs the text through a language model once and follows its attention: for the chosen token, the share that
    each token it could see had in what it took in, over all heads. The page that is written answers the same for
    every other token, by layer and head.
    """
    _check_options(token, word, top)
    given = files.read_text(text, file)
    is_example = given is None
    if given is None:
        given = EXAMPLE_TEXT
        word = EXAMPLE_WORD if token is None and word is None else word
    if not given:
        raise UserError("the text is empty: give it at least one character")
    if word is not None and not chat:
        # This and the token's position are settled again in the run; here a mistake costs no waiting.
        _places(given, word)
    page = out or (None if as_json else Path("look.html"))
    if page is not None:
        check_writable(page)

    run = _run(given, model, layers, token, chat=chat)
    index, remark = choose(run, token, word)
    sources = run.sources(token=index, top=top)
    if page is not None:  # first: the reader of a pipe may go away before the table's end
        _write(page, run, index)
    if as_json:
        terminal.say_json(as_data(run, sources, page))
        return
    if is_example:
        terminal.say(f"An example, as no text was given: {EXAMPLE_TEXT}\n\n")
    which = "all layers" if layers is None else f"layer {layers}" if layers.isdigit() else f"layers {layers}"
    describe(run, sources, remark, which)
    if page is not None:
        terminal.say(f"Every other token, layer and head: {terminal.inert(str(page))}\n")


def _check_options(token: int | None, word: str | None, top: int) -> None:
    if token is not None and word is not None:
        raise UserError("give --token or --word, not both")
    if word is not None and not word.strip():
        raise UserError("--word must not be empty")
    if top < 1:
        raise UserError(f"--top must be at least 1; got {top}")


def _run(text: str, model: str, layers: str | None, token: int | None, *, chat: bool) -> Run:
    loaded = terminal.open_model(model)
    chosen = None if layers is None else parse_layers(layers, loaded.config.layers)
    if token is not None and not chat:
        _position(token, len(loaded.encode(text)))
    with terminal.bar("Looking") as report:
        return loaded.look(text, layers=chosen, chat=chat, progress=report)


def _write(page: Path, run: Run, focus: int) -> None:
    with terminal.bar(f"Writing {page}") as report:
        run.save(page, focus=focus, progress=report)


def parse_layers(text: str, count: int) -> list[int]:
    """Layers written as in "0-5,7", in rising order, each once.

    Raises:
        UserError: another form, or a layer that the model does not have.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, re.ASCII)
        if match is None:
            raise UserError(f"--layers must be numbers and ranges, as in 0-5,7; got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise UserError(
                f"--layers must lie between 0 and {count - 1}, first to last; got {part.strip()!r}"
            )
        found.update(range(first, last + 1))
    return sorted(found)


def choose(run: Run, token: int | None, word: str | None) -> tuple[int, str]:
    """Which token is asked, and what there is to say about the choice.

    Raises:
        UserError: there is no such token, or no such word.
    """
    if word is not None:
        return find_word(run.text, run.tokens, word)
    return _position(-1 if token is None else token, len(run.tokens)), ""


def _position(token: int, length: int) -> int:
    if not -length <= token < length:
        raise UserError(
            f"--token must lie between {-length} and {length - 1}, as the text has "
            f"{terminal.count(length, 'token')}; got {token}"
        )
    return token % length


def find_word(text: str, tokens: Sequence[Token], word: str) -> tuple[int, str]:
    """The last token of the last place where a word stands in a text, by itself if it ever does.

    Raises:
        UserError: the text does not hold the word.
    """
    word = word.strip()
    places = _places(text, word)
    alone = [at for at in places if not _inside_a_word(text, at, at + len(word))]
    start = (alone or places)[-1]
    within = [t for t in tokens if t.start < start + len(word) and t.end > start]
    remarks = []
    if not alone:
        remarks.append(f"{word!r} stands only inside longer words")
    if len(within) > 1:
        pieces = " + ".join(repr(t.text.strip()) for t in within)
        remarks.append(f"{word!r} is {len(within)} tokens, {pieces}; the last one is asked")
    return within[-1].index, "; ".join(remarks)


def _places(text: str, word: str) -> list[int]:
    places = [match.start() for match in re.finditer(re.escape(word.strip()), text)]
    if not places:
        raise UserError(f"the text does not hold the word {word.strip()!r}")
    return places


def _inside_a_word(text: str, start: int, end: int) -> bool:
    """Whether a letter or digit goes on across either end of text[start:end]."""
    return any(0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum() for at in (start, end))


def describe(run: Run, sources: Sources, remark: str, layers: str) -> None:
    """Print what the chosen token drew from."""
    token = sources.token
    terminal.say(
        f"{terminal.inert(run.model_name)}: where {_quoted(run.text, token)} "
        f"(token {token.index} of 0 to {len(run.tokens) - 1}) drew from\n"
    )
    if remark:
        terminal.say(f"({terminal.inert(remark)})\n")
    terminal.show(_table(run, sources))
    terminal.say(
        f"The first token, {_quoted(run.text, run.tokens[0])}, is where heads rest that look for nothing: "
        f"{_percent(sources.sink)} / {_percent(sources.sink_written)}.\n"
    )
    others = [item for item in sources.items if item.token.index not in {0, token.index}]
    if others:
        most = max(others, key=lambda item: item.written)
        terminal.say(
            f"Of the earlier tokens listed, most was written from {_quoted(run.text, most.token)}: "
            f"{_percent(most.weight)} / {_percent(most.written)}.\n"
        )
    terminal.say(
        f"\nattention: the mean weight over the heads of {terminal.inert(layers)}.\n"
        "written: each weight times the length of what it moved into the residual stream.\n\n"
    )


def _table(run: Run, sources: Sources) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    room = min(_BAR_WIDTH, terminal.console_for(sys.stdout).width - _OTHER_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # In a narrow terminal the bars go first; then token texts, and nothing else, are folded.
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column("token", overflow="fold", max_width=24)
    table.add_column("at", justify="right", style="dim", no_wrap=True)
    table.add_column("attention", justify="right", no_wrap=True)
    if room > 0:
        table.add_column("", style="cyan", no_wrap=True)
    table.add_column("written", justify="right", no_wrap=True)
    most = max((item.weight for item in sources.items), default=0.0)
    for rank, item in enumerate(sources.items, start=1):
        bar = [_bar(item.weight / most if most else 0.0, room)] if room > 0 else []
        table.add_row(
            str(rank),
            Text(name_of(run.text, item.token)),
            str(item.token.index),
            _percent(item.weight),
            *bar,
            _percent(item.written),
        )
    table.add_section()
    none = [""] if room > 0 else []
    table.add_row(
        "", "all that is not listed", "", _percent(sources.rest), *none, _percent(sources.rest_written)
    )
    return table


def name_of(text: str, token: Token) -> str:
    """How a token is shown: without the space before it, and with "…" where it goes on with a word."""
    goes_on = 0 < token.start < token.end and text[token.start].isalnum() and text[token.start - 1].isalnum()
    shown = terminal.inert(token.text)
    return ("…" if goes_on else "") + (shown.strip() or "␠" * len(shown))


def _quoted(text: str, token: Token) -> str:
    return f"“{name_of(text, token)}”"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _bar(share: float, width: int) -> str:
    if not terminal.is_unicode(sys.stdout):
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def as_data(run: Run, sources: Sources, page: Path | None) -> dict[str, Any]:
    """The JSON document that the file's opening describes."""
    return {
        "model": run.model_name,
        "text": run.text,
        "tokens": [_token_data(token) for token in run.tokens],
        "token": _token_data(sources.token),
        "sources": [
            {"token": _token_data(item.token), "weight": item.weight, "written": item.written}
            for item in sources.items
        ],
        "sink": {"weight": sources.sink, "written": sources.sink_written},
        "rest": {"weight": sources.rest, "written": sources.rest_written},
        "page": None if page is None else str(page),
    }


def _token_data(token: Token) -> dict[str, Any]:
    return {
        "index": token.index,
        "id": token.id,
        "text": token.text,
        "start": token.start,
        "end": token.end,
    }
