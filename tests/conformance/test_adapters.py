"""Adapters of other libraries: each answers what it offers, and what it documents otherwise is a difference."""

import pytest

from regardant.conformance import NotOffered, select, verdict
from regardant.conformance.target import find
from regardant.conformance.worker import put

PEERS = ["torch", "flex", "onnxruntime", "jax", "transformers:eager", "transformers:sdpa"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    "case", select("alignment/square,heads/grouped,types/float16,scale/given,gradients/plain"), ids=str
)
def test_what_everybody_does_passes(name, case):
    found = put(case, find(name))
    if case.name == "types/float16" and name == "transformers:eager":
        # It rounds scores and weights to float16; whether that shows depends on the machine's matrix product.
        return
    assert found.verdict in {verdict.PASSED, verdict.NOT_OFFERED}, found.line()
    if case.name in {"alignment/square", "heads/grouped", "scale/given"}:
        assert found.verdict == verdict.PASSED, found.line()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["torch", "onnxruntime"])
def test_a_documented_convention_is_a_difference(name):
    found = put(select("alignment/fewer-queries")[0], find(name))
    assert found.verdict == verdict.DIFFERS
    assert found.cause == "causal mask aligned top-left"
    assert "documented" in found.line()
    assert not found.is_fault


def test_what_is_not_offered_is_named():
    with pytest.raises(NotOffered, match="window"):
        select("window/width")[0].check(find("torch"))


def test_gradients_that_a_peer_refuses_are_not_offered():
    found = put(select("gradients/plain")[0], find("flex"))
    assert found.verdict == verdict.NOT_OFFERED
    assert "dout" in found.detail
