"""A loaded model written for other programs: one GGUF file, or a Hugging Face folder in another type.

GGUF files hold matrices in the type asked for, gains and biases as float32; the rows of Llama's query and key
projections stand in pairs (2i, 2i + 1), as llama.cpp's rotary kernel wants them; vocabulary and merges are inside.
Files are whole or not there.

Refused: GPT-2 and models with a window, which GGUF does not cover; a model that was not read from a folder, whose
tokenizer cannot be handed on; a tokenizer whose way of cutting text GGUF has no name for; a folder that is not empty.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.errors import UserError
from regardant.lm.checkpoint import read_config, read_json
from regardant.lm.gguf_file import LAYER_NAMES, WHOLE_NAMES
from regardant.lm.tokenizer import cut_name
from regardant.writing import reason, replacing

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from regardant.lm.config import Config
    from regardant.lm.language_model import LanguageModel

TYPES = ("float32", "float16", "bfloat16")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
)
_NORMAL, _CONTROL = 1, 3  # GGUF's tokenizer.ggml.token_type


def check_type(dtype: str) -> None:
    """Refuse a type that is not written.

    Raises:
        UserError: it is none of `TYPES`.
    """
    if dtype not in TYPES:
        raise UserError(f"--dtype must be one of {', '.join(TYPES)}; got {dtype}")


def write_gguf(model: LanguageModel, path: Path, dtype: str = "float32") -> Path:
    """Write a model and its tokenizer as one GGUF file. Memory: one more copy of the weights.

    Raises:
        UserError: the model cannot be said in GGUF, or the file cannot be written.
    """
    import gguf

    check_type(dtype)
    folder = _source(model)
    architecture = _architecture(model.config)
    vocabulary = _vocabulary(folder, model)
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        _add_config(writer, model)
        _add_vocabulary(writer, vocabulary)
        for name, tensor in model.weights.items():
            weight = (
                _paired(name, np.asarray(tensor), model.config)
                if architecture == "llama"
                else np.asarray(tensor)
            )
            kind = getattr(gguf.GGMLQuantizationType, _GGUF_TYPES[dtype] if weight.ndim > 1 else "F32")
            writer.add_tensor(
                _gguf_name(name), gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


_GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_folder(model: LanguageModel, folder: Path, dtype: str = "float32") -> Path:
    """Write a model as a Hugging Face folder, its tokenizer's files as they were.

    Raises:
        UserError: the folder is not empty or cannot be written.
    """
    import ml_dtypes
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    check_type(dtype)
    source = _source(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already, and not an empty folder; choose another")
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = {**read_config(source), "dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        tensors = {
            name: np.ascontiguousarray(np.asarray(t), dtype=wanted) for name, t in model.weights.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        # The package lets nobody but the owner read what it writes.
        shutil.copymode(folder / "config.json", folder / "model.safetensors")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {reason(error)}") from None
    except SafetensorError as error:
        raise UserError(f"cannot write {folder}: {error}") from None
    return folder


def _source(model: LanguageModel) -> Path:
    if model.source is None or not os.path.isdir(model.source):  # noqa: PTH112 - as in `load`
        raise UserError(
            f"{model.name}: only a model folder can be exported, its tokenizer is needed as a file"
        )
    return model.source


def _architecture(config: Config) -> str:
    if config.family == "gpt2":
        raise UserError(
            "a GPT-2 model cannot be exported as GGUF: the architectures are llama, qwen2 and qwen3"
        )
    if any(window is not None for window in config.windows):
        raise UserError(
            "a model with a window cannot be exported as GGUF: readers of these families leave it out"
        )
    return config.family


def _add_config(writer: Any, model: LanguageModel) -> None:
    config = model.config
    if config.rope is None or config.rope.scaling is not None:
        raise UserError(f"{model.name}: scaled rotary positions cannot be exported as GGUF yet")
    writer.add_name(model.name)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_vocab_size(config.vocab_size)


def _vocabulary(folder: Path, model: LanguageModel) -> dict[str, Any]:
    """Tokens, their kinds, merges and roles, as GGUF names them."""
    stored = read_json(folder / "tokenizer.json")
    bpe, size = stored["model"], model.config.vocab_size
    name = cut_name(folder / "tokenizer.json")
    added = {entry["id"]: entry for entry in stored.get("added_tokens", [])}
    tokens = {index: token for token, index in bpe["vocab"].items()}
    tokens |= {index: entry["content"] for index, entry in added.items()}
    special = {index for index, entry in added.items() if entry["special"]}
    return {
        "pre": name,
        "tokens": [tokens.get(index, f"[unused {index}]") for index in range(size)],
        "kinds": [_CONTROL if index in special else _NORMAL for index in range(size)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]],
        "bos": model.tokenizer.bos,
        "eos": min(model.tokenizer.eos, default=None),
        "begins": bool(model.encode("a")) and model.encode("a")[0] == model.tokenizer.bos,
    }


def _add_vocabulary(writer: Any, vocabulary: dict[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["kinds"])
    writer.add_token_merges(vocabulary["merges"])
    if vocabulary["bos"] is not None:
        writer.add_bos_token_id(vocabulary["bos"])
    if vocabulary["eos"] is not None:
        writer.add_eos_token_id(vocabulary["eos"])
    writer.add_add_bos_token(vocabulary["begins"])


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    wholes = {theirs: ours for ours, theirs in WHOLE_NAMES.items()}
    if stem in wholes:
        return f"{wholes[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    parts = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
    return f"blk.{layer}.{parts[part]}.{suffix}"


def _paired(name: str, weight: NDArray[Any], config: Config) -> NDArray[Any]:
    """Put the rows of a head's two halves in pairs."""
    kinds = {"q_proj": config.heads, "k_proj": config.kv_heads}
    heads = kinds.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
