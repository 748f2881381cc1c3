"""Bad input: one sentence that names the argument, what was expected and what came, from every front door."""

import re

import numpy as np
import pytest

import regardant as rg

Q = np.zeros((2, 8, 16, 64), np.float32)
K = np.zeros((2, 4, 9, 64), np.float32)
V = np.zeros((2, 4, 9, 32), np.float32)
OUT = np.zeros((2, 8, 16, 32), np.float32)
LSE = np.zeros((2, 8, 16), np.float32)

WRONG = [
    ({"k": K[..., :32]}, ValueError, "k must be (2, G, S, 64) to match q (2, 8, 16, 64); got (2, 4, 9, 32)"),
    ({"k": K[0]}, ValueError, "k must be (2, G, S, 64) to match q (2, 8, 16, 64); got (4, 9, 64)"),
    ({"k": K[:1]}, ValueError, "k must be (2, G, S, 64) to match q (2, 8, 16, 64); got (1, 4, 9, 64)"),
    ({"v": V[:, :, :8]}, ValueError, "v must be (2, 4, 9, E) to match k (2, 4, 9, 64); got (2, 4, 8, 32)"),
    ({"v": V[0]}, ValueError, "v must be (2, 4, 9, E) to match k (2, 4, 9, 64); got (4, 9, 32)"),
    ({"k": K[:, :3], "v": V[:, :3]}, ValueError, "q's heads must be a multiple of k's; got 8 and 3"),
    ({"k": K[:, :0], "v": V[:, :0]}, ValueError, "q's heads must be a multiple of k's; got 8 and 0"),
    ({"q": Q[None]}, ValueError, "q must be (B, H, T, D), (H, T, D) or (T, D); got (1, 2, 8, 16, 64)"),
    ({"q": Q[0, 0, 0]}, ValueError, "q must be (B, H, T, D), (H, T, D) or (T, D); got (64,)"),
    ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "q and v must be at least 1 wide"),
    ({"v": V[..., :0]}, ValueError, "q and v must be at least 1 wide"),
    ({"q": Q.tolist()}, TypeError, "q must be a NumPy array; got builtins.list"),
    ({"q": np.ma.masked_array(Q)}, TypeError, "q must be a NumPy array; got MaskedArray of float32"),
    ({"k": K[0, 0].view(np.matrix)}, TypeError, "k must be a NumPy array; got matrix of float32"),
    ({"q": Q.astype(int)}, TypeError, "q must be one of float64, float32, float16, bfloat16; got int64"),
    ({"q": Q.astype(complex)}, TypeError, "q must be one of float64, float32, float16, bfloat16; got complex128"),
    ({"q": Q.astype(">f4")}, TypeError, "q must be one of float64, float32, float16, bfloat16; got >f4"),
    ({"k": K.astype(np.float16)}, TypeError, "k must be float32 to match q; got float16"),
    ({"v": V.astype(np.float64)}, TypeError, "v must be float32 to match q; got float64"),
    ({"causal": 1}, TypeError, "causal must be True or False; got 1"),
    ({"offset": 1.0}, TypeError, "offset must be an integer; got 1.0"),
    ({"offset": True}, TypeError, "offset must be an integer; got True"),
    ({"window": 0}, ValueError, "window must be at least 1; got 0"),
    ({"window": "4"}, TypeError, "window must be an integer; got '4'"),
    ({"starts": [1, 2, 3]}, ValueError, "starts must be (2,), one number per batch row; got (3,)"),
    ({"starts": 1}, ValueError, "starts must be (2,), one number per batch row; got ()"),
    ({"starts": [0, -1]}, ValueError, "starts must lie between 0 and the 9 keys; got -1"),
    ({"lengths": [9, 10]}, ValueError, "lengths must lie between 0 and the 9 keys; got 10"),
    ({"lengths": [1.0, 2.0]}, TypeError, "lengths must be integers of 64 bits at most; got float64"),
    ({"lengths": [10**30, 1]}, TypeError, "lengths must be integers of 64 bits at most; got object"),
    ({"starts": [[0], [1, 2]]}, ValueError, "starts must be one flat list; got lists of unequal length"),
    ({"segments": (np.full((2, 16), 2**64 - 1, np.uint64), np.zeros((2, 9), int))}, ValueError,
     "segments of the queries must be at most 2**63 - 1; got 18446744073709551615"),
    ({"lengths": [True, False]}, TypeError, "lengths must be integers of 64 bits at most; got bool"),
    ({"segments": np.zeros((2, 16), int)}, TypeError, "segments must be a pair, ids of the queries and of the keys"),
    ({"segments": (np.zeros((2, 9), int), np.zeros((2, 9), int))}, ValueError,
     "segments of the queries must be (2, 16); got (2, 9)"),
    ({"segments": (np.zeros((2, 16), int), np.zeros((2, 9)))}, TypeError, "segments of the keys must be integers"),
    ({"mask": np.ones((16, 9))}, TypeError,
     "mask must be a boolean NumPy array, True = visible; got ndarray of float64"),
    ({"mask": np.ones((9, 16), bool)}, ValueError,
     "mask must broadcast to (B, H, T, S) = (2, 8, 16, 9); got (9, 16)"),
    ({"mask": np.ones((1, 2, 8, 16, 9), bool)}, ValueError, "mask must broadcast to (B, H, T, S)"),
    ({"mask": [[True]]}, TypeError, "mask must be a boolean NumPy array"),
    ({"mask": np.ma.masked_array(np.ones((16, 9), bool))}, TypeError, "mask must be a NumPy array; got Masked"),
    ({"bias": np.ones((16, 9), bool)}, TypeError, "bias must be a floating NumPy array, added to the scores"),
    ({"bias": np.ones((4, 16, 9), np.float32)}, ValueError,
     "bias must broadcast to (B, H, T, S) = (2, 8, 16, 9); got (4, 16, 9)"),
    ({"bias": np.zeros(9, ">f4")}, TypeError,
     "bias must be a floating NumPy array, added to the scores; got ndarray of >f4"),
    ({"alibi": np.ones(4)}, ValueError, "alibi must be (8,), one number per query head; got (4,)"),
    ({"sinks": np.ones((8, 1))}, ValueError, "sinks must be (8,), one number per query head; got (8, 1)"),
    ({"alibi": [[1.0], [1.0, 2.0]]}, ValueError, "alibi must be one flat list; got lists of unequal length"),
    ({"sinks": np.full(8, np.inf)}, ValueError, "sinks must be finite in float32, the type of scores; got inf"),
    ({"sinks": np.full(8, np.nan)}, ValueError, "sinks must be finite in float32, the type of scores; got nan"),
    ({"alibi": np.full(8, -np.inf)}, ValueError, "alibi must be finite in float32, the type of scores; got -inf"),
    ({"alibi": np.full(8, 1e300)}, ValueError, "alibi must be finite in float32, the type of scores; got 1e+300"),
    ({"sinks": np.full(8, -1e39)}, ValueError, "sinks must be finite in float32, the type of scores; got -1e+39"),
    ({"softcap": 1e39}, ValueError, "softcap must be finite in float32, the type of scores; got 1e+39"),
    ({"scale": -1e39}, ValueError, "scale must be finite in float32, the type of scores; got -1e+39"),
    ({"scale": 10**400}, ValueError, "scale must be finite; got an integer of 1329 bits"),
    ({"causal": 10**5000}, TypeError, "causal must be True or False; got an integer of 16610 bits"),
    ({"impl": ["native"]}, TypeError, "impl must be a name; got builtins.list"),
    ({"sinks": ["a"] * 8}, TypeError, "sinks must be numbers; got <U1"),
    ({"softcap": 0}, ValueError, "softcap must be greater than 0, or None for no cap; got 0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be finite; got inf"),
    ({"scale": float("nan")}, ValueError, "scale must be finite; got nan"),
    ({"scale": "x"}, TypeError, "scale must be a number; got 'x'"),
    ({"scale": True}, TypeError, "scale must be a number; got True"),
]  # fmt: skip


