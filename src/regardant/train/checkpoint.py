"""Checkpoints: everything that a training needs to go on, in one folder that is there whole or not at all.

A checkpoint is written into a folder with a temporary name; each file and the folder are synced to the disk; then the
folder is renamed, which is one step. Older ones are renamed away before they are deleted. So a `step-…` folder is
always complete, whatever instant the process is killed at. It is a Hugging Face folder too:

    RUN/checkpoints/step-00000100/   model.safetensors config.json generation_config.json tokenizer.json
                                     tokenizer_config.json optimiser.safetensors state.json

`optimiser.safetensors` holds AdamW's averages by the names of the weights, and the state of torch's random numbers.
`state.json` holds the rest: settings, step, the data's position and fingerprint, and the SHA-256 of the other files.
RUN itself shows the newest: its `model.safetensors` is a second name (a hard link) for the checkpoint's.

Refused: a checkpoint whose files are not those that its state names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import sys
from typing import TYPE_CHECKING, Any

import torch

from regardant.errors import UserError
from regardant.train.texts import fingerprint
from regardant.writing import reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regardant.train.parameters import Parameters

FOLDER = "checkpoints"
MODEL, OPTIMISER, STATE = "model.safetensors", "optimiser.safetensors", "state.json"
# What a run folder shows of its newest checkpoint besides the weights; none of it changes in a run.
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_WRITING, _DELETING = ".writing-", ".deleting-"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One that is there: where, and what its state.json says."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """How many updates were made."""
        return int(self.state["step"])


def save(
    run: Path, state: dict[str, Any], parameters: Parameters, optimiser: torch.optim.AdamW, keep: int
) -> Path:
    """Write a checkpoint, show it in the run folder, and let all but the newest `keep` go.

    Raises:
        UserError: it could not be written; the ones before are as they were.
    """
    where = run / FOLDER
    folder = where / f"step-{int(state['step']):08d}"
    if folder.exists():  # a run comes to a step in one way only
        return folder
    with _sentence(run):
        where.mkdir(exist_ok=True)
        clear(run)
        part = where / f"{_WRITING}{secrets.token_hex(6)}"
        part.mkdir()
        try:
            for name in BESIDE:
                shutil.copyfile(run / name, part / name)
            _write_tensors(part / MODEL, dict(parameters.named()))
            _write_tensors(part / OPTIMISER, _optimiser_tensors(parameters, optimiser))
            for name in (MODEL, OPTIMISER):  # the package lets nobody but the owner read what it writes
                shutil.copymode(part / BESIDE[0], part / name)
            files = {path.name: fingerprint(path) for path in sorted(part.iterdir())}
            whole = {**state, "files": files}
            write_json(part / STATE, {**whole, "sha256": _digest(whole)})
            sync(*part.iterdir(), part)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        part.rename(folder)
        sync(where)
        show(run, folder)
        for old in folders(run)[:-keep]:
            _delete(old)
    return folder


def show(run: Path, folder: Path) -> None:
    """Make a checkpoint's weights the run folder's own, in one step."""
    temporary = run / f"{_WRITING}{secrets.token_hex(6)}"
    try:
        os.link(folder / MODEL, temporary)
    except OSError:  # not every file system has hard links: then a copy
        shutil.copyfile(folder / MODEL, temporary)
        sync(temporary)
    temporary.replace(run / MODEL)
    sync(run)


def newest(run: Path) -> Checkpoint | None:
    """The last checkpoint of a run, checked; None if there is none.

    Raises:
        UserError: it is damaged.
    """
    there = folders(run)
    if not there:
        return None
    folder = there[-1]
    way_out = "delete it to go on from the one before" if len(there) > 1 else "train anew in another folder"
    try:
        state = json.loads((folder / STATE).read_bytes())
        wrong = [] if state.pop("sha256") == _digest(state) else [STATE]
        wrong += [name for name, sha256 in state["files"].items() if fingerprint(folder / name) != sha256]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: is damaged ({error}); {way_out}") from None
    if wrong:
        raise UserError(f"{folder}: is damaged, {wrong[0]} is not what was written; {way_out}")
    return Checkpoint(folder, state)


def _digest(state: dict[str, Any]) -> str:
    """Tell a state from any other, by its meaning: the order of names and the spacing do not count."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def restore(checkpoint: Checkpoint, parameters: Parameters, optimiser: torch.optim.AdamW) -> None:
    """Put weights, averages and random numbers back as they were.

    Raises:
        UserError: the checkpoint is of a model of another shape.
    """
    from safetensors.torch import load_file

    weights, kept = load_file(checkpoint.folder / MODEL), load_file(checkpoint.folder / OPTIMISER)
    with torch.no_grad():
        for name, tensor in parameters.named():
            if name not in weights or weights[name].shape != tensor.shape:
                raise UserError(f"{checkpoint.folder}: holds a model of another shape: {name} does not fit")
            tensor.copy_(weights[name])
    torch.set_rng_state(kept["rng"])
    state = {}
    for number, leaf in enumerate(parameters.leaves.values()):
        if f"step.{number}" in kept:
            state[leaf] = {
                "step": kept[f"step.{number}"].to(leaf.device),
                **{key: torch.empty_like(leaf, requires_grad=False) for key in _AVERAGES},
            }
    if state:
        for key in _AVERAGES:
            parts = parameters.split({name: state[leaf][key] for name, leaf in parameters.leaves.items()})
            for name, part in parts.items():
                part.copy_(kept[f"{key}.{name}"])
    optimiser.state.update(state)


