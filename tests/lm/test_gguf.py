"""GGUF files: equal to what the gguf package and transformers read from them, and refused when they are not whole."""

import struct

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import LLAMA3_ROPE, random_model, write_gguf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from regardant.lm import gguf_file
from regardant.lm.config import Config, UnsupportedModelError
from regardant.lm.errors import LoadError, UserError
from regardant.lm.language_model import LanguageModel
from regardant.lm.load import load
from regardant.lm.model import expected_weights

KIND = gguf.GGMLQuantizationType
GGUF_FAMILIES = ["llama", "llama untied, with biases", "mistral", "qwen2", "qwen3"]


def window_of(model):
    window = getattr(model.config, "sliding_window", None) if model.config.model_type == "mistral" else None
    return [("llama.attention.sliding_window", window)] if window else []


def state(model):
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.numpy()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def dequantisable():
    """Every type the package can dequantise, by its own word."""
    for kind in KIND:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        yield pytest.param(kind, block, size, id=kind.name)


def test_header_is_what_the_gguf_package_reads(smollm2_gguf):
    theirs, ours = gguf.GGUFReader(smollm2_gguf), gguf_file.open_file(smollm2_gguf)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        if field.types[0] == gguf.GGUFValueType.FLOAT32:
            assert np.float32(ours.metadata[key]) == np.float32(field.contents()), key
        else:
            assert ours.metadata[key] == field.contents(), key
    assert [*ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        found = (mine.start, mine.nbytes, mine.kind, mine.shape[::-1])
        assert found == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type, tuple(tensor.shape))


def test_every_type_of_metadata_value_survives(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    values = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000,
        "int32": -2_000_000_000, "uint64": 2**63, "int64": -(2**62), "float32": 1e-5, "float64": 0.1,
        "bool": True, "string": "é😀",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    arrays = {"ints": [1, -2, 3], "strings": ["a", "", "é"], "floats": [0.5, -2.0], "flags": [True, False]}
    for name, value in arrays.items():
        writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = gguf_file.open_file(tmp_path / "values.gguf").metadata
    assert {name: metadata[name] for name in values | arrays} == values | arrays


@pytest.mark.parametrize(("kind", "block", "size"), [*dequantisable()])
def test_every_type_gives_what_the_package_dequantises(tmp_path, kind, block, size):
    # More blocks than one job takes, and not a multiple of it. Small bytes: no scale is infinite or NaN.
    blocks = 2 * (gguf_file.shared.CHUNK // block) + 5 if kind == KIND.Q4_0 else 37
    raw = np.random.default_rng(3).integers(0, 60, (3, blocks * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.open_file(tmp_path / "one.gguf")
    name, shape = "model.embed_tokens.weight", (3, blocks * block)
    weights = gguf_file.read_weights(file, {name: shape}, np.dtype(np.float32))
    np.testing.assert_array_equal(weights[name], gguf.dequantize(raw, kind), strict=True)
    wide = gguf_file.read_weights(file, {name: shape}, np.dtype(np.float64))
    np.testing.assert_array_equal(wide[name], gguf.dequantize(raw, kind).astype(np.float64), strict=True)


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_float32_weights_come_back_bit_for_bit(tmp_path, family):
    model = random_model(family)
    path = write_gguf(tmp_path / "model.gguf", model, metadata=window_of(model))
    loaded = load(path)
    assert set(loaded.weights) == set(state(model))
    for name, weight in state(model).items():
        np.testing.assert_array_equal(loaded.weights[name], weight, err_msg=name, strict=True)
    assert loaded.config == Config.from_hugging_face(model.config.to_dict())
    assert loaded.name == "model"
    assert loaded.source == path


@pytest.mark.parametrize("kind", [KIND.Q8_0, KIND.Q4_1, KIND.F16, KIND.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_that_transformers_reads(tmp_path, family, kind):
    model = random_model(family)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    # It is told the configuration: of the file's, it overlooks the head width of qwen3.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, config=model.config
    )
    ours = load(path).weights
    for name, weight in state(theirs).items():
        np.testing.assert_array_equal(ours[name], weight, err_msg=name, strict=True)


def test_float32_tensors_stay_in_the_file_and_float64_ones_do_not(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_model("qwen2"))
    assert not any(weight.flags.writeable for weight in load(path).weights.values())
    wide = load(path, dtype="float64").weights
    assert {weight.dtype for weight in wide.values()} == {np.dtype(np.float64)}
    np.testing.assert_array_equal(wide["model.norm.weight"], load(path).weights["model.norm.weight"])


def test_smollm2_is_the_model_that_transformers_reads(smollm2, smollm2_gguf):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    fields = theirs.config.to_dict() | {"quantization_config": None}
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))
    assert smollm2.config == Config.from_hugging_face(fields)
    for name, weight in state(theirs).items():
        np.testing.assert_array_equal(smollm2.weights[name], weight, err_msg=name, strict=True)


def llama3_factors(head_width=16, theta=500_000.0, **changes):
    """What the converter stores: how much transformers slows each frequency down."""
    config = transformers.LlamaConfig(
        head_dim=head_width, hidden_size=64, rope_parameters=LLAMA3_ROPE | {"rope_theta": theta} | changes
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / theta ** (torch.arange(0, head_width, 2) / head_width)
    return (plain / frequencies).numpy().astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_factors(tmp_path, factor):
    model = random_model("llama3 rope")
    model.config.rope_parameters["factor"] = factor
    factors = llama3_factors(factor=factor)
    path = write_gguf(tmp_path / "model.gguf", model, extra=[("rope_freqs.weight", factors)])
    assert load(path).config == Config.from_hugging_face(model.config.to_dict())


@pytest.mark.parametrize("change", ["another rule", "too few", "all the same"])
def test_other_rotary_factors_are_refused(tmp_path, change):
    factors = {
        "another rule": llama3_factors(high_freq_factor=8.0),
        "too few": llama3_factors()[:4],
        "all the same": 2 * np.ones(8, np.float32),
    }[change]
    model = random_model("llama3 rope")
    path = write_gguf(tmp_path / "model.gguf", model, extra=[("rope_freqs.weight", factors)])
    with pytest.raises(LoadError, match="does not follow Llama 3's rule"):
        load(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_scalings_are_refused_by_name(tmp_path, kind):
    path = write_gguf(
        tmp_path / "m.gguf", random_model("llama"), metadata=[("llama.rope.scaling.type", kind)]
    )
    with pytest.raises(UnsupportedModelError, match=kind):
        load(path)


def test_other_architectures_and_experts_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match="architecture 'mamba' is not implemented"):
        load(tmp_path / "other.gguf")
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"), metadata=[("llama.expert_count", 8)])
    with pytest.raises(LoadError, match="mixture of 8 experts"):
        load(path)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ([("llama.rope.dimension_count", 8)], "rope.dimension_count 8 differs from the head width 16"),
        ([("split.count", 3)], "one of 3 parts"),
        ([("llama.attention.sliding_window", "wide")], "must be one number for all layers; got 'wide'"),
    ],
)
def test_metadata_that_means_another_model_is_refused(tmp_path, metadata, sentence):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), metadata=metadata)
    with pytest.raises(LoadError, match=sentence):
        load(path)


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    model = random_model("llama")
    path = write_gguf(
        tmp_path / "model.gguf", model, extra=[("blk.7.attn_q.weight", np.ones((4, 4), np.float32))]
    )
    with pytest.raises(LoadError, match=r"does not use model.layers.7.self_attn.q_proj.weight \(4, 4\)"):
        load(path)
    path = write_gguf(tmp_path / "odd.gguf", model, extra=[("blk.0.ssm_a", np.ones(4, np.float32))])
    with pytest.raises(LoadError, match=r"'blk.0.ssm_a' belongs to no model that is implemented"):
        load(path)
    with pytest.raises(LoadError, match=r"lacks lm_head.weight \(300, 64\)"):
        gguf_file.read_weights(
            gguf_file.open_file(write_gguf(tmp_path / "tied.gguf", model)),
            expected_weights(load(write_gguf(tmp_path / "u.gguf", random_model("mistral"))).config),
            np.dtype(np.float32),
        )


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path):
    model = random_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model, extra=[("output_norm.bias", np.ones(4, np.int32))])
    file = gguf_file.open_file(path)
    expected = {"model.norm.bias": (4,)}
    whole = gguf_file.GGUFFile(
        path, file.data, file.metadata, {"output_norm.bias": file.tensors["output_norm.bias"]}
    )
    with pytest.raises(LoadError, match=r"'output_norm.bias' is of type I32, which the gguf package cannot"):
        gguf_file.read_weights(whole, expected, np.dtype(np.float32))


