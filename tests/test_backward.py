"""The way back, over every implementation that has one: against exact sums, finite differences and identities."""

import itertools
import os
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regardant as rg
from op import (
    BACKWARD,
    OPTION_NAMES,
    TILED_BACKWARD,
    TYPES,
    checked,
    gradient_errors_within_budget,
    option_sets,
    tensors,
)
from regardant import reference

EDGES = [1, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
QKV = ("dq", "dk", "dv")


def arriving(seed, q, v):
    """Gradients arriving at out and lse, in the types of out and lse."""
    rng = np.random.default_rng([seed, 1])
    wide = np.float64 if q.dtype == np.float64 else np.float32
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return dout, rng.standard_normal(q.shape[:-1]).astype(wide)


def there_and_back(q, k, v, dout, dlse=None, impl="auto", **options):
    """Gradients from a forward and a backward pass of one implementation."""
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    wants_bias = options.get("bias") is not None
    return rg.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, bias_gradient=wants_bias, impl=impl, **options
    )


def assert_same(got, want, where=None):
    """Every gradient has the same bits or, with `where`, those of dq, dk, dv that it tells."""
    for name in rg.Gradients._fields if where is None else QKV:
        ours, theirs = getattr(got, name), getattr(want, name)
        if ours is None:
            assert theirs is None, name
            continue
        at = ... if where is None else where[name]
        np.testing.assert_array_equal(ours[at], theirs[at], err_msg=name)


# Against exact sums.


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_option_within_the_error_budget(impl, dtype, name):
    B, H, T, S = 2, 4, 37, 45
    q, k, v = tensors(1, B, H, 2, T, S, 16, 24, dtype)
    options = option_sets(2, B, H, T, S)[name]
    dout, dlse = arriving(3, q, v)
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    for gradient, like in zip(got[:3], (q, k, v), strict=True):
        assert gradient.shape == like.shape
        assert gradient.dtype == dtype
    gradient_errors_within_budget(got, q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("impl", TILED_BACKWARD)
@pytest.mark.parametrize("T", EDGES)
def test_sizes_around_each_tile_edge(impl, T):
    for S in EDGES:
        q, k, v = tensors(T * 1000 + S, 1, 2, 1, T, S, 5, 3)
        dout, dlse = arriving(4, q, v)
        got = there_and_back(q, k, v, dout, dlse, impl)
        gradient_errors_within_budget(got, q, k, v, dout, dlse)


@pytest.mark.parametrize("impl", TILED_BACKWARD)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 80, 128, 130, 256, 260])
def test_widths_around_each_vector(impl, width):
    for D, E in ((width, 16), (16, width), (width, width)):
        q, k, v = tensors(5, 1, 2, 1, 20, 35, D, E)
        dout, dlse = arriving(6, q, v)
        got = there_and_back(q, k, v, dout, dlse, impl)
        gradient_errors_within_budget(got, q, k, v, dout, dlse)