@pytest.mark.parametrize("op", ["attention", "look", "attention_backward"])
@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize(("wrong", "error", "says"), WRONG, ids=[says[:60] for _, _, says in WRONG])
def test_bad_input_is_named(op, impl, wrong, error, says):
    given = {"q": Q, "k": K, "v": V, "impl": impl} | wrong
    arrays = [given.pop(name) for name in "qkv"]
    if op == "attention_backward":
        arrays += [OUT, LSE, OUT]
    with pytest.raises(error, match=re.escape(f"{op}: {says}")):
        getattr(rg, op)(*arrays, **given)


SHAPES = "(2, 8, 16, 32) to match q (2, 8, 16, 64) and v (2, 4, 9, 32)"


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"out": OUT[..., :8]}, ValueError, f"out must be {SHAPES}; got (2, 8, 16, 8)"),
        ({"out": OUT[0]}, ValueError, f"out must be {SHAPES}; got (8, 16, 32)"),
        ({"out": OUT.astype(np.float64)}, TypeError, "out must be float32 to go with q of float32; got float64"),
        ({"out": (OUT, LSE)}, TypeError, "out must be a NumPy array; got builtins.tuple"),
        ({"lse": LSE[..., None]}, ValueError, "lse must be (2, 8, 16) to match q (2, 8, 16, 64); got (2, 8, 16, 1)"),
        ({"lse": LSE.astype(np.float16)}, TypeError, "lse must be float32 to go with q of float32; got float16"),
        ({"lse": LSE.astype(">f4")}, TypeError, "lse must be float32 to go with q of float32; got >f4"),
        ({"lse": None}, TypeError, "lse must be a NumPy array; got None"),
        ({"dout": OUT[:1]}, ValueError, f"dout must be {SHAPES}; got (1, 8, 16, 32)"),
        ({"dout": 1.0}, TypeError, "dout must be a NumPy array; got 1.0"),
        ({"dout": np.ma.masked_array(OUT)}, TypeError, "dout must be a NumPy array; got MaskedArray of float32"),
        ({"dlse": OUT}, ValueError, "dlse must be (2, 8, 16) to match q (2, 8, 16, 64); got (2, 8, 16, 32)"),
        ({"dlse": LSE.astype(int)}, TypeError, "dlse must be float32 to go with q of float32; got int64"),
        ({"bias_gradient": 1, "bias": np.zeros(9, np.float32)}, TypeError,
         "bias_gradient must be True or False; got 1"),
        ({"bias_gradient": True}, ValueError, "bias must be given for bias_gradient=True; got None"),
    ],
)  # fmt: skip
def test_what_a_backward_pass_is_given_is_checked(impl, wrong, error, says):
    given = {"out": OUT, "lse": LSE, "dout": OUT, "impl": impl} | wrong
    with pytest.raises(error, match=re.escape(f"attention_backward: {says}")):
        rg.attention_backward(Q, K, V, **given)


