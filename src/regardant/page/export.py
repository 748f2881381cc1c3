"""One self-contained HTML page from plain data: for every token, where it drew its information from.

Refused: shapes that do not fit together, weights outside [0, 1], rows that do not sum to one, sources that lie
after their token, a focus that is no token. Nothing is mended silently, with one exception that the page could
not otherwise be written for: lone surrogates in a text become U+FFFD.

The page is one file of pure ASCII. Its policy forbids every request and every script but its own, by hash, and
the text of a token reaches the document as a text node only, so that no token can do anything but be read.

The arrays stand in the page as one record of fixed size for each token, so that a browser decodes only the
tokens that are asked about. Letters used for the axes:

    T tokens    L layers    H heads in a layer    M, K  sources kept for a token (all heads together, one head)
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array = npt.NDArray[Any]

WEIGHT_UNITS = 65535
"""A weight w is kept as round(w * 65535)."""
ENTROPY_UNITS = 4096
"""An entropy of h nats is kept as round(h * 4096), at most 65535 (16 nats: nine million tokens)."""

_BLOCK_CHARACTERS = 1 << 20
_SUM_TOLERANCE = 1e-3
# What a browser's title bar could be misled by: controls, marks and overrides of direction.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@dataclass(frozen=True)
class _Field:
    """One array of the record: `values` with the tokens on `axis`, written as `kind`."""

    name: str
    values: Array
    axis: int
    kind: str  # "key", "weight", "rest" or "entropy"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one token's part."""
        return self.values.shape[: self.axis] + self.values.shape[self.axis + 1 :]

    @property
    def size(self) -> int:
        """The number of values in one token's part."""
        return int(np.prod(self.shape, dtype=np.int64))

    def part(self, start: int, stop: int) -> Array:
        """The values of tokens `start` to `stop`, (stop - start, ...)."""
        window = (slice(None),) * self.axis + (slice(start, stop),)
        return np.moveaxis(self.values[window], self.axis, 0)


def render(data: Mapping[str, object]) -> str:
    """The page as one string of ASCII characters, ready to be written to a file.

    `data` has these entries; "layers" numbers the layers that were looked at, "heads" counts each one's heads:

    - title, model: str; focus: int, the token that is selected at first
    - tokens: T mappings with text (str, anything) and id (int); layers: L ints; heads: int, H
    - all: weight and written, each a mapping with keys (T, M), weights (T, M), rest (T,), sink (T,): the means
      over all layers and heads, the share that is not listed, the first token's share
    - per_layer: None, or keys (L, T, M), weights (L, T, M), rest (L, T): the means over a layer's heads
    - heads_top: keys (L, H, T, K), weights (L, H, T, K), entropy (L, H, T) in nats

    Keys are positions of tokens, -1 where a row has fewer sources than room; weights are shares in [0, 1].

    The page takes 4 * ceil(b / 3) characters for each token, where with s = 2 bytes for a key (4 from 65,535
    tokens on), M sources of all and of each layer and K of each head

        b = 2 * (M * (s + 2) + 4) + L * (M * (s + 2) + 2) + L * H * (K * (s + 2) + 2)

    and the tokens' text and about 40 kB besides: SmolLM2 (L = 30, H = 9, K = 8, M = 16) gives 15 kB for a
    token. Memory peaks at about twice the page.

    Raises:
        TypeError: an entry is missing or of the wrong kind; the sentence names it.
        ValueError: shapes do not fit, or values are out of range; the sentence names the entry.
    """
    tokens = _tokens(data)
    layers = _integers(data, "layers")
    heads = _integer(data, "heads")
    focus = _integer(data, "focus")
    if not 0 <= focus < len(tokens):
        raise ValueError(f"page: focus must be a token from 0 to {len(tokens) - 1}; got {focus}")
    fields = _fields(data, len(tokens), len(layers), heads)
    record, blocks = _pack(fields, len(tokens))
    title = _encodable(_text(data, "title"))
    facts: dict[str, object] = {
        "title": title,
        "model": _encodable(_text(data, "model")),
        "focus": focus,
        "texts": [_encodable(text) for text, _ in tokens],
        "ids": [number for _, number in tokens],
        "layers": layers,
        "heads": heads,
        "record": record,
    }
    style, script = _static("page.css"), _static("page.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    shown = html.escape(_UNSEEN.sub("\ufffd", title) + " \u2013 regardant")
    parts = {
        "policy": policy,
        "title": shown.encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "style": style,
        "script": script,
        "data": _json(facts),
    }
    # Each half is filled in one pass: what is put in is never searched for further places.
    before, after = (
        re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], half)
        for half in _static("page.html").split("{{records}}")
    )
    return "".join([before, *blocks, after])


