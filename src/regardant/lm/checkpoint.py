"""Checkpoints as Hugging Face lays them out: a folder with config.json and one or many .safetensors files.

The files are mapped. float32 tensors are used where they lie, which the safetensors package does not offer for
NumPy (it copies, and has no bfloat16): so the header, eight bytes of length and a JSON table, is read here.
bfloat16, float16 and float64 are converted, on several threads.

Refused: a folder without configuration or weights, weights that are only a pickle (pytorch_model.bin, which could
run code), files that are cut short or damaged, quantised checkpoints, and tensors that do not fit the configuration.
Buffers that older checkpoints carry along (GPT-2's causal masks, rotary frequencies) and an output layer beside a
tied embedding are passed over: transformers does not read them either.

Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import mmap
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.lm import weights as shared
from regardant.lm.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from regardant.lm.weights import Progress, Shape, Weights

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTH = 8  # bytes of the number that a file begins with: the size of its header

_LAYOUTS = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2"}
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in which mapped file, and how."""

    path: Path
    data: mmap.mmap
    kind: str
    shape: Shape
    start: int
    nbytes: int


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON file that holds one object; an optional one that is missing counts as empty.

    Raises:
        LoadError: it is missing, is not JSON, or holds something else.
    """
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else f"is not valid JSON ({error})"
        raise LoadError(f"{path}: {why}") from None
    if not isinstance(content, dict):
        raise LoadError(f"{path}: must hold a JSON object; got {type(content).__name__}")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json.

    Raises:
        LoadError: it is missing or damaged.
    """
    if not (folder / "config.json").is_file():
        inside = sorted(folder.glob("*.gguf"))
        hint = f"; to load {inside[0].name} in it, give that file's path" if inside else ""
        raise LoadError(f"{folder}: is not a model folder, it has no config.json{hint}")
    return read_json(folder / "config.json")


