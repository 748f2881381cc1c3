"""The hard rules of attention, over every implementation: each of them has been broken by somebody in public."""

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
    IMPLS,
    OPTION_NAMES,
    TILED,
    TYPES,
    attention_errors_within_budget,
    checked,
    option_sets,
    tensors,
)
from regardant import reference

EDGES = [1, 2, 13, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
DEAD = {
    "mask": {"mask": np.zeros((1, 1, 6, 6), np.bool)},
    "lengths": {"lengths": [0]},
    "starts": {"starts": [6]},
    "starts after lengths": {"starts": [4], "lengths": [2]},
    "offset": {"offset": -6},
    "segments": {"segments": (np.zeros((1, 6), int), np.ones((1, 6), int))},
    "window behind": {"offset": 20, "window": 3},
    "bias": {"bias": np.full((6, 6), -np.inf, np.float32)},
    "sinks": {"lengths": [0], "sinks": np.array([0.5, -0.5])},
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_option_within_the_error_budget(impl, dtype, name):
    B, H, T, S = 2, 4, 37, 45
    q, k, v = tensors(1, B, H, 2, T, S, 16, 24, dtype)
    options = option_sets(2, B, H, T, S)[name]
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    attention_errors_within_budget(out, lse, q, k, v, **options)


@pytest.mark.parametrize("impl", TILED)
@pytest.mark.parametrize("S", EDGES)
@pytest.mark.parametrize("T", [1, 8, 9, 33, 127, 128, 129, 257])
def test_sizes_around_each_tile_edge(impl, T, S):
    q, k, v = tensors(T * 1000 + S, 1, 2, 1, T, S, 5, 3)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True)
    attention_errors_within_budget(out, lse, q, k, v)


@pytest.mark.parametrize("impl", TILED)
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_the_error_does_not_grow_with_the_number_of_keys(impl, T, spread):
    q, k, v = tensors(40, 1, 1, 1, T, 12_000, 16, 16, spread=spread)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True)
    attention_errors_within_budget(out, lse, q, k, v)


@pytest.mark.parametrize("impl", TILED)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 3), G=st.integers(1, 3), R=st.integers(1, 3), T=st.integers(1, 150), S=st.integers(1, 300),
    D=st.sampled_from([1, 3, 7, 56, 64, 80]), E=st.sampled_from([1, 2, 64, 65]), seed=st.integers(0, 10**6),
    dtype=st.sampled_from(TYPES), name=st.sampled_from(OPTION_NAMES),
)  # fmt: skip
def test_drawn_shapes_and_options_within_the_error_budget(impl, B, G, R, T, S, D, E, seed, dtype, name):
    q, k, v = tensors(seed, B, G * R, G, T, S, D, E, dtype)
    options = option_sets(seed, B, G * R, T, S)[name]
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    attention_errors_within_budget(out, lse, q, k, v, **options)


# 1. A row that sees nothing.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cause", DEAD)
def test_a_row_that_sees_nothing_is_zero(impl, cause):
    q, k, v = tensors(3, B=1, H=2, G=1, T=6, S=6)
    look = rg.look(q, k, v, impl=impl, received=True, pooled=(2, 3), **DEAD[cause])
    zero = ["out", "entropy", "sink_weight", "top_weights", "received", "pooled"]
    for name in zero:
        np.testing.assert_array_equal(getattr(look, name), 0, err_msg=name)
    np.testing.assert_array_equal(look.rows([0, 5]), 0)
    np.testing.assert_array_equal(look.lse, -np.inf)
    np.testing.assert_array_equal(look.max_logit, -np.inf)
    np.testing.assert_array_equal(look.top_keys, -1)


@pytest.mark.parametrize("impl", IMPLS)
def test_dead_and_live_rows_stand_side_by_side(impl):
    q, k, v = tensors(4, B=2, H=2, G=2, T=5, S=3)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, lengths=[3, 0])
    np.testing.assert_array_equal(
        out[0, :, :2], 0
    )  # the last query sees the last key: two rows come before any
    np.testing.assert_array_equal(lse[0, :, :2], -np.inf)
    np.testing.assert_array_equal(out[0, :, 2], v[0, :, 0])
    np.testing.assert_array_equal(out[1], 0)


