"""A run folder: begun from texts, or opened again where it stopped.

    RUN/run.json            settings, written first: what makes the folder a run
    RUN/tokenizer.json …    the tokenizer, the configuration: what does not change
    RUN/data/               token ids, mapped while training: see `data`
    RUN/checkpoints/        see `checkpoint`
    RUN/model.safetensors   the newest checkpoint's weights: with the files beside it, a Hugging Face model
    RUN/metrics.jsonl       a line for each step, and for each time that something was measured
    RUN/report.html         the same, drawn

Refused, each with what is amiss: a folder that holds something else, a run that another process trains, a text, a
tokenizer or a setting that is not what the run was begun with, weights of another shape. The number of steps may be
another, as long as no step made would have had another learning rate: in the warm-up, and on a trapezoid's top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regardant.errors import UserError
from regardant.lm.config import Config
from regardant.lm.fetch import try_lock
from regardant.train import checkpoint, data, settings, texts, vocabulary
from regardant.train.optimiser import adamw, learning_rate
from regardant.train.parameters import Parameters, require_memory
from regardant.writing import reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from regardant.train.settings import Settings

RUN, METRICS, LOCK, DATA = "run.json", "metrics.jsonl", ".lock", "data"
_VERSION = 1


@dataclasses.dataclass
class Training:
    """A run that is ready to be trained: what it is made of, and how far it has come."""

    folder: Path
    chosen: Settings
    config: Config
    facts: dict[str, Any]
    tokenizer_sha256: str
    begin_token: int | None
    train: data.Tokens
    valid: data.Tokens
    feed: data.Feed
    parameters: Parameters
    optimiser: torch.optim.AdamW
    step: int = 0
    seconds: float = 0.0
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def drawn(self) -> int:
        """How many rows were learned from: the data's position."""
        return self.step * self.chosen.batch * self.chosen.accumulate

    def state(self) -> dict[str, Any]:
        """What `state.json` holds, but for the files' fingerprints."""
        return {
            "version": _VERSION,
            "step": self.step,
            "rows_drawn": self.drawn,
            "seconds": self.seconds,
            "settings": self.chosen.plain(),
            "schedule": {"kind": self.chosen.schedule, "done": self.step, "of": self.chosen.steps},
            "config": checkpoint_config(self.folder),
            "tokenizer_sha256": self.tokenizer_sha256,
            "data": self.facts,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def save(self) -> Path:
        """Write a checkpoint of this very moment."""
        with _written(self.folder / METRICS):
            if (self.folder / METRICS).exists():
                checkpoint.sync(self.folder / METRICS)
        return checkpoint.save(self.folder, self.state(), self.parameters, self.optimiser, self.chosen.keep)

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`."""
        path = self.folder / METRICS
        with _written(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json; of one that is missing or damaged, nothing."""
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content


@contextlib.contextmanager
def _written(path: Path, left: str = "the last checkpoint is as it was") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}; {left}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder this process's own while it trains.

    Raises:
        UserError: it cannot be made or written, or another process trains in it.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {reason(error)}") from None
    try:
        if not try_lock(handle):
            raise UserError(f"{folder}: another process is training in it")
        yield
    finally:
        os.close(handle)
        if made and [path.name for path in folder.glob("*")] == [LOCK]:  # nothing was begun
            (folder / LOCK).unlink()
            folder.rmdir()


def refuse_what_is_no_run(folder: Path) -> None:
    """Refuse a folder that holds something else, which training would mix with or write over.

    Raises:
        UserError: it does.
    """
    try:
        if not folder.exists() or (folder / RUN).is_file():
            return
    except OSError as error:
        raise UserError(f"cannot write {folder}: {reason(error)}") from None
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; --out takes a folder")
    inside = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    if inside:
        raise UserError(f"{folder}: is no run folder, and holds {inside[0]}; choose another for --out")


def open_run(
    folder: Path,
    named: Sequence[str],
    tokenizer: Path | None,
    size: str | None,
    given: Mapping[str, Any],
    *,
    resume: bool,
    report: Callable[[int, int, str], None] | None = None,
) -> Training:
    """Begin a run, or go on with one. The folder is locked by the caller.

    Args:
        folder: the run. `named`: texts; needed to begin. `tokenizer`: a tokenizer.json; None to make one.
        size: a size's name. `given`: settings by name, over the size's.
        resume: go on from the last checkpoint, where there is one.
        report: called with (bytes done, bytes in all, what is being done).

    Raises:
        UserError: whatever the opening of this file says.
    """
    last = checkpoint.newest(folder)
    if last is not None and not resume:
        raise UserError(
            f"{folder}: holds a training that has come to step {last.step}; --resume goes on with it, "
            "or choose another folder"
        )
    if last is None:
        if not named:
            what = "holds no checkpoint to go on from" if resume else "is to be begun"
            raise UserError(f"{folder}: {what}: give --data a file, a folder or a pattern")
        return _begin(folder, named, tokenizer, settings.settings(size, given), report)
    return _go_on(folder, last, named, tokenizer, size, given)


# ------------------------------------------------------------------------------------------------------ begin


def _begin(
    folder: Path,
    named: Sequence[str],
    tokenizer: Path | None,
    chosen: Settings,
    report: Callable[[int, int, str], None] | None,
) -> Training:
    paths = texts.find(named)
    _check_texts(paths)
    try:
        return _made(folder, paths, tokenizer, chosen, report)
    except BaseException:  # nothing half made stays
        with contextlib.suppress(OSError):  # what went wrong first is what is said
            _unmake(folder)
        raise


def _unmake(folder: Path) -> None:
    checkpoint.clear(folder)
    shutil.rmtree(folder / DATA, ignore_errors=True)
    for name in (RUN, METRICS, *checkpoint.BESIDE):
        (folder / name).unlink(missing_ok=True)


def _made(
    folder: Path,
    paths: list[Path],
    tokenizer: Path | None,
    chosen: Settings,
    report: Callable[[int, int, str], None] | None,
) -> Training:
    with _written(folder, "nothing was begun"):
        _unmake(folder)
        checkpoint.write_json(folder / RUN, {"version": _VERSION, "settings": chosen.plain()})
        made, beside = _tokenizer(folder, paths, tokenizer, chosen, report)
        facts = _data(folder, paths, made, beside, chosen, report)
        bos, eos = facts["before"], facts["after"]
        mapping = settings.hugging_face_config(chosen, facts["vocab_size"], bos, eos)
        checkpoint.write_json(folder / "config.json", mapping)
        ends = {
            name: index for name, index in (("bos_token_id", bos), ("eos_token_id", eos)) if index is not None
        }
        checkpoint.write_json(folder / "generation_config.json", ends)
    training = _assembled(folder, chosen, facts)
    training.parameters.begin(chosen.seed, chosen.layers)
    torch.manual_seed(chosen.seed)
    if not len(training.valid) and chosen.valid_share > 0:
        training.notes.append("no document could be set aside for validation: the texts are one document")
    return training


def _check_texts(paths: list[Path]) -> None:
    """Read every text once before anything is made of any, so that a bad one is found at once."""
    for path in paths:
        for _ in texts.documents(path):
            pass


def _tokenizer(
    folder: Path,
    paths: list[Path],
    given: Path | None,
    chosen: Settings,
    report: Callable[[int, int, str], None] | None,
) -> tuple[Any, dict[str, Any]]:
    if given is not None:
        made, beside = vocabulary.given(given)
        content = given.read_text(encoding="utf-8")
    else:
        total, done = sum(path.stat().st_size for path in paths), 0

        def learned_from() -> Iterator[str]:
            nonlocal done
            for number, document in data.counted(paths):
                if not data.is_set_aside(number, chosen.valid_share):
                    yield document
                done += len(document)
                if report is not None:
                    report(min(done, total), total, "making a tokenizer")

        made = vocabulary.learn(learned_from(), chosen.vocab_size)
        beside = vocabulary.settings(made)
        content = made.to_str()
    beside["model_max_length"] = chosen.context
    temporary = folder / ".writing-tokenizer"
    temporary.write_text(content, encoding="utf-8")
    checkpoint.sync(temporary)
    temporary.replace(folder / "tokenizer.json")
    checkpoint.write_json(folder / "tokenizer_config.json", beside)
    return made, beside


def _data(
    folder: Path,
    paths: list[Path],
    made: Any,
    beside: dict[str, Any],
    chosen: Settings,
    report: Callable[[int, int, str], None] | None,
) -> dict[str, Any]:
    total, done = sum(path.stat().st_size for path in paths), 0

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if report is not None:
            report(min(done, total), total, "turning text into tokens")

    ids = [
        made.token_to_id(beside[role]) if beside.get(role) else None for role in ("bos_token", "eos_token")
    ]
    part = folder / ".writing-data"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    facts = data.build(
        part,
        paths,
        made,
        texts.fingerprint(folder / "tokenizer.json"),
        data.Ends(*ids),
        chosen.valid_share,
        read,
    )
    facts["vocab_size"] = 1 + max(made.get_vocab(with_added_tokens=True).values())
    facts["special"] = sorted(made.get_added_tokens_decoder())
    checkpoint.write_json(part / "data.json", facts)
    left, aside = (facts[name]["tokens"] for name in data.PARTS)
    if left <= chosen.context < aside:
        raise UserError(
            f"--valid-share {chosen.valid_share} sets {aside:,} tokens aside and leaves {left:,} to learn from, "
            f"and a row takes {chosen.context + 1:,}: give more text, or a smaller share"
        )
    data.Order(left, chosen.context, chosen.seed)  # too little text is found here
    checkpoint.sync(*part.iterdir(), part)
    shutil.rmtree(folder / DATA, ignore_errors=True)
    part.rename(folder / DATA)
    checkpoint.sync(folder)
    return facts


def _assembled(folder: Path, chosen: Settings, facts: dict[str, Any]) -> Training:
    config = Config.from_hugging_face(checkpoint_config(folder))
    train, valid = (data.Tokens(folder / DATA, name, facts) for name in data.PARTS)
    ordinary = np.setdiff1d(np.arange(config.vocab_size), np.asarray(facts["special"], np.int64))
    order = data.Order(len(train), chosen.context, chosen.seed)
    early = chosen.repeat_steps * chosen.batch * chosen.accumulate
    feed = data.Feed(train, order, chosen.repeats, facts["before"], ordinary, early)
    require_memory(config, chosen)
    parameters = Parameters(config, chosen.device)
    return Training(
        folder=folder,
        chosen=chosen,
        config=config,
        facts=facts,
        tokenizer_sha256=facts["tokenizer_sha256"],
        begin_token=facts["before"],
        train=train,
        valid=valid,
        feed=feed,
        parameters=parameters,
        optimiser=adamw(parameters, chosen),
    )


# ------------------------------------------------------------------------------------------------------ go on


def _go_on(
    folder: Path,
    last: checkpoint.Checkpoint,
    named: Sequence[str],
    tokenizer: Path | None,
    size: str | None,
    given: Mapping[str, Any],
) -> Training:
    state = last.state
    if state["version"] != _VERSION:
        raise UserError(
            f"{last.folder}: is of version {state['version']}, and this regardant reads {_VERSION}; "
            "train anew in another folder"
        )
    free = settings.FREE
    if _steps_may_change(state["settings"], given, last.step):
        free |= {"steps"}
    chosen = settings.restored(state["settings"], given, size, str(folder), free)
    facts = state["data"]
    _same_tokenizer(folder, state, tokenizer)
    _same_texts(folder, facts, named)
    if checkpoint_config(folder) != state["config"]:
        raise UserError(
            f"{folder}: its config.json is not that of {last.folder}: put that one back, or train in another folder"
        )
    training = _assembled(folder, chosen, facts)
    for part in (training.train, training.valid):
        part.check()
    checkpoint.restore(last, training.parameters, training.optimiser)
    training.step, training.seconds = last.step, state["seconds"]
    if not (folder / METRICS).exists():
        training.notes.append(f"{METRICS} was gone, and begins anew behind step {last.step}")
    with _written(folder / METRICS):
        checkpoint.clear(folder)
        checkpoint.show(folder, last.folder)
        _forget_after(folder / METRICS, last.step)
    for what, now in (("torch", torch.__version__), ("threads", torch.get_num_threads())):
        if state[what] != now:
            training.notes.append(
                f"{what} was {state[what]} and is {now}: the loss may differ in its last digits from here on"
            )
    return training


def _steps_may_change(before: Mapping[str, Any], given: Mapping[str, Any], done: int) -> bool:
    """Whether every step that was made would have had the same learning rate with the number of steps given now."""
    was = settings.Settings(**before)
    now = dataclasses.replace(was, steps=given.get("steps", was.steps))
    return now.steps >= done and all(
        learning_rate(step, was) == learning_rate(step, now) for step in range(done)
    )


def _same_tokenizer(folder: Path, state: dict[str, Any], given: Path | None) -> None:
    ours = folder / "tokenizer.json"
    for path, way_out in ((ours, "put that one back"), (given, "leave --tokenizer out to go on")):
        if path is not None and texts.fingerprint(path) != state["tokenizer_sha256"]:
            raise UserError(f"{path}: is not the tokenizer that {folder} was begun with; {way_out}")


def _same_texts(folder: Path, facts: dict[str, Any], named: Sequence[str]) -> None:
    """Compare the texts with what they were: all that are named, wherever they lie now; else those still there."""
    before = {text["path"]: text["sha256"] for text in facts["texts"]}
    paths = texts.find(named) if named else [Path(name) for name in before if Path(name).exists()]
    now = {str(path.resolve()): texts.fingerprint(path) for path in paths}
    for name, sha256 in now.items():
        if before.get(name, sha256) != sha256:
            raise UserError(
                f"{name}: was changed since {folder} was begun; put it back as it was, or train in another folder"
            )
    if named and sorted(now.values()) != sorted(before.values()):
        added = next((name for name in now if now[name] not in before.values()), None)
        gone = next((name for name in before if before[name] not in now.values()), None)
        what = f"{added} is new" if added else f"{gone} is missing" if gone else "one was named twice"
        raise UserError(f"{folder} was begun with other texts: {what}; name the same ones, or none")


def _forget_after(path: Path, step: int) -> None:
    """Keep the lines up to a step: those after it come again. A last line that was cut off goes too."""
    if not path.exists():
        return
    temporary = path.with_name(".writing-metrics")
    with path.open(encoding="utf-8") as file, temporary.open("w", encoding="utf-8") as kept:
        for number, line in enumerate(file, 1):
            if line.endswith("\n") and _step(path, number, line) <= step:
                kept.write(line)
    checkpoint.sync(temporary)
    temporary.replace(path)


def _step(path: Path, number: int, line: str) -> int:
    try:
        step: int = json.loads(line)["step"] + 0
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: line {number} is none that a training wrote; take it out, or delete the file"
        ) from None
    return step