def test_a_backward_pass_names_the_shapes_of_the_callers_rank():
    with pytest.raises(
        ValueError, match=re.escape("dout must be (16, 32) to match q (16, 64) and v (9, 32); got (16, 9)")
    ):
        rg.attention_backward(Q[0, 0], K[0, 0], V[0, 0], OUT[0, 0], LSE[0, 0], OUT[0, 0, :, :9])


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"top": -1}, ValueError, "look: top must be at least 0; got -1"),
        ({"top": 2.0}, TypeError, "look: top must be an integer; got 2.0"),
        ({"top": 10**400}, ValueError, "look: top must be at most 2147483647; got an integer of 1329 bits"),
        (
            {"pooled": (2**63, 1)},
            ValueError,
            "look: pooled's query blocks must be at most 2147483647; got 9223372036854775808",
        ),
        ({"received": 1}, TypeError, "look: received must be True or False; got 1"),
        ({"pooled": 4}, TypeError, "look: pooled must be a pair (query blocks, key blocks); got 4"),
        ({"pooled": (0, 4)}, ValueError, "look: pooled's query blocks must be at least 1; got 0"),
        ({"pooled": (4, 1.5)}, TypeError, "look: pooled's key blocks must be an integer; got 1.5"),
    ],
)
def test_what_look_is_asked_for_is_checked(wrong, error, says):
    with pytest.raises(error, match=re.escape(says)):
        rg.look(Q, K, V, **wrong)


def test_whether_lse_is_wanted_is_a_yes_or_no():
    with pytest.raises(TypeError, match="attention: return_lse must be True or False; got 'no'"):
        rg.attention(Q, K, V, return_lse="no")


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="dropout"):
        rg.attention(Q, K, V, dropout=0.1)


@pytest.mark.parametrize(
    ("queries", "heads", "error", "says"),
    [
        (16, None, ValueError, "rows: queries must lie between -16 and 15; got 16"),
        ([-17], None, ValueError, "rows: queries must lie between -16 and 15; got -17"),
        (0, [8], ValueError, "rows: heads must lie between -8 and 7; got 8"),
        (0.5, None, TypeError, "rows: queries must be integers of 64 bits at most; got float64"),
        ([[0]], None, ValueError, "rows: queries must be a number or a flat list of them; got shape (1, 1)"),
        ([True], None, TypeError, "rows: queries must be integers of 64 bits at most; got bool"),
    ],
)
def test_rows_checks_its_indices(queries, heads, error, says):
    look = rg.look(Q, K, V)
    with pytest.raises(error, match=re.escape(says)):
        look.rows(queries, heads)


def test_nothing_is_written_into_the_inputs():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(a.shape).astype(np.float32) for a in (Q, K, V)]
    before = [a.copy() for a in arrays]
    rg.look(*arrays, received=True, softcap=2.0, bias=before[0][0, 0, :, :9].copy())
    for array, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, was)