# 2. What is invisible is never read.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_what_nobody_sees_changes_nothing(impl, bad, name):
    B, H, T, S = 2, 2, 11, 140
    q, k, v = tensors(5, B, H, 1, T, S)
    options = option_sets(6, B, H, T, S)[name] | {"offset": 100}
    unseen = ~reference.dense(checked(q, k, v, **options)).visible_BHTS.any(axis=(1, 2))
    if name not in {"full", "window full", "mask full"}:
        assert unseen.any()
    clean = rg.look(q, k, v, impl=impl, received=True, pooled=(2, 2), **options)
    k, v = k.copy(), v.copy()
    k[unseen[:, None]] = bad
    v[unseen[:, None]] = bad
    dirty = rg.look(q, k, v, impl=impl, received=True, pooled=(2, 2), **options)
    for field in ("out", "lse", "max_logit", "entropy", "top_keys", "top_weights", "received", "pooled"):
        np.testing.assert_array_equal(getattr(dirty, field), getattr(clean, field), err_msg=field)
    np.testing.assert_array_equal(dirty.rows(range(T)), clean.rows(range(T)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("where", ["k", "v", "q", "bias"])
@pytest.mark.parametrize("name", ["plain", "window", "mask", "segments", "all"])
def test_a_visible_nan_shows_in_the_rows_that_see_it_and_in_no_others(impl, where, name):
    B, H, T, S, at = 1, 2, 40, 40, 17
    q, k, v = tensors(7, B, H, 2, T, S)
    options = option_sets(8, B, H, T, S)[name]
    bias = np.broadcast_to(options.get("bias", np.float32(0)), (B, H, T, S)).copy()
    options["bias"] = bias
    visible = reference.dense(checked(q, k, v, **options)).visible_BHTS
    clean = rg.attention(q, k, v, impl=impl, **options)
    if where == "bias":
        bias[..., at] = np.where(bias[..., at] == -np.inf, -np.inf, np.nan)
    else:
        {"q": q, "k": k, "v": v}[where][:, :, at] = np.nan
    hit = visible[..., at] if where != "q" else (np.arange(T) == at) & visible.any(axis=-1)
    out = rg.attention(q, k, v, impl=impl, **options)
    assert hit.any()
    assert np.isnan(out[hit]).all()
    np.testing.assert_array_equal(out[~hit], clean[~hit])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_row_does_not_reach_the_columns_it_cannot_see(impl):
    q, k, v = tensors(9, B=1, H=1, G=1, T=6, S=6)
    q[..., 2, :] = np.nan
    look = rg.look(q, k, v, impl=impl, received=True, pooled=(6, 6))
    assert np.isnan(look.received[..., :3]).all()
    assert np.isfinite(look.received[..., 3:]).all()
    assert (np.isnan(look.pooled[0, 0]) == (np.tri(6, dtype=bool) & (np.arange(6) == 2)[:, None])).all()


# 3. Scores in float32 at least.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T", [1, 2, 20])
def test_a_visible_nan_value_shows_though_every_score_is_minus_infinity(impl, T):
    k, v = np.float32([[-np.inf]]), np.float32([[np.nan]])
    out = rg.attention(np.ones((T, 1), np.float32), k, v, causal=False, impl=impl)
    assert np.isnan(out).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T", [2, 20])
def test_a_bias_is_read_in_the_type_of_scores(impl, T):
    q, k, v = tensors(4, 1, 1, 1, T, 9, 8, 8)
    narrow = np.zeros((1, 1, T, 9))
    narrow[..., 3] = -np.inf
    wide = np.where(narrow == -np.inf, -1e39, 0)
    v[:, :, 3] = np.nan
    want = rg.attention(q, k, v, bias=narrow, causal=False, impl=impl)
    np.testing.assert_array_equal(rg.attention(q, k, v, bias=wide, causal=False, impl=impl), want)
    assert np.isfinite(want).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_largest_softcap_caps_nothing(impl):
    q, k, v = tensors(5, 1, 2, 1, 20, 20, 8, 8)
    capped, lse = rg.attention(q, k, v, softcap=float(np.finfo(np.float32).max), impl=impl, return_lse=True)
    attention_errors_within_budget(capped, lse, q, k, v)


@pytest.mark.parametrize("impl", IMPLS)
def test_float16_scores_do_not_overflow(impl):
    q, k, v = tensors(10, D=64, dtype=np.float16)
    q, k = q * np.float16(90), k * np.float16(90)
    assert (
        np.abs(q.astype(np.float64) @ k.astype(np.float64).repeat(2, axis=1).swapaxes(-1, -2)).max() > 65504
    )
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, scale=1.0)
    assert np.isfinite(out).all()
    attention_errors_within_budget(out, lse, q, k, v, scale=1.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1e4},
        {"scale": 1e-30},
        {"scale": 0.0},
        {"scale": 1e4, "softcap": 30.0},
        {"sinks": np.array([300.0, -300, 0, 1e4])},
        {"sinks": np.full(4, -np.inf)},
    ],
)
def test_extreme_scores_within_the_error_budget(impl, options):
    q, k, v = tensors(11)
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    attention_errors_within_budget(out, lse, q, k, v, **options)


