"""scaled_dot_product_attention beside torch's own, in float64 by its plain formula (the math backend)."""

import itertools
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from regardant.torch import scaled_dot_product_attention as ours

# Two float64 calculations of sums of at most 64 products of numbers below 2⁵, each in its own order.
BOUND = 2**5 * 64 * torch.finfo(torch.float64).eps


def theirs(*arguments, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*arguments, **options)


def assert_alike(tensors, **options):
    """The same output, and the same gradient of every floating tensor."""
    torch.manual_seed(1)
    leaves = [[x.clone().requires_grad_() for x in tensors] for _ in range(2)]
    masks = [options.get("attn_mask")] * 2
    if masks[0] is not None and masks[0].is_floating_point():
        masks = [masks[0].clone().requires_grad_() for _ in range(2)]
        leaves = [[*made, mask] for made, mask in zip(leaves, masks, strict=True)]
    outs = []
    for attend, made, mask in zip((ours, theirs), leaves, masks, strict=True):
        given = options if mask is None else options | {"attn_mask": mask}
        outs.append(attend(*made[:3], **given))
    torch.testing.assert_close(*outs, rtol=0, atol=BOUND)
    weights = torch.randn_like(outs[0])
    for out in outs:
        (out * weights).sum().backward()
    for mine, other in zip(*leaves, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=BOUND)