def test_a_file_cut_short_anywhere_gives_one_sentence(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", random_model("llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    places = [
        0,
        1,
        3,
        4,
        7,
        8,
        15,
        23,
        24,
        31,
        40,
        100,
        *range(200, len(whole) - 1, len(whole) // 97),
        len(whole) - 33,
    ]
    for place in places:
        cut.write_bytes(whole[:place])
        with pytest.raises(LoadError, match=r"cut short|is empty|is not a GGUF file|is damaged"):
            load(cut)
    with pytest.raises(LoadError, match=rf"it has {len(whole) - 33:,} of [\d,]+ bytes"):
        load(cut)


def outcome(path):
    """Load a file that may be refused."""
    try:
        return load(path)
    except UserError as error:
        return error


def test_damage_anywhere_in_the_header_never_gives_a_traceback_of_numpy(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", random_model("llama")).read_bytes()
    header = whole.index(b"output_norm.weight")
    bad = tmp_path / "bad.gguf"
    generator = np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(whole)
        place = int(generator.integers(4, header))
        damaged[place : place + 8] = generator.bytes(int(generator.integers(1, 9)))
        bad.write_bytes(damaged)
        assert isinstance(outcome(bad), UserError | LanguageModel), place


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (b"PK\x03\x04" + bytes(60), "begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "is GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 6, 2**60), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "entries are of unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 99), "has 99 axes"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 999, 0), "of type 999"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "in blocks of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 0, 2**63), "cut short"),
    ],
)
def test_headers_that_lie_are_found_out(tmp_path, start, sentence):
    (tmp_path / "bad.gguf").write_bytes(start)
    with pytest.raises(LoadError, match=sentence):
        gguf_file.open_file(tmp_path / "bad.gguf")


def test_a_file_without_weights_says_so(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_head_count(4)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(LoadError, match=r"lacks llama.feed_forward_length|holds no weights"):
        load(tmp_path / "vocabulary.gguf")