# --- the record ------------------------------------------------------------------------------------------


def _fields(data: Mapping[str, object], count: int, layers: int, heads: int) -> list[_Field]:
    every = _mapping(data, "all")
    fields: list[_Field] = []
    for measure in ("weight", "written"):
        entry = _mapping(every, measure, "all.")
        name = f"all.{measure}"
        pair = _pair(entry, name, name, (count,))
        rest = _Field(f"{name}.rest", _floats(entry, "rest", f"{name}.", (count,)), 0, "rest")
        first = _Field(f"{name}.first", _floats(entry, "sink", f"{name}.", (count,)), 0, "weight")
        fields += [*pair, rest, first]
    means = data.get("per_layer")
    if means is not None:
        entry = _mapping(data, "per_layer")
        pair = _pair(entry, "per_layer", "layer", (layers, count))
        rest = _Field("layer.rest", _floats(entry, "rest", "per_layer.", (layers, count)), 1, "rest")
        fields += [*pair, rest]
    entry = _mapping(data, "heads_top")
    fields += _pair(entry, "heads_top", "head", (layers, heads, count))
    entropy = _floats(entry, "entropy", "heads_top.", (layers, heads, count))
    fields.append(_Field("head.entropy", entropy, 2, "entropy"))
    return fields


def _pair(entry: Mapping[str, object], source: str, name: str, shape: tuple[int, ...]) -> list[_Field]:
    """Keys and weights, both `shape` and one more axis; the last axis of `shape` is the tokens'."""
    keys = _array(entry, "keys", f"{source}.")
    if keys.dtype.kind not in "iu" or keys.ndim != len(shape) + 1 or keys.shape[:-1] != shape:
        expected = ", ".join(map(str, (*shape, "any")))
        raise ValueError(f"page: {source}.keys must be integers ({expected}); got {keys.dtype} {keys.shape}")
    weights = _floats(entry, "weights", f"{source}.", keys.shape)
    axis = len(shape) - 1
    return [_Field(f"{name}.keys", keys, axis, "key"), _Field(f"{name}.weights", weights, axis, "weight")]


