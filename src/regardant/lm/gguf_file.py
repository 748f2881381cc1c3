"""GGUF files of the Llama, Qwen2 and Qwen3 families: metadata, configuration, weights.

The header is read here, straight from the map: the `gguf` package's own reader makes an array object for every
string, which takes seconds for a vocabulary. Its tables of types and its `dequantize` do the rest. Tensors come
out under their Hugging Face names, in the Hugging Face order of rows.

Refused: a file that is cut short or damaged, big-endian or split files, other architectures, mixtures of experts,
tensors that the model would not use, tensor types that the package cannot dequantise, rotary scalings that the
configuration does not have. Nothing is taken on trust before it is read: every size is checked against the file's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).

Shape legend: R rows, N blocks, Y bytes of one block.
"""

from __future__ import annotations

import dataclasses
import functools
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

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_AXES = 4

_WHOLE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# The values with which every Llama 3.1 to 3.3 was published; GGUF keeps only the factors that follow from them.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in the file, and how: its shape is NumPy's, slowest axis first."""

    name: str
    shape: Shape
    kind: int
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A mapped file, its metadata as plain Python values, and its tensors, none of them read yet."""

    path: Path
    data: mmap.mmap
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_file(path: Path) -> GGUFFile:
    """Map a file and read its header.

    Raises:
        LoadError: it is no GGUF file, or is cut short, damaged, or of a version that is not known.
    """
    if path.stat().st_size == 0:
        raise LoadError(f"{path}: is empty, not a GGUF file")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(path, data)
    try:
        metadata, tensors = _header(reader)
    except struct.error:
        raise reader.cut_short() from None
    except UnicodeDecodeError:
        raise LoadError(f"{path}: is damaged: a name near byte {reader.at} is not UTF-8") from None
    return GGUFFile(path, data, metadata, tensors)


class _Reader:
    """A position in the mapped header; reading past the end raises struct.error or says what is amiss."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def cut_short(self) -> LoadError:
        return LoadError(
            f"{self.path}: is cut short or damaged: its header does not end within its {len(self.data):,} bytes; "
            "fetch or copy the file again"
        )

    def numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        return self._take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(*self.numbers("IQ"))
        if kind not in _SCALARS:
            raise LoadError(f"{self.path}: is damaged: near byte {self.at} a value is of unknown type {kind}")
        (value,) = self.numbers(_SCALARS[kind])
        return _shortest(value) if kind == _FLOAT32 else value

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            # The length alone takes 8 bytes: a count that is not possible is found before the loop.
            if count * 8 > len(self.data) - self.at:
                raise self.cut_short()
            return self._strings(count)
        if kind not in _SCALARS:
            raise LoadError(f"{self.path}: near byte {self.at} an array's entries are of unknown type {kind}")
        layout = np.dtype(f"<{_SCALARS[kind]}")
        return list(np.frombuffer(self._take(count * layout.itemsize), layout).tolist())

    def _strings(self, count: int) -> list[str]:
        # The one hot loop of loading: a vocabulary and its merges are a hundred thousand strings and more.
        data, at, found = self.data, self.at, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = at + 8 + length_at(data, at)[0]
            if end > len(data):
                raise self.cut_short()
            found.append(data[at + 8 : end].decode())
            at = end
        self.at = at
        return found

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise self.cut_short()
        taken = self.data[self.at : end]
        self.at = end
        return taken


def _shortest(value: float) -> float:
    """Give back the decimal that was written: 1e-05, not the float32 next to it seen as 9.9999997e-06."""
    return float(str(np.float32(value)))


