"""What PPMd needs for the bytes that a run set aside, after it has seen the bytes that the run learned from.

    python recipes/ppmd.py RUN [--order N ...]

The texts come out of the run's own token files, so that both are asked about the very same bytes. The answer is the
growth of the compressed stream when the second part is put behind the first, in nats a byte (Cleary & Witten 1984;
PPMd variant H as in 7-Zip, by the package `pyppmd`), for each order; the lowest counts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pyppmd

from regardant.lm.tokenizer import Tokenizer
from regardant.train import data

MEMORY = 1 << 30


def text_of(run: Path, part: str) -> bytes:
    """The bytes of a part of a run's texts, one document behind the other."""
    facts = json.loads((run / "data" / "data.json").read_bytes())
    tokenizer = Tokenizer.from_file(run / "tokenizer.json")
    spelt = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    around = {facts["before"], facts["after"]}
    ids = data.Tokens(run / "data", part, facts).ids_N
    return b"".join(spelt[index] for index in ids.tolist() if index not in around)


def nats_per_byte(seen: bytes, new: bytes, order: int) -> float:
    """The growth of the stream, in nats for each byte of `new`."""
    sizes = []
    for whole in (seen, seen + new):
        encoder = pyppmd.Ppmd7Encoder(order, MEMORY)
        sizes.append(len(encoder.encode(whole)) + len(encoder.flush()))
    return (sizes[1] - sizes[0]) * 8 * math.log(2) / len(new)


def main() -> None:
    """Compress and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--order", type=int, nargs="+", default=[4, 5, 6, 8, 16])
    chosen = parser.parse_args()
    seen, new = (text_of(chosen.run, part) for part in data.PARTS)
    print(f"{len(seen):,} bytes seen, {len(new):,} bytes new")
    for order in chosen.order:
        print(f"PPMd order {order:2}: {nats_per_byte(seen, new, order):.4f} nats a byte", flush=True)


if __name__ == "__main__":
    main()