@pytest.mark.parametrize("impl", TILED_BACKWARD)
@pytest.mark.parametrize(("T", "S"), [(3, 6000), (40, 6000), (6000, 40), (6000, 3)])
@pytest.mark.parametrize(
    ("spread", "dtype"), [(0.1, np.float32), (2.0, np.float32), (2.0, ml_dtypes.bfloat16)]
)
def test_the_error_does_not_grow_with_the_length(impl, T, S, spread, dtype):
    q, k, v = tensors(7, 1, 4, 1, T, S, 4, 4, dtype, spread=spread)
    dout, dlse = arriving(8, q, v)
    options = {"sinks": np.zeros(4), "causal": False}
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    gradient_errors_within_budget(got, q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("impl", TILED_BACKWARD)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 2), G=st.integers(1, 2), R=st.integers(1, 3), T=st.integers(1, 100), S=st.integers(1, 100),
    D=st.sampled_from([1, 3, 7, 56, 64, 80]), E=st.sampled_from([1, 2, 64, 65]), seed=st.integers(0, 10**6),
    dtype=st.sampled_from(TYPES), names=st.sets(st.sampled_from(OPTION_NAMES), max_size=4), with_dlse=st.booleans(),
)  # fmt: skip
def test_drawn_shapes_and_options_within_the_error_budget(
    impl, B, G, R, T, S, D, E, seed, dtype, names, with_dlse
):
    q, k, v = tensors(seed, B, G * R, G, T, S, D, E, dtype)
    sets = option_sets(seed, B, G * R, T, S)
    options = {key: value for name in sorted(names) for key, value in sets[name].items()}
    dout, dlse = arriving(seed, q, v)
    dlse = dlse if with_dlse else None
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    gradient_errors_within_budget(got, q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1e4},
        {"scale": 1e-30},
        {"scale": 0.0},
        {"scale": -0.5},
        {"scale": 1e4, "softcap": 30.0},
        {"sinks": np.array([300.0, -300, 0, 1e4])},
        {"sinks": np.full(4, -np.inf)},
    ],
)
def test_extreme_scores_within_the_error_budget(impl, options):
    q, k, v = tensors(9)
    dout, dlse = arriving(10, q, v)
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    gradient_errors_within_budget(got, q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("impl", BACKWARD)
def test_float16_scores_do_not_overflow(impl):
    q, k, v = tensors(11, D=64, dtype=np.float16)
    q, k = q * np.float16(90), k * np.float16(90)
    dout, dlse = arriving(12, q, v)
    got = there_and_back(q, k, v, dout, dlse, impl, scale=1.0)
    gradient_errors_within_budget(got, q, k, v, dout, dlse, scale=1.0)


@pytest.mark.parametrize("impl", BACKWARD)
def test_a_gradient_too_large_for_float16_becomes_infinite_without_a_warning(impl):
    q, k, v = (np.full((1, 2), number, np.float16) for number in (1, 1, 1))
    out, lse = rg.attention(q, k, v, return_lse=True, impl=impl)
    got = rg.attention_backward(q, k, v, out, lse, 0 * out, dlse=lse + 1e6, scale=1.0, impl=impl)
    np.testing.assert_array_equal(got.dq, np.inf)
    np.testing.assert_array_equal(got.dk, np.inf)


# Against finite differences.


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_central_finite_differences(impl, G, name):
    B, H, T, S = 2, 4, 7, 9
    q, k, v = tensors(13, B, H, G, T, S, 5, 3, np.float64)
    options = option_sets(14, B, H, T, S)[name]
    point = {"q": q, "k": k, "v": v} | {name: options[name] for name in ("sinks", "bias") if name in options}
    point = {name: array.astype(np.float64) for name, array in point.items()}
    dout, dlse = arriving(15, q, v)
    got = there_and_back(**options | point, dout=dout, dlse=dlse, impl=impl)

    def terms(at):
        out, lse = rg.attention(**options | at, impl="reference", return_lse=True)
        return np.concatenate([(dout * out).ravel(), dlse[lse != -np.inf] * lse[lse != -np.inf]])

    def slope(name, way, step):
        ends = [terms(point | {name: point[name] + sign * step * way}).sum() for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    # A central difference errs by step²·c and by rounding, divided by the step: where both are about as large,
    # and half the step tells what step²·c is.
    step = np.finfo(np.float64).eps ** (1 / 3)
    size = np.abs(terms(point)).sum()
    rng = np.random.default_rng(16)
    for which, array in point.items():
        way = rng.standard_normal(array.shape)
        coarse, fine = slope(which, way, 2 * step), slope(which, way, step)
        rounding = 16 * np.finfo(np.float64).eps * size / step  # each score passes some sixteen roundings
        along = np.sum(getattr(got, f"d{which}") * way)
        np.testing.assert_array_less(np.abs(along - fine), np.abs(coarse - fine) + rounding, err_msg=which)


# Identities.


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("dtype", TYPES)
def test_without_dlse_is_with_zero(impl, dtype):
    q, k, v = tensors(17, dtype=dtype)
    dout, dlse = arriving(18, q, v)
    assert_same(there_and_back(q, k, v, dout, None, impl), there_and_back(q, k, v, dout, 0 * dlse, impl))


@pytest.mark.parametrize("impl", BACKWARD)
def test_a_shared_key_head_gathers_from_all_heads_that_read_it(impl):
    q, k, v = tensors(19, 2, 6, 2, 20, 30, dtype=np.float64)
    dout, dlse = arriving(20, q, v)
    grouped = there_and_back(q, k, v, dout, dlse, impl)
    apart = there_and_back(q, k.repeat(3, axis=1), v.repeat(3, axis=1), dout, dlse, impl)
    bound = (
        64 * np.finfo(np.float64).eps
    )  # three sums of 20 terms of at most some tens, added in another order
    np.testing.assert_allclose(grouped.dq, apart.dq, rtol=bound, atol=bound)
    for name in ("dk", "dv"):
        summed = getattr(apart, name).reshape(2, 2, 3, 30, 8).sum(axis=2)
        np.testing.assert_allclose(getattr(grouped, name), summed, rtol=bound, atol=64 * bound, err_msg=name)


@pytest.mark.parametrize("impl", TILED_BACKWARD)
@pytest.mark.parametrize("options", [{}, {"window": 30}, {"softcap": 2.0}, {"sinks": np.array([0.5, -1])}])
def test_gradients_of_keys_taken_in_parts_add_up(impl, options):
    T, S, cut = 40, 90, 37
    q, k, v = tensors(21, 1, 2, 1, T, S, dtype=np.float64)
    dout, dlse = arriving(22, q, v)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    whole = rg.attention_backward(q, k, v, out, lse, dout, dlse=dlse, impl=impl, **options)
    parts = [
        rg.attention_backward(
            q, k[:, :, keys], v[:, :, keys], out, lse, dout, dlse=dlse, offset=S - T - keys.start, impl=impl,
            **options,
        )
        for keys in (slice(0, cut), slice(cut, S))
    ]  # fmt: skip
    bound = S * np.finfo(np.float64).eps
    np.testing.assert_allclose(parts[0].dq + parts[1].dq, whole.dq, rtol=bound, atol=16 * bound)
    for name in ("dk", "dv"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=2)
        np.testing.assert_allclose(joined, getattr(whole, name), rtol=bound, atol=16 * bound, err_msg=name)


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("name", ["bias", "several", "all"])
def test_a_rows_score_gradients_sum_to_what_arrives_at_its_lse(impl, name):
    B, H, T, S = 1, 2, 30, 40
    q, k, v = tensors(23, B, H, 1, T, S, dtype=np.float64)
    options = option_sets(24, B, H, T, S)[name]
    options["bias"] = np.broadcast_to(options["bias"], (B, H, T, S)).astype(np.float64)
    dout, dlse = arriving(25, q, v)
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    _, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    expected = np.where(lse == -np.inf, 0, dlse).sum(axis=(0, 2))
    of_sinks = 0 if got.dsinks is None else got.dsinks
    bound = T * S * np.finfo(np.float64).eps * np.abs(got.dbias).max()
    np.testing.assert_allclose(got.dbias.sum(axis=(0, 2, 3)) + of_sinks, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (20,),
        (17, 1),
        (17, 20),
        (4, 1, 1),
        (4, 17, 20),
        (2, 1, 17, 20),
        (2, 4, 1, 20),
        (1, 4, 17, 1),
    ],
)
def test_a_biass_gradient_has_its_own_shape_and_type(impl, dtype, shape):
    q, k, v = tensors(26, 2, 4, 2, 17, 20)
    bias = np.random.default_rng(27).standard_normal(shape).astype(dtype)
    bias = np.asarray(bias)
    dout, dlse = arriving(28, q, v)
    got = there_and_back(q, k, v, dout, dlse, impl, bias=bias)
    assert got.dbias.shape == shape
    assert got.dbias.dtype == dtype
    gradient_errors_within_budget(got, q, k, v, dout, dlse, bias=bias)


@pytest.mark.parametrize("impl", BACKWARD)
def test_a_bias_that_its_caller_repeated_keeps_its_shape(impl):
    q, k, v = tensors(29, 2, 4, 2, 9, 9)
    row = np.random.default_rng(30).standard_normal(9).astype(np.float32)
    dout, dlse = arriving(31, q, v)
    bias = np.broadcast_to(row, (2, 4, 9, 9))
    got = there_and_back(q, k, v, dout, dlse, impl, bias=bias)
    assert_same(got, there_and_back(q, k, v, dout, dlse, impl, bias=bias.copy()))
    gradient_errors_within_budget(got, q, k, v, dout, dlse, bias=bias)


@pytest.mark.parametrize("impl", BACKWARD)
def test_a_biass_gradient_changes_no_other(impl):
    q, k, v = tensors(32, 2, 4, 2, 70, 90)
    dout, _ = arriving(33, q, v)
    bias = np.zeros((4, 1, 90), np.float32)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, bias=bias)
    without = rg.attention_backward(q, k, v, out, lse, dout, impl=impl, bias=bias)
    assert without.dbias is None
    assert without.dsinks is None
    assert_same(there_and_back(q, k, v, dout, impl=impl, bias=bias)._replace(dbias=None), without)


