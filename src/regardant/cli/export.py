"""`regardant export`: write a model as one GGUF file, or as a Hugging Face folder in another type.

JSON: an object with `model`, `path`, `bytes` and `dtype`.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from regardant.cli import terminal
from regardant.errors import UserError


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, name or .gguf file.")],
    *,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one GGUF file.")] = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a Hugging Face folder.")] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, float16 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a model for other programs.

    regardant export run --gguf run.gguf
    """
    from regardant.lm import export as writing

    if (gguf is None) == (folder is None):
        raise UserError("give --gguf a file or --folder a folder, one of them")
    writing.check_type(dtype)
    loaded = terminal.open_model(model)
    if gguf is not None:
        path = writing.write_gguf(loaded, gguf, dtype)
        size = path.stat().st_size
    else:
        assert folder is not None  # noqa: S101 - one of them is given
        path = writing.write_folder(loaded, folder, dtype)
        size = sum(file.stat().st_size for file in path.iterdir())
    if as_json:
        terminal.say_json({"model": loaded.name, "path": str(path), "bytes": size, "dtype": dtype})
    else:
        terminal.say(f"{terminal.inert(str(path))}: {size / 1e6:,.1f} MB, {dtype}\n")