@pytest.mark.parametrize("impl", TILED)
@pytest.mark.parametrize("T", [3, 90])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_a_sum_of_huge_values_does_not_overflow_where_their_mean_does_not(impl, T, dtype):
    huge = float(ml_dtypes.finfo(dtype).max) * 0.9
    q, k, v = tensors(33, 1, 2, 1, T, 90, 4, 3, dtype)
    v = np.full_like(v, huge)
    v[..., 1] = 1.0
    look = rg.look(q, k, v, impl=impl)
    rounding = 8 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(look.out.astype(np.float64)[..., [0, 2]], float(v[0, 0, 0, 0]), rtol=rounding)
    np.testing.assert_allclose(look.out.astype(np.float64)[..., 1], 1, rtol=rounding)
    np.testing.assert_array_equal(look.out, rg.attention(q, k, v, impl=impl))


# 4. Nothing ignored, nothing replaced, no hidden matrix.


def test_an_unknown_implementation_is_refused():
    q, k, v = tensors(12)
    with pytest.raises(
        ValueError, match=r"attention: impl must be 'auto', 'reference', 'blocked', 'native'.*; got 'quick'"
    ):
        rg.attention(q, k, v, impl="quick")
    with pytest.raises(ValueError, match="look: impl must be"):
        rg.look(q, k, v, impl="Blocked")


def test_an_explicit_implementation_is_the_one_that_runs(monkeypatch):
    q, k, v = tensors(12)
    monkeypatch.setattr(
        reference, "attend", lambda *_: {"out": np.full(q.shape, 7.0), "lse": np.zeros(q.shape[:3])}
    )
    np.testing.assert_array_equal(rg.attention(q, k, v, impl="reference"), 7)
    assert not (rg.attention(q, k, v, impl="blocked") == 7).any()


