"""What looking says, against weights computed one number at a time, and against what weights must add up to."""

import dataclasses

import numpy as np
import pytest

import regardant as rg
import scalar
from op import IMPLS, OPTION_NAMES, TYPES, checked, naive, option_sets, tensors
from regardant import reference

SINKS = ["sinks", "several", "all"]


@pytest.fixture(scope="module", params=IMPLS)
def impl(request):
    return request.param


def seen(impl, name, dtype=np.float64, T=23, S=31, **asked):
    q, k, v = tensors(1, 2, 4, 2, T, S, 8, 3, dtype)
    options = option_sets(2, 2, 4, T, S)[name]
    look = rg.look(q, k, v, impl=impl, **asked, **options)
    out, lse, weights = scalar.attention(q, k, v, **options)
    return look, out, lse, weights, options


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_everything_it_says_follows_from_the_weights(impl, name):
    look, out, lse, weights, options = seen(impl, name, top=5, received=True, pooled=(4, 7))
    close = {"rtol": 1e-11, "atol": 1e-13}
    np.testing.assert_allclose(look.out, out, **close)
    np.testing.assert_allclose(look.lse, lse, **close)
    live = np.isfinite(lse)
    heaviest = weights.max(axis=-1)[live]
    np.testing.assert_allclose(look.max_logit[live], np.log(heaviest) + lse[live], rtol=1e-11, atol=1e-12)
    sink = np.zeros(lse.shape)
    if "sinks" in options:
        sink[live] = np.exp(np.broadcast_to(options["sinks"][:, None], lse.shape)[live] - lse[live])
    np.testing.assert_allclose(look.sink_weight, sink, **close)
    outcomes = np.concatenate([weights, sink[..., None]], axis=-1)
    entropy = -np.sum(outcomes * np.log(np.where(outcomes > 0, outcomes, 1)), axis=-1)
    np.testing.assert_allclose(look.entropy, entropy, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(look.received, weights.sum(axis=2), **close)
    np.testing.assert_allclose(look.rows(range(23)), weights, **close)


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_top_keys_are_the_heaviest_in_order(impl, name):
    look, _, _, weights, _ = seen(impl, name, top=5)
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :5]
    np.testing.assert_allclose(
        look.top_weights, np.take_along_axis(weights, order, -1), rtol=1e-11, atol=1e-13
    )
    listed = look.top_weights > 0
    np.testing.assert_array_equal(look.top_keys[listed], order[listed])
    np.testing.assert_array_equal(look.top_keys[~listed], -1)


@pytest.mark.parametrize("top", [0, 1, 8, 31, 50])
def test_any_number_of_top_keys(impl, top):
    look, _, _, weights, _ = seen(impl, "plain", top=top)
    assert look.top_keys.shape == (2, 4, 23, top)
    visible = (weights > 0).sum(axis=-1)
    np.testing.assert_array_equal((look.top_keys >= 0).sum(axis=-1), np.minimum(visible, top))
    assert (np.diff(look.top_weights, axis=-1) <= 0).all()


@pytest.mark.parametrize("T", [3, 700])
def test_among_equal_weights_the_earlier_key_is_listed(impl, T):
    q, k, v = (np.zeros((1, 1, T, 4), np.float32) for _ in range(3))
    look = rg.look(q, k, v, impl=impl, top=8)
    for i in (0, 2, T - 1):
        listed = look.top_keys[0, 0, i]
        np.testing.assert_array_equal(listed, [j if j <= i else -1 for j in range(8)])


def test_a_heavy_key_in_any_tile_is_found(impl):
    q, k, v = tensors(3, 1, 1, 1, 900, 900, 4, 4)
    for at in (0, 1, 255, 256, 511, 512, 700):
        loud = k.copy()
        loud[0, 0, at] = 50 * q[0, 0, 899] / np.linalg.norm(q[0, 0, 899])
        look = rg.look(q, loud, v, impl=impl, top=3)
        assert look.top_keys[0, 0, 899, 0] == at