def _header(reader: _Reader) -> tuple[dict[str, Any], dict[str, Tensor]]:
    magic = reader.data[:4]
    if magic != _MAGIC:
        raise LoadError(f'{reader.path}: is not a GGUF file: it begins with {magic!r}, not b"GGUF"')
    reader.at = 4
    (version,) = reader.numbers("I")
    if version not in _VERSIONS:
        swapped = version & 0xFFFF == 0
        what = "is big-endian" if swapped else f"is GGUF version {version}"
        raise LoadError(f"{reader.path}: {what}; little-endian GGUF of versions 2 and 3 is read")
    tensor_count, value_count = reader.numbers("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = reader.string()
        (kind,) = reader.numbers("I")
        metadata[key] = reader.value(kind)
    if metadata.get("split.count", 1) > 1:
        raise LoadError(
            f"{reader.path}: is one of {metadata['split.count']} parts, and split files are not read; "
            "merge them with llama.cpp's llama-gguf-split --merge"
        )
    return metadata, _tensors(reader, tensor_count, metadata.get("general.alignment", 32))


def _tensors(reader: _Reader, count: int, alignment: object) -> dict[str, Tensor]:
    if not isinstance(alignment, int) or alignment < 1:
        raise LoadError(f"{reader.path}: is damaged: general.alignment is {alignment!r}")
    entries = []
    for _ in range(count):
        name = reader.string()
        (axes,) = reader.numbers("I")
        if axes > _MOST_AXES:
            raise LoadError(f"{reader.path}: is damaged: tensor {name!r} has {axes} axes")
        shape = reader.numbers(f"{axes}Q")[::-1]
        entries.append((name, shape, *reader.numbers("IQ")))
    first = -(-reader.at // alignment) * alignment
    tensors = {name: _tensor(reader, name, shape, kind, first + at) for name, shape, kind, at in entries}
    needed = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=0)
    if needed > len(reader.data):
        raise LoadError(
            f"{reader.path}: is cut short: it has {len(reader.data):,} of {needed:,} bytes; "
            "fetch or copy the file again"
        )
    return tensors


def _tensor(reader: _Reader, name: str, shape: Shape, kind: int, start: int) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError:
        raise LoadError(
            f"{reader.path}: tensor {name!r} is of type {kind}, which the gguf package does not know"
        ) from None
    if not shape or shape[-1] % block:
        raise LoadError(f"{reader.path}: is damaged: tensor {name!r} has shape {shape} in blocks of {block}")
    return Tensor(name, shape, kind, start, math.prod(shape) // block * block_bytes)


# --------------------------------------------------------------------------------------------- configuration


def hugging_face_config(file: GGUFFile) -> dict[str, Any]:
    """Say what the metadata says in the terms of a Hugging Face `config.json`.

    Raises:
        LoadError: another architecture, a mixture of experts, or metadata that is missing or not understood.
    """
    fields = _Fields(file)
    architecture = fields.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise LoadError(
            f"{file.path}: architecture {architecture!r} is not implemented for GGUF; "
            f"known are {', '.join(ARCHITECTURES)}"
        )
    if fields.get("expert_count", 0):
        raise LoadError(f"{file.path}: is a mixture of {fields.get('expert_count')} experts, not implemented")
    heads = fields.get("attention.head_count")
    head_width = fields.get("attention.key_length", fields.get("embedding_length") // max(1, heads))
    window = fields.get("attention.sliding_window", 0) or None
    _same_width(fields, head_width)
    mapping = {
        "model_type": "mistral" if architecture == "llama" and window else architecture,
        "num_hidden_layers": _layers(fields),
        "hidden_size": fields.get("embedding_length"),
        "intermediate_size": fields.get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_width,
        "max_position_embeddings": fields.get("context_length"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": fields.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, fields, head_width),
    }
    return mapping | _windows(architecture, window) | _biases(file, architecture)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The numbers that metadata gives under the architecture's prefix."""

    file: GGUFFile

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        name = f"{self.metadata['general.architecture']}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise LoadError(f"{self.file.path}: its metadata lacks {name}")
        if not isinstance(value, int | float) or value < 0:
            raise LoadError(f"{self.file.path}: {name} must be one number for all layers; got {value!r:.60}")
        return value


def _layers(fields: _Fields) -> int:
    layers = int(fields.get("block_count"))
    if layers > len(fields.file.tensors) > 0:  # before anything is laid out for as many
        raise LoadError(
            f"{fields.file.path}: is damaged: {layers} layers of {len(fields.file.tensors)} tensors"
        )
    return layers


def _same_width(fields: _Fields, head_width: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        width = fields.get(key, head_width)
        if width != head_width:
            raise LoadError(
                f"{fields.file.path}: {key} {width} differs from the head width {head_width}, not implemented"
            )


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError(f"{file.path}: holds no weights: token_embd.weight is missing")
    return int(embedding.shape[0])


def _windows(architecture: str, window: int | None) -> dict[str, Any]:
    if window is None:
        return {}
    return {"sliding_window": window} | ({} if architecture == "llama" else {"use_sliding_window": True})


def _biases(file: GGUFFile, architecture: str) -> dict[str, bool]:
    if architecture != "llama":
        return {}
    kinds = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {field: True for field, tensor in kinds.items() if tensor in file.tensors}


def _rope_scaling(file: GGUFFile, fields: _Fields, head_width: int) -> dict[str, Any] | None:
    kind = fields.metadata.get(f"{fields.metadata['general.architecture']}.rope.scaling.type", "none")
    if kind != "none":
        # Handed on as it stands: the configuration takes it or refuses it by name.
        return {"rope_type": kind, "factor": fields.get("rope.scaling.factor", 1.0)}
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = _values(file, file.tensors[_ROPE_FACTORS])
    factor = float(factors.max(initial=1.0))
    expected = _llama3_factors(head_width, fields.get("rope.freq_base", 10_000.0), factor)
    # Both sides are the same formula in float32 or better; a wrong parameter moves a factor by whole percents.
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise LoadError(
            f"{file.path}: {_ROPE_FACTORS} does not follow Llama 3's rule, and no other is implemented"
        )
    return None if factor == 1 else {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _llama3_factors(head_width: int, theta: float, factor: float) -> NDArray[np.float64]:
    """What Llama 3.1 divides each rotary frequency by (Grattafiori et al. 2024), for its published parameters."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_width, 2) / head_width)
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelength
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - kept) / factor + kept), np.float64)


# --------------------------------------------------------------------------------------------------- weights


def read_weights(
    file: GGUFFile, expected: Mapping[str, Shape], dtype: np.dtype[Any], progress: Progress | None = None
) -> Weights:
    """Dequantise every tensor to `dtype`, under its Hugging Face name.

    float32 tensors stay in the mapped file when float32 is wanted, read-only; memory grows with the others. The
    rows of Llama's query and key projections, which GGUF stores in pairs (2i, 2i + 1) for its own rotary kernel,
    are put back in halves.

    Raises:
        LoadError: the tensors are not those that `expected` names, or of a type that cannot be dequantised.
    """
    from gguf import GGMLQuantizationType

    tensors = {
        _hugging_face_name(file, name): tensor for name, tensor in file.tensors.items() if _is_weight(name)
    }
    shared.check(str(file.path), {name: tensor.shape for name, tensor in tensors.items()}, expected)
    weights: Weights = {}
    raw = {name: _blocks(file, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.kind == GGMLQuantizationType.F32 and dtype == np.float32:
            stored = raw[name].view("<f4")
            if stored.flags.aligned:
                weights[name] = stored.reshape(tensor.shape)
    made = shared.room({n: tensor.shape for n, tensor in tensors.items() if n not in weights}, dtype)
    jobs: list[tuple[int, Callable[[], None]]] = []
    for name, array in made.items():
        jobs += _jobs(file, tensors[name], raw[name], array.reshape(-1))
    weights |= made
    shared.run(jobs, "dequantising", progress)
    return weights


def _is_weight(name: str) -> bool:
    return name != _ROPE_FACTORS and not name.endswith(".attn_rot_embd.weight")


def _hugging_face_name(file: GGUFFile, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _WHOLE_NAMES:
        return f"{_WHOLE_NAMES[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and layer.isdecimal() and part in _LAYER_NAMES:
        return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{suffix}"
    raise LoadError(f"{file.path}: tensor {name!r} belongs to no model that is implemented")


def _blocks(file: GGUFFile, tensor: Tensor) -> NDArray[np.uint8]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    raw = np.frombuffer(file.data, np.uint8, tensor.nbytes, tensor.start).reshape(-1, block_bytes)
    heads = _paired_heads(file, tensor.name)
    if heads is None:
        return raw
    # Rows are put back in order while they are still small: block by block they are the same rows.
    rows = tensor.shape[0]
    pairs = raw.reshape(heads, rows // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(-1, block_bytes)


def _paired_heads(file: GGUFFile, name: str) -> int | None:
    """How many heads' rows of this tensor stand in pairs; None where rows stand as in the original."""
    if file.metadata["general.architecture"] != "llama":
        return None
    kind = name.split(".")[-2]
    heads = int(file.metadata["llama.attention.head_count"])
    return {"attn_q": heads, "attn_k": int(file.metadata.get("llama.attention.head_count_kv", heads))}.get(
        kind
    )


def _jobs(
    file: GGUFFile, tensor: Tensor, raw_NY: NDArray[np.uint8], out: NDArray[Any]
) -> Iterator[tuple[int, Callable[[], None]]]:
    block = out.size // max(1, len(raw_NY))
    step = max(1, shared.CHUNK // max(1, block))
    for start in range(0, len(raw_NY), step):
        part_NY = raw_NY[start : start + step]
        target = out[start * block : (start + step) * block]
        yield target.nbytes, functools.partial(_dequantise, file, tensor, part_NY, target)


def _dequantise(file: GGUFFile, tensor: Tensor, part_NY: NDArray[np.uint8], out: NDArray[Any]) -> None:
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    try:
        # One long row: the package would otherwise go through it sixteen rows at a time, at half the speed.
        values = dequantize(part_NY.reshape(1, -1), kind)
    except NotImplementedError:
        raise LoadError(
            f"{file.path}: tensor {tensor.name!r} is of type {kind.name}, which the gguf package cannot dequantise"
        ) from None
    out[...] = values[0]


def _values(file: GGUFFile, tensor: Tensor) -> NDArray[np.float32]:
    out = np.empty(math.prod(tensor.shape), np.float32)
    _dequantise(file, tensor, _blocks(file, tensor), out)
    return out