# A row that sees nothing passes nothing on, and what is invisible is never read.


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.zeros((1, 1, 6, 6), np.bool)},
        {"lengths": [0]},
        {"starts": [4], "lengths": [2]},
        {"offset": -6},
        {"segments": (np.zeros((1, 6), int), np.ones((1, 6), int))},
        {"offset": 20, "window": 3},
        {"bias": np.full((6, 6), -np.inf, np.float32)},
        {"lengths": [0], "sinks": np.array([0.5, -0.5]), "bias": np.ones((6, 6), np.float32)},
    ],
)
def test_rows_that_see_nothing_give_zero(impl, options):
    q, k, v = tensors(34, B=1, H=2, G=1, T=6, S=6)
    dout, dlse = arriving(35, q, v)
    for gradient in there_and_back(q, k, v, dout, dlse, impl, **options):
        if gradient is not None:
            np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("impl", BACKWARD)
def test_a_row_that_sees_only_scores_of_minus_infinity_gives_zero(impl):
    q, k, v = tensors(34, B=1, H=2, G=1, T=6, S=6)
    q, k[:, :, :3] = np.abs(q), -np.inf
    dout, dlse = arriving(35, q, v)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, offset=0)
    np.testing.assert_array_equal(lse[:, :, :3], -np.inf)
    got = rg.attention_backward(q, k, v, out, lse, dout, dlse=dlse, impl=impl, offset=0)
    np.testing.assert_array_equal(got.dq[:, :, :3], 0)


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_what_is_invisible_changes_nothing(impl, bad, name):
    B, H, T, S = 2, 4, 11, 140
    q, k, v = tensors(36, B, H, 2, T, S)
    options = option_sets(37, B, H, T, S)[name] | {"offset": -4}  # the first rows see nothing
    dout, dlse = arriving(38, q, v)
    visible = reference.dense(checked(q, k, v, **options)).visible_BHTS
    dead, unseen = ~visible.any(axis=-1), ~visible.any(axis=(1, 2))
    if not name.endswith("full"):
        assert dead.any()
        assert unseen.any()
    wants_bias = "bias" in options
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    clean = rg.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, bias_gradient=wants_bias, impl=impl, **options
    )
    for rows in (q, out, dout, dlse):
        rows[dead] = bad
    for columns in (k, v):
        columns[np.broadcast_to(unseen[:, None], columns.shape[:3])] = bad
    if wants_bias:
        bias = np.broadcast_to(options["bias"], visible.shape)
        options["bias"] = np.where(visible | (bias == -np.inf), bias, bad)
        clean = clean._replace(dbias=None)  # it has another shape now
    dirty = rg.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, bias_gradient=wants_bias, impl=impl, **options
    )
    if wants_bias:
        np.testing.assert_array_equal(dirty.dbias[~visible], 0)
        assert np.isfinite(dirty.dbias).all()
        dirty = dirty._replace(dbias=None)
    assert_same(dirty, clean)
    np.testing.assert_array_equal(dirty.dq[dead], 0)
    for gradient in (dirty.dk, dirty.dv):
        np.testing.assert_array_equal(gradient[np.broadcast_to(unseen[:, None], gradient.shape[:3])], 0)


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("where", ["q", "k", "v", "bias", "dout", "dlse"])
@pytest.mark.parametrize("name", ["plain", "window", "mask", "segments", "softcap", "all"])
def test_a_visible_nan_shows_in_what_it_touches_and_in_nothing_else(impl, where, name):
    B, H, T, S, at = 1, 2, 40, 40, 17
    q, k, v = tensors(39, B, H, 2, T, S)
    options = option_sets(40, B, H, T, S)[name]
    bias = np.broadcast_to(options.get("bias", np.float32(0)), (B, H, T, S)).copy()
    options["bias"] = bias
    dout, dlse = arriving(41, q, v)
    visible = reference.dense(checked(q, k, v, **options)).visible_BHTS
    clean = there_and_back(q, k, v, dout, dlse, impl, **options)
    if where == "bias":
        bias[..., at] = np.where(bias[..., at] == -np.inf, -np.inf, np.nan)
    else:
        {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse}[where][:, :, at] = np.nan
    of_column = where in {"k", "v", "bias"}
    rows = visible[..., at] if of_column else (np.arange(T) == at) & visible.any(axis=-1)
    columns = (visible & rows[..., None]).any(axis=-2)
    # Values and what arrives at lse have no part in the weights; what arrives at out has one in dv itself.
    hit = {"dq": rows, "dk": columns, "dv": columns if where not in {"v", "dlse"} else columns & False}
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    assert rows.any()
    for gradient, touched in hit.items():
        assert np.isnan(getattr(got, gradient)[touched]).all(), gradient
    assert_same(got, clean, where={gradient: ~touched for gradient, touched in hit.items()})
    np.testing.assert_array_equal(np.isnan(got.dbias), visible & rows[..., None])


