"""`regardant generate`: continue a prompt, or answer one, and show the text as it comes.

JSON (once the text is complete): an object with `model`, `prompt` (as given), `prompt_ids` (as the model read it),
`text`, `ids` (chosen, an end token included), `finish_reason` ("stop", "eos", "length" or "context") and
`settings` (all of them; where none was given, the seed that was used).
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regardant.cli import files, terminal
from regardant.lm.errors import UserError

if TYPE_CHECKING:
    from regardant.lm.generate import Generation

_REASONS = {
    "stop": "a stop string",
    "eos": "the model's end of text",
    "length": "--max-tokens",
    "context": "the end of the model's context",
}

# Line breaks and tabs, and the joiners that emoji and some scripts are spelt with.
_KEPT = "\n\t\u200c\u200d"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to continue; - reads standard input.", show_default=False
        ),
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="PATH", help="Read the prompt from a file.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", metavar="NAME", help="A model's name, folder, .gguf file or repository."
        ),
    ] = "smollm2",
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt to the model as a user's message.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Write at most N tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token; above, one is drawn.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Draw among the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Draw among the likeliest tokens that together reach P."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Draw among tokens at least P times as likely as the likeliest."),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="R", help="Above 1, tokens that were read or written become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed draws the same text.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given several times."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="What computes: numpy, or torch (extra torch).")
    ] = "numpy",
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="float32 or float64; with torch also bfloat16.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, once the text is complete.")] = False,
) -> None:
    """Continue a text with a language model.

    Only the new text is printed, as it is written; the prompt is not repeated. With the settings as they are, the
    likeliest token is taken each time, so the same prompt gives the same text. For livelier text:
    --temperature 0.8 --top-p 0.95
    """
    given = files.read_text(prompt, file)
    if given is None:
        raise UserError("nothing to continue: give a prompt, --file, or - for standard input")
    if seed is None and temperature > 0:
        # Chosen here, so that it can be told and the text be written again.
        seed = random.SystemRandom().getrandbits(32)
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or [],
        "chat": chat,
    }
    _check(settings, engine, dtype)
    loaded = terminal.open_model(model, engine=engine, dtype=dtype)
    with terminal.bar("Reading the prompt") as report:
        text = loaded.generate(given, **settings, progress=report)
        # The first token comes when the whole prompt has been read; the bar must be gone by then.
        first = next(text, "")
    if as_json:
        terminal.say_json(
            {
                "model": loaded.name,
                "prompt": given,
                "prompt_ids": list(text.prompt_ids),
                "text": first + text.text(),
                "ids": text.ids,
                "finish_reason": text.finish_reason,
                "settings": settings | {"engine": engine, "dtype": dtype},
            }
        )
        return
    began = time.monotonic()
    _stream(first, text)
    speed = (len(text.ids) - 1) / max(time.monotonic() - began, 1e-9)
    terminal.note(
        f"{terminal.count(len(text.ids), 'token')}{f', {speed:.1f} a second' if speed else ''}; "
        f"ended by {_REASONS[text.finish_reason or 'stop']}{f'; seed {seed}' if temperature > 0 else ''}"
    )


def _check(settings: dict[str, Any], engine: str, dtype: str) -> None:
    """Refuse settings without a meaning before a model is loaded for them."""
    from regardant.lm import engine as engines
    from regardant.lm import generate as lm

    engines.check(engine, dtype)

    lm.check_max_tokens(settings["max_tokens"])
    lm.random_generator(settings["seed"])
    lm.stop_strings(settings["stop"])
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    lm.Sampling(**{name: settings[name] for name in names})
    for name in ("top_k", "top_p", "min_p"):
        if settings["temperature"] == 0 and settings[name] is not None:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option} narrows what is drawn, and nothing is at temperature 0: give --temperature too"
            )


def _stream(first: str, text: Generation) -> None:
    """Write pieces as they come, and end the line whatever happens. A terminal gets no control sequences."""
    to_person = sys.stdout.isatty()
    try:
        for piece in itertools.chain([first], text):
            terminal.say(terminal.inert(piece, keep=_KEPT) if to_person else piece)
    finally:
        terminal.say("\n")
