"""Token ids on disk, mapped into memory, and rows of them in an order that a seed and a number fix.

`build` streams the documents of all texts through the tokenizer into two files of ids, one to learn from and one set
aside, with the place where each document begins, and a `data.json` that says what they were made of, with SHA-256 of
everything. `Tokens` maps such a file. A row is a stretch of `context` ids, whatever documents it holds, with their
segment ids; where a pass over the file begins changes from pass to pass, and the order of rows is a permutation that
is computed, not stored. So the n-th row ever drawn is a function of (seed, n): "the data's position" is one number.

Refused: too little text for one row, and files that are not those that `data.json` describes.

Shape legend: B rows of a batch, T positions, D documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from regardant.errors import UserError
from regardant.train import texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from numpy.typing import NDArray

    _Row: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # ids, segments, labels

PARTS = ("train", "valid")
IGNORED = -1  # a label that takes no part in the loss
_TOGETHER = 16  # documents handed to the tokenizer at a time
_FEW = 2  # random tokens that are said again, at least
_EARLY = 0.5  # the share of rows of repeated random tokens, in the beginning that asks for it
_SHORTEST = 2  # tokens of a row

# What the seed is used for: the numbers of one use tell nothing of another's.
_OFFSETS, _ORDER, _REPEATED, _WHICH = range(4)


@dataclasses.dataclass(frozen=True)
class Ends:
    """What is put around a document: `before` it, and what its last token is followed by, `after`."""

    before: int | None
    after: int | None


def is_set_aside(document: int, share: float) -> bool:
    """Whether a document, by its number among all, is for validation: the second, and on from there evenly spread."""
    return share > 0 and math.floor((document - 1) * share) > math.floor((document - 2) * share)


def counted(paths: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """All documents of all texts, numbered."""
    number = 0
    for path in paths:
        for document in texts.documents(path):
            yield number, document
            number += 1


def build(
    folder: Path,
    paths: Sequence[Path],
    tokenizer: Any,
    tokenizer_sha256: str,
    ends: Ends,
    valid_share: float,
    report: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write the token files of all texts into `folder`, which exists and is empty, and say what they hold.

    Memory: a few documents. Disk: two bytes a token, four where there are more than 65,536 in the vocabulary.

    Raises:
        UserError: a text that cannot be read, or is no text.
    """
    kind = "<u2" if tokenizer.get_vocab_size(with_added_tokens=True) <= 1 << 16 else "<u4"
    # What a text says is text, though it spell a special token.
    tokenizer.encode_special_tokens = True
    parts = {name: _Writer(folder, name, np.dtype(kind), ends) for name in PARTS}
    described, number = [], 0
    waiting: list[tuple[str, str]] = []
    for path in paths:
        digest = hashlib.sha256()
        for document in texts.documents(path, digest, report):
            waiting.append(("valid" if is_set_aside(number, valid_share) else "train", document))
            number += 1
            if len(waiting) == _TOGETHER:
                _encode(tokenizer, waiting, parts)
                waiting = []
        size = path.stat().st_size
        described.append({"path": str(path.resolve()), "bytes": size, "sha256": digest.hexdigest()})
    _encode(tokenizer, waiting, parts)
    facts = {
        "version": 1,
        "texts": described,
        "tokenizer_sha256": tokenizer_sha256,
        "valid_share": valid_share,
        "type": kind,
        "before": ends.before,
        "after": ends.after,
        **{name: writer.close() for name, writer in parts.items()},
    }
    (folder / "data.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return facts


def _encode(tokenizer: Any, documents: list[tuple[str, str]], parts: dict[str, _Writer]) -> None:
    encoded = tokenizer.encode_batch([text for _, text in documents], add_special_tokens=False)
    for (part, text), encoding in zip(documents, encoded, strict=True):
        parts[part].add(encoding.ids, len(text.encode()))


class _Writer:
    """One file of ids that grows, and what is to be told of it."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], ends: Ends) -> None:
        self.ids, self.starts = (folder / f"{name}.{kind}.bin" for kind in ("ids", "starts"))
        self.file, self.starts_file = self.ids.open("wb"), self.starts.open("wb")
        self.dtype, self.ends = dtype, ends
        self.tokens = self.documents = self.bytes = 0
        self.digest = hashlib.sha256()

    def add(self, ids: list[int], nbytes: int) -> None:
        before, after = self.ends.before, self.ends.after
        whole = ([] if before is None else [before]) + ids
        if after is not None and after != before:
            whole.append(after)
        raw = np.asarray(whole, self.dtype).tobytes()
        self.file.write(raw)
        self.starts_file.write(np.int64(self.tokens).astype("<i8").tobytes())
        self.digest.update(raw)
        self.tokens += len(whole)
        self.documents += 1
        self.bytes += nbytes

    def close(self) -> dict[str, Any]:
        self.file.close()
        self.starts_file.close()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": self.digest.hexdigest(),
            "starts_sha256": texts.fingerprint(self.starts),
        }


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows to learn from: ids, document ids and labels, each (B, T); a label is the next id, or `IGNORED`."""

    ids_BT: NDArray[np.int64]
    segments_BT: NDArray[np.int64]
    labels_BT: NDArray[np.int64]

    @property
    def counted(self) -> int:
        """How many labels there are."""
        return int((self.labels_BT != IGNORED).sum())


class Tokens:
    """One mapped file of ids.

    Args:
        folder: what `build` wrote. `name`: "train" or "valid". `facts`: the contents of `data.json`.

    Raises:
        UserError: a file is missing or of another size.
    """

    def __init__(self, folder: Path, name: str, facts: dict[str, Any]) -> None:
        self.path = folder / f"{name}.ids.bin"
        count, documents = facts[name]["tokens"], facts[name]["documents"]
        self.ids_N = _mapped(self.path, np.dtype(facts["type"]), count)
        starts = folder / f"{name}.starts.bin"
        self.starts_D = _mapped(starts, np.dtype("<i8"), documents)
        self._written = {self.path: facts[name]["sha256"], starts: facts[name]["starts_sha256"]}
        self.bytes: int = facts[name]["bytes"]
        # Where a document's end is told by what begins the next, that is a label like any other.
        self.ends_are_told = facts["before"] is not None and facts["before"] == facts["after"]

    def __len__(self) -> int:
        return len(self.ids_N)

    def check(self) -> None:
        """Compare the ids, and where documents begin, with the SHA-256 that they were written with.

        Raises:
            UserError: they differ.
        """
        for path, sha256 in self._written.items():
            if texts.fingerprint(path) != sha256:
                raise UserError(f"{path}: was changed since it was written; train anew in another folder")

    def rows(self, firsts_B: NDArray[np.int64], T: int) -> Batch:
        """The rows that begin at `firsts_B`, T positions each; where the file ends, labels are `IGNORED`."""
        at_BU = firsts_B[:, None] + np.arange(T + 1)
        inside_BU = at_BU < len(self)
        at_BU = np.minimum(at_BU, len(self) - 1)
        ids_BU = self.ids_N[at_BU].astype(np.int64)
        segments_BU = np.searchsorted(self.starts_D, at_BU, side="right")
        labels_BT = ids_BU[:, 1:].copy()
        labels_BT[~inside_BU[:, 1:]] = IGNORED
        if not self.ends_are_told:
            labels_BT[segments_BU[:, 1:] != segments_BU[:, :-1]] = IGNORED
        return Batch(ids_BU[:, :-1], segments_BU[:, :-1], labels_BT)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size = path.stat().st_size if path.is_file() else -1
    if size != count * dtype.itemsize:
        what = "is missing" if size < 0 else f"has {size:,} bytes, not {count * dtype.itemsize:,}"
        raise UserError(f"{path}: {what}; train anew in another folder")
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


class Order:
    """Which row comes when: rows of T of a file of `tokens`, shuffled anew in every pass.

    Raises:
        UserError: the file does not hold one row.
    """

    def __init__(self, tokens: int, T: int, seed: int) -> None:
        if tokens < T + 1:
            shorter = f", or a --context of {tokens - 1:,} at most" if tokens - 1 >= _SHORTEST else ""
            raise UserError(
                f"the texts come to {tokens:,} tokens to learn from, and a row takes {T + 1:,}: "
                f"give more text{shorter}"
            )
        self.T, self.seed = T, seed
        # A pass begins less than `slack` tokens in; what is left is cut into rows, one more label behind each.
        self.slack = min(T, tokens - T)
        self.count = (tokens - self.slack) // T

    def firsts(self, drawn: int, rows: int) -> NDArray[np.int64]:
        """Where rows number `drawn` to `drawn + rows`, of all that are ever drawn, begin in the file."""
        numbers = np.arange(drawn, drawn + rows)
        passes, places = np.divmod(numbers, self.count)
        firsts = np.empty(rows, np.int64)
        for which in np.unique(passes):
            chosen = passes == which
            offset = _generator(self.seed, _OFFSETS, int(which)).integers(self.slack)
            firsts[chosen] = offset + self.T * shuffled(places[chosen], self.count, (self.seed, int(which)))
        return firsts


def shuffled(places: NDArray[np.int64], count: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Where a permutation of `count` numbers, chosen by `key`, sends these.

    A Feistel network of four rounds over the next even number of bits, walked on from what falls outside (Black and
    Rogaway 2002): a shuffle in constant memory.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    keys = _generator(key[0], _ORDER, key[1]).integers(1 << 63, size=4, dtype=np.uint64)
    values = places.astype(np.uint64)
    walking = np.ones(len(values), bool)
    while walking.any():
        left, right = values[walking] >> np.uint64(half), values[walking] & low
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & low)
        values[walking] = left << np.uint64(half) | right
        walking = values >= np.uint64(count)
    return values.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 (the finish of SplitMix64, Steele et al. 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _generator(seed: int, use: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, use, number]))