# Documents, batch rows and later tokens.


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("by", ["segments", "mask", "bias"])
@pytest.mark.parametrize("cut", [1, 16, 37, 64, 100])
def test_a_packed_document_does_not_know_its_neighbour(impl, dtype, by, cut):
    T = 130
    q, k, v = tensors(42, 1, 4, 2, T, T, 16, 16, dtype)
    dout, dlse = arriving(43, q, v)
    ids = (np.arange(T) >= cut).astype(int)
    same = ids[:, None] == ids
    options = {
        "segments": {"segments": (ids[None], ids[None])},
        "mask": {"mask": same},
        "bias": {"bias": np.where(same, 0, -np.inf).astype(np.float32)},
    }[by]
    before = there_and_back(q, k, v, dout, dlse, impl, **options)
    rng = np.random.default_rng(44)
    second = dict.fromkeys(QKV, np.s_[:, :, cut:])
    for fill in (100, np.nan):
        for array in (q, k, v, dout, dlse):
            array[:, :, :cut] = fill * rng.standard_normal(array[:, :, :cut].shape)
        assert_same(there_and_back(q, k, v, dout, dlse, impl, **options), before, where=second)


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_a_batch_row_does_not_know_its_mates(impl, name):
    B, H, T, S = 3, 2, 20, 31
    q, k, v = tensors(45, B, H, 1, T, S)
    options = option_sets(46, B, H, T, S)[name]
    dout, dlse = arriving(47, q, v)
    before = there_and_back(q, k, v, dout, dlse, impl, **options)
    for array in (q, k, v, dout, dlse):
        array[::2] = np.nan
    after = there_and_back(q, k, v, dout, dlse, impl, **options)
    assert_same(after, before, where=dict.fromkeys(QKV, 1))


