"""The definition against plain-Python sums, against torch, and against the identities of attention."""

import ml_dtypes
import numpy as np
import pytest
import torch

import regardant as rg
import scalar
from op import OPTION_NAMES, TYPES, checked, option_sets, tensors
from regardant import reference


@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 8), (7, 4), (1, 6)])
def test_oracle_equals_plain_python_sums(name, T, S):
    q, k, v = tensors(1, B=2, H=4, G=2, T=T, S=S, D=3, E=5, dtype=np.float64)
    options = option_sets(2, 2, 4, T, S)[name]
    exact = reference.dense(checked(q, k, v, **options))
    out, lse, weights = scalar.attention(q, k, v, **options)
    np.testing.assert_allclose(exact.out_BHTE, out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(exact.lse_BHT, lse, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(exact.a_BHTS, weights, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", TYPES)
def test_oracle_computes_in_float64_whatever_the_input(dtype):
    q, k, v = tensors(3, dtype=dtype)
    out, _, _ = scalar.attention(q, k, v)
    got = rg.attention(q, k, v, impl="reference")
    assert got.dtype == dtype
    if dtype == np.float64:
        np.testing.assert_allclose(got, out, rtol=1e-13, atol=1e-14)
    else:  # one rounding from float64, and nothing narrower on the way
        np.testing.assert_array_equal(got, out.astype(dtype))


def test_one_head_is_softmax_of_scaled_products():
    rng = np.random.default_rng(0)
    x, wq, wk, wv = (rng.standard_normal(s) for s in ((6, 4), (4, 3), (4, 3), (4, 5)))
    out, _, _ = scalar.attention(*(a[None, None] for a in (x @ wq, x @ wk, x @ wv)))
    np.testing.assert_allclose(rg.causal_attention(x, wq, wk, wv), out[0, 0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_head_keeps_the_type_and_a_prefix_ignores_the_rest(dtype):
    rng = np.random.default_rng(1)
    x, wq, wk, wv = (rng.standard_normal(s).astype(dtype) for s in ((7, 4), (4, 3), (4, 3), (4, 2)))
    whole = rg.causal_attention(x, wq, wk, wv)
    assert whole.dtype == dtype
    poisoned = x.copy()
    poisoned[4:] = np.nan
    np.testing.assert_array_equal(rg.causal_attention(poisoned, wq, wk, wv)[:4], whole[:4])
    assert np.isnan(rg.causal_attention(poisoned, wq, wk, wv)[4:]).all()


def test_one_head_survives_scores_beyond_the_exponential():
    x = np.array([[1000.0, 0], [0, 1000], [-1000, 1000]], np.float32)
    eye = np.eye(2, dtype=np.float32)
    out = rg.causal_attention(x, eye, eye, eye)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[1], x[1])


def test_one_head_in_float16_does_not_overflow():
    x = np.full((3, 64), 200, np.float16)
    eye = np.eye(64, dtype=np.float16)
    np.testing.assert_array_equal(rg.causal_attention(x, eye, eye, eye), x)


def test_no_tokens_give_no_rows():
    eye = np.eye(2)
    assert rg.causal_attention(np.zeros((0, 2)), eye, eye, eye).shape == (0, 2)


def test_one_head_refuses_a_batch():
    eye = np.eye(2)
    with pytest.raises(
        ValueError, match=r"causal_attention: x must be \(T, C\), one sequence; got \(3, 3, 2\)"
    ):
        rg.causal_attention(np.zeros((3, 3, 2)), eye, eye, eye)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, None), (4, 2), (6, 1)])
def test_many_heads_equal_torch(heads, kv_heads):
    rng = np.random.default_rng(2)
    G, D, E, C, T = kv_heads or heads, 3, 5, 7, 9
    x = rng.standard_normal((T, C))
    wq, wk, wv = (rng.standard_normal((C, n)) for n in (heads * D, G * D, G * E))
    wo = rng.standard_normal((heads * E, C))
    split = [
        torch.tensor(x @ w).reshape(T, n, -1).transpose(0, 1)[None]
        for w, n in ((wq, heads), (wk, G), (wv, G))
    ]
    mixed = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True)
    want = mixed[0].transpose(0, 1).reshape(T, heads * E).numpy() @ wo
    got = rg.multi_head_attention(x, wq, wk, wv, wo, heads=heads, kv_heads=kv_heads)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_many_heads_refuse_what_does_not_divide():
    x, w = np.zeros((2, 6)), np.zeros((6, 6))
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads; got 4 and 3"):
        rg.multi_head_attention(x, w, w, w, w, heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="wq must divide into 4 heads; got 6 wide"):
        rg.multi_head_attention(x, w, w, w, w, heads=4)


X, W = np.ones((3, 2)), np.eye(2)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: rg.causal_attention(X.astype(int), W, W, W),
            TypeError,
            "causal_attention: x must be a NumPy array of float64",
        ),
        (
            lambda: rg.causal_attention([[1.0, 2.0]], W, W, W),
            TypeError,
            "causal_attention: x must be a NumPy array of",
        ),
        (lambda: rg.causal_attention(X, None, W, W), TypeError, "causal_attention: wq must be .*; got None"),
        (
            lambda: rg.causal_attention(X, W, np.eye(3), W),
            ValueError,
            "causal_attention: wk must have 2 rows, x's width",
        ),
        (
            lambda: rg.causal_attention(X, W, W[:, :1], W),
            ValueError,
            r"causal_attention: wk must be \(2, 2\), as wq is",
        ),
        (lambda: rg.causal_attention(X, W, W, W[:1]), ValueError, "causal_attention: wv must have 2 rows"),
        (
            lambda: rg.multi_head_attention(X[None], W, W, W, W, heads=1),
            ValueError,
            r"multi_head_attention: x must be \(T, C\)",
        ),
        (
            lambda: rg.multi_head_attention(X, W, W, W, W, heads="a"),
            TypeError,
            "heads must be an integer; got 'a'",
        ),
        (
            lambda: rg.multi_head_attention(X, W, W, W, W, heads=2.0),
            TypeError,
            "heads must be an integer; got 2.0",
        ),
        (
            lambda: rg.multi_head_attention(X, W, W, W, W[:1], heads=2),
            ValueError,
            "wo must have 2 rows, the heads' values",
        ),
        (
            lambda: rg.multi_head_attention(X, W, W[:, :1], W, W, heads=1),
            ValueError,
            "wk must be 2 wide, as wq's heads are; got 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_torch_agrees_with_the_oracle_on_the_causal_square():
    q, k, v = tensors(5, dtype=np.float64)
    want = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)), is_causal=True, enable_gqa=True
    )
    np.testing.assert_allclose(rg.attention(q, k, v, impl="reference"), want.numpy(), rtol=1e-12, atol=1e-13)


def test_bfloat16_comes_back_as_bfloat16():
    q, k, v = tensors(6, dtype=ml_dtypes.bfloat16)
    assert rg.attention(q, k, v).dtype == ml_dtypes.bfloat16