def read_weights(
    folder: Path, expected: Mapping[str, Shape], dtype: np.dtype[Any], progress: Progress | None = None
) -> Weights:
    """Map every tensor, and convert to `dtype` those that are stored in another type.

    Memory: `dtype`'s size for each number that is converted; the others are read from the file as they are used,
    and are read-only.

    Raises:
        LoadError: a file is missing, cut short or damaged, or the tensors are not those that `expected` names.
    """
    stored_tensors = _tensors(folder)
    _refuse_two_heads(folder, stored_tensors, expected)
    tensors = _named_as_expected(stored_tensors, expected)
    shared.check(str(folder), {name: tensor.shape for name, tensor in tensors.items()}, expected)
    stored = {name: _stored(name, tensor) for name, tensor in tensors.items()}
    weights: Weights = {
        name: stored[name].reshape(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.kind != "BF16" and stored[name].dtype == dtype and stored[name].flags.aligned
    }
    made = shared.room({n: tensor.shape for n, tensor in tensors.items() if n not in weights}, dtype)
    jobs: list[tuple[int, Callable[[], None]]] = []
    for name, array in made.items():
        jobs += _jobs(tensors[name].kind, stored[name], array.reshape(-1))
    weights |= made
    shared.run(jobs, f"converting to {dtype}", progress)
    return weights


def _named_as_expected(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Complete the names of GPT-2's older files, and leave out what transformers does not read either."""
    prefix = "transformer."
    gpt2 = any(name.startswith(prefix) for name in expected)
    whole = {
        name if not gpt2 or name.startswith((prefix, _HEAD)) else prefix + name: tensor
        for name, tensor in tensors.items()
    }
    return {
        name: tensor
        for name, tensor in whole.items()
        if name in expected or not (name.endswith(_BUFFERS) or name == _HEAD)
    }


def _refuse_two_heads(folder: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> None:
    """Refuse a head of its own where the configuration says that the embedding is the head."""
    embedding = next((tensors[n] for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    head = tensors.get(_HEAD)
    if _HEAD in expected or head is None or embedding is None:
        return
    if not np.array_equal(_stored(_HEAD, head), _stored("the embedding", embedding)):
        raise LoadError(
            f"{folder}: holds an {_HEAD} other than the embedding, though config.json says that they are tied; "
            "set tie_word_embeddings to false there if the model has a head of its own"
        )


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        tensors.update(_file_tensors(path))
    return tensors


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        if any((folder / pickle).is_file() for pickle in _PICKLES):
            raise LoadError(
                f"{folder}: holds its weights only as pytorch_model.bin, a pickle that could run code when read; "
                "save it again as safetensors (transformers' save_pretrained does)"
            )
        raise LoadError(f"{folder}: holds no weights, neither {_SINGLE} nor {_INDEX}")
    shards = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise LoadError(f"{folder / _INDEX}: must hold a weight_map of tensor names to file names")
    paths = [folder / shard for shard in sorted(set(shards.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise LoadError(f"{folder}: lacks {len(missing)} of {len(paths)} files of its weights: {missing[0]}")
    return paths


def _file_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    size = path.stat().st_size
    if size < _LENGTH:
        raise LoadError(f"{path}: is cut short, it has {size} bytes; fetch or copy the file again")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (length,) = struct.unpack_from("<Q", data)
    first = _LENGTH + length
    if first > size:
        raise LoadError(
            f"{path}: is cut short or is not a safetensors file: its header would end at byte {first:,} of {size:,}"
        )
    header = _header(path, data[_LENGTH:first])
    needed = first + max((end for _, _, (_, end) in header.values()), default=0)
    if needed > size:
        raise LoadError(
            f"{path}: is cut short: it has {size:,} of {needed:,} bytes; fetch or copy the file again"
        )
    for name, (kind, shape, (start, end)) in header.items():
        yield name, Tensor(path, data, kind, shape, first + start, end - start)


def _header(path: Path, raw: bytes) -> dict[str, tuple[str, Shape, tuple[int, int]]]:
    """Check the table's form once, so that nothing behind it has to."""
    try:
        table = json.loads(raw)
        table.pop("__metadata__", None)
        entries = {
            name: (str(entry["dtype"]), tuple(entry["shape"]), tuple(entry["data_offsets"]))
            for name, entry in table.items()
        }
        for kind, shape, (start, end) in entries.values():
            fits = kind not in _LAYOUTS or end - start == math.prod(shape) * np.dtype(_LAYOUTS[kind]).itemsize
            if min((start, *shape)) < 0 or end < start or not fits:
                raise ValueError(f"{kind} {shape} in bytes {start} to {end}")  # noqa: TRY301 - one way to report
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{path}: is damaged: its header is not that of a safetensors file ({error})"
        ) from None
    return entries


def _stored(name: str, tensor: Tensor) -> NDArray[Any]:
    if tensor.kind not in _LAYOUTS:
        raise LoadError(
            f"{tensor.path}: tensor {name} is of type {tensor.kind}; float32, float64, float16 and bfloat16 are read"
        )
    layout = np.dtype(_LAYOUTS[tensor.kind])
    return np.frombuffer(tensor.data, layout, tensor.nbytes // layout.itemsize, tensor.start)


def _jobs(kind: str, stored: NDArray[Any], out: NDArray[Any]) -> Iterator[tuple[int, Callable[[], None]]]:
    widen = _widen_bfloat16 if kind == "BF16" else _convert
    for start in range(0, out.size, shared.CHUNK):
        target = out[start : start + shared.CHUNK]
        yield target.nbytes, functools.partial(widen, stored[start : start + shared.CHUNK], target)


def _convert(stored: NDArray[Any], out: NDArray[Any]) -> None:
    out[...] = stored


def _widen_bfloat16(stored: NDArray[Any], out: NDArray[Any]) -> None:
    # A bfloat16 is the upper half of the float32 of the same value.
    out[...] = (stored.astype(np.uint32) << 16).view(np.float32)
