"""The key/value cache: step by step gives what the whole gives, and a failed step changes nothing."""

import numpy as np
import pytest
import torch

import regardant as rg
from op import TYPES, attention_errors_within_budget, tensors


def test_steps_over_the_cache_equal_the_whole():
    q, k, v = tensors(1, 2, 4, 2, 40, 40, 8, 6)
    cache = rg.KVCache(3, 2, 2, 64, 8, 6, like=q)
    outs = []
    for first, last in [(0, 17), (17, 18), (18, 40)]:
        new = slice(first, last)
        for layer in range(3):
            keys, values = cache.write(layer, k[:, :, new], v[:, :, new])
            assert np.shares_memory(keys, cache.write(layer, k[:, :, new], v[:, :, new])[0])
        cache.advance(last - first)
        outs.append(rg.attention(q[:, :, new], keys, values))
    whole, lse = rg.attention(q, k, v, return_lse=True)
    attention_errors_within_budget(np.concatenate(outs, axis=2), lse, q, k, v)
    assert whole.shape == (2, 4, 40, 6)
    assert cache.length == 40


def test_a_write_that_was_not_advanced_is_no_past():
    _, k, v = tensors(2, T=4, S=4)
    cache = rg.KVCache(1, 2, 2, 8, 8, like=k)
    cache.write(0, k, v)
    assert cache.length == 0
    keys, _ = cache.write(0, k[:, :, :1] + 1, v[:, :, :1])
    np.testing.assert_array_equal(keys, k[:, :, :1] + 1)


def test_truncating_forgets_the_end():
    _, k, v = tensors(3, S=6)
    cache = rg.KVCache(1, 2, 2, 8, 8, like=k)
    cache.write(0, k, v)
    cache.advance(6)
    cache.truncate(2)
    keys, _ = cache.write(0, k[:, :, 5:], v[:, :, 5:])
    np.testing.assert_array_equal(keys, k[:, :, [0, 1, 5]])


def test_it_holds_torch_tensors_as_well():
    _, k, v = (torch.from_numpy(a) for a in tensors(4))
    cache = rg.KVCache(1, 2, 2, 16, 8, like=k.bfloat16())
    keys, _ = cache.write(0, k.bfloat16(), v.bfloat16())
    assert keys.dtype == torch.bfloat16
    assert torch.equal(keys, k.bfloat16())


@pytest.mark.parametrize("dtype", TYPES)
def test_it_holds_every_type_that_attention_takes(dtype):
    _, k, v = tensors(4, dtype=dtype)
    cache = rg.KVCache(1, 2, 2, 16, 8, like=k)
    keys, values = cache.write(0, k, v)
    assert keys.dtype == dtype
    np.testing.assert_array_equal(keys, k)
    np.testing.assert_array_equal(values, v)


def test_what_does_not_fit_is_refused_and_nothing_changes():
    _, k, v = tensors(5, S=6)
    cache = rg.KVCache(1, 2, 2, 8, 8, like=k)
    cache.write(0, k, v)
    cache.advance(6)
    with pytest.raises(ValueError, match="capacity must hold 12 positions; it was made for 8"):
        cache.write(0, k, v)
    with pytest.raises(ValueError, match=r"v must be \(2, 2, 2, 8\); got \(2, 2, 6, 8\)"):
        cache.write(0, k[:, :, :2], v)
    with pytest.raises(ValueError, match="count must lie between 0 and the 2 free positions; got 3"):
        cache.advance(3)
    with pytest.raises(ValueError, match="length must lie between 0 and 6; got 7"):
        cache.truncate(7)
    with pytest.raises(ValueError, match="layers must be at least 1; got 0"):
        rg.KVCache(0, 2, 2, 8, 8, like=k)
    assert cache.length == 6
    np.testing.assert_array_equal(cache.write(0, k[:, :, :0], v[:, :, :0])[0], k)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda c, k: c.write(0, k.astype(np.float64), k),
            TypeError,
            "k must be numpy.ndarray of float32 as the cache is",
        ),
        (
            lambda c, k: c.write(0, k, torch.from_numpy(k)),
            TypeError,
            "v must be numpy.ndarray of float32 as the cache is",
        ),
        (
            lambda c, k: c.write(0, None, k),
            TypeError,
            "k must be numpy.ndarray of float32 as the cache is; got .*NoneType",
        ),
        (lambda c, k: c.write(0, k, k[0]), ValueError, r"v must be \(2, 2, 6, 8\); got \(2, 6, 8\)"),
        (lambda c, k: c.write(-1, k, k), ValueError, "layer must be at least 0; got -1"),
        (lambda c, k: c.write(3, k, k), ValueError, "layer must be at most 2; got 3"),
        (lambda c, _: c.advance(1.5), TypeError, "count must be an integer; got 1.5"),
        (lambda c, _: c.advance("a"), TypeError, "count must be an integer; got 'a'"),
        (lambda c, _: c.truncate(None), TypeError, "length must be an integer; got None"),
        (lambda _, k: rg.KVCache("a", 2, 2, 8, 8, like=k), TypeError, "layers must be an integer; got 'a'"),
        (lambda *_: rg.KVCache(1, 2, 2, 8, 8, like=None), TypeError, "like must be an array; got None"),
        (
            lambda _, k: rg.KVCache(1, 2, 2, 8, 8, like=k.astype(int)),
            TypeError,
            "like must be an array of float64, float32, float16, bfloat16; got numpy.ndarray of int64",
        ),
    ],
)
def test_what_is_no_key_value_or_number_is_refused_by_name(call, error, match):
    _, k, _ = tensors(5, S=6)
    cache = rg.KVCache(3, 2, 2, 8, 8, like=k)
    with pytest.raises(error, match=f"KVCache: {match}"):
        call(cache, k)
    assert cache.length == 0
