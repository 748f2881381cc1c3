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

    def backward(self, *arguments):
        return self._with(native.backward, *arguments)

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
BACKWARD = IMPLS
TILED_BACKWARD = TILED


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
    _, H, _, _, S, D, _ = problem.sizes
    rounded = wide is None
    wide = problem.accumulator if rounded else np.dtype(wide)
    visible = reference.dense(problem).visible_BHTS
    d, j = _shuffled(shuffle, D, S)
    _, s = _naive_scores(problem, wide, d)
    s = np.where(visible, s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    dead = m == -np.inf
    sinks_H = np.full(H, -np.inf) if problem.sinks_H is None else problem.sinks_H
    sink = sinks_H.astype(wide)[:, None, None]
    m = np.where(dead, 0, np.maximum(m, sink))
    e = np.exp(s - m)
    total = e[..., j].sum(axis=-1, keepdims=True) + np.exp(sink - m)
    total = np.where(dead, 1, total)
    out = (e / total)[..., j] @ _repeated(problem, problem.v_BGSE, wide)[:, :, j]
    if rounded:
        out = out.astype(q.dtype)
    lse = np.where(dead, -np.inf, m + np.log(total))[..., 0]
    return problem.restore(out), problem.restore(lse)


def _shuffled(shuffle, *counts):
    """An order of summation over each of some axes."""
    rng = np.random.default_rng(shuffle)
    return [np.arange(count) if shuffle is None else rng.permutation(count) for count in counts]


def _repeated(problem, array_BGSW, wide):
    """Keys or values for each query head."""
    _, H, G, *_ = problem.sizes
    return np.repeat(array_BGSW, H // G, axis=1).astype(wide)


def _naive_scores(problem, wide, d):
    """Every score, visible or not: after the softcap, and after all options."""
    _, _, _, T, S, *_ = problem.sizes
    k_BHSD = _repeated(problem, problem.k_BGSD, wide)
    c = (problem.q_BHTD.astype(wide)[..., d] @ k_BHSD[..., d].swapaxes(-1, -2)) * wide.type(problem.scale)
    if problem.softcap is not None:
        c = wide.type(problem.softcap) * np.tanh(c / wide.type(problem.softcap))
    s = c
    if problem.bias_BHTS is not None:
        s = s + problem.bias_BHTS.astype(wide)
    if problem.alibi_H is not None:
        distance = (problem.offset + np.arange(T)[:, None] - np.arange(S)).astype(wide)
        s = s - problem.alibi_H.astype(wide)[:, None, None] * distance
    return c, s


def naive_gradients(q, k, v, out, lse, dout, dlse=None, wide=None, shuffle=None, **options):
    """Gradients by name, with the whole matrix, from the results of a forward pass; else as `naive`.

    With `shuffle` the loss is scaled as well, and δ is as exact as its type allows: that two sums of products cancel
    to the last bit is the luck of adding them alike.
    """
    problem = checked(q, k, v, **options)
    B, H, G, T, S, D, E = problem.sizes
    rounded = wide is None
    wide = problem.accumulator if rounded else np.dtype(wide)
    times = wide.type(1 if shuffle is None else np.random.default_rng(shuffle).uniform(1, 2))
    live = lse != -np.inf
    visible = reference.dense(problem).visible_BHTS & live[..., None]
    d, e, t, j, n = _shuffled(shuffle, D, E, T, S, B * T)
    k_BHSD, v_BHSE = (_repeated(problem, array, wide) for array in (k, v))
    q, out, lse, dout = (array.astype(wide) for array in (q, out, lse, dout))
    dout, dlse = times * dout, 0 if dlse is None else times * dlse.astype(wide)
    c, s = _naive_scores(problem, wide, d)
    a = np.exp(np.where(visible, s - np.where(live, lse, 0)[..., None], -np.inf))
    exactly = wide if shuffle is None else np.longdouble
    delta = (dout.astype(exactly) * out).sum(axis=-1).astype(wide) - dlse
    ds = a * (dout[..., e] @ v_BHSE[..., e].swapaxes(-1, -2) - delta[..., None])
    dx = wide.type(problem.scale) * ds
    if problem.softcap is not None:
        dx = dx * (1 - (c / wide.type(problem.softcap)) ** 2)
    dk = dx[:, :, t].swapaxes(-1, -2) @ q[:, :, t]
    dv = a[:, :, t].swapaxes(-1, -2) @ dout[:, :, t]
    gradients = {
        "dq": dx[..., j] @ k_BHSD[:, :, j],
        "dk": dk.reshape(B, G, H // G, S, D).sum(axis=2),
        "dv": dv.reshape(B, G, H // G, S, E).sum(axis=2),
    }
    types = dict.fromkeys(gradients, problem.q_BHTD.dtype)
    if problem.sinks_H is not None:
        sinks = problem.sinks_H.astype(wide)[:, None]
        terms = np.where(live, -np.exp(sinks - np.where(live, lse, 0)) * delta, 0)
        gradients["dsinks"] = terms.swapaxes(0, 1).reshape(H, -1)[:, n].sum(axis=-1)
        types["dsinks"] = wide
    if problem.bias_BHTS is not None:
        repeated = tuple(axis for axis, size in enumerate(problem.bias_sizes) if size == 1)
        for axis, order in enumerate(_shuffled(shuffle, *ds.shape)):
            ds = ds.take(order, axis) if axis in repeated else ds
        gradients["dbias"] = ds.sum(axis=repeated, keepdims=True).reshape(options["bias"].shape)
        types["dbias"] = problem.bias_BHTS.dtype
    return {name: (a / times).astype(types[name] if rounded else wide) for name, a in gradients.items()}


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
    outs, lses = zip(*(naive(q, k, v, shuffle=order, **options) for order in _orders(exact_lse)), strict=True)
    assert_within_budget(got_out, exact_out, outs, q.dtype)
    assert_within_budget(got_lse, exact_lse, lses, lses[0].dtype)


def gradient_errors_within_budget(got, q, k, v, dout, dlse=None, **options):
    """All gradients in `got`, those of a forward and a backward pass together, against passes both naive."""
    exact_out, exact_lse = naive(q, k, v, wide=np.longdouble, **options)
    exact = naive_gradients(q, k, v, exact_out, exact_lse, dout, dlse, wide=np.longdouble, **options)
    plains = []
    for order in _orders(exact_lse):
        out, lse = naive(q, k, v, shuffle=order, **options)
        plains.append(naive_gradients(q, k, v, out, lse, dout, dlse, shuffle=order, **options))
    for name in exact.keys() & {name for name, array in got._asdict().items() if array is not None}:
        array = getattr(got, name)
        assert array.dtype == plains[0][name].dtype, name
        assert_within_budget(array, exact[name], [plain[name] for plain in plains], array.dtype)
    assert (got.dsinks is None) == ("dsinks" not in exact)


def _orders(lse):
    """Seeds of orders of summation: the fewer rows see anything, the more it takes to know what error to expect."""
    return [None, *range(1, max(4, 64 // max(1, np.isfinite(lse).sum())))]