@pytest.mark.parametrize(("R", "C"), [(1, 1), (3, 4), (23, 31), (40, 50)])
@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_pooled_is_the_mass_of_each_block(impl, R, C, name):
    look, _, _, weights, _ = seen(impl, name, pooled=(R, C))
    for r, c in np.ndindex(R, C):
        block = weights[:, :, 23 * r // R : 23 * (r + 1) // R, 31 * c // C : 31 * (c + 1) // C]
        np.testing.assert_allclose(look.pooled[..., r, c], block.sum(axis=(2, 3)), rtol=1e-11, atol=1e-13)
    assert look.received is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_rows_within_the_error_budget(dtype, name):
    B, H, T, S = 1, 2, 130, 140
    q, k, v = tensors(4, B, H, 1, T, S, 16, 3, dtype)
    options = option_sets(5, B, H, T, S)[name]
    look = rg.look(q, k, v, impl="blocked", **options)
    queries, heads = np.array([129, 0, 77, 128]), np.array([1, 0])
    got = look.rows(queries, heads)
    assert got.dtype == (np.float64 if dtype == np.float64 else np.float32)
    # Values that pick out one key each turn the naive output into naive weights.
    picks = np.broadcast_to(np.eye(S, dtype=q.dtype), (B, 1, S, S))
    exact, _ = naive(q, k, picks, wide=np.longdouble, **options)
    wide = got.dtype
    naive_error = max(
        np.abs(
            naive(q.astype(wide), k.astype(wide), picks.astype(wide), shuffle=s, **options)[0] - exact
        ).max()
        for s in (None, 1, 2)
    )
    error = np.abs(got - exact[:, heads][:, :, queries]).max()
    np.testing.assert_array_less(error, 2 * naive_error + np.finfo(wide).eps)


def test_rows_pick_heads_and_queries_in_the_order_asked(impl):
    look, _, _, weights, _ = seen(impl, "plain")
    np.testing.assert_allclose(
        look.rows([-1, 2, 2], heads=[3, 0]), weights[:, [3, 0]][:, :, [22, 2, 2]], rtol=1e-11
    )
    np.testing.assert_allclose(look.rows(5, heads=1), weights[:, 1:2, 5:6], rtol=1e-11)
    assert look.rows([]).shape == (2, 4, 0, 31)
    assert look.rows([0], heads=[]).shape == (2, 0, 1, 31)


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_rows_and_sink_sum_to_one(impl, name):
    look, _, lse, _, _ = seen(impl, name, dtype=np.float32)
    total = look.rows(range(23)).sum(axis=-1) + look.sink_weight
    np.testing.assert_allclose(total, np.isfinite(lse), rtol=0, atol=31 * np.finfo(np.float32).eps)


def test_uniform_attention_has_the_entropy_of_a_fair_choice(impl):
    q, k, v = (np.zeros((1, 2, 400, 4), np.float32) for _ in range(3))
    look = rg.look(q, k, v, impl=impl, sinks=[-np.inf, 0.0])
    count = np.arange(1, 401)
    np.testing.assert_allclose(look.entropy[0, 0], np.log(count), rtol=4e-7, atol=1e-6)
    np.testing.assert_allclose(look.entropy[0, 1], np.log(count + 1), rtol=4e-7, atol=1e-6)
    # e^(sink − lse) inherits the rounding of an lse of up to 6 as a relative error.
    np.testing.assert_allclose(look.sink_weight[0, 1], 1 / (count + 1), rtol=2 * np.spacing(np.float32(6)))


def test_received_of_a_long_text_adds_up(impl):
    q, k, v = tensors(6, 1, 2, 1, 600, 600, 8, 8)
    look = rg.look(q, k, v, impl=impl, received=True, pooled=(7, 9))
    np.testing.assert_allclose(look.received.sum(axis=-1), 600, rtol=1e-6)
    np.testing.assert_allclose(look.pooled.sum(axis=(-2, -1)), 600, rtol=1e-6)


def test_a_look_cannot_be_changed():
    look = rg.look(*tensors(7))
    with pytest.raises(dataclasses.FrozenInstanceError):
        look.lse = None


def test_the_oracle_itself_is_right_about_visibility():
    _, _, _, weights, options = seen("reference", "all")
    q, k, v = tensors(1, 2, 4, 2, 23, 31, 8, 3, np.float64)
    np.testing.assert_array_equal(reference.dense(checked(q, k, v, **options)).a_BHTS > 0, weights > 0)
