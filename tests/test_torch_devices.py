"""Which implementation serves which call, and torch's two, run on the CPU where their answers can be checked."""

import re
import types

import numpy as np
import pytest
import torch

import regardant.torch as rt
from op import OPTION_NAMES, attention_errors_within_budget, option_sets, tensors
from regardant.torch import devices
from regardant.torch.options import Options, checked
from regardant.torch.problem import problem
from torch_op import JIT_IS_DEPRECATED, to_torch

GPU = devices.Call(
    device="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    sizes=(2, 8, 4, 64, 64, 64, 64),
    causal=True,
    offset=0,
    options=frozenset(),
    gradients=frozenset(),
    lse=False,
    compiling=False,
)


def call(**changes):
    return GPU._replace(**changes)


def sized(**changes):
    named = dict(zip("BHGTSDE", GPU.sizes, strict=True)) | changes
    return tuple(named.values())


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (call(), "sdpa"),
        (call(device="cpu"), "native"),
        (call(device="meta"), "native"),
        (call(device="mps"), "torch"),
        (call(device="xpu"), "torch"),
        (call(capability=(7, 5)), "torch"),
        (call(options=frozenset({"scale"})), "sdpa"),
        (call(causal=False, sizes=sized(S=80)), "sdpa"),
        (call(sizes=sized(S=80), offset=16), "flex"),
        (call(sizes=sized(S=80), offset=79), "sdpa"),  # everything is visible
        (call(sizes=sized(T=1, S=80), offset=79), "sdpa"),
        (call(sizes=sized(T=1, S=80), offset=40), "flex"),
        (call(lse=True), "flex"),
        (call(lse=True, compiling=True), "torch"),
        (call(compiling=True), "sdpa"),
        (call(dtype=torch.float64), "torch"),
        (call(dtype=torch.float32), "flex"),
        (call(dtype=torch.float32, sizes=sized(G=8)), "sdpa"),
        (call(sizes=sized(E=32)), "flex"),
        (call(sizes=sized(D=260, E=260)), "torch"),
        (call(sizes=sized(D=60, E=60)), "flex"),
        (call(sizes=sized(D=8, E=8)), "sdpa"),
        (call(sizes=sized(D=8, E=8), lse=True), "torch"),
        (call(sizes=sized(H=12, G=4), lse=True), "torch"),
        (call(sizes=sized(S=0), causal=False), "torch"),
        *((call(options=frozenset({name})), "flex") for name in (
            "window", "starts", "lengths", "segments", "mask", "bias", "alibi", "softcap", "sinks")),
        (call(options=frozenset({"bias", "window"}), gradients=frozenset({"bias"})), "torch"),
        (call(options=frozenset({"sinks"}), gradients=frozenset({"sinks"})), "torch"),
    ],
)  # fmt: skip
def test_the_table(wanted, chosen):
    assert devices.choose(wanted) == chosen
    assert devices.choose(wanted, chosen) == chosen


