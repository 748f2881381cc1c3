"""The model against transformers on tiny random models of every family, and against itself in pieces.

transformers' eager attention is the independent truth in float32. Its RMS norms and softmax are float32 whatever
the model's type, so float64 is compared with it for GPT-2 only, and NumPy with torch for all families. Query and
key weights are scaled up so that attention is far from uniform and a wrong window, angle or scale shows.
"""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from numpy.testing import assert_allclose, assert_array_equal

from regardant.cache import KVCache
from regardant.lm import model
from regardant.lm.config import Config, Llama3Scaling, Rope

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
# Wavelengths of a head 16 wide are 6.3, 20, 63, ...: with these, one stays, one is blended, the rest are stretched.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: transformers.LlamaConfig(
        **SIZES | {"num_key_value_heads": None}, tie_word_embeddings=True, rms_norm_eps=1e-2
    ),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-windows": lambda: transformers.Qwen3Config(
        **SIZES,
        head_dim=12,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2_SIZES),
    "gpt2-scales": lambda: transformers.GPT2Config(
        **GPT2_SIZES,
        n_inner=56,
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
        tie_word_embeddings=False,
    ),
}
T = 40
STARTS = [0, 3, 17]


@dataclasses.dataclass
class Tiny:
    """A random model of transformers, and the same as our configuration and weights."""

    name: str
    theirs: transformers.PreTrainedModel
    config: Config

    def tensors(self, dtype=torch.float32):
        """Weights as the checkpoint names them; what is tied appears once."""
        state = self.theirs.state_dict()
        if self.config.tied:
            del state["lm_head.weight"]
        return {name: tensor.to(dtype) for name, tensor in state.items()}

    def arrays(self, dtype=np.float32):
        return {name: tensor.numpy().astype(dtype) for name, tensor in self.tensors().items()}

    def their_logits(self, ids, starts=None):
        ids = torch.asarray(ids)
        options = {}
        if starts is not None:
            mask = torch.arange(ids.shape[1]) >= torch.asarray(starts)[:, None]
            options = {"attention_mask": mask.long(), "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        with torch.no_grad():
            return self.theirs(ids, use_cache=False, **options).logits.numpy()


def tiny_model(name):
    config = FAMILIES[name]()
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(sorted(FAMILIES).index(name))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, weight in theirs.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(0.3 * noise + (0 if path.endswith("bias") else 1))
            elif "embed" in path or "wte" in path or "wpe" in path:
                weight.copy_(noise)
            else:
                weight.copy_(noise / 48**0.5)
            if "q_proj.weight" in path or "k_proj.weight" in path:
                weight.mul_(2)
            if "c_attn.weight" in path:
                weight[:, :96].mul_(1.2 if name == "gpt2-scales" else 2)
    return Tiny(name, theirs, Config.from_hugging_face(config.to_dict()))


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(5).integers(0, SIZES["vocab_size"], (3, T))


def our_logits(ids, weights, config, **options):
    return model.logits(model.forward(ids, weights, config, **options), weights, config)


def error(ours, theirs):
    """Largest difference at each position, relative to the largest logit there."""
    return np.abs(np.asarray(ours) - theirs).max(-1) / np.abs(theirs).max(-1)


def test_weights_are_named_and_shaped_as_in_the_checkpoint(tiny):
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny.tensors().items()}
    assert model.expected_weights(tiny.config) == shapes


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_logits_equal_transformers(tiny, ids, kind):
    ours = our_logits(ids, getattr(tiny, kind)(), tiny.config)
    assert ours.dtype == {"arrays": np.float32, "tensors": torch.float32}[kind]
    assert error(ours, tiny.their_logits(ids)).max() <= 1e-4


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_logits_equal_transformers_with_left_padding(tiny, ids, kind):
    weights = getattr(tiny, kind)()
    hidden = model.forward(ids, weights, tiny.config, starts_B=np.asarray(STARTS))
    assert np.isfinite(np.asarray(hidden)).all()
    ours, theirs = model.logits(hidden, weights, tiny.config), tiny.their_logits(ids, STARTS)
    for row, start in enumerate(STARTS):
        assert error(ours[row, start:], theirs[row, start:]).max() <= 1e-4


