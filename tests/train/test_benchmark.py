"""The benchmark's plain torch model computes what the loop does: gradients, clipping and updates included."""

import math

import pytest
from benchmarks import train as benchmark

from regardant.train import settings


@pytest.mark.parametrize(
    ("shape", "documents"), [({}, None), ({"heads": 4, "kv_heads": 2}, None), ({}, (4, 20))]
)
def test_both_sides_have_the_same_losses_step_by_step(shape, documents):
    chosen = settings.settings("nano", {"context": 48, "batch": 2, "layers": 2, "lr": 1e-3, **shape})
    steps = benchmark.sides(chosen)
    losses = {
        name: [step(batch) for batch in benchmark.batches(chosen, benchmark.CHECKED, documents)]
        for name, step in steps.items()
    }
    ends = {(batch.segments_BT[:, -1] > 0).all() for batch in benchmark.batches(chosen, 3, documents)}
    assert ends == {documents is not None}
    assert losses["regardant"] == pytest.approx(losses["torch"], abs=benchmark.AGREE)
    # Random labels cost ln V at least, whatever is predicted (96 of them, so give or take).
    assert math.log(benchmark.VOCABULARY) - 0.2 < losses["torch"][0] < 2 * math.log(benchmark.VOCABULARY)