@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"segments": None}, {"softcap": 5.0}, {"alibi": [0.5]}]
)
def test_the_matrix_is_never_held(options):
    T = 6000
    q, k, v = tensors(13, 1, 1, 1, T, T, 4, 4)
    if "segments" in options:
        ids = np.arange(T)[None] // 1000
        options = {"segments": (ids, ids)}
    tracemalloc.start()
    rg.look(q, k, v, received=True, pooled=(8, 8), **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < T * T  # a quarter of the float32 matrix, and most of it is the results


def test_a_broadcast_mask_and_bias_are_read_tile_by_tile():
    T = 6000
    q, k, v = tensors(14, 1, 1, 1, T, T, 4, 4)
    mask, bias = np.ones((1, T), np.bool), np.zeros((T, 1), np.float32)
    tracemalloc.start()
    got = rg.attention(q, k, v, mask=mask, bias=bias)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < T * T // 2
    np.testing.assert_array_equal(got, rg.attention(q, k, v))


# 5. Looking never changes the output.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_looking_gives_the_same_bits(impl, dtype, name):
    B, H, T, S = 2, 4, 70, 300
    q, k, v = tensors(15, B, H, 2, T, S, dtype=dtype)
    options = option_sets(16, B, H, T, S)[name]
    out, lse = rg.attention(q, k, v, impl=impl, return_lse=True, **options)
    look = rg.look(q, k, v, impl=impl, received=True, pooled=(3, 5), **options)
    np.testing.assert_array_equal(look.out, out)
    np.testing.assert_array_equal(look.lse, lse)


# 6. Whole = chunked = token by token, and no row knows its batch-mates.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", ["plain", "window", "starts", "sinks", "alibi", "softcap"])
def test_whole_equals_chunked(impl, chunk, name):
    B, H, T = 2, 2, 150
    q, k, v = tensors(17, B, H, 1, T, T)
    options = option_sets(18, B, H, T, T)[name]
    parts = []
    for i in range(0, T, chunk):
        end = min(i + chunk, T)
        past = options | ({"starts": np.minimum(options["starts"], end)} if "starts" in options else {})
        arrays = q[:, :, i:end], k[:, :, :end], v[:, :, :end]
        parts.append(rg.attention(*arrays, impl=impl, return_lse=True, **past))
    out, lse = (np.concatenate(part, axis=2) for part in zip(*parts, strict=True))
    attention_errors_within_budget(out, lse, q, k, v, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", [name for name in OPTION_NAMES if "full" not in name])
def test_a_prefix_ignores_what_comes_later(impl, name):
    B, H, T = 1, 2, 60
    q, k, v = tensors(19, B, H, 1, T, T)
    options = option_sets(20, B, H, T, T)[name] | {"offset": 0}
    before = rg.attention(q, k, v, impl=impl, **options)
    k[:, :, 40:], v[:, :, 40:] = 9, -9
    np.testing.assert_array_equal(rg.attention(q, k, v, impl=impl, **options)[:, :, :40], before[:, :, :40])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_a_row_does_not_depend_on_its_batch_mates(impl, name):
    B, H, T, S = 3, 2, 20, 31
    q, k, v = tensors(21, B, H, 1, T, S)
    options = option_sets(22, B, H, T, S)[name]
    whole = rg.attention(q, k, v, impl=impl, **options)
    q, k, v = q.copy(), k.copy(), v.copy()
    q[::2], k[::2], v[::2] = 5, np.nan, np.inf
    np.testing.assert_array_equal(rg.attention(q, k, v, impl=impl, **options)[1], whole[1])


def test_the_same_bits_for_any_thread_count_and_run_to_run():
    code = (
        "import hashlib, sys; sys.path.insert(0, 'tests'); import regardant as rg; from op import tensors;"
        "a = rg.look(*tensors(23, 1, 6, 2, 700, 900, 64, 64), received=True);"
        "print(hashlib.sha256(a.out.tobytes() + a.lse.tobytes() + a.received.tobytes()).hexdigest())"
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


# 7. Any strides, read-only arrays, zero-length axes, more than 2**31 elements.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_strides_give_the_same_result(impl, dtype):
    q, k, v = tensors(24, 2, 4, 2, 30, 30, 6, 6, dtype)
    _, want_lse = rg.attention(q, k, v, impl=impl, return_lse=True)
    fused = np.concatenate([a.swapaxes(1, 2).reshape(2, 30, -1) for a in (q, k, v)], axis=-1)
    cut = np.split(fused, [24, 36], axis=-1)
    from_fused = [a.reshape(2, 30, -1, 6).swapaxes(1, 2) for a in cut]
    laid_out = {
        "fused": from_fused,
        "columns": [np.asfortranarray(a) for a in (q, k, v)],
        "negative": [np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1] for a in (q, k, v)],
        "gaps": [np.repeat(np.repeat(a, 2, -1), 3, -2)[..., ::3, ::2] for a in (q, k, v)],
    }
    for how, arrays in laid_out.items():
        for array in arrays:
            array.flags.writeable = False
        out, lse = rg.attention(*arrays, impl=impl, return_lse=True)
        attention_errors_within_budget(out, lse, q, k, v)
        assert out.flags.writeable, how
        assert lse.shape == want_lse.shape, how


@pytest.mark.parametrize("impl", IMPLS)
def test_stride_zero_arrays_are_read_as_what_they_show(impl):
    q, k, v = tensors(25, 1, 1, 1, 12, 12)
    spread = [np.broadcast_to(a, (3, 2, 12, 8)) for a in (q, k, v)]
    want = rg.attention(*(a.copy() for a in spread), impl=impl)
    np.testing.assert_array_equal(rg.attention(*spread, impl=impl), want)
    same_key = np.broadcast_to(k[:, :, :1], k.shape)
    np.testing.assert_array_equal(
        rg.attention(q, same_key, v, impl=impl), rg.attention(q, same_key.copy(), v, impl=impl)
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("axis", ["B", "H", "T", "S"])
def test_axes_of_length_zero(impl, axis):
    sizes = {"B": 2, "H": 2, "G": 1, "T": 3, "S": 4} | {axis: 0}
    q, k, v = tensors(26, **sizes)
    look = rg.look(q, k, v, impl=impl, received=True, pooled=(2, 2), sinks=np.zeros(sizes["H"]))
    B, H, T, S = (sizes[n] for n in "BHTS")
    assert look.out.shape == (B, H, T, 8)
    assert look.top_keys.shape == (B, H, T, 8)
    assert look.received.shape == (B, H, S)
    assert look.pooled.shape == (B, H, 2, 2)
    np.testing.assert_array_equal(look.out, 0)


def test_more_than_two_to_the_31_elements():
    S = 2**25 + 77  # times 64 wide: more than 2**31 numbers, one row of memory
    row = np.random.default_rng(27).standard_normal((1, 1, 1, 64)).astype(np.float32)
    k = np.broadcast_to(row, (1, 1, S, 64))
    assert k.size > 2**31
    q = row.repeat(2, axis=2)
    out, lse = rg.attention(q, k, k, window=500, return_lse=True)
    few = np.ascontiguousarray(k[:, :, :500])
    attention_errors_within_budget(out, lse, q, few, few, causal=False)


def test_positions_beyond_32_bits():
    q, k, v = tensors(28, 1, 1, 1, 2, 5, dtype=np.float64)
    far = rg.attention(q, k, v, offset=2**40, window=2**40 - 1)
    want = rg.attention(
        q, k, v, mask=np.array([[False, False, True, True, True], [False] * 3 + [True] * 2]), causal=False
    )
    np.testing.assert_allclose(far, want, rtol=1e-14)


# Ranks.


@pytest.mark.parametrize("impl", IMPLS)
def test_ranks_two_and_three_give_their_rank_back(impl):
    q, k, v = tensors(29, B=1, H=1, G=1, T=4, S=6)
    four = rg.look(q, k, v, impl=impl, received=True, pooled=(2, 2))
    for cut in (1, 2):
        arrays = [a[(0,) * cut] for a in (q, k, v)]
        look = rg.look(*arrays, impl=impl, received=True, pooled=(2, 2))
        for name in ("out", "lse", "entropy", "top_keys", "received", "pooled"):
            np.testing.assert_array_equal(getattr(look, name), getattr(four, name)[(0,) * cut])
        np.testing.assert_array_equal(look.rows([1]), four.rows([1])[(0,) * cut])


def test_masks_and_segments_fit_the_rank():
    q, k, v = (a[0, 0] for a in tensors(30, B=1, H=1, G=1, T=4, S=4))
    ids = np.array([0, 0, 1, 1])
    by_mask = rg.attention(q, k, v, mask=ids[:, None] == ids)
    np.testing.assert_array_equal(rg.attention(q, k, v, segments=(ids, ids)), by_mask)


def test_query_head_h_reads_key_head_h_over_group():
    q, k, v = tensors(31, B=1, H=6, G=2)
    grouped = rg.attention(q, k, v)
    repeated = rg.attention(q, k.repeat(3, axis=1), v.repeat(3, axis=1))
    tiled = rg.attention(q, np.tile(k, (1, 3, 1, 1)), np.tile(v, (1, 3, 1, 1)))
    np.testing.assert_allclose(grouped, repeated, rtol=1e-5, atol=1e-6)
    assert np.abs(grouped - tiled).max() > 0.1
