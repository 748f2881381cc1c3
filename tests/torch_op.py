"""What the tests of the op on tensors share: arrays as tensors and back, and a loss's way through both passes."""

import numpy as np
import pytest
import torch

import regardant as rg
import regardant.torch as rt
from regardant.torch.memory import as_array, as_tensor

# torch itself, when it first compiles or looks for forward-mode derivatives.
# What torch's own compiler warns of, depending on what else is installed.
JIT_IS_DEPRECATED = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script:DeprecationWarning", "ignore:The distutils package:DeprecationWarning"
)


def to_torch(given):
    """Arrays as tensors of their own memory, in pairs too; all else as it is."""
    if isinstance(given, dict):
        return {name: to_torch(part) for name, part in given.items()}
    if isinstance(given, tuple):
        return tuple(map(to_torch, given))
    return as_tensor(given) if isinstance(given, np.ndarray) else given


def arriving(seed, q, v):
    """Gradients arriving at out and lse, in the types of out and lse."""
    rng = np.random.default_rng([seed, 1])
    wide = np.float64 if q.dtype == np.float64 else np.float32
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return dout, rng.standard_normal(q.shape[:-1]).astype(wide)


def leaf(array):
    return as_tensor(array.copy()).requires_grad_()


def with_typed_sinks(options, q):
    """The options with sinks in the accumulation type, in which their gradient comes."""
    if "sinks" not in options:
        return options
    return options | {"sinks": options["sinks"].astype(np.float64 if q.dtype == np.float64 else np.float32)}


def there_and_back(q, k, v, dout, dlse=None, attend=rt.attention, **options):
    """Out, lse and `rg.Gradients` of NumPy arrays; bias and sinks need gradients where they are given."""
    leaves = [leaf(array) for array in (q, k, v)]
    learned = {name: leaf(options[name]) for name in ("sinks", "bias") if options.get(name) is not None}
    out, lse = attend(*leaves, return_lse=True, **to_torch(options) | learned)
    arrived = [as_tensor(dout)] + ([] if dlse is None else [as_tensor(dlse)])
    torch.autograd.backward([out, lse][: len(arrived)], arrived)
    extra = [as_array(learned[name].grad) if name in learned else None for name in ("sinks", "bias")]
    gradients = rg.Gradients(*(as_array(x.grad) for x in leaves), *extra)
    return as_array(out), as_array(lse), gradients
