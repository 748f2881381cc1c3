"""What the tests of the op share: inputs from a seed, option sets, and the derived error budget.

The budget (DESIGN.md, section 2): at most twice the error of the naive computation in the same input type, plus
one rounding of the output. What is exact is computed in long double, so that float64 has an error to speak of.
"""

import ml_dtypes
import numpy as np

from regardant import _native, native, ops, reference
from regardant import problem as problems

DEFAULTS = {
    "causal": True, "offset": None, "window": None, "starts": None, "lengths": None, "segments": None,
    "mask": None, "bias": None, "alibi": None, "softcap": None, "sinks": None, "scale": None,
}  # fmt: skip
TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


class Forced:
    """The native implementation with one instruction set, whatever the machine would choose."""

    def __init__(self, instruction_set):
        self.instruction_set = instruction_set

    def attend(self, problem, watch=None):
        return self._with(native.attend, problem, watch)

    def rows(self, *arguments):
        return self._with(native.rows, *arguments)

    def _with(self, call, *arguments):
        before = _native.instruction_set()
        _native.choose(self.instruction_set)
        try:
            return call(*arguments)
        finally:
            _native.choose(before)


# Every instruction set that this machine has, under names of its own.
NATIVE = [f"native-{isa}" for isa in native.capabilities().present]
ops.IMPLEMENTATIONS |= {f"native-{isa}": Forced(isa) for isa in native.capabilities().present}
IMPLS = ["reference", "blocked", *NATIVE]
TILED = ["blocked", *NATIVE]  # O(n) memory


def tensors(seed, B=2, H=4, G=2, T=9, S=9, D=8, E=8, dtype=np.float32, spread=2.0):
    """q, k, v with scores spread widely enough that a wrong mask, scale or head shows."""
    rng = np.random.default_rng(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return (spread * q).astype(dtype), k.astype(dtype), v.astype(dtype)


def option_sets(seed, B, H, T, S):
    """Every option by itself and several together, for given sizes."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, S // 2 + 1, B)
    lengths = rng.integers(S // 2, S + 1, B)
    ids_q, ids_k = np.sort(rng.integers(0, 3, (B, T)), axis=-1), np.sort(rng.integers(0, 3, (B, S)), axis=-1)
    mask = rng.random((B, 1, T, S)) < 0.6
    bias = rng.standard_normal((H, T, S)).astype(np.float32)
    holes = np.where(rng.random((1, 1, T, S)) < 0.3, -np.inf, 0).astype(np.float32)
    alibi = 2.0 ** -np.arange(1, H + 1)
    sinks = rng.standard_normal(H)
    return {
        "plain": {},
        "full": {"causal": False},
        "offset 0": {"offset": 0},
        "offset -3": {"offset": -3},
        "window": {"window": 3},
        "window full": {"window": 4, "causal": False},
        "starts": {"starts": starts},
        "lengths": {"lengths": lengths},
        "segments": {"segments": (ids_q, ids_k)},
        "mask": {"mask": mask},
        "mask full": {"mask": mask, "causal": False},
        "bias": {"bias": bias},
        "bias holes": {"bias": holes},
        "alibi": {"alibi": alibi},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": sinks},
        "scale": {"scale": 0.7},
        "several": {"window": 5, "starts": starts, "bias": bias, "softcap": 2.0, "sinks": sinks},
        "all": {
            "window": max(2, S // 2), "starts": starts, "lengths": lengths, "segments": (ids_q, ids_k),
            "mask": mask, "bias": bias + holes, "alibi": alibi, "softcap": 2.0, "sinks": sinks, "scale": 0.5,
            "offset": S - T + 1,
        },
    }  # fmt: skip


OPTION_NAMES = list(option_sets(0, 1, 1, 4, 4))


def checked(q, k, v, **options):
    return problems.problem("test", q, k, v, **(DEFAULTS | options))


def naive(q, k, v, wide=None, shuffle=None, **options):
    """(out, lse) with the whole matrix, by default in the accumulation type: what the budget is measured by.

    `shuffle` sums over widths and keys in another order, which is neither more nor less naive.
    """
    problem = checked(q, k, v, **options)
    _, H, G, T, S, _, _ = problem.sizes
    rounded = wide is None
    wide = problem.accumulator if rounded else np.dtype(wide)
    k_BHSD, v_BHSE = (np.repeat(a, H // G, axis=1).astype(wide) for a in (problem.k_BGSD, problem.v_BGSE))
    visible = reference.dense(problem).visible_BHTS
    rng = np.random.default_rng(shuffle)
    d, j = (np.arange(n) if shuffle is None else rng.permutation(n) for n in (q.shape[-1], S))
    s = (problem.q_BHTD.astype(wide)[..., d] @ k_BHSD[..., d].swapaxes(-1, -2)) * wide.type(problem.scale)
    if problem.softcap is not None:
        s = wide.type(problem.softcap) * np.tanh(s / wide.type(problem.softcap))
    if problem.bias_BHTS is not None:
        s = s + problem.bias_BHTS.astype(wide)
    if problem.alibi_H is not None:
        distance = (problem.offset + np.arange(T)[:, None] - np.arange(S)).astype(wide)
        s = s - problem.alibi_H.astype(wide)[:, None, None] * distance
    s = np.where(visible, s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    dead = m == -np.inf
    sinks_H = np.full(H, -np.inf) if problem.sinks_H is None else problem.sinks_H
    sink = sinks_H.astype(wide)[:, None, None]
    m = np.where(dead, 0, np.maximum(m, sink))
    e = np.exp(s - m)
    total = e[..., j].sum(axis=-1, keepdims=True) + np.exp(sink - m)
    total = np.where(dead, 1, total)
    out = (e / total)[..., j] @ v_BHSE[:, :, j]
    if rounded:
        out = out.astype(q.dtype)
    lse = np.where(dead, -np.inf, m + np.log(total))[..., 0]
    return problem.restore(out), problem.restore(lse)


def assert_within_budget(got, exact, plains, dtype):
    """`got` may err twice as much as the naive results `plains`, plus one rounding to `dtype`; all against `exact`.

    The largest error of each is compared, and several naive results are taken: that one element of one order of
    summation came out exact by luck is no part of the bound.
    """
    got, exact = (np.asarray(a).astype(np.longdouble) for a in (got, exact))
    assert got.shape == exact.shape
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    if not finite.any():
        return
    rounding = float(ml_dtypes.finfo(dtype).eps) * np.abs(exact[finite]).max()
    naive_error = max(np.abs(plain.astype(np.longdouble)[finite] - exact[finite]).max() for plain in plains)
    allowed = 2 * naive_error + rounding
    np.testing.assert_array_less(np.abs(got[finite] - exact[finite]).max(), np.nextafter(allowed, np.inf))


def attention_errors_within_budget(got_out, got_lse, q, k, v, **options):
    exact_out, exact_lse = naive(q, k, v, wide=np.longdouble, **options)
    # The fewer rows see anything, the more orders of summation it takes to know how large an error is to be expected.
    orders = range(max(4, 64 // max(1, np.isfinite(exact_lse).sum())))
    outs, lses = zip(*(naive(q, k, v, shuffle=order or None, **options) for order in orders), strict=True)
    assert_within_budget(got_out, exact_out, outs, q.dtype)
    assert_within_budget(got_lse, exact_lse, lses, lses[0].dtype)
