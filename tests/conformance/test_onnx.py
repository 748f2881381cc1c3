"""The ONNX standard's own cases of Attention, RotaryEmbedding and RMSNormalization, run against regardant."""

import numpy as np
import onnx_nodes
import pytest

from regardant.conformance.budget import unit

ATTENTION = [name for name in onnx_nodes.standard() if "attention" in name]
OTHERS = [name for name in onnx_nodes.standard() if "attention" not in name]


def check(name, **options):
    case = onnx_nodes.standard()[name]
    for inputs, outputs in case.data_sets:
        made = onnx_nodes.run(case, inputs, **options)
        assert len(made) == len(outputs)
        for got, want in zip(made, outputs, strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            narrow = 0 if want.dtype == np.float32 else 4 * unit(want.dtype)
            wide = (array.astype(np.float64) for array in (got, want))
            # The standard's own bounds; its reference rounds half types after every step, we do once.
            np.testing.assert_allclose(*wide, rtol=case.rtol + narrow, atol=case.atol + narrow)


def test_all_of_the_standards_cases_are_there():
    assert len(ATTENTION) == 93
    assert len(OTHERS) == 8 + 19


@pytest.mark.parametrize("impl", ["native", "blocked", "reference"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, impl):
    check(name, impl=impl)


@pytest.mark.parametrize("name", OTHERS)
def test_rotary_embedding_and_rms_normalization(name):
    check(name)
