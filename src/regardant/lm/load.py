"""Load a language model by name, from a Hugging Face folder, or from a GGUF file.

What a name or path means is decided here; the formats are read in `checkpoint` (safetensors) and `gguf_file`, and
named models come from `fetch`. Nothing of what a file says is changed, and nothing that it asks for is left out
silently: a model that cannot be run as it was made is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regardant.lm import engine as engines
from regardant.lm.errors import LoadError
from regardant.lm.fetch import NAMED, ModelEntry, hub_model, models, named_model

if TYPE_CHECKING:
    from regardant.lm.language_model import LanguageModel
    from regardant.lm.weights import Progress

__all__ = ["ModelEntry", "load", "models"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    engine: str = "numpy",
    dtype: object = "float32",
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a language model.

    Args:
        name_or_path: a named model ("smollm2"), a folder as Hugging Face lays it out (config.json, safetensors,
            tokenizer.json), a .gguf file, or a name on the Hugging Face hub ("HuggingFaceTB/SmolLM2-135M").
        engine: "numpy", or "torch": what computes the model, and what its arrays are.
        dtype: "float32" or "float64", what weights of other types are widened to; with torch also "bfloat16", what
            they are rounded to.
        progress: called with (bytes done, bytes in all or 0, what is being done), at most every megabyte.

    Memory is four (float32) or eight (float64) bytes a weight, four also on the way to bfloat16's two; float32
    weights that the file stores as such are used where they lie, and take up memory as they are read.

    Raises:
        LoadError, FetchError, ConfigError: subclasses of ValueError, with one sentence on what to do.
    """
    engines.check(engine, dtype)
    name = os.fspath(name_or_path)
    try:
        model = _load(name, engines.stored_type(engine, dtype), progress)
    except OSError as error:
        raise LoadError(f"{error.filename or name}: cannot be read: {error.strerror or error}") from None
    if engine == "numpy":
        return model
    weights = dict(model.weights)
    model = dataclasses.replace(
        model, weights={}
    )  # so that nothing holds the arrays while they are converted
    return dataclasses.replace(model, weights=engines.convert(weights, engine, dtype))


def _load(name: str, dtype: Any, progress: Progress | None) -> LanguageModel:
    path = Path(name).expanduser()
    if name and os.path.isdir(path):  # noqa: PTH112 - pathlib's raises for a name that is too long
        return _from_folder(path, path.resolve().name, dtype, progress)
    if os.path.isfile(path):  # noqa: PTH113 - likewise
        return _from_file(path, dtype, progress)
    if name in NAMED:
        return _from_gguf(named_model(name, progress), name, dtype, progress)
    _refuse_missing_path(path, name)
    return _from_folder(hub_model(name, progress), name, dtype, progress)


def _refuse_missing_path(path: Path, name: str) -> None:
    if (
        _HUB_NAME.fullmatch(name)
        and not name.startswith(".")
        and path.suffix not in {".gguf", ".safetensors"}
    ):
        return
    if "/" in name or os.sep in name or path.suffix in {".gguf", ".safetensors"}:
        raise LoadError(f"{path}: there is no such folder or file")
    near = difflib.get_close_matches(name, NAMED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise LoadError(
        f"model {name!r:.80} is not known, and there is no folder or file of that name; known are "
        f"{', '.join(NAMED)}, a model folder, a .gguf file, or a hub name like HuggingFaceTB/SmolLM2-135M{hint}"
    )


def _from_file(path: Path, dtype: Any, progress: Progress | None) -> LanguageModel:
    if path.suffix == ".safetensors":
        raise LoadError(
            f"{path}: give the folder it lies in: the configuration and the tokenizer are needed too"
        )
    return _from_gguf(path, path.stem, dtype, progress)


def _from_gguf(path: Path, name: str, dtype: Any, progress: Progress | None) -> LanguageModel:
    from regardant.lm import gguf_file
    from regardant.lm.config import Config
    from regardant.lm.language_model import LanguageModel
    from regardant.lm.model import expected_weights
    from regardant.lm.tokenizer import Tokenizer

    file = gguf_file.open_file(path)
    config = Config.from_hugging_face(gguf_file.hugging_face_config(file))
    tokenizer = Tokenizer.from_gguf(file.metadata, str(path))
    weights = gguf_file.read_weights(file, expected_weights(config), dtype, progress)
    return LanguageModel(config=config, weights=weights, tokenizer=tokenizer, name=name, source=path)


def _from_folder(folder: Path, name: str, dtype: Any, progress: Progress | None) -> LanguageModel:
    from regardant.lm import checkpoint
    from regardant.lm.config import Config
    from regardant.lm.language_model import LanguageModel
    from regardant.lm.model import expected_weights
    from regardant.lm.tokenizer import Tokenizer

    config = Config.from_hugging_face(checkpoint.read_config(folder))
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    weights = checkpoint.read_weights(folder, expected_weights(config), dtype, progress)
    return LanguageModel(config=config, weights=weights, tokenizer=tokenizer, name=name, source=folder)
