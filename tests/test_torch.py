"""The front door on tensors: the same numbers on the same memory as NumPy's, looking, types, devices, bad input."""

import re

import numpy as np
import pytest
import torch

import regardant as rg
import regardant.torch as rt
from op import OPTION_NAMES, TYPES, attention_errors_within_budget, option_sets, tensors
from regardant.torch.memory import as_array, as_tensor
from torch_op import to_torch

Q = torch.zeros(1, 2, 3, 4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_tensors_have_the_bits_of_arrays(dtype, name):
    q, k, v = tensors(1, B=2, H=4, G=2, T=11, S=13, dtype=dtype)
    options = option_sets(2, 2, 4, 11, 13)[name]
    want = rg.attention(q, k, v, return_lse=True, **options)
    got = rt.attention(*to_torch((q, k, v)), return_lse=True, **to_torch(options))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(as_array(ours), theirs, strict=True)
    alone = rt.attention(*to_torch((q, k, v)), **to_torch(options))
    np.testing.assert_array_equal(as_array(alone), want[0])


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_every_rank_comes_back(rank):
    q, k, v = (x.reshape(x.shape[4 - rank :]) for x in to_torch(tensors(3, B=1, H=1, G=1, T=5, S=7)))
    out, lse = rt.attention(q, k, v, return_lse=True)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == q.shape[:-1]
    assert rt.look(q, k, v).rows([0, 4]).shape == (*q.shape[:-2], 2, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_memory_is_shared_both_ways(dtype):
    x = torch.zeros(2, 3, 4, 5, dtype=dtype)
    for view in (x, x.transpose(1, 2), x[:, 1:, :, ::2], x[:, :, :1].expand(2, 3, 9, 5), x.requires_grad_()):
        array = as_array(view)
        assert array.ctypes.data == view.data_ptr()
        assert array.shape == view.shape
        assert array.strides == tuple(stride * x.element_size() for stride in view.stride())
    array = np.zeros((2, 3), as_array(x).dtype)
    assert as_tensor(array).data_ptr() == array.ctypes.data
    assert as_tensor(array).dtype == dtype


def test_strided_and_expanded_tensors():
    q, k, v = to_torch(tensors(4, B=2, H=4, G=1, T=9, S=9))
    want = rt.attention(q, k, v)
    heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(rt.attention(*heads_inside), want)
    assert torch.equal(rt.attention(q, k.expand(2, 4, 9, 8), v.expand(2, 4, 9, 8)), want)


@pytest.mark.parametrize("impl", ["auto", "native", "blocked", "reference", "torch"])
def test_every_implementation_by_name(impl):
    q, k, v = tensors(5, B=2, H=4, G=2, T=40, S=50)
    options = option_sets(6, 2, 4, 40, 50)["all"]
    out, lse = rt.attention(*to_torch((q, k, v)), return_lse=True, impl=impl, **to_torch(options))
    attention_errors_within_budget(as_array(out), as_array(lse), q, k, v, **options)


def test_lists_serve_for_numbers_per_row_or_head():
    q, k, v = to_torch(tensors(7))
    ids = [[0] * 4 + [1] * 5] * 2
    options = {"starts": [0, 2], "lengths": [9, 8], "segments": (ids, ids), "alibi": [0.5, 0.25, 0.125, 0.0]}
    made = {name: torch.tensor(o) for name, o in options.items() if name != "segments"}
    made["segments"] = (torch.tensor(ids), torch.tensor(ids))
    sinks = np.array([1.0, -np.inf, 0.5, 2.0])
    got = rt.attention(q, k, v, sinks=sinks, **options)
    assert torch.equal(got, rt.attention(q, k, v, sinks=torch.from_numpy(sinks), **made))


# Looking.


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_a_look_holds_tensors_of_what_numpy_saw(name):
    q, k, v = tensors(8, B=2, H=4, G=2, T=11, S=13)
    options = option_sets(9, 2, 4, 11, 13)[name]
    kept = {"top": 3, "received": True, "pooled": (2, 3)}
    got = rt.look(*to_torch((q, k, v)), **to_torch(options), **kept)
    want = rg.look(q, k, v, **options, **kept)
    for field in (
        "out", "lse", "max_logit", "entropy", "sink_weight", "top_keys", "top_weights", "received", "pooled",
    ):  # fmt: skip
        ours = getattr(got, field)
        assert isinstance(ours, torch.Tensor)
        np.testing.assert_array_equal(ours.numpy(), getattr(want, field), strict=True, err_msg=field)
    assert torch.equal(got.out, rt.attention(*to_torch((q, k, v)), **to_torch(options)))
    for queries, heads in ((-1, None), ([0, 5, 2], [3, 1]), (torch.tensor([4]), torch.tensor([0, 2]))):
        rows = got.rows(queries, heads)
        assert isinstance(rows, torch.Tensor)
        np.testing.assert_array_equal(rows.numpy(), want.rows(np.asarray(queries), heads))


def test_what_was_not_asked_for_is_none():
    seen = rt.look(*to_torch(tensors(10)), top=0)
    assert seen.received is None
    assert seen.pooled is None
    assert seen.top_keys.shape == (2, 4, 9, 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_look_in_every_type(dtype):
    q, k, v = tensors(11, dtype=dtype)
    got, want = rt.look(*to_torch((q, k, v)), received=True), rg.look(q, k, v, received=True)
    np.testing.assert_array_equal(as_array(got.out), want.out, strict=True)
    np.testing.assert_array_equal(got.received.numpy(), want.received, strict=True)
    np.testing.assert_array_equal(got.rows([3]).numpy(), want.rows([3]), strict=True)


def test_weights_of_a_look_that_learns_can_be_had():
    q, k, v = (x.requires_grad_() for x in to_torch(tensors(12)))
    assert not rt.look(q, k, v).rows([0]).requires_grad


# Around torch.


def test_autocast_casts_as_torch_does_for_its_own():
    q, k, v = to_torch(tensors(13, H=4, G=4))
    with torch.autocast("cpu", torch.bfloat16):
        ours = rt.attention(q, k.bfloat16(), v)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k.bfloat16(), v)
        assert rt.attention(q.double(), k.double(), v.double()).dtype == torch.float64
        assert rt.look(q, k, v).out.dtype == torch.bfloat16
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours, rt.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_meta_tensors_give_shapes():
    q, k, v = (x.to("meta") for x in to_torch(tensors(14, E=5)))
    out, lse = rt.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 9, 5)
    assert lse.shape == (2, 4, 9)
    seen = rt.look(q, k, v, top=3, received=True, pooled=(2, 3))
    assert seen.top_keys.shape == (2, 4, 9, 3)
    assert seen.top_keys.dtype == torch.int64
    assert seen.pooled.shape == (2, 4, 2, 3)
    assert seen.received.shape == (2, 4, 9)


def test_threads_are_those_of_torch_unless_told(monkeypatch):
    from regardant import threads

    monkeypatch.setattr(threads, "_chosen", None)
    assert threads.num_threads() == torch.get_num_threads()
    monkeypatch.setattr(threads, "_chosen", 3)
    assert threads.num_threads() == 3


# Bad input.


WRONG = [
    ({"q": np.zeros((1, 2, 3, 4))}, TypeError, "q must be a torch tensor; got ndarray of float64 (1, 2, 3, 4)"),
    ({"k": None}, TypeError, "k must be a torch tensor; got None"),
    ({"q": Q.long()}, TypeError, "q must be one of float64, float32, float16, bfloat16; got int64"),
    ({"q": Q.to(torch.float8_e4m3fn)}, TypeError, "q must be one of float64, float32, float16, bfloat16; got float8"),
    ({"q": Q.to(torch.complex64)}, TypeError, "q must be one of float64, float32, float16, bfloat16; got complex64"),
    ({"k": Q.double()}, TypeError, "k must be float32 to match q; got float64"),
    ({"v": Q.bfloat16()}, TypeError, "v must be float32 to match q; got bfloat16"),
    ({"v": Q.to(torch.float8_e5m2)}, TypeError, "v must be one of float64, float32, float16, bfloat16; got float8"),
    ({"k": Q.to("meta")}, ValueError, "k must be on cpu as q is; got a tensor on meta"),
    ({"mask": torch.ones(3, 3, dtype=torch.bool, device="meta")}, ValueError, "mask must be on cpu as q is"),
    ({"sinks": torch.zeros(2, device="meta")}, ValueError, "sinks must be on cpu as q is; got a tensor on meta"),
    ({"segments": (torch.zeros(1, 3, device="meta").long(), torch.zeros(1, 3).long())}, ValueError,
     "segments of the queries must be on cpu as q is"),
    ({"k": Q[..., :2]}, ValueError, "k must be (1, G, S, 4) to match q (1, 2, 3, 4); got (1, 2, 3, 2)"),
    ({"mask": np.ones((3, 3), bool)}, TypeError, "mask must be a torch tensor; got ndarray of bool (3, 3)"),
    ({"mask": torch.ones(3, 3)}, TypeError, "mask must be a boolean"),
    ({"mask": torch.ones(2, 2, dtype=torch.bool)}, ValueError, "mask must broadcast to (B, H, T, S) = (1, 2, 3, 3)"),
    ({"bias": torch.ones(3, 3, dtype=torch.int64)}, TypeError, "bias must be a floating"),
    ({"starts": torch.zeros(1)}, TypeError, "starts must be integers of 64 bits at most; got float32"),
    ({"starts": [5]}, ValueError, "starts must lie between 0 and the 3 keys; got 5"),
    ({"starts": "0"}, TypeError, "starts must be a tensor or a list of numbers; got '0'"),
    ({"segments": torch.zeros(1, 3)}, TypeError, "segments must be a pair"),
    ({"alibi": [1.0]}, ValueError, "alibi must be (2,), one number per query head; got (1,)"),
    ({"sinks": [torch.inf, 0.0]}, ValueError, "sinks must be finite in float32, the type of scores; got inf"),
    ({"causal": 1}, TypeError, "causal must be True or False; got 1"),
    ({"offset": 0.5}, TypeError, "offset must be an integer; got 0.5"),
    ({"window": 0}, ValueError, "window must be at least 1; got 0"),
    ({"offset": -(10**30)}, ValueError, "offset must be at least -4611686018427387904; got -1000000"),
    ({"softcap": -1.0}, ValueError, "softcap must be greater than 0"),
    ({"scale": "1"}, TypeError, "scale must be a number; got '1'"),
    ({"scale": float("nan")}, ValueError, "scale must be finite; got nan"),
    ({"impl": 3}, TypeError, "impl must be a name; got 3"),
]  # fmt: skip


@pytest.mark.parametrize("op", [rt.attention, rt.look])
@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize(("wrong", "error", "sentence"), WRONG)
def test_bad_input_gets_one_sentence(op, impl, wrong, error, sentence):
    given = {"q": Q, "k": Q, "v": Q, "impl": impl} | wrong
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        op(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert str(raised.value).startswith(f"{op.__name__}: ")
    assert "\n" not in str(raised.value)


def test_numbers_of_other_kinds_are_taken():
    q, k, v = to_torch(tensors(15))
    want = rt.attention(q, k, v, window=3, offset=0, scale=1.0, causal=True)
    got = rt.attention(q, k, v, window=np.int64(3), offset=np.int32(0), scale=1, causal=np.True_)
    assert torch.equal(got, want)
    far = rt.attention(q, k, v, window=10**30, offset=10**30)
    assert torch.equal(far, rt.attention(q, k, v, window=2**62, offset=2**62))


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_a_bias_is_read_in_the_type_of_scores(impl):
    q, k, v = to_torch(tensors(16))
    far = torch.zeros(9, 9, dtype=torch.float64).fill_diagonal_(-1e39)
    hidden = ~torch.eye(9, dtype=torch.bool)
    assert torch.equal(
        rt.attention(q, k, v, bias=far, impl=impl), rt.attention(q, k, v, mask=hidden, impl=impl)
    )


@pytest.mark.parametrize(
    "wrong", [{"top": -1}, {"top": 1.5}, {"received": 1}, {"pooled": 3}, {"pooled": (0, 1)}]
)
def test_what_to_keep_is_checked(wrong):
    with pytest.raises((TypeError, ValueError), match=r"^look: "):
        rt.look(Q, Q, Q, **wrong)