@pytest.mark.parametrize("impl", BACKWARD)
def test_what_comes_later_changes_no_earlier_querys_gradient(impl):
    q, k, v = tensors(48, 1, 2, 1, 70, 70)
    dout, dlse = arriving(49, q, v)
    before = there_and_back(q, k, v, dout, dlse, impl)
    for array in (q, k, v, dout, dlse):
        array[:, :, 40:] = 9
    np.testing.assert_array_equal(
        there_and_back(q, k, v, dout, dlse, impl).dq[:, :, :40], before.dq[:, :, :40]
    )


def test_the_same_bits_for_any_thread_count_and_run_to_run():
    code = (
        "import hashlib, sys; sys.path.insert(0, 'tests'); import numpy as np, regardant as rg\n"
        "from op import TILED_BACKWARD, tensors\n"
        "for impl in TILED_BACKWARD:\n"
        "    for H, G, D, E in ((6, 2, 64, 64), (8, 1, 128, 1), (4, 4, 1, 80), (32, 1, 128, 128)):\n"
        "        q, k, v = tensors(50, 2, H, G, 130, 300, D, E)\n"
        "        options = {'impl': impl, 'sinks': np.zeros(H), 'bias': np.zeros((1, 300), np.float32)}\n"
        "        out, lse = rg.attention(q, k, v, return_lse=True, **options)\n"
        "        for wants_bias in (False, True):\n"
        "            got = rg.attention_backward(q, k, v, out, lse, out, bias_gradient=wants_bias, **options)\n"
        "            given = [array.tobytes() for array in got if array is not None]\n"
        "            print(hashlib.sha256(b''.join(given)).hexdigest())"
    )
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    digests = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | dict.fromkeys(names, count),
            capture_output=True, text=True, check=True,
        ).stdout
        for count in ("1", "2", "3", "2")
    ]  # fmt: skip
    assert len(set(digests)) == 1


