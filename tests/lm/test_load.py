"""Models load as transformers saved them, whatever the layout, and a folder that is not whole says what is amiss."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from checkpoints import CONFIGS, random_model, write_folder, write_gguf

from regardant.lm import checkpoint
from regardant.lm.config import Config, UnsupportedModelError
from regardant.lm.errors import LoadError, UserError
from regardant.lm.load import load

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def state(model):
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.float().numpy()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "tiny", random_model("llama"))


def rewrite(folder, change, file="model.safetensors"):
    """Change a folder's tensors, a mapping from names to arrays, by a function."""
    tensors = dict(safetensors.numpy.load_file(folder / file))
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / file)


# ------------------------------------------------------------------------------------------------ equal weights


@pytest.mark.parametrize("shards", [None, "100KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_those_that_transformers_saved(tmp_path, kind, dtype, shards):
    model = random_model(kind).to(TYPES[dtype])
    write_folder(tmp_path / "tiny", model, **({} if shards is None else {"max_shard_size": shards}))
    assert (tmp_path / "tiny" / "model.safetensors.index.json").is_file() == (shards is not None)
    loaded = load(tmp_path / "tiny")
    expected = state(model)
    assert set(loaded.weights) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(loaded.weights[name], weight, err_msg=name, strict=True)
        # In the map they are read-only: float32 is used where it lies, the others are widened into memory.
        assert loaded.weights[name].flags.writeable == (dtype != "float32"), name
    assert loaded.config == Config.from_hugging_face(model.config.to_dict())
    assert (loaded.name, loaded.source) == ("tiny", tmp_path / "tiny")


@pytest.mark.parametrize("dtype", TYPES)
def test_float64_holds_the_same_values(tmp_path, dtype):
    model = random_model("llama").to(TYPES[dtype])
    loaded = load(write_folder(tmp_path / "tiny", model), dtype=np.float64)
    for name, weight in state(model).items():
        np.testing.assert_array_equal(loaded.weights[name], weight.astype(np.float64), strict=True)


def test_every_bfloat16_is_widened_exactly(folder):
    # All 65,536 of them, NaN and infinities and subnormals included.
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file({"all": every}, folder / "model.safetensors")
    weights = checkpoint.read_weights(folder, {"all": (1 << 16,)}, np.dtype(np.float32))
    np.testing.assert_array_equal(weights["all"].view(np.uint32), every.float().numpy().view(np.uint32))


def test_tensors_that_are_not_aligned_are_copied(folder):
    def stretch_header(raw):
        (length,) = struct.unpack_from("<Q", raw)
        return struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :]

    before = load(folder).weights
    file = folder / "model.safetensors"
    (folder / "odd.safetensors").write_bytes(stretch_header(file.read_bytes()))
    (folder / "odd.safetensors").replace(file)
    after = load(folder).weights
    assert all(weight.flags.aligned for weight in after.values())
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)


