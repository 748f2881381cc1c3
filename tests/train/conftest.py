"""One small text and one small run, trained once for all that only look at it."""

import pytest

from train.corpus import SMALL, text, train


@pytest.fixture(scope="session")
def small_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "story.txt"
    path.write_text(text(80_000), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, small_text):
    folder = tmp_path_factory.mktemp("runs") / "small"
    train(folder, [small_text], SMALL)
    return folder
