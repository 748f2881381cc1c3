"""The command line's front: which subcommands there are, and which exceptions are sentences for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import regardant
from regardant.cli import MISTAKE, check, complain, export, generate, look, models, terminal, train
from regardant.lm.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

# typer's own frames (rich_markup_mode) double the time that --help takes, and say no more.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("look")(look.look)
app.command("generate")(generate.generate)
app.command("train")(train.train)
app.command("export")(export.export)
app.command("models")(models.models)
app.command("check")(check.check)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Causal attention that you can see.

    Start with `regardant look`: it runs a small language model over a sentence and shows which earlier words one
    word drew its information from. Each command explains itself with --help.
    """
    if version:
        terminal.say(f"regardant {regardant.__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        terminal.say(context.get_help() + "\n")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code; a person's mistakes are said, not raised."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("regardant", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as mistake:
        complain(f"{mistake.format_message().rstrip('.')}; --help lists what there is")
        return MISTAKE
    except UserError as mistake:
        complain(str(mistake))
        return MISTAKE
    return 0
