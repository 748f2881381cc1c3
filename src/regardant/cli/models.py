"""`regardant models`: which models have a name here, and which of them are already on this machine.

JSON: a list of objects with `name`, `what`, `bytes` (on this machine, or to be fetched) and `cached` (the path, or
null where it has not been fetched).
"""

from __future__ import annotations

from typing import Annotated

import typer

from regardant.cli import terminal


def models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that have a name here.

    Any other model is given as a folder in Hugging Face's layout, as a .gguf file, or as a repository's name
    (owner/name), which is looked up in the local Hugging Face cache and fetched if need be.
    """
    from regardant.lm.load import models as known

    entries = known()
    if as_json:
        terminal.say_json(
            [
                {
                    "name": entry.name,
                    "what": entry.what,
                    "bytes": entry.nbytes,
                    "cached": None if entry.path is None else str(entry.path),
                }
                for entry in entries
            ]
        )
        return

    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("on this machine", overflow="fold")
    for entry in entries:
        table.add_row(
            entry.name,
            entry.what,
            f"{entry.nbytes / 1e6:,.0f} MB",
            "not yet: fetched when first used" if entry.path is None else str(entry.path),
        )
    terminal.show(table)