def _pack(fields: list[_Field], count: int) -> tuple[dict[str, object], list[str]]:
    """The layout of a record, and the blocks of records as script elements that no browser runs."""
    wide = count >= WEIGHT_UNITS
    key = np.dtype("<u4" if wide else "<u2")
    ordered = sorted(fields, key=lambda field: field.kind != "key")  # the widest first: each is aligned
    layout: list[dict[str, object]] = []
    size = 0
    for field in ordered:
        width = key.itemsize if field.kind == "key" else 2
        layout.append({"name": field.name, "type": f"u{8 * width}", "at": size, "shape": list(field.shape)})
        size += width * field.size
    characters = 4 * -(-size // 3)
    per_block = max(1, _BLOCK_CHARACTERS // characters)
    padded = 3 * -(-size // 3)
    blocks: list[str] = []
    for number, start in enumerate(range(0, count, per_block)):
        stop = min(count, start + per_block)
        records = np.zeros((stop - start, padded), np.uint8)
        at = 0
        for values in _encoded(ordered, key, start, stop):
            part = np.ascontiguousarray(values).reshape(stop - start, -1).view(np.uint8)
            records[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        coded = base64.b64encode(records.tobytes()).decode("ascii")
        blocks.append(f'<script type="application/octet-stream" id="records-{number}">{coded}</script>')
    return {"chars": characters, "perBlock": per_block, "fields": layout}, blocks


def _encoded(fields: list[_Field], key: np.dtype[Any], start: int, stop: int) -> Iterator[Array]:
    """Each field's part for the tokens `start` to `stop` as little-endian integers, checked."""
    sums: dict[str, Array] = {}
    for field in fields:
        part = field.part(start, stop)
        if field.kind == "key":
            yield _coded_keys(field.name, part, start, key)
        elif field.kind == "entropy":
            yield _coded_entropy(field.name, part)
        else:
            coded = _coded_shares(field.name, part)
            group = field.name.rpartition(".")[0]
            if field.name.endswith("weights"):
                sums[group] = part.sum(axis=-1, dtype=np.float64)
                _check_sums(group, sums[group], 0)
            elif field.kind == "rest":
                _check_sums(f"{group} with its rest", sums[group] + part, 1)
            yield coded


def _coded_keys(name: str, part: Array, start: int, key: np.dtype[Any]) -> Array:
    position = start + np.arange(part.shape[0]).reshape((-1,) + (1,) * (part.ndim - 1))
    if (part < -1).any() or (part > position).any():
        raise ValueError(f"page: {name} must be -1 or positions up to the token's own; got others")
    return np.where(part < 0, np.iinfo(key).max, part.astype(np.int64)).astype(key)


def _coded_shares(name: str, part: Array) -> Array:
    if not ((part >= -_SUM_TOLERANCE) & (part <= 1 + _SUM_TOLERANCE)).all():
        raise ValueError(f"page: {name} must be shares in [0, 1]; got {part.min()} to {part.max()}")
    return np.rint(np.clip(part.astype(np.float64), 0, 1) * WEIGHT_UNITS).astype("<u2")


def _coded_entropy(name: str, part: Array) -> Array:
    if not (part >= -_SUM_TOLERANCE).all() or not np.isfinite(part).all():
        raise ValueError(f"page: {name} must be finite and at least 0 nats; got {part.min()} to {part.max()}")
    return np.rint(np.clip(part.astype(np.float64) * ENTROPY_UNITS, 0, WEIGHT_UNITS)).astype("<u2")


def _check_sums(group: str, sums: Array, least: int) -> None:
    if not ((sums >= least - _SUM_TOLERANCE) & (sums <= 1 + _SUM_TOLERANCE)).all():
        expected = "to 1" if least else "to at most 1"
        raise ValueError(f"page: {group} must sum {expected}; got sums from {sums.min()} to {sums.max()}")


# --- text ------------------------------------------------------------------------------------------------


def _encodable(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _json(value: object) -> str:
    """JSON in ASCII that holds no character by which HTML could leave a script element."""
    coded = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return coded.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _static(name: str) -> str:
    return (resources.files("regardant.page") / "static" / name).read_text("utf-8")


# --- the entries of data ---------------------------------------------------------------------------------


def _entry(data: Mapping[str, object], name: str, where: str = "") -> object:
    if name not in data:
        raise TypeError(f"page: {where}{name} is missing")
    return data[name]


def _mapping(data: Mapping[str, object], name: str, where: str = "") -> Mapping[str, object]:
    value = _entry(data, name, where)
    if not isinstance(value, Mapping):
        raise TypeError(f"page: {where}{name} must be a mapping; got {type(value).__name__}")
    return value


def _text(data: Mapping[str, object], name: str, where: str = "") -> str:
    value = _entry(data, name, where)
    if not isinstance(value, str):
        raise TypeError(f"page: {where}{name} must be a str; got {type(value).__name__}")
    return value


def _integer(data: Mapping[str, object], name: str, where: str = "") -> int:
    value = _entry(data, name, where)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"page: {where}{name} must be an int; got {type(value).__name__}")
    return int(value)


def _sequence(data: Mapping[str, object], name: str) -> Sequence[object]:
    value = _entry(data, name)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) == 0:
        raise TypeError(f"page: {name} must be a list with at least one entry; got {value!r:.60}")
    return value


def _integers(data: Mapping[str, object], name: str) -> list[int]:
    values = _sequence(data, name)
    return [_integer({"": value}, "", f"{name}[{i}]") for i, value in enumerate(values)]


def _tokens(data: Mapping[str, object]) -> list[tuple[str, int]]:
    tokens: list[tuple[str, int]] = []
    for i, token in enumerate(_sequence(data, "tokens")):
        where = f"tokens[{i}]"
        if not isinstance(token, Mapping):
            raise TypeError(f"page: {where} must be a mapping; got {type(token).__name__}")
        tokens.append((_text(token, "text", f"{where}."), _integer(token, "id", f"{where}.")))
    return tokens


def _array(data: Mapping[str, object], name: str, where: str) -> Array:
    value = _entry(data, name, where)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"page: {where}{name} must be a NumPy array; got {type(value).__name__}")
    return value


def _floats(data: Mapping[str, object], name: str, where: str, shape: tuple[int, ...]) -> Array:
    value = _array(data, name, where)
    if value.dtype.kind != "f" or value.shape != shape:
        raise ValueError(f"page: {where}{name} must be floats {shape}; got {value.dtype} {value.shape}")
    return value
