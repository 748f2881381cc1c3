"""Plain torch, block by block, run on the CPU where its answers can be checked: budget, looking, memory, visibility.

Its gradients are in `test_torch_gradients`, under impl="torch".
"""

import numpy as np
import pytest
import torch

import regardant as rg
import regardant.torch as rt
from op import OPTION_NAMES, TYPES, attention_errors_within_budget, option_sets, tensors
from regardant.torch import blocked
from regardant.torch.memory import as_array
from torch_op import arriving, there_and_back, to_torch

EDGES = [1, 7, 8, 64, 65, 130]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 7 queries and 64 keys, so that small problems have many."""
    monkeypatch.setattr(blocked, "QUERIES", 7)
    monkeypatch.setattr(blocked, "KEYS", 64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.usefixtures("small_tiles")
def test_every_option_within_the_error_budget(dtype, name):
    B, H, T, S = 2, 4, 37, 145
    q, k, v = tensors(1, B, H, 2, T, S, 16, 24, dtype)
    options = option_sets(2, B, H, T, S)[name]
    out, lse = rt.attention(*to_torch((q, k, v)), return_lse=True, impl="torch", **to_torch(options))
    assert as_array(out).dtype == dtype
    attention_errors_within_budget(as_array(out), as_array(lse), q, k, v, **options)


@pytest.mark.parametrize("T", EDGES)
@pytest.mark.usefixtures("small_tiles")
def test_sizes_around_each_tile_edge(T):
    for S in EDGES:
        for options in ({}, {"window": 3}, {"offset": 0}, {"offset": -5, "causal": True}, {"causal": False}):
            q, k, v = tensors(100 * T + S, 1, 2, 1, T, S, 5, 3, np.float64)
            dout, dlse = arriving(3, q, v)
            out, lse, got = there_and_back(q, k, v, dout, dlse, impl="torch", **options)
            want = rg.attention(q, k, v, return_lse=True, impl="reference", **options)
            back = rg.attention_backward(q, k, v, *want, dout, dlse=dlse, impl="reference", **options)
            for ours, theirs in zip((out, lse, *got[:3]), (*want, *back[:3]), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * max(T, S))


@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.usefixtures("small_tiles")
def test_what_looking_keeps(name):
    B, H, T, S = 2, 4, 37, 145
    q, k, v = tensors(4, B, H, 2, T, S, dtype=np.float64)
    options = option_sets(5, B, H, T, S)[name]
    kept = {"top": 5, "received": True, "pooled": (3, 4)}
    got = rt.look(*to_torch((q, k, v)), impl="torch", **to_torch(options), **kept)
    want = rg.look(q, k, v, impl="reference", **options, **kept)
    assert torch.equal(got.out, rt.attention(*to_torch((q, k, v)), impl="torch", **to_torch(options)))
    np.testing.assert_array_equal(got.top_keys, want.top_keys)
    for field in ("lse", "max_logit", "entropy", "sink_weight", "top_weights", "received", "pooled"):
        # Sums of at most 37 · 145 weights, each good to some rounding errors of scores up to 2⁶.
        np.testing.assert_allclose(
            getattr(got, field), getattr(want, field), rtol=1e-12, atol=1e-12, err_msg=field
        )
    np.testing.assert_allclose(
        got.rows([0, -1, 17], [3, 0]), want.rows([0, -1, 17], [3, 0]), rtol=1e-12, atol=1e-14
    )


@pytest.mark.usefixtures("small_tiles")
def test_among_equal_keys_the_earlier_comes_first():
    q, k, v = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 150, 4), torch.ones(1, 1, 150, 4)
    assert rt.look(q, k, v, impl="torch", top=70).top_keys[0, 0, 0].tolist() == list(range(70))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("array", ["k", "v"])
@pytest.mark.usefixtures("small_tiles")
def test_a_hidden_value_changes_no_bit_and_a_visible_one_shows(poison, array):
    q, k, v = tensors(6, 1, 2, 1, 20, 80)
    mask = np.random.default_rng(7).random((20, 80)) < 0.5
    want = rt.attention(*to_torch((q, k, v)), mask=torch.from_numpy(mask), causal=False, impl="torch")
    at = 70
    (k if array == "k" else v)[:, :, at] = poison
    got = rt.attention(*to_torch((q, k, v)), mask=torch.from_numpy(mask), causal=False, impl="torch")
    sees = torch.from_numpy(mask[:, at])
    np.testing.assert_array_equal(got[:, :, ~sees], want[:, :, ~sees])
    exact = rg.attention(q, k, v, mask=mask, causal=False, impl="reference")
    np.testing.assert_array_equal(torch.isnan(got[:, :, sees]), np.isnan(exact[:, :, sees]))
    np.testing.assert_array_equal(torch.isinf(got[:, :, sees]), np.isinf(exact[:, :, sees]))
    assert array == "k" or not torch.isfinite(got[:, :, sees]).any()


def test_large_values_do_not_overflow_on_the_way():
    q, k, v = tensors(8, 1, 1, 1, 4, 300)
    v[:] = np.finfo(np.float32).max / 2
    out = rt.attention(*to_torch((q, k, v)), causal=False, impl="torch")
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_axes_of_length_zero(shape):
    B, H, T = shape
    for S in (0, 3):
        q, k, v = torch.zeros(B, H, T, 4), torch.zeros(B, H, S, 4), torch.zeros(B, H, S, 5)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = rt.attention(*leaves, return_lse=True, impl="torch")
        assert out.shape == (B, H, T, 5)
        assert lse.shape == (B, H, T)
        out.sum().backward()
        assert q.grad.shape == q.shape
        seen = rt.look(q, k, v, impl="torch", received=True, pooled=(2, 2))
        assert seen.received.shape == (B, H, S)


def test_no_key_at_all_gives_zero():
    q, k, v = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 5)
    out, lse = rt.attention(q, k, v, sinks=torch.ones(2), return_lse=True, impl="torch")
    assert torch.equal(out, torch.zeros(1, 2, 3, 5))
    assert (lse == -torch.inf).all()


def peak(run):
    """The most bytes that torch's allocator held at one time while `run` ran, beyond what there was before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    for event in profile.events():
        if event.name == "[memory]":
            held += event.cpu_memory_usage
            most = max(most, held)
    return most


def test_memory_grows_with_the_length_and_not_its_square(monkeypatch):
    monkeypatch.setattr(blocked, "TILE", 2**14)
    monkeypatch.setattr(blocked, "QUERIES", 128)

    def run(T):
        q, k, v = (torch.zeros(1, 1, T, 8, requires_grad=True) for _ in range(3))
        rt.attention(q, k, v, impl="torch").sum().backward()

    short, long = (peak(lambda T=T: run(T)) for T in (512, 2048))
    assert long <= 4.5 * short
    assert long < 2048 * 2048  # a quarter of the matrix
