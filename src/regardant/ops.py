"""`attention`, `look`, `attention_backward`: check the arguments once, choose an implementation visibly, call it.

Both refuse bad input before any work. An implementation named with `impl=` is used or refused, never replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from regardant import blocked, native, reference
from regardant import problem as problems
from regardant.looks import Look

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import ArrayLike

    from regardant.problem import Array

# Each offers attend(problem, watch), rows(problem, lse, queries, heads) and
# backward(problem, out, lse, dout, dlse, bias_gradient), and none imports another.
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "blocked": blocked,
    "native": native,
}


def implementation(op: str, impl: str) -> ModuleType:
    """The module that serves `impl`; "auto" is the fastest that honours every option.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(impl, str):
        raise TypeError(f"{op}: impl must be a name; got {problems.kind(impl)}")
    if impl == "auto":
        return native
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: impl must be 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}; got {impl!r}")
    return IMPLEMENTATIONS[impl]


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = ...,
    offset: int | None = ...,
    window: int | None = ...,
    starts: ArrayLike | None = ...,
    lengths: ArrayLike | None = ...,
    segments: tuple[ArrayLike, ArrayLike] | None = ...,
    mask: Array | None = ...,
    bias: Array | None = ...,
    alibi: ArrayLike | None = ...,
    softcap: float | None = ...,
    sinks: ArrayLike | None = ...,
    scale: float | None = ...,
    impl: str = ...,
    return_lse: Literal[False] = ...,
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = ...,
    offset: int | None = ...,
    window: int | None = ...,
    starts: ArrayLike | None = ...,
    lengths: ArrayLike | None = ...,
    segments: tuple[ArrayLike, ArrayLike] | None = ...,
    mask: Array | None = ...,
    bias: Array | None = ...,
    alibi: ArrayLike | None = ...,
    softcap: float | None = ...,
    sinks: ArrayLike | None = ...,
    scale: float | None = ...,
    impl: str = ...,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    segments: tuple[ArrayLike, ArrayLike] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention: each query mixes the values of the keys it may see, by softmax of scaled dot products.

        s_ij   = scale · q_i·k_j
        s_ij   = softcap · tanh(s_ij / softcap)            if softcap is given
        s_ij  += bias_ij − alibi_h · (p_i − j)             p_i = offset + i
        s_ij   = −∞                                        where key j is not visible to query i
        lse_i  = log( Σ_j exp s_ij [+ exp sink_h] )
        out_i  = Σ_j exp(s_ij − lse_i) · v_j

    Args:
        q: queries (B, H, T, D), or (H, T, D), or (T, D): float64, float32, float16 or bfloat16.
        k: keys (B, G, S, D), q's type. Query head h reads key/value head h // (H // G).
        v: values (B, G, S, E), q's type. All three in any strides.
        causal: key j is visible to query i only if j <= offset + i.
        offset: keys before the first query. Default S − T: the last query sees the last key.
        window: key j is visible only if offset + i − j < window: so many keys, its own included.
        starts: (B,) integers; keys before starts[b] are invisible (left padding).
        lengths: (B,) integers; keys from lengths[b] on are invisible (right padding).
        segments: a pair of integer ids (B, T) and (B, S); visible only where they are equal (packed documents).
        mask: boolean, broadcastable to (B, H, T, S); True = visible. All conditions hold together.
        bias: floating, broadcastable to (B, H, T, S), added to the scores; −∞ hides a key as a mask does. It is read
            in the type of scores: −1e39 is −∞ in float32.
        alibi: (H,) slopes (Press et al. 2022).
        softcap: bounds the scores smoothly, before any mask or bias (Gemma 2).
        sinks: (H,) logits that join the denominator only, so that a row's weights sum to less than 1 (GPT-OSS);
            −∞ for none.
        scale: factor on the dot products. Default 1/√D.
        impl: "native" (compiled), "blocked" (NumPy), "reference" (float64, T·S memory), or "auto", the fastest.
        return_lse: also return lse.

    Returns:
        out (B, H, T, E) in q's type and q's rank; with `return_lse` also lse (B, H, T), natural log, float32
        (float64 for float64 input). A row that sees nothing gives out 0 and lse −∞, sink or no sink.
        An invisible key or value is never read into the arithmetic. Memory beyond the result does not grow with
        T or S, except under "reference".

    Raises:
        TypeError: an argument of the wrong kind or type.
        ValueError: a shape or value that does not fit. Both name the argument, what was expected and what came.

    Sources: Vaswani et al. 2017; Milakov & Gimelshein 2018 for the online softmax; Dao et al. 2022 for the tiles.
    """
    checked = problems.problem(
        "attention",
        q,
        k,
        v,
        causal=causal,
        offset=offset,
        window=window,
        starts=starts,
        lengths=lengths,
        segments=segments,
        mask=mask,
        bias=bias,
        alibi=alibi,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
    )
    problems.flag("attention", "return_lse", return_lse)
    seen = implementation("attention", impl).attend(checked)
    out = checked.restore(seen["out"])
    return (out, checked.restore(seen["lse"])) if return_lse else out


def look(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    segments: tuple[ArrayLike, ArrayLike] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    impl: str = "auto",
    top: int = 8,
    received: bool = False,
    pooled: tuple[int, int] | None = None,
) -> Look:
    """Attention, and from the same computation where each query drew its information.

    Args:
        q: queries. `k`: keys. `v`: values. They, and the options up to `impl`, are as in `attention`.
        top: how many of the heaviest keys to keep per row.
        received: also sum each key's weight over all queries (one more pass over the scores).
        pooled: (R, C): also sum the weights over R blocks of queries by C blocks of keys (the same second pass).

    Returns:
        A `Look`; its `out` has the same bits as `attention` gives. Memory beyond inputs and output: per row
        2·top + 4 numbers, and what `received` and `pooled` hold; never T·S, except under "reference".

    Raises:
        TypeError, ValueError: as `attention`.
    """
    watch = problems.watch("look", top=top, received=received, pooled=pooled)
    checked = problems.problem(
        "look",
        q,
        k,
        v,
        causal=causal,
        offset=offset,
        window=window,
        starts=starts,
        lengths=lengths,
        segments=segments,
        mask=mask,
        bias=bias,
        alibi=alibi,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
    )
    chosen = implementation("look", impl)
    seen = {name: checked.restore(array) for name, array in chosen.attend(checked, watch).items()}
    return Look(**seen, _problem=checked, _rows=chosen.rows)


class Gradients(NamedTuple):
    """What `attention_backward` gives: the gradients of a loss, each in the shape of what it belongs to.

    Attributes:
        dq: of q. `dk`: of k. `dv`: of v. In their type and rank.
        dsinks: of the sinks, (H,), float32 (float64 for float64 input); None without sinks.
        dbias: of the bias, in its shape and type; None unless it was asked for.
    """

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None
    dbias: Array | None


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    dlse: Array | None = None,
    bias_gradient: bool = False,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    segments: tuple[ArrayLike, ArrayLike] | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Gradients:
    """The gradients of a loss L with respect to what `attention` was given, from those with respect to its results.

        a_ij    = exp(s_ij − lse_i)                           the weights, made again
        δ_i     = dout_i·out_i − dlse_i
        ds_ij   = a_ij (dout_i·v_j − δ_i)                     = dbias_ij
        dx_ij   = ds_ij · (1 − (c_ij/softcap)²)               c: the score after softcap, before bias; else dx = ds
        dq_i    = scale · Σ_j dx_ij k_j        dk_j = scale · Σ_i dx_ij q_i        dv_j = Σ_i a_ij dout_i
        dsink_h = −Σ_i exp(sink_h − lse_i) δ_i

    Sums over queries run over all query heads that read a key/value head, sums for sinks over the batch as well.

    Args:
        q: queries. `k`: keys. `v`: values. They, and the options from `causal` to `scale`, as `attention` had them.
        out: (B, H, T, E), what `attention(..., return_lse=True)` gave. `lse`: (B, H, T), likewise.
        dout: ∂L/∂out, out's shape and type.
        dlse: ∂L/∂lse, lse's shape and type; None if the loss does not depend on lse.
        bias_gradient: also give the bias's gradient, summed over every axis that the bias was repeated along.
        impl: "blocked" (NumPy), "reference" (float64, T·S memory), or "auto", the fastest.

    Returns:
        `Gradients`. A row that sees nothing passes nothing on, and a key that nobody sees gets 0; neither is read
        into the arithmetic, nor is anything else that is invisible. Products are summed in float32 (float64 for
        float64 input). Memory beyond the results does not grow with T·S: under "blocked" it is, for each thread, dk
        and dv of one key/value head, and a bias's gradient has the bias's own size. The alibi slopes, and which keys
        are visible, have no gradient here.

    Raises:
        TypeError: an argument of the wrong kind or type.
        ValueError: a shape or value that does not fit; `bias_gradient` without a bias.

    Sources: Dao et al. 2022, appendix B, for the backward pass from lse; the softcap and sink terms are ours.
    """
    checked = problems.problem(
        "attention_backward",
        q,
        k,
        v,
        causal=causal,
        offset=offset,
        window=window,
        starts=starts,
        lengths=lengths,
        segments=segments,
        mask=mask,
        bias=bias,
        alibi=alibi,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
    )
    arrived = problems.arrived(
        "attention_backward", checked, out=out, lse=lse, dout=dout, dlse=dlse, bias_gradient=bias_gradient
    )
    chosen = implementation("attention_backward", impl)
    made = chosen.backward(checked, *arrived, bias_gradient)
    dq, dk, dv = (checked.restore(made[name]) for name in ("dq", "dk", "dv"))
    dbias = None if bias is None or not bias_gradient else made["dbias"].reshape(bias.shape)
    return Gradients(dq, dk, dv, made.get("dsinks"), dbias)
