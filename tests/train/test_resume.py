"""Killed for real and gone on with: the same losses, bit for bit, and what may not have changed."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regardant.errors import UserError
from regardant.train import checkpoint, run
from train.corpus import SMALL, command, flags, regardant, text, train

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LONG = {**SMALL, "steps": 24, "repeats": 0.3, "accumulate": 2}


def numbers(folder):
    """Everything in the metrics that is not a time."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in {"seconds", "tokens_per_s"}}
        for line in lines
    ]


def same_weights(one, other):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, small_text):
    """The run of `LONG`, uninterrupted, in a process like those that are killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    killed(folder, small_text, 0, "never")
    return folder


def killed(folder, text_file, seed, mode):
    script = Path(__file__).with_name("killed.py")
    arguments = [str(folder), str(text_file), json.dumps(LONG), str(seed), mode]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mode", ["files", "moments"])
def test_killed_at_any_instant_it_comes_to_the_same_end(tmp_path, small_text, whole_run, mode, seed):
    folder = tmp_path / "run"
    at = killed(folder, small_text, seed, mode)
    assert len(at) >= 4
    assert numbers(folder) == numbers(whole_run)
    same_weights(folder, whole_run)
    steps = [step for step in at if step is not None]
    assert steps == sorted(steps)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000021",
        "step-00000024",
    ]
    assert not list(folder.glob(".writing*"))


def test_the_command_is_killed_and_goes_on(tmp_path, small_text, whole_run):
    folder = tmp_path / "run"
    arguments = ["train", "--data", small_text, "--out", folder, *flags(LONG)]
    child = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    while not list(folder.glob("checkpoints/step-0000000[3-9]")):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    refused = regardant(*arguments)
    assert refused.returncode == 2
    assert "--resume goes on with it" in refused.stderr
    done = regardant("train", "--out", folder, "--resume", "--json", env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 24
    assert numbers(folder) == numbers(whole_run)


def test_interrupted_it_finishes_the_step_and_keeps_it(tmp_path, small_text):
    folder = tmp_path / "run"
    settings = {
        **LONG,
        "steps": 100_000,
        "checkpoint_every": 100_000,
        "eval_every": 100_000,
        "heads_every": 100_000,
    }
    arguments = ["train", "--data", small_text, "--out", folder, *flags(settings)]
    child = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    while not (folder / "metrics.jsonl").exists() or '"loss"' not in (folder / "metrics.jsonl").read_text():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate()
    assert child.returncode == 0
    assert "--resume goes on" in said
    last = checkpoint.newest(folder)
    assert last is not None
    assert last.step == numbers(folder)[-1]["step"]


def test_what_changed_is_refused_by_name(tmp_path, small_text):
    story = tmp_path / "story.txt"
    story.write_bytes(small_text.read_bytes())
    folder = tmp_path / "run"
    stopped = {**SMALL, "steps": 6}
    train(folder, [story], stopped)

    def refused(match, given=(), named=(story,), **options):
        with pytest.raises(UserError, match=match):
            train(folder, named, given, resume=True, **options)

    refused("begun with --width 32; got --width 64", {"width": 64})
    refused("begun with --width 32; got --size micro, which has 192", size="micro")
    refused("begun with --steps 6; got --steps 7, with which .* other learning rates", {"steps": 7})
    refused("begun with no --qk-norm; got --qk-norm", {"qk_norm": True})
    refused("begun with --heads 2; got --heads 3", {"heads": 3})
    refused("^--lr must be greater than 0; got nan", {"lr": math.nan})
    refused(
        "begun with other texts: .*other.txt is new", named=[story, _written(tmp_path / "other.txt", "x")]
    )
    other = _written(tmp_path / "other.json", (folder / "tokenizer.json").read_text() + " ")
    refused("other.json: is not the tokenizer", tokenizer=other)
    for name, match in (
        ("tokenizer.json", "is not the tokenizer that"),
        ("config.json", "config.json is not that of"),
        (
            "checkpoints/step-00000006/model.safetensors",
            "is damaged, model.safetensors is not what was written",
        ),
        ("checkpoints/step-00000006/state.json", "is damaged"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before.replace(b"1", b"2") + b" ")
        refused(match, named=())
        (folder / name).write_bytes(before)
    tokens = folder / "data" / "train.ids.bin"
    before = tokens.read_bytes()
    for changed, match in (
        (before[:-1] + bytes([before[-1] ^ 1]), "was changed since it was written"),
        (before + b" ", f"has {len(before) + 1:,} bytes, not {len(before):,}"),
    ):
        tokens.write_bytes(changed)
        refused(f"train.ids.bin: {match}", named=())
    tokens.write_bytes(before)
    starts = folder / "data" / "train.starts.bin"
    before = starts.read_bytes()
    starts.write_bytes(before[:-8] + bytes([before[-8] ^ 1]) + before[-7:])
    refused("train.starts.bin: was changed since it was written", named=())
    starts.write_bytes(before)
    config = folder / "config.json"
    before = config.read_bytes()
    config.write_bytes(before[:-20])
    refused("config.json is not that of", named=())
    config.write_bytes(before)
    metrics = folder / "metrics.jsonl"
    before = metrics.read_text()
    for damage in ("garbage", "[]", '{"loss": 1}', '{"step": null}'):
        metrics.write_text(f"{damage}\n{before}")
        refused("metrics.jsonl: line 1 is none that a training wrote", named=())
    metrics.write_text(before)
    moved = _written(tmp_path / "moved.txt", story.read_text())
    train(folder, [moved], {**stopped, "keep": 3}, resume=True)  # the same text, and what may differ
    story.write_text(story.read_text().replace("king", "ring"))
    refused("story.txt: was changed since")
    refused("story.txt: was changed since", named=())
    story.unlink()
    train(folder, [], resume=True)  # the token file is what counts, and it is as it was


def test_a_state_of_another_meaning_or_version_is_refused(tmp_path, small_text):
    folder = tmp_path / "run"
    train(folder, [small_text], {**SMALL, "steps": 3})
    path = folder / "checkpoints" / "step-00000003" / "state.json"
    whole = json.loads(path.read_bytes())
    for changed in ({"files": {}}, {**whole, "step": 2}, {**whole, "settings": {}}, []):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match="step-00000003: is damaged"):
            train(folder, [], resume=True)
    later = {name: value for name, value in whole.items() if name != "sha256"} | {"version": 2}
    path.write_text(json.dumps({**later, "sha256": checkpoint._digest(later)}))
    with pytest.raises(UserError, match="is of version 2, and this regardant reads 1"):
        train(folder, [], resume=True)
    path.write_text(json.dumps(whole))
    (folder / "metrics.jsonl").unlink()
    assert "metrics.jsonl was gone" in train(folder, [], resume=True).notes[0]


def test_steps_may_be_others_as_long_as_no_learning_rate_was(tmp_path, small_text):
    flat = {**SMALL, "schedule": "trapezoid", "warmup": 2, "steps": 10}
    train(tmp_path / "run", [small_text], flat, stop=_after(3))
    train(tmp_path / "run", [], {"steps": 20}, resume=True, stop=_after(3))
    with pytest.raises(UserError, match="begun with --warmup 2; got --warmup 1"):
        train(tmp_path / "run", [], {"steps": 20, "warmup": 1}, resume=True)
    for few in (5, 6):  # too few, and a last side that would have begun with the last step made
        with pytest.raises(UserError, match=f"begun with --steps 20; got --steps {few}"):
            train(tmp_path / "run", [], {"steps": few}, resume=True)
    train(tmp_path / "run", [], {"steps": 12}, resume=True)
    train(tmp_path / "whole", [small_text], {**flat, "steps": 12})
    losses = [[r for r in numbers(tmp_path / name) if "loss" in r] for name in ("run", "whole")]
    assert losses[0] == losses[1]
    with pytest.raises(UserError, match="begun with --steps 12; got --steps 13"):
        train(tmp_path / "run", [], {"steps": 13}, resume=True)


def _after(steps):
    """Stop once so many steps were made."""
    asked = iter(range(steps + 1))
    return lambda: next(asked) == steps


def _written(path, content):
    path.write_text(content, encoding="utf-8")
    return path


def test_a_folder_of_something_else_is_left_alone(tmp_path, small_text):
    (tmp_path / "notes.txt").write_text("mine")
    for out, sentence in ((tmp_path, "is no run folder, and holds notes.txt"), (small_text, "is a file")):
        done = regardant("train", "--data", small_text, "--out", out)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_do_not_train_in_one_folder(tmp_path):
    with (
        run.locked(tmp_path / "run"),
        pytest.raises(UserError, match="another process is training in it"),
        run.locked(tmp_path / "run"),
    ):
        pass


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, small_text):
    """A limit on the size of files stands in for the disk: the optimiser's file is the largest."""
    folder = tmp_path / "run"
    train(folder, [small_text], {**SMALL, "steps": 3, "checkpoint_every": 3})
    size = (folder / "checkpoints/step-00000003/optimiser.safetensors").stat().st_size
    other = tmp_path / "other"
    begun = shlex.join(command("train", "--data", small_text, "--out", other, *flags({**SMALL, "steps": 3})))
    limited = subprocess.run(
        ["bash", "-c", f"ulimit -f {(size - 1) // 1024}; exec {begun}"],
        capture_output=True, text=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert limited.returncode == 2, limited.stderr
    assert "cannot write a checkpoint in" in limited.stderr
    assert "the last good checkpoint is" in limited.stderr
    assert "step-00000000" in limited.stderr
    assert len(limited.stderr.splitlines()) == 1
    last = checkpoint.newest(other)
    assert last is not None
    assert last.step == 0
    done = regardant("train", "--out", other, "--resume", env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_a_loss_that_is_no_number_stops_before_it_reaches_the_weights(tmp_path, small_text):
    folder = tmp_path / "run"
    settings = {**SMALL, "steps": 30, "lr": 1e30, "warmup": 0, "clip": 0.0, "checkpoint_every": 1}
    with pytest.raises(UserError, match=r"is (nan|inf) at step \d+; the last good checkpoint is .*step-"):
        train(folder, [small_text], settings)
    last = checkpoint.newest(folder)
    assert last is not None
    assert last.step >= 1


def test_an_unwritable_folder_is_one_sentence(tmp_path, small_text):
    (tmp_path / "file").write_text("")
    done = regardant("train", "--data", small_text, "--out", tmp_path / "file" / "run")
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_text_can_be_long_gone_and_the_seed_decides(tmp_path):
    path = _written(tmp_path / "a.txt", text(40_000))
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path / name, [path], {**SMALL, "steps": 2, "seed": seed})
        losses.append(numbers(tmp_path / name))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