# Any strides, read-only arrays, ranks, empty axes, no matrix.


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_strides_and_read_only_arrays(impl, dtype):
    q, k, v = tensors(51, 2, 4, 2, 30, 30, 6, 6, dtype)
    dout, dlse = arriving(52, q, v)
    bias = np.random.default_rng(53).standard_normal((4, 30, 30)).astype(np.float32)
    out, lse = rg.attention(q, k, v, bias=bias, return_lse=True)
    arrays = (q, k, v, out, lse, dout, dlse, bias)
    layouts = {
        "columns": np.asfortranarray,
        "heads last": lambda a: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1),
        "negative": lambda a: np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1],
        "gaps": lambda a: np.repeat(np.repeat(a, 2, -1), 3, -2)[..., ::3, ::2],
    }
    for layout in layouts.values():
        laid = [layout(array) for array in arrays]
        before = [array.copy() for array in laid]
        for array in laid:
            array.flags.writeable = False
        *given, dlse_laid, bias_laid = laid
        got = rg.attention_backward(*given, dlse=dlse_laid, bias=bias_laid, bias_gradient=True, impl=impl)
        gradient_errors_within_budget(got, q, k, v, dout, dlse, bias=bias)
        for array, was in zip(laid, before, strict=True):
            np.testing.assert_array_equal(array, was)


@pytest.mark.parametrize("impl", BACKWARD)
def test_one_gradient_for_all_rows_and_one_key_for_all_places(impl):
    q, k, v = tensors(54, 1, 2, 1, 9, 9)
    out, lse = rg.attention(q, k, v, return_lse=True)
    one = np.broadcast_to(np.float32(1), out.shape)  # what summing out sends back
    got = rg.attention_backward(q, k, v, out, lse, one, impl=impl)
    assert_same(got, rg.attention_backward(q, k, v, out, lse, one.copy(), impl=impl))
    same = np.broadcast_to(k[:, :, :1], k.shape)
    dout, dlse = arriving(55, q, v)
    assert_same(
        there_and_back(q, same, v, dout, dlse, impl), there_and_back(q, same.copy(), v, dout, dlse, impl)
    )


