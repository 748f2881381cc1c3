"""Texts for the tests: sentences made of a few words, so that a tiny model learns something in a few steps."""

import random
import subprocess
import sys

from regardant.train import loop, run

WORDS = [
    *(
        "the",
        "king",
        "the",
        "queen",
        "a",
        "ship",
        "the",
        "sea",
        "and",
        "then",
        "of",
        "night",
        "day",
        "was",
        "were",
    ),
    *("said", "he", "she", "it", "went", "came", "upon", "his", "her", "my", "lord"),
]

SMALL = {
    "width": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "context": 32,
    "batch": 4,
    "vocab_size": 300,
    "steps": 12,
    "eval_every": 4,
    "heads_every": 4,
    "checkpoint_every": 3,
    "eval_rows": 4,
}


def text(characters, seed=0):
    """Sentences, about so many characters of them, with paragraphs."""
    rng = random.Random(seed)  # noqa: S311
    parts, size = [], 0
    while size < characters:
        sentence = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(4, 12))).capitalize() + "."
        parts.append(sentence + rng.choice([" ", " ", "\n", "\n\n"]))
        size += len(parts[-1])
    return "".join(parts)


def flags(settings):
    """Settings as the command line takes them."""
    given = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        given += [option] if value is True else [option, str(value)]
    return given


def command(*arguments):
    return [sys.executable, "-m", "regardant", *map(str, arguments)]


def regardant(*arguments, **options):
    """Run the command line in a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **options)


def train(folder, named, given=(), **options):
    """Train in this process."""
    with run.locked(folder):
        training = run.open_run(
            folder,
            [str(n) for n in named],
            options.pop("tokenizer", None),
            options.pop("size", None),
            dict(given),
            resume=options.pop("resume", False),
        )
        loop.train(training, options.pop("stop", lambda: False), lambda _: None)
    assert not options
    return training