def test_padding_is_the_same_as_a_shorter_text(tiny, ids):
    weights = tiny.arrays(np.float64)
    padded = our_logits(ids, weights, tiny.config, starts_B=np.asarray(STARTS))
    for row, start in enumerate(STARTS):
        alone = our_logits(ids[row : row + 1, start:], weights, tiny.config)
        assert error(padded[row, start:], alone[0]).max() <= 1e-12


def test_float64_is_the_same_on_numpy_and_torch(tiny, ids):
    numpy = our_logits(ids, tiny.arrays(np.float64), tiny.config, starts_B=np.asarray(STARTS))
    torches = our_logits(ids, tiny.tensors(torch.float64), tiny.config, starts_B=torch.asarray(STARTS))
    assert numpy.dtype == np.float64
    assert torches.dtype == torch.float64
    assert error(torches, numpy).max() <= 1e-10


def test_float64_equals_transformers_where_transformers_keeps_float64(ids):
    tiny = tiny_model("gpt2")
    tiny.theirs.double()
    assert error(our_logits(ids, tiny.arrays(np.float64), tiny.config), tiny.their_logits(ids)).max() <= 1e-10


@pytest.mark.parametrize("last", [0, 1, 5, T])
def test_the_last_positions_alone_are_those_of_the_whole(tiny, ids, last):
    weights, starts = tiny.arrays(np.float64), np.asarray(STARTS)
    for options in ({}, {"starts_B": starts}):
        whole = model.forward(ids, weights, tiny.config, **options)
        part = model.forward(ids, weights, tiny.config, last=last, **options)
        assert part.shape == (3, last, whole.shape[-1])
        for row, start in enumerate(STARTS if options else [0] * 3):
            real = max(start, T - last)
            assert_allclose(
                part[row, last - (T - real) :], whole[row, real:], rtol=0, atol=1e-12 * np.abs(whole).max()
            )