@pytest.mark.parametrize(
    ("impl", "wanted", "sentence"),
    [
        (
            "native",
            call(),
            "impl='native' cannot serve this call: the compiled kernels are for the CPU, not cuda",
        ),
        (
            "blocked",
            call(),
            "impl='blocked' cannot serve this call: the compiled kernels are for the CPU, not cuda",
        ),
        ("sdpa", call(lse=True), "impl='sdpa' cannot serve this call: it gives no lse"),
        (
            "sdpa",
            call(options=frozenset({"window", "bias"})),
            "cannot serve this call: it has no bias, window",
        ),
        (
            "flex",
            call(gradients=frozenset({"bias"})),
            "cannot serve this call: it has no gradient of bias here",
        ),
        ("flex", call(device="cpu"), "impl='flex' cannot serve this call: it is for CUDA devices, not cpu"),
        (
            "fast",
            call(),
            "impl must be one of 'auto', 'blocked', 'reference', 'native', 'sdpa', 'flex', 'torch'",
        ),
    ],
)
def test_a_name_is_used_or_refused_with_the_reason(impl, wanted, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        devices.choose(wanted, impl)


def test_a_call_is_described_as_it_is():
    q, k, v = to_torch(tensors(1, T=5, S=9))
    given = {"bias": torch.zeros(5, 9, requires_grad=True), "segments": ([[0] * 5] * 2, [[0] * 9] * 2)}
    options = checked_options(q, k, v, given)
    described = devices.describe(q, k, v, options, lse=True)
    assert described == devices.Call(
        "cpu", (0, 0), torch.float32, (2, 4, 2, 5, 9, 8, 8), True, 4, frozenset({"bias", "segments"}),
        frozenset({"bias"}), True, False,
    )  # fmt: skip
    with torch.no_grad():
        assert devices.describe(q, k, v, options, lse=False).gradients == frozenset()
    q, k, v = (x[0, 0] for x in (q, k, v))
    one = devices.describe(q, k, v, checked_options(q, k, v, {"offset": 0}), lse=False)
    assert one.sizes == (1, 1, 1, 5, 9, 8, 8)
    assert one.offset == 0


def test_what_needs_a_gpu_is_refused_on_the_cpu():
    q, k, v = to_torch(tensors(2))
    with pytest.raises(
        ValueError, match="attention: impl='sdpa' cannot serve this call: it is for CUDA devices"
    ):
        rt.attention(q, k, v, impl="sdpa")
    with pytest.raises(ValueError, match="attention: impl must be one of 'auto', "):
        rt.attention(q, k, v, impl="quick")
    with pytest.raises(ValueError, match="look: impl must be 'auto'"):
        rt.look(q, k, v, impl="flex")


def checked_options(q, k, v, options):
    plain = dict.fromkeys(set(Options._fields) - {"q_segments", "k_segments"} | {"segments"})
    return checked("attention", q, k, v, **(plain | {"causal": True, "impl": "auto"} | options))


@pytest.mark.parametrize(
    ("T", "S", "options"),
    [
        (9, 9, {"offset": 0}),
        (9, 9, {}),
        (9, 9, {"causal": False, "scale": 0.7}),
        (5, 9, {"causal": False}),
        (5, 9, {"offset": 8}),
        (1, 9, {}),
        (1, 1, {}),
    ],
)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_scaled_dot_product_attention_by_torch(T, S, options, rank):
    heads = 1 if rank == 2 else 4
    q, k, v = (x.reshape(x.shape[4 - rank :]) for x in tensors(3, B=1, H=heads, G=heads, T=T, S=S))
    given = to_torch((q, k, v))
    described = devices.describe(*given, checked_options(*given, options), lse=False)
    assert devices.sdpa_cannot(described._replace(device="cuda", capability=(8, 0))) is None
    out = devices.sdpa(*given, checked_options(*given, options))
    _, lse = rt.attention(*given, return_lse=True, **options)
    attention_errors_within_budget(out.numpy(), lse.numpy(), q, k, v, **options)


def test_scaled_dot_product_attention_shares_heads():
    q, k, v = to_torch(tensors(4, dtype=np.float32))
    out = devices.sdpa(q, k, v, checked_options(q, k, v, {}))
    _, lse = rt.attention(q, k, v, return_lse=True)
    attention_errors_within_budget(out.numpy(), lse.numpy(), q.numpy(), k.numpy(), v.numpy())


UNFUSED = pytest.mark.filterwarnings("ignore:(?s).*flex_attention called without torch.compile:UserWarning")


@UNFUSED
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_flex_attention_honours_every_option(name):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = tensors(5, 2, 4, 2, 37, 45, 16, 24)
    options = option_sets(6, 2, 4, 37, 45)[name]
    given = to_torch((q, k, v))
    out, lse = devices.flex(*given, checked_options(*given, to_torch(options)), flex_attention)
    attention_errors_within_budget(out.numpy(), lse.numpy(), q, k, v, **options)


@pytest.mark.parametrize("T", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("S", [1, 128, 257])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"offset": 0}, {"offset": -200}, {"offset": 400}, {"window": 5}, {"window": 140},
     {"causal": False, "window": 3}],
)  # fmt: skip
def test_flex_attentions_blocks_hold_all_that_is_visible_and_no_more(T, S, options):
    q, k = torch.zeros(1, 1, T, 16), torch.zeros(1, 1, S, 16)
    p = problem("test", q, k, k, checked_options(q, k, k, options))
    mask = devices.block_mask(p)
    i, j = torch.arange(T)[:, None], torch.arange(S)
    visible = mask.mask_mod(torch.tensor(0), torch.tensor(0), i, j).expand(T, S)
    want = (j <= p.offset + i) if p.causal else torch.ones(T, S, dtype=torch.bool)
    if p.window is not None:
        want = want & (p.offset + i - j < p.window)
    assert torch.equal(visible, want)
    blocks = torch.zeros(-(-T // 128), -(-S // 128), dtype=torch.bool)
    for row, (count, order) in enumerate(zip(mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0], strict=True)):
        assert sorted(order.tolist()) == list(range(blocks.shape[1]))
        blocks[row, order[:count].long()] = True
    padded = torch.zeros(blocks.shape[0] * 128, blocks.shape[1] * 128, dtype=torch.bool)
    padded[:T, :S] = want
    touched = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(dim=3).any(dim=1)
    assert torch.equal(blocks, touched)


@JIT_IS_DEPRECATED
def test_flex_attention_compiled_reads_those_blocks():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = tensors(7, 1, 2, 1, 150, 300, 16, 16)
    options = {"window": 40, "offset": 120, "softcap": 3.0}
    given = to_torch((q, k, v))
    _, lse = rt.attention(*given, return_lse=True, **options)
    compiled = torch.compile(flex_attention)

    def without_lse(*tensors, return_aux, **named):  # which torch does not compile for the CPU
        assert return_aux.lse
        return compiled(*tensors, **named), types.SimpleNamespace(lse=lse)

    out, _ = devices.flex(*given, checked_options(*given, options), without_lse)
    attention_errors_within_budget(out.numpy(), lse.numpy(), q, k, v, **options)