@pytest.mark.parametrize("impl", BACKWARD)
@pytest.mark.parametrize("axis", ["B", "H", "T", "S"])
def test_axes_of_length_zero(impl, axis):
    sizes = {"B": 2, "H": 2, "G": 1, "T": 3, "S": 4} | {axis: 0}
    q, k, v = tensors(56, **sizes)
    dout, dlse = arriving(57, q, v)
    H, S = sizes["H"], sizes["S"]
    options = {"sinks": np.zeros(H), "bias": np.zeros((H, 1, S), np.float32)}
    got = there_and_back(q, k, v, dout, dlse, impl, **options)
    for gradient, like in zip(got, (q, k, v, options["sinks"], options["bias"]), strict=True):
        assert gradient.shape == like.shape
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("impl", BACKWARD)
def test_no_heads_at_all(impl):
    q, k, v = tensors(56, H=0, G=0)
    dout, dlse = arriving(57, q, v)
    assert [gradient.shape for gradient in there_and_back(q, k, v, dout, dlse, impl)[:3]] == [
        (2, 0, 9, 8)
    ] * 3


@pytest.mark.parametrize("impl", BACKWARD)
def test_ranks_two_and_three_give_their_rank_back(impl):
    q, k, v = tensors(58, B=1, H=1, G=1, T=4, S=6)
    dout, dlse = arriving(59, q, v)
    options = {"sinks": [0.5], "bias": np.ones((4, 6), np.float32)}
    four = there_and_back(q, k, v, dout, dlse, impl, **options)
    for cut in (1, 2):
        arrays = [a[(0,) * cut] for a in (q, k, v, dout, dlse)]
        got = there_and_back(*arrays, impl, **options)
        for name in QKV:
            np.testing.assert_array_equal(getattr(got, name), getattr(four, name)[(0,) * cut])
        np.testing.assert_array_equal(got.dsinks, four.dsinks)
        np.testing.assert_array_equal(got.dbias, four.dbias)


@pytest.mark.parametrize("impl", BACKWARD)
def test_positions_beyond_32_bits(impl):
    q, k, v = tensors(60, 1, 1, 1, 2, 5, dtype=np.float64)
    dout, dlse = arriving(61, q, v)
    far = there_and_back(q, k, v, dout, dlse, impl, offset=2**40, window=2**40 - 1)
    mask = np.array([[False, False, True, True, True], [False] * 3 + [True] * 2])
    near = there_and_back(q, k, v, dout, dlse, impl, mask=mask, causal=False)
    for name in QKV:
        bound = 64 * np.finfo(np.float64).eps
        np.testing.assert_allclose(getattr(far, name), getattr(near, name), rtol=bound, atol=bound)


@pytest.mark.parametrize("impl", TILED_BACKWARD)
@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"softcap": 5.0}, {"bias": np.zeros((6000, 1), np.float32)}]
)
def test_the_matrix_is_never_held(impl, options):
    T = 6000
    q, k, v = tensors(62, 1, 1, 1, T, T, 4, 4)
    dout, dlse = arriving(63, q, v)
    tracemalloc.start()
    there_and_back(q, k, v, dout, dlse, impl, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < T * T // 4  # a sixteenth of the float32 matrix


# The front door.


def test_auto_goes_back_and_an_unknown_implementation_is_refused():
    q, k, v = tensors(64)
    dout, dlse = arriving(65, q, v)
    got = there_and_back(q, k, v, dout, dlse)
    gradient_errors_within_budget(got, q, k, v, dout, dlse)
    with pytest.raises(ValueError, match=r"attention_backward: impl must be 'auto', .*; got 'quick'"):
        rg.attention_backward(q, k, v, dout, dlse, dout, impl="quick")
    with pytest.raises(TypeError, match="return_lse"):
        rg.attention_backward(q, k, v, dout, dlse, dout, return_lse=True)


def test_every_array_must_be_there():
    q, k, v = tensors(66)
    for count in range(3, 6):
        with pytest.raises(TypeError, match="missing"):
            rg.attention_backward(*itertools.islice(itertools.cycle((q, k, v)), count))
