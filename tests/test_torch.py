"""The front door on tensors: torch's own attention agrees, memory is shared, and what it cannot do it refuses."""

import numpy as np
import pytest
import torch

import regardant.torch as rt
from op import attention_errors_within_budget, tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_it_equals_torch(dtype):
    q, k, v = (torch.from_numpy(a).to(dtype) for a in tensors(1, 2, 4, 2, 33, 33, 16, 16, np.float64))
    out, lse = rt.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    wide = [t.double() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    bound = 4 * torch.finfo(dtype).eps * want.abs().max() if dtype != torch.float64 else 1e-13
    assert (out.double() - want).abs().max() <= bound
    assert torch.isfinite(lse).all()


def test_options_are_tensors_too():
    q, k, v = (torch.from_numpy(a) for a in tensors(2, B=2, H=2, G=1, T=5, S=5))
    mask, sinks, starts = torch.rand(2, 1, 5, 5) < 0.7, torch.randn(2), torch.tensor([0, 2])
    ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    options = {"mask": mask, "sinks": sinks, "starts": starts, "segments": (ids, ids), "softcap": 3.0}
    out, lse = rt.attention(q, k, v, return_lse=True, **options)
    plain = {n: o.numpy() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    plain["segments"] = (ids.numpy(), ids.numpy())
    attention_errors_within_budget(out.numpy(), lse.numpy(), q.numpy(), k.numpy(), v.numpy(), **plain)


def test_tensors_on_two_devices_are_refused():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="attention: k must be on cpu as q is; got a tensor on meta"):
        rt.attention(q, q.to("meta"), q)


def test_bad_shapes_get_the_same_sentence():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"attention: k must be \(1, G, S, 4\)"):
        rt.attention(q, q[..., :2], q)