_AVERAGES = ("exp_avg", "exp_avg_sq")


def _optimiser_tensors(parameters: Parameters, optimiser: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    if optimiser.state:
        for number, leaf in enumerate(parameters.leaves.values()):
            tensors[f"step.{number}"] = optimiser.state[leaf]["step"]
        for key in _AVERAGES:
            whole = {name: optimiser.state[leaf][key] for name, leaf in parameters.leaves.items()}
            tensors |= {f"{key}.{name}": part for name, part in parameters.split(whole).items()}
    return tensors


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:  # copies, because parts of one leaf share their memory, which the package refuses
        save_file(
            {name: t.detach().cpu().clone() for name, t in tensors.items()}, path, metadata={"format": "pt"}
        )
    except SafetensorError as error:
        raise OSError(
            None, f"{error}".rpartition("I/O error: ")[2].rpartition(" (os error")[0] or str(error)
        ) from error


# ------------------------------------------------------------------------------------------------------- files


def write_json(path: Path, content: object) -> None:
    """Write JSON; where a file of the name is there, it is replaced in one step."""
    temporary = path.with_name(f"{_WRITING}{secrets.token_hex(6)}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(*paths: Path) -> None:
    """Have files and folders written to the disk. Windows cannot open folders, and does without."""
    for path in paths:
        if path.is_dir() and sys.platform == "win32":
            continue
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def clear(run: Path) -> None:
    """Delete what a sitting that was killed has left half written or half deleted."""
    for folder in (run, run / FOLDER):
        for pattern in (f"{_WRITING}*", f"{_DELETING}*", ".regardant-*.tmp"):
            for left in folder.glob(pattern):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted(path for path in (run / FOLDER).glob("step-*") if path.is_dir())


def _delete(folder: Path) -> None:
    away = folder.with_name(f"{_DELETING}{secrets.token_hex(6)}")
    folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


@contextlib.contextmanager
def _sentence(run: Path) -> Iterator[None]:
    """Say what could not be written, and what is left."""
    try:
        yield
    except OSError as error:
        there = folders(run)
        left = f"the last good checkpoint is {there[-1]}" if there else "there is no checkpoint yet"
        raise UserError(f"cannot write a checkpoint in {run}: {reason(error)}; {left}") from error
