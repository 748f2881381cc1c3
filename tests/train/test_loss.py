"""Chunked cross-entropy against torch's own over all logits, and what it holds in memory."""

import pytest
import torch

from regardant.train import loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 200])
def test_value_and_gradients_are_those_of_the_whole(dtype, rows, monkeypatch):
    monkeypatch.setattr(loss, "BLOCK", 16 * 50)
    torch.manual_seed(rows)
    hidden = torch.randn(rows, 24, dtype=dtype, requires_grad=True)
    out = (torch.randn(50, 24, dtype=dtype) * 2).requires_grad_()
    labels = torch.randint(0, 50, (rows,))
    labels[:: max(2, rows // 3)] = -1
    ours = loss.cross_entropy(hidden, out, labels)
    got = torch.autograd.grad(ours * 0.3, (hidden, out))

    def naive(kind):
        h, o = (t.detach().to(kind).requires_grad_() for t in (hidden, out))
        logits = (h @ o.T).to(torch.promote_types(kind, torch.float32))
        total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return total, *torch.autograd.grad(total * 0.3, (h, o))

    exact, same_type = naive(torch.float64), naive(dtype)
    for ours_, exact_, same_ in zip((ours, *got), exact, same_type, strict=True):
        scale = exact_.abs().max()
        budget = 2 * (same_.double() - exact_).abs().max() + torch.finfo(ours_.dtype).eps * scale
        assert (ours_.double() - exact_).abs().max() <= budget


def test_nothing_counted_is_nothing_lost():
    hidden = torch.randn(4, 8, requires_grad=True)
    out = torch.randn(10, 8, requires_grad=True)
    total = loss.cross_entropy(hidden, out, torch.full((4,), -1))
    total.backward()
    assert total.item() == 0
    assert not hidden.grad.any()
    assert not out.grad.any()


def test_no_more_logits_than_a_block(monkeypatch):
    """Every tensor that is made inside is seen; none has as many numbers as all the logits."""
    monkeypatch.setattr(loss, "BLOCK", 16 * 512)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                sizes.append(made.numel())
            return made

    hidden = torch.randn(256, 8, requires_grad=True)
    out = torch.randn(512, 8, requires_grad=True)
    with Watch():
        loss.cross_entropy(hidden, out, torch.randint(0, 512, (256,))).backward()
    assert max(sizes) == 16 * 512


def test_a_gradient_is_not_made_where_none_is_wanted():
    hidden, out = torch.randn(4, 8), torch.randn(10, 8, requires_grad=True)
    (got,) = torch.autograd.grad(loss.cross_entropy(hidden, out, torch.arange(4)), out)
    assert got.shape == out.shape
    with torch.no_grad():
        assert not loss.cross_entropy(hidden, out, torch.arange(4)).requires_grad