def test_the_last_positions_behind_a_cache(tiny, ids):
    weights = tiny.arrays(np.float64)
    config = tiny.config
    whole = model.forward(ids, weights, config)
    like = weights[next(iter(weights))]
    cache = KVCache(config.layers, 3, config.kv_heads, T, config.head_width, like=like)
    for first, end in ((0, 20), (20, T)):
        part = model.forward(ids[:, first:end], weights, config, cache=cache, last=2)
        cache.advance(end - first)
        assert_allclose(part, whole[:, end - 2 : end], rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_bfloat16_is_no_further_from_the_truth_than_transformers(ids, name):
    tiny = tiny_model(name)
    tiny.theirs.bfloat16()
    weights = tiny.tensors(torch.bfloat16)
    truth = our_logits(ids, {name: tensor.double() for name, tensor in weights.items()}, tiny.config).numpy()
    ours = our_logits(ids, weights, tiny.config)
    assert ours.dtype == torch.bfloat16
    with torch.no_grad():
        theirs = tiny.theirs(torch.asarray(ids)).logits.float().numpy()
    # Two roundings of the same sums: the same size of error, give or take its spread over the positions.
    assert np.median(error(ours.float(), truth)) <= 1.25 * np.median(error(theirs, truth))


def test_float16_arrays_stay_float16(ids):
    tiny = tiny_model("llama-tied")
    ours = our_logits(ids, tiny.arrays(np.float16), tiny.config)
    assert ours.dtype == np.float16
    assert np.median(error(ours, tiny.their_logits(ids))) <= 2**-7


WRONG = {
    "no window": ("mistral", {"windows": (None,) * 3}),
    "one key more": ("mistral", {"windows": (8,) * 3}),
    "windows in the wrong layers": ("qwen2-windows", {"windows": (5, None, None)}),
    "another theta": ("llama", {"rope": Rope(10_500.0)}),
    "frequencies not stretched": ("llama3", {"rope": Rope(10_000.0)}),
    "another blend": ("llama3", {"rope": Rope(10_000.0, Llama3Scaling(8.0, 1.0, 5.0, 32))}),
    "another epsilon": ("llama-tied", {"norm_eps": 1e-5}),
    "no qk norm": ("qwen3", {"qk_norm": False}),
    "no biases": ("qwen2", {"qkv_bias": False}),
    "no scale by layer": ("gpt2-scales", {"scales": (1.0,) * 3}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_yardstick_sees_a_wrong_model(ids, wrong):
    name, change = WRONG[wrong]
    tiny = tiny_model(name)
    ours = our_logits(ids, tiny.arrays(), dataclasses.replace(tiny.config, **change))
    assert error(ours, tiny.their_logits(ids)).max() > 1e-3


@pytest.mark.parametrize("chunks", [[40], [17, 1, 22], [1] * 40])
@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_whole_equals_chunks_equals_token_by_token(tiny, ids, chunks, kind):
    weights = tiny.arrays(np.float64) if kind == "arrays" else tiny.tensors(torch.float64)
    starts = np.asarray(STARTS)
    whole = np.asarray(our_logits(ids, weights, tiny.config, starts_B=starts))
    config = tiny.config
    cache = KVCache(
        config.layers, 3, config.kv_heads, T, config.head_width, like=next(iter(weights.values()))
    )
    for count in chunks:
        part = slice(cache.length, cache.length + count)
        ours = our_logits(ids[:, part], weights, config, cache=cache, starts_B=starts)
        cache.advance(count)
        for row, start in enumerate(STARTS):
            real = slice(max(start, part.start), part.stop)
            if real.start < real.stop:
                inside = slice(real.start - part.start, None)
                assert error(ours[row, inside], whole[row, real]).max() <= 1e-12


def test_a_prefix_ignores_later_tokens(tiny, ids):
    weights = tiny.arrays()
    other = np.concatenate([ids[:, :23], (ids[:, 23:] + 1) % SIZES["vocab_size"]], axis=1)
    kept, changed = (model.forward(each, weights, tiny.config) for each in (ids, other))
    assert_array_equal(kept[:, :23], changed[:, :23])
    assert (kept[:, 23:] != changed[:, 23:]).any()
    short = model.forward(ids[:, :23], tiny.arrays(np.float64), tiny.config)
    long = model.forward(ids, tiny.arrays(np.float64), tiny.config)
    assert error(short, long[:, :23]).max() <= 1e-12


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_the_same_lines_train(ids, name):
    tiny = tiny_model(name)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tiny.tensors().items()}

    def attend(_layer, q, k, v, **_options):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    loss = our_logits(ids, leaves, tiny.config, attend=attend).logsumexp(-1).mean()
    loss.backward()
    tiny.theirs(torch.asarray(ids)).logits.logsumexp(-1).mean().backward()
    for path, weight in tiny.theirs.named_parameters():
        assert_allclose(leaves[path].grad, weight.grad, rtol=0, atol=1e-4 * weight.grad.abs().max())


@pytest.mark.parametrize("rows", [1, 7, 40, 119])
def test_rows_in_pieces_are_the_rows_as_a_whole(tiny, ids, rows, monkeypatch):
    weights, starts = tiny.arrays(np.float64), np.asarray(STARTS)
    whole = our_logits(ids, weights, tiny.config, starts_B=starts)
    monkeypatch.setattr(model, "ROWS", rows)
    assert error(our_logits(ids, weights, tiny.config, starts_B=starts), whole).max() <= 1e-12


def test_attend_is_told_what_each_layer_wants():
    seen = []

    def attend(layer, q, k, v, **options):
        seen.append((layer, q.shape, k.shape, v.shape, options))
        return np.zeros(q.shape, q.dtype)

    windows, scales = tiny_model("qwen2-windows"), tiny_model("gpt2-scales")
    starts = np.asarray([0, 1])
    model.forward([[1, 2, 3]] * 2, windows.arrays(), windows.config, starts_B=starts, attend=attend)
    model.forward([[1, 2, 3]] * 2, scales.arrays(), scales.config, attend=attend)
    common = {"causal": True, "offset": 0}
    assert [entry[0] for entry in seen] == [0, 1, 2, 0, 1, 2]
    assert [entry[1:4] for entry in seen[2:4]] == [
        ((2, 6, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)),
        ((2, 6, 3, 8),) * 3,
    ]
    assert seen[0][4] == {**common, "window": None, "starts": starts}
    assert seen[1][4] == {**common, "window": 5, "starts": starts}
    assert seen[5][4] == {**common, "window": None, "starts": None, "scale": 1 / 3}


def test_the_cache_is_written_and_left_to_the_caller_to_advance():
    tiny = tiny_model("qwen2")
    weights = tiny.arrays()
    cache = KVCache(3, 1, 2, 8, 8, like=weights["model.norm.weight"])
    first = model.forward([[7, 8, 9]], weights, tiny.config, cache=cache)
    assert cache.length == 0
    assert_array_equal(model.forward([[7, 8, 9]], weights, tiny.config, cache=cache), first)


def test_heads_write_through_the_output_projection(tiny):
    weights = tiny.arrays(np.float64)
    config = tiny.config
    out_HD = np.random.default_rng(2).standard_normal((config.heads, config.head_width))
    for layer in range(config.layers):
        wo_HDC = model.output_projection(layer, weights, config)
        assert wo_HDC.shape == (config.heads, config.head_width, config.width)
        their_layer = (
            tiny.theirs.transformer.h[layer].attn.c_proj
            if config.family == "gpt2"
            else tiny.theirs.model.layers[layer].self_attn.o_proj
        )
        with torch.no_grad():
            flat = torch.asarray(out_HD).flatten()[None].float()
            theirs = their_layer(flat) - their_layer(torch.zeros_like(flat))
        ours = np.einsum("hd,hdc->c", out_HD, wo_HDC)
        assert_allclose(ours, theirs[0], rtol=0, atol=1e-5 * np.abs(ours).max())
        assert np.shares_memory(
            wo_HDC,
            next(
                w
                for n, w in weights.items()
                if f"{layer}.attn.c_proj.weight" in n or f"{layer}.self_attn.o_proj.weight" in n
            ),
        )


@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize(
    "scaling", [None, Llama3Scaling(8.0, 1.0, 4.0, 8192), Llama3Scaling(32.0, 1.0, 4.0, 32)]
)
def test_frequencies_equal_transformers(width, scaling):
    for theta in (1e4, 1e5, 5e5, 1e6):
        parameters = {"rope_type": "default", "rope_theta": theta}
        if scaling is not None:
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            parameters |= {
                "rope_type": "llama3",
                **dict(zip(names, dataclasses.astuple(scaling), strict=True)),
            }
        config = transformers.LlamaConfig(
            head_dim=width, max_position_embeddings=10**6, rope_parameters=parameters
        )
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
        # Powers and quotients in float32, each within a rounding or two of exact.
        assert_allclose(model.inverse_frequencies(Rope(theta, scaling), width), theirs, rtol=4 * 2**-24)


def test_angles_far_into_a_text_are_those_of_transformers():
    config = transformers.LlamaConfig(
        head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    )
    positions = np.asarray([0, 1, 4095, 8191, 100_000])
    with torch.no_grad():
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cos, sin = (table[0].numpy() for table in rotary(torch.zeros(1), torch.asarray(positions)[None]))
    ours = model.rotary_tables(positions, Rope(1e5), 64, np.zeros(1, np.float32))
    sign = np.repeat([-1, 1], 32)  # ours go straight onto the swapped halves
    for mine, other in zip(ours, (cos, sin * sign), strict=True):
        assert mine.dtype == np.float32
        # Cosines in float32, each side within two roundings of that of the same angle.
        assert_allclose(mine[:, 0], other, rtol=0, atol=4 * 2**-24)


FAR = np.asarray([-3e38, -1e4, -100.0, -88.5, -20.0, -1.0, -1e-30, 0.0, 1e-30, 1.0, 20.0, 100.0, 1e4, 3e38])


def test_silu_equals_torch_out_to_the_ends_of_float32():
    exact = torch.nn.functional.silu(torch.asarray(FAR))
    ours = model.silu(FAR.astype(np.float32))
    # Relative rounding of e^x, one sum and one quotient; and nothing at all below the clip at e^-88.
    assert_allclose(ours, exact, rtol=1e-6, atol=3e38 * np.exp(-88.0))
    assert_allclose(model.silu(FAR[1:-1]), exact[1:-1], rtol=1e-14, atol=1e4 * np.exp(-88.0))


def test_gelu_equals_torch():
    x = np.linspace(-12, 12, 4001)
    theirs = torch.nn.functional.gelu(torch.asarray(x), approximate="tanh")
    assert_allclose(model.gelu_tanh(x), theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_norms_equal_torch(scale):
    rng = np.random.default_rng(1)
    x, gain, bias = (rng.standard_normal(shape) for shape in ((5, 33), 33, 33))
    x *= scale
    tensors = [torch.asarray(array) for array in (gain, bias)]
    theirs = torch.nn.functional.layer_norm(torch.asarray(x), (33,), *tensors, eps=1e-5)
    assert_allclose(model.layer_norm(x, gain, bias, 1e-5), theirs, rtol=0, atol=1e-13)
    theirs = torch.nn.functional.rms_norm(torch.asarray(x), (33,), tensors[0], eps=1e-5)
    assert_allclose(model.rms_norm(x, gain, 1e-5), theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_ids_that_cannot_be_are_refused(kind):
    tiny = tiny_model("llama")
    weights = getattr(tiny, kind)()
    with pytest.raises(ValueError, match=r"ids must be \(B, T\); got \(3,\)"):
        model.forward([1, 2, 3], weights, tiny.config)
    with pytest.raises(TypeError, match=r"ids must be integers; got .*float"):
        model.forward([[1.0, 2.0]], weights, tiny.config)
    with pytest.raises(ValueError, match="ids must lie between 0 and 60; got 61"):
        model.forward([[1, 61]], weights, tiny.config)
    with pytest.raises(ValueError, match="ids must lie between 0 and 60; got -1"):
        model.forward([[-1, 60]], weights, tiny.config)
    for last in (-1, 4):
        with pytest.raises(
            ValueError, match=f"forward: last must lie between 0 and the 3 positions; got {last}"
        ):
            model.forward([[1, 2, 3]], weights, tiny.config, last=last)


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_starts_that_cannot_be_are_refused(kind):
    tiny = tiny_model("llama")
    weights = getattr(tiny, kind)()
    for starts, error_type, message in (
        ([0], ValueError, r"starts must be \(2,\), one a row; got \(1,\)"),
        ([0.0, 1.0], TypeError, r"starts must be integers; got .*float"),
        ([0, -1], ValueError, "starts must lie between 0 and the 3 keys; got -1"),
        ([0, 4], ValueError, "starts must lie between 0 and the 3 keys; got 4"),
    ):
        with pytest.raises(error_type, match=message):
            model.forward([[1, 2, 3]] * 2, weights, tiny.config, starts_B=starts)


def test_no_tokens_give_no_hidden_states():
    tiny = tiny_model("llama")
    weights = tiny.arrays()
    assert model.forward(np.zeros((2, 0), int), weights, tiny.config).shape == (2, 0, 48)
    assert model.forward(np.zeros((0, 4), int), weights, tiny.config).shape == (0, 4, 48)


def test_more_positions_than_were_learned_are_refused():
    tiny = tiny_model("gpt2")
    weights = tiny.arrays()
    cache = KVCache(3, 1, 6, 70, 8, like=weights["transformer.ln_f.weight"])
    model.forward(np.zeros((1, 64), int), weights, tiny.config, cache=cache)
    cache.advance(64)
    with pytest.raises(ValueError, match="the model has 64 positions; got 65"):
        model.forward([[1]], weights, tiny.config, cache=cache)