@dataclasses.dataclass(frozen=True)
class Feed:
    """The batches of a training, by the number of rows drawn before.

    Attributes:
        repeats: the share of rows that hold repeated random tokens of `vocabulary` instead of text.
        early: how many rows at the beginning take a share of a half instead.
    """

    tokens: Tokens
    order: Order
    repeats: float
    begin: int | None
    vocabulary: NDArray[np.int64]
    early: int = 0

    def batch(self, drawn: int, rows: int) -> Batch:
        """Rows number `drawn` to `drawn + rows`."""
        batch = self.tokens.rows(self.order.firsts(drawn, rows), self.order.T)
        for row, number in enumerate(range(drawn, drawn + rows)):
            share = _EARLY if number < self.early else self.repeats
            if share > 0 and _generator(self.order.seed, _WHICH, number).random() < share:
                random = _generator(self.order.seed, _REPEATED, number)
                batch.ids_BT[row], batch.segments_BT[row], batch.labels_BT[row] = repeated_row(
                    random, self.vocabulary, self.begin, self.order.T
                )
        return batch


def repeated_row(
    random: np.random.Generator, vocabulary: NDArray[np.int64], begin: int | None, T: int
) -> _Row:
    """A row of documents of random tokens, each said twice to four times: ids, segments and labels, (T,) each.

    A document says from two tokens to half a row, lengths drawn with a density of 1/length²: what is short, where
    weights are still spread over all and yet find the earlier copy, fills as many rows as what is long. (Lengths from
    an eighth of a row on taught nothing in 1,000 steps.) Labels are `IGNORED` for what was not said before.
    """
    lead = [] if begin is None else [begin]
    ids: list[NDArray[np.int64]] = []
    known: list[NDArray[np.bool_]] = []
    segments: list[NDArray[np.int64]] = []
    left = T + 1
    while left > 0:
        longest = max(1, T // 2)
        length = int(1 / random.uniform(1 / (longest + 1), 1 / min(_FEW, longest)))
        times = int(random.integers(2, 5))
        document = np.concatenate(
            [np.asarray(lead, np.int64), np.tile(random.choice(vocabulary, length), times)]
        )
        # The first token of the first repetition cannot be known either: nothing says where it begins.
        said = np.arange(len(document)) > len(lead) + length
        ids.append(document[:left])
        known.append(said[:left])
        segments.append(np.full(len(document), len(ids), np.int64)[:left])
        left -= len(document)
    ids_U: NDArray[np.int64] = np.concatenate(ids)
    labels_U: NDArray[np.int64] = np.where(np.concatenate(known), ids_U, IGNORED)
    segments_U: NDArray[np.int64] = np.concatenate(segments)
    return ids_U[:-1], segments_U[:-1], labels_U[1:]