def test_logits_of_a_loaded_folder_are_those_of_transformers(tmp_path):
    model = random_model("qwen3")
    loaded = load(write_folder(tmp_path / "tiny", model, max_shard_size="100KB"))
    ids = np.random.default_rng(5).integers(0, 300, (2, 40))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    found = loaded.logits(ids)
    error = np.abs(found - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    assert error.max() <= 1e-4


def test_a_folder_and_the_gguf_of_it_are_the_same_model(tmp_path):
    model = random_model("llama untied, with biases")
    one = load(write_folder(tmp_path / "tiny", model))
    other = load(write_gguf(tmp_path / "tiny.gguf", model))
    assert one.config == other.config
    for name, weight in one.weights.items():
        np.testing.assert_array_equal(other.weights[name], weight)


# -------------------------------------------------------------------------------------- what older files carry


def test_gpt2_files_without_the_prefix_and_with_their_masks(tmp_path):
    model = random_model("gpt2")
    folder = write_folder(tmp_path / "tiny", model)

    def age(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 128, 128), np.uint8))
            tensors[f"h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)

    rewrite(folder, age)
    loaded = load(folder)
    assert set(loaded.weights) == set(state(model))
    for name, weight in state(model).items():
        np.testing.assert_array_equal(loaded.weights[name], weight)


def test_rotary_buffers_and_an_output_layer_beside_a_tied_embedding_are_passed_over(folder):
    def age(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    expected = set(load(folder).weights)
    rewrite(folder, age)
    assert set(load(folder).weights) == expected


def test_a_head_of_its_own_beside_a_tied_embedding_is_refused(folder):
    def part(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    rewrite(folder, part)
    with pytest.raises(
        LoadError, match=r"holds an lm_head.weight other than the embedding, though config.json says"
    ):
        load(folder)


# ------------------------------------------------------------------------------------------- what is not whole


def test_tensors_that_do_not_fit_are_all_named(folder):
    def spoil(tensors):
        tensors["model.norm.weight"] = np.ones(63, np.float32)
        tensors["model.layers.5.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
        for layer in range(2):
            for part in ("q", "k", "v"):
                del tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"]

    rewrite(folder, spoil)
    with pytest.raises(LoadError) as caught:
        load(folder)
    sentence = str(caught.value)
    assert sentence.startswith(f"{folder}: does not fit its configuration: it lacks model.layers.")
    assert "and 2 more; has in another shape model.norm.weight (63), not (64)" in sentence
    assert "does not use model.layers.5.mlp.up_proj.weight (2, 2)" in sentence


def test_an_output_layer_that_is_not_tied_must_be_there(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    with pytest.raises(LoadError, match=r"lacks lm_head.weight \(300, 64\)"):
        load(folder)


def test_types_that_are_not_read_are_named(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(64, np.int8)}))
    with pytest.raises(LoadError, match=r"tensor model.norm.weight is of type I8"):
        load(folder)


def test_a_file_cut_short_anywhere_gives_one_sentence(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for place in (0, 3, 7, 8, 9, 500, *range(1000, len(whole) - 1, len(whole) // 31), len(whole) - 1):
        file.write_bytes(whole[:place])
        with pytest.raises(LoadError, match=r"model.safetensors: is cut short"):
            load(folder)
    with pytest.raises(LoadError, match=rf"it has {len(whole) - 1:,} of {len(whole):,} bytes"):
        load(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not JSON",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
    ],
)
def test_a_damaged_header_gives_one_sentence(folder, header):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(LoadError, match=r"model.safetensors: is damaged: its header is not that of"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path / "tiny", random_model("llama"), max_shard_size="100KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(LoadError, match=rf"lacks 1 of \d files of its weights: {shard.name}"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "is not a model folder, it has no config.json"),
        ("config.json", "{", "config.json: is not valid JSON"),
        ("config.json", "[]", "config.json: must hold a JSON object; got list"),
        ("config.json", "{}", "model_type is missing"),
        ("config.json", '{"model_type": "mamba"}', "model_type 'mamba' is not implemented"),
        ("tokenizer.json", None, "tokenizer.json: there is no such file, and without it text"),
        ("model.safetensors", None, "holds no weights, neither model.safetensors nor"),
    ],
)
def test_what_a_folder_lacks_is_named(folder, name, content, sentence):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        load(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(LoadError, match="must hold a weight_map of tensor names to file names"):
        load(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"only as pytorch_model.bin, a pickle that could run code"):
        load(folder)


def test_a_gguf_file_in_a_folder_is_pointed_out(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(
        LoadError, match=r"has no config.json; to load model.gguf in it, give that file's path"
    ):
        load(tmp_path)


def test_a_configuration_that_is_not_implemented_is_refused_before_weights_are_read(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="yarn"):
        load(folder)


# --------------------------------------------------------------------------------------- what a name can mean


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smolm2", r"'smolm2' is not known, .*known are tiny, smollm2, .*; did you mean 'smollm2'\?"),
        ("qqq", r"'qqq' is not known, .*HuggingFaceTB/SmolLM2-135M$"),
        ("", "'' is not known"),
        ("a\x00b", "is not known"),
        ("x" * 5000, "is not known"),
        ("./nowhere", "there is no such folder or file"),
        ("/nowhere/at/all", "there is no such folder or file"),
        ("some/model.gguf", "there is no such folder or file"),
        ("model.gguf", "there is no such folder or file"),
        ("http://example.org/x", "there is no such folder or file"),
    ],
)
def test_names_that_mean_nothing(name, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=sentence):
        load(name)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(LoadError, match="give the folder it lies in"):
        load(tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(LoadError, match=r"notes.txt: is not a GGUF file: it begins with b'hell'"):
        load(tmp_path / "notes.txt")
    with pytest.raises(TypeError):
        load(3)


@pytest.mark.parametrize("dtype", [None, "float16", "half", np.int32, 3, [], ""])
def test_types_that_weights_cannot_have(folder, dtype):
    with pytest.raises(UserError, match='dtype must be "float32" or "float64"; got'):
        load(folder, dtype=dtype)


def test_a_file_that_vanishes_before_it_is_read_is_named(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "_files", lambda where: [where / "gone.safetensors"])
    with pytest.raises(LoadError, match=r"gone.safetensors: cannot be read: No such file or directory"):
        load(folder)


def test_progress_counts_bytes_to_the_end(tmp_path):
    seen = []
    model = random_model("llama").to(torch.bfloat16)
    load(write_folder(tmp_path / "tiny", model), progress=lambda *step: seen.append(step))
    done, totals, what = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == totals[0] == 4 * sum(weight.size for weight in state(model).values())
    assert set(what) == {"converting to float32"}


def test_an_error_in_a_job_ends_the_others():
    begun = []

    def fail():
        raise LoadError("no")

    jobs = [(1, fail)] + [(1, lambda: begun.append(1))] * 10_000
    with pytest.raises(LoadError, match="no"):
        checkpoint.shared.run(jobs, "testing", None)
    assert len(begun) < 10_000


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys, regardant.lm.load\n"
        "print([m for m in ('gguf', 'jinja2', 'safetensors', 'tokenizers', 'huggingface_hub', 'torch') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


def test_a_path_with_a_tilde_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert load("~/tiny").source == Path("~/tiny").expanduser()


def test_a_bundled_model_is_loaded_from_the_package_or_its_absence_is_said(tmp_path, monkeypatch):
    from regardant.lm import fetch

    monkeypatch.setattr(fetch, "__file__", str(tmp_path / "lm" / "fetch.py"))
    with pytest.raises(
        ValueError, match=r"tiny: this installation does not hold the model; .*recipes/tiny.sh"
    ):
        load("tiny")
    assert "tiny" not in {entry.name for entry in fetch.models()}
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    write_folder(folder, random_model("llama"))
    assert load("tiny").source == folder
    entry = next(entry for entry in fetch.models() if entry.name == "tiny")
    assert entry.path == folder
    assert entry.nbytes == sum(file.stat().st_size for file in folder.iterdir())
