"""One small text and one small run, trained once for all that only look at it."""

import pytest
from train.corpus import SMALL, text

from regardant.train import loop, run


@pytest.fixture(scope="session")
def small_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    path.write_text(text(80_000), encoding="utf-8")
    return path


def train(folder, named, given=(), **options):
    """Train in this process."""
    with run.locked(folder):
        training = run.open_run(
            folder,
            [str(n) for n in named],
            options.pop("tokenizer", None),
            None,
            dict(given),
            resume=options.pop("resume", False),
        )
        loop.train(training, options.pop("stop", lambda: False), lambda _: None)
    assert not options
    return training


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, small_text):
    folder = tmp_path_factory.mktemp("runs") / "small"
    train(folder, [small_text], SMALL)
    return folder
