"""Gradients on tensors: the budget, finite differences, what is invisible, transforms, and what is refused."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

import regardant as rg
import regardant.torch as rt
from op import OPTION_NAMES, TYPES, gradient_errors_within_budget, option_sets, tensors
from torch_op import JIT_IS_DEPRECATED, arriving, leaf, there_and_back, to_torch, with_typed_sinks

IMPLS = ["auto", "torch"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_tensors_have_the_gradients_of_arrays(dtype, name):
    B, H, T, S = 2, 4, 11, 13
    q, k, v = tensors(1, B, H, 2, T, S, dtype=dtype)
    options = with_typed_sinks(option_sets(2, B, H, T, S)[name], q)
    dout, dlse = arriving(3, q, v)
    out, lse, got = there_and_back(q, k, v, dout, dlse, **options)
    want = rg.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, bias_gradient="bias" in options, **options
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_option_within_the_error_budget_in_plain_torch(dtype, name):
    B, H, T, S = 2, 4, 37, 45
    q, k, v = tensors(2, B, H, 2, T, S, 16, 24, dtype)
    options = with_typed_sinks(option_sets(3, B, H, T, S)[name], q)
    dout, dlse = arriving(4, q, v)
    _, _, got = there_and_back(q, k, v, dout, dlse, impl="torch", **options)
    gradient_errors_within_budget(got, q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_finite_differences_agree(impl, name):
    q, k, v = tensors(4, 2, 2, 1, 4, 5, 3, 2, np.float64)
    options = to_torch(option_sets(5, 2, 2, 4, 5)[name])
    learned = [n for n in ("sinks", "bias") if n in options]
    leaves = [leaf(x) for x in (q, k, v)] + [options.pop(n).double().requires_grad_() for n in learned]

    def attend(q, k, v, *more):
        out, lse = rt.attention(
            q, k, v, return_lse=True, impl=impl, **options, **dict(zip(learned, more, strict=True))
        )
        return out, torch.where(lse == -torch.inf, 0, lse)  # a dead row's differences would be −∞ less −∞

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("impl", IMPLS)
def test_finite_differences_agree_in_every_rank(rank, impl):
    leaves = [leaf(x.reshape(x.shape[4 - rank :])) for x in tensors(6, 1, 1, 1, 4, 5, 3, 2, np.float64)]
    assert torch.autograd.gradcheck(lambda *x: rt.attention(*x, impl=impl, softcap=2.0), leaves)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "shape", [(5, 6), (1, 6), (5, 1), (1, 1), (6,), (4, 1, 6), (2, 1, 5, 1), (2, 4, 5, 6), (1, 4, 1, 1), ()]
)
def test_a_bias_of_every_shape_has_its_gradient(impl, shape):
    q, k, v = to_torch(tensors(7, 2, 4, 2, 5, 6, dtype=np.float64))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda bias: rt.attention(q, k, v, bias=bias, impl=impl), [bias])


@pytest.mark.parametrize("impl", IMPLS)
def test_only_what_needs_a_gradient_gets_one(impl):
    q, k, v = to_torch(tensors(10))
    out = rt.attention(q, k.requires_grad_(), v, impl=impl)
    out.sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad.shape == k.shape
    with torch.no_grad():
        assert not rt.attention(q, k, v, impl=impl).requires_grad
    bias = torch.zeros(9, 9, requires_grad=True)
    rt.attention(q, k.detach(), v, bias=bias, impl=impl).sum().backward()
    assert bias.grad.shape == (9, 9)


@pytest.mark.parametrize("impl", IMPLS)
def test_lse_alone_passes_gradients_on(impl):
    q, k, v = (leaf(x) for x in tensors(11, dtype=np.float64))
    _, lse = rt.attention(q, k, v, return_lse=True, causal=False, impl=impl)
    lse.sum().backward()
    s = q.detach().unflatten(1, (2, 2)) @ k.detach()[:, :, None].mT / 8**0.5
    want = (torch.softmax(s, -1) @ k.detach()[:, :, None]).flatten(1, 2) / 8**0.5
    torch.testing.assert_close(q.grad, want, rtol=0, atol=64 * torch.finfo(torch.float64).eps)
    assert torch.equal(v.grad, torch.zeros_like(v))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_look_learns_through_out_and_only_through_it(impl):
    q, k, v = tensors(12, dtype=np.float64)
    options = {"softcap": 2.0, "sinks": np.zeros(4), "bias": np.ones((9, 9))}
    dout, _ = arriving(13, q, v)
    _, _, want = there_and_back(q, k, v, dout, impl=impl, **options)
    seen = []

    def looked(*leaves, return_lse, **rest):
        assert return_lse
        seen.append(rt.look(*leaves, received=True, pooled=(2, 2), **rest))
        return seen[0].out, seen[0].lse

    _, _, got = there_and_back(q, k, v, dout, attend=looked, impl=impl, **options)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("lse", "max_logit", "entropy", "sink_weight", "top_weights", "received", "pooled"):
        assert not getattr(seen[0], name).requires_grad


# What is invisible.


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_see_nothing_are_zero_and_pass_on_zero(impl):
    q, k, v = tensors(14, B=1, T=6, S=6)
    mask = np.ones((6, 6), bool)
    mask[[1, 4]] = False
    mask[:, 3] = False
    for options in ({"mask": mask}, {"mask": mask, "sinks": np.ones(4, np.float32)}):
        dout, dlse = arriving(15, q, v)
        out, lse, got = there_and_back(q, k, v, dout, dlse, impl=impl, **options)
        assert not out[:, :, [1, 4]].any()
        assert (lse[:, :, [1, 4]] == -np.inf).all()
        assert not got.dq[:, :, [1, 4]].any()
        assert not got.dk[:, :, 3].any()
        assert not got.dv[:, :, 3].any()
        dout[:, :, [1, 4]] = np.nan
        dlse[:, :, [1, 4]] = np.nan
        _, _, again = there_and_back(q, k, v, dout, dlse, impl=impl, **options)
        for ours, theirs in zip(again, got, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_packed_documents_do_not_touch_each_other(impl, poison):
    T = 150  # two tiles and a half of each implementation's smallest
    q, k, v = tensors(16, B=1, T=T, S=T)
    ids = np.repeat([0, 1], T // 2)[None]
    dout, dlse = arriving(17, q, v)
    first, second = slice(0, T // 2), slice(T // 2, T)
    want = there_and_back(q, k, v, dout, dlse, impl=impl, segments=(ids, ids))
    for array in (q, k, v, dout):
        array[:, :, first] = poison
    got = there_and_back(q, k, v, dout, dlse, impl=impl, segments=(ids, ids))
    for ours, theirs in zip((*got[:2], *got[2][:3]), (*want[:2], *want[2][:3]), strict=True):
        np.testing.assert_array_equal(ours[:, :, second], theirs[:, :, second])
        assert np.isfinite(theirs).all()


# Transforms.


def loss(q, k, v, **options):
    return rt.attention(q, k, v, **options).square().sum()


@pytest.mark.parametrize("impl", IMPLS)
def test_torch_func_grad_and_vmap(impl):
    q, k, v = (torch.from_numpy(x) for x in tensors(18, B=3, dtype=np.float64))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(loss(*leaves, impl=impl), leaves)
    whole = grad(lambda *x: loss(*x, impl=impl), (0, 1, 2))(q, k, v)
    each = vmap(grad(lambda *x: loss(*x, impl=impl), (0, 1, 2)))(q, k, v)
    around = grad(lambda *x: vmap(lambda *y: rt.attention(*y, impl=impl))(*x).square().sum(), (0, 1, 2))(
        q, k, v
    )
    rounding = 64 * torch.finfo(torch.float64).eps
    for got in (whole, each, around):
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


def test_vmap_over_an_option_alone_and_over_a_look():
    q, k, v = to_torch(tensors(19))
    sinks = torch.randn(5, 4)
    got = vmap(lambda s: rt.attention(q, k, v, sinks=s), out_dims=1)(sinks)
    for i, one in enumerate(sinks):
        assert torch.equal(got[:, i], rt.attention(q, k, v, sinks=one))
    entropy = vmap(lambda q: rt.look(q, k[0], v[0], pooled=(2, 2)).entropy)(q)
    assert torch.equal(entropy[1], rt.look(q[1], k[0], v[0]).entropy)
    plain = (*[None] * 8, True, *[None] * 4, "auto")
    direct = vmap(lambda q, k, v: torch.ops.regardant.attention.default(q, k, v, *plain)[0])
    assert torch.equal(direct(q, k, v), rt.attention(q, k, v))


# Refused.


@JIT_IS_DEPRECATED
def test_second_derivatives_say_so():
    q, k, v = (leaf(x) for x in tensors(20))
    (first,) = torch.autograd.grad(rt.attention(q, k, v).sum(), q, create_graph=True)
    sentence = "attention: gradients of its gradients are not computed here"
    with pytest.raises(NotImplementedError, match=sentence):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=sentence):
        jacrev(jacrev(lambda q: loss(q, k.detach()[0, 0], v.detach()[0, 0])))(q.detach()[0, 0])


@JIT_IS_DEPRECATED
def test_forward_mode_says_so_and_is_not_silently_zero():
    q, k, v = to_torch(tensors(21))
    with pytest.raises(
        NotImplementedError, match="attention: forward-mode derivatives are not computed here"
    ):
        jvp(lambda q: rt.attention(q, k, v), (q,), (q,))
    with forward_ad.dual_level():
        with pytest.raises(
            NotImplementedError, match="attention: forward-mode derivatives are not computed here"
        ):
            rt.attention(q, forward_ad.make_dual(k, k), v)
        assert rt.attention(q, k, v).shape == q.shape


def test_slopes_have_no_gradient():
    q, k, v = (leaf(x) for x in tensors(22))
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attention: alibi has no gradient here; detach it"):
        rt.attention(q, k, v, alibi=slopes).sum().backward()
