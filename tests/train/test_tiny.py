"""The model that comes with the package: small, offline, better than a compressor, and with heads that copy.

`unseen.txt` is 9 kB out of what its training had set aside: Austen, Melville, Shakespeare and a president.
"""

import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from regardant.cli import main
from regardant.lm.fetch import bundled_model
from regardant.lm.load import load, models
from regardant.train import heads

UNSEEN = Path(__file__).with_name("unseen.txt")
# What PPMd (order 16, the best of 4 to 16) needs for these bytes behind the whole training text, as `recipes/ppmd.py`
# reckons: nats a byte.
PPMD = 1.1855


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


def test_it_comes_with_the_package_and_needs_no_network(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for variable in ("REGARDANT_CACHE", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    loaded = load("tiny")
    assert loaded.source == bundled_model("tiny")
    assert not (tmp_path / "cache").exists()
    assert "".join(loaded.generate("It was", max_tokens=8, temperature=0.8, seed=1)).strip()
    (entry,) = (entry for entry in models() if entry.name == "tiny")
    assert entry.nbytes <= 8_000_000
    assert {path.name for path in bundled_model("tiny").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_it_stores_half_precision():
    header = (bundled_model("tiny") / "model.safetensors").read_bytes()[:200]
    assert b'"F16"' in header
    assert b'"F32"' not in header


def test_text_that_it_has_not_seen_costs_less_than_with_ppmd(tiny):
    text = UNSEEN.read_text(encoding="utf-8")
    ids = np.asarray(tiny.encode(text))
    T = tiny.config.context
    total = 0.0
    # Rows half overlapping: each label once, after half a row or more.
    for first in range(0, len(ids) - 1, T // 2):
        row, labels = ids[first : first + T], ids[first + 1 : first + T + 1]
        scores = tiny.logits(row[: len(labels)])[0].astype(np.float64)
        scores -= scores.max(-1, keepdims=True)
        logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        new = slice(0 if first == 0 else T // 2, None)
        total -= logp[np.arange(len(labels)), labels][new].sum()
    assert total / len(text.encode()) < PPMD


def test_the_readmes_example_looks_at_what_followed_last_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "It was Miss Bates who came, and they all sat down with Miss"
    assert main(["look", text, "--model", "tiny", "--layers", "1", "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)["sources"]
    assert (first["token"]["text"], first["token"]["index"]) == (" B", 4)
    assert first["weight"] == pytest.approx(0.949, abs=0.0006)
    assert main(["look", text, "--model", "tiny", "--layers", "1"]) == 0
    assert "over the heads of layer 1." in capsys.readouterr().out
    assert main(["generate", text, "--model", "tiny", "--max-tokens", "2", "--temperature", "0"]) == 0
    assert "Bates" in capsys.readouterr().out


def test_two_heads_at_least_copy_what_followed_last_time(tiny):
    weights = {name: torch.tensor(array) for name, array in tiny.weights.items()}
    vocabulary = np.setdiff1d(np.arange(tiny.config.vocab_size), [tiny.tokenizer.bos])
    text = np.asarray([tiny.encode(UNSEEN.read_text(encoding="utf-8"))[: tiny.config.context]])
    on = heads.probe(text, vocabulary, tiny.tokenizer.bos, tiny.config.context, seed=12)
    measured = heads.measure(weights, tiny.config, on)
    scores = sorted((score for layer in measured["induction"] for score in layer), reverse=True)
    assert scores[1] > 0.5
    assert all(math.isfinite(score) for score in scores)