def made(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize(("L", "S"), [(5, 5), (3, 7), (7, 3), (1, 4)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_every_rank_and_shape(lead, L, S, options):
    assert_alike(made((*lead, L, 4), (*lead, S, 4), (*lead, S, 6)), **options)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 5, 4), (1, 1, 6, 4), (1, 1, 6, 4)),
        ((2, 3, 5, 4), (2, 1, 6, 4), (2, 3, 6, 4)),
        ((2, 3, 5, 4), (6, 4), (6, 2)),
        ((5, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
        ((1, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4)),
        ((2, 1, 5, 4), (1, 3, 6, 4), (1, 1, 6, 4)),
        ((3, 5, 4), (2, 3, 6, 4), (3, 6, 4)),
        ((2, 1, 3, 5, 4), (4, 1, 6, 4), (1, 4, 1, 6, 4)),
    ],
)
def test_batch_axes_broadcast(shapes):
    assert_alike(made(*shapes))
    assert_alike(made(*shapes), is_causal=True)


@pytest.mark.parametrize("lead", [(), (2,), (2, 2), (2, 1, 2)])
def test_query_heads_share_keys(lead):
    assert_alike(made((*lead, 6, 5, 4), (*lead, 2, 7, 4), (*lead, 2, 7, 3)), enable_gqa=True)
    assert_alike(made((*lead, 6, 5, 4), (*lead, 2, 7, 4), (*lead, 2, 7, 3)), enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("lead", [(2, 3), (2, 2, 3)])
@pytest.mark.parametrize(
    "shape", [(5, 6), (1, 6), (5, 1), (3, 5, 6), (1, 5, 6), (2, 1, 5, 6), (2, 3, 1, 1), (6,)]
)
@pytest.mark.parametrize("kind", ["boolean", "floating"])
def test_masks(lead, shape, kind):
    torch.manual_seed(2)
    mask = torch.rand(shape) < 0.7 if kind == "boolean" else torch.randn(shape, dtype=torch.float64)
    if kind == "boolean":
        mask[..., 0] = True  # torch's gradients of rows that see nothing are not to be followed
    assert_alike(made((*lead, 5, 4), (*lead, 6, 4), (*lead, 6, 4)), attn_mask=mask)
    shared = made((*lead[:-1], 4, 5, 4), (*lead[:-1], 2, 6, 4), (*lead[:-1], 2, 6, 4))
    if 3 not in shape[-4:-2]:
        assert_alike(shared, attn_mask=mask, enable_gqa=True)


def test_a_mask_of_five_axes():
    for shape in [(2, 3, 4, 5, 6), (2, 1, 1, 5, 6), (1, 3, 4, 1, 6), (1, 1, 4, 5, 1)]:
        assert_alike(made((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)), attn_mask=made(shape)[0])


@pytest.mark.parametrize("hide", [torch.zeros(5, 6, dtype=torch.bool), torch.full((5, 6), -torch.inf)])
def test_rows_that_see_nothing_are_zero_with_gradient_zero(hide):
    mask = hide.clone()
    mask[1:] = True if mask.dtype == torch.bool else 0.0
    leaves = [x.float().requires_grad_() for x in made((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4))]
    out = ours(*leaves, attn_mask=mask)
    assert torch.equal(out[:, :, 0], torch.zeros(2, 3, 4))
    out.sum().backward()
    assert torch.equal(leaves[0].grad[:, :, 0], torch.zeros(2, 3, 4))
    assert all(torch.isfinite(x.grad).all() for x in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_types_and_a_float32_mask(dtype):
    q, k, v = (x.to(dtype) for x in made((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)))
    mask = torch.randn(5, 6)
    out = ours(q, k, v, attn_mask=mask)
    assert out.dtype == dtype
    want = theirs(q.double(), k.double(), v.double(), attn_mask=mask.double())
    # One rounding of the output, and of each weight: sums of at most 6 weights times values below 4.
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_it_takes_the_place_of_torchs(monkeypatch):
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 16)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7)
    want = layer(x, src_mask=mask, is_causal=True)
    calls = itertools.count()

    def counted(*arguments, **options):
        next(calls)
        return ours(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    got = layer(x, src_mask=mask, is_causal=True)
    assert next(calls) == 1
    torch.testing.assert_close(got, want, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


X = torch.zeros(2, 3, 5, 4)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"query": X.numpy()}, TypeError, "query must be a torch tensor; got ndarray of float32 (2, 3, 5, 4)"),
        ({"key": X.double()}, TypeError, "key must be torch.float32 to match query; got torch.float64"),
        ({"value": X.to("meta")}, ValueError, "value must be on cpu as query is; got a tensor on meta"),
        ({"key": X[0, 0, 0]}, ValueError, "key must have at least 2 axes; got (4,)"),
        ({"key": X[..., :3]}, ValueError, "key must be 4 wide to match query; got (2, 3, 5, 3)"),
        ({"value": X[:, :, :3]}, ValueError, "value must have key's 5 positions; got (2, 3, 3, 4)"),
        ({"key": X[:, :2], "value": X[:, :2]}, ValueError,
         "the batch axes of query, key and value must broadcast; got (2, 3, 5, 4), (2, 2, 5, 4) and (2, 2, 5, 4) ("),
        ({"key": X[:, :2], "value": X[:, :2], "enable_gqa": True}, ValueError,
         "query's heads must be a multiple of key's and value's for enable_gqa=True; got 3, 2 and 2"),
        ({"query": X[0, 0], "enable_gqa": True}, ValueError, "must have an axis of heads for enable_gqa=True"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p must be 0, dropout is not computed here; got 0.1"),
        ({"dropout_p": None}, TypeError, "dropout_p must be a number; got None"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False; got 1"),
        ({"is_causal": True, "attn_mask": torch.ones(5, 5).bool()}, ValueError,
         "attn_mask must be None if is_causal=True; got (5, 5)"),
        ({"attn_mask": torch.ones(5, 5).long()}, TypeError, "attn_mask must be boolean or floating; got torch.int64"),
        ({"attn_mask": torch.ones(4, 5).bool()}, ValueError, "attn_mask must broadcast to (2, 3, 5, 5); got (4, 5)"),
        ({"attn_mask": torch.ones(1, 2, 3, 5, 5)}, ValueError, "attn_mask must broadcast to (2, 3, 5, 5)"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a torch tensor; got builtins.list"),
        ({"attn_mask": torch.ones(5, 5, device="meta")}, ValueError, "attn_mask must be on cpu as query is"),
        ({"scale": "1"}, TypeError, "scale must be a number; got '1'"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(wrong, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        ours(**({"query": X, "key": X, "value": X} | wrong))
    assert "\n" not in str(raised.value)


def test_the_signature_is_torchs():
    q, k, v = made((1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2))
    mask = torch.ones(3, 3, dtype=torch.bool)
    got = ours(q, k, v, mask, 0.0, False, scale=None, enable_gqa=False)
    torch.testing.assert_close(got, theirs(q, k, v, mask, 0.0, False), rtol=0, atol=BOUND)
