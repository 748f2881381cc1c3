"""Projections of one input in one product: only where their weights really are the rows of one array, in order."""

import numpy as np
import pytest

from regardant.lm.blas import rows_of_one
from regardant.lm.weights import room

STEM = "model.layers.3."
SHAPES = {
    STEM + "self_attn.k_proj.weight": (4, 6),
    STEM + "self_attn.q_proj.weight": (8, 6),
    STEM + "self_attn.v_proj.weight": (4, 6),
    STEM + "self_attn.q_proj.bias": (8,),
    STEM + "mlp.up_proj.weight": (10, 6),
    STEM + "mlp.gate_proj.weight": (10, 6),
    STEM + "mlp.down_proj.weight": (6, 10),
}


def test_room_lays_projections_of_one_input_side_by_side():
    arrays = room(SHAPES, np.dtype(np.float32))
    assert {name: array.shape for name, array in arrays.items()} == SHAPES
    q, k, v = (arrays[f"{STEM}self_attn.{n}_proj.weight"] for n in "qkv")
    gate, up = arrays[STEM + "mlp.gate_proj.weight"], arrays[STEM + "mlp.up_proj.weight"]
    q[...], k[...], v[...] = 1, 2, 3
    np.testing.assert_array_equal(rows_of_one([q, k, v])[:, 0], [1] * 8 + [2] * 4 + [3] * 4)
    assert rows_of_one([gate, up]).shape == (20, 6)


def test_room_needs_the_whole_group():
    shapes = {name: shape for name, shape in SHAPES.items() if "v_proj" not in name}
    arrays = room(shapes, np.dtype(np.float32))
    assert {name: array.shape for name, array in arrays.items()} == shapes
    assert (
        rows_of_one([arrays[STEM + "self_attn.q_proj.weight"], arrays[STEM + "self_attn.k_proj.weight"]])
        is None
    )


@pytest.mark.parametrize(
    "pick",
    [
        lambda a: [a[4:8], a[:4], a[8:]],  # another order
        lambda a: [a[:4], a[4:8]],  # not all
        lambda a: [a[:4], a[5:8], a[8:]],  # a gap
        lambda a: [a[:4], a[4:8].copy(), a[8:]],  # of another array
        lambda a: [a[:4, :3], a[4:8, :3], a[8:, :3]],  # not whole rows
        lambda a: [a, a],
    ],
)
def test_what_does_not_follow_each_other_is_not_taken_for_one(pick):
    whole = np.arange(60, dtype=np.float32).reshape(12, 5).copy()
    assert rows_of_one([whole[:4], whole[4:8], whole[8:]]) is whole
    assert rows_of_one(pick(whole)) is None
