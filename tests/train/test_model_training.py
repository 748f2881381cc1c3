"""The model under training: packed documents, gradients, recomputation, accumulation, schedules, settings."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from regardant.errors import UserError
from regardant.lm import model
from regardant.lm.config import Config
from regardant.train import data, loop, optimiser, settings
from regardant.train.parameters import Parameters
from train.corpus import SMALL

CHOSEN = settings.settings("nano", {**SMALL, "context": 16})


def made(chosen=CHOSEN, dtype=torch.float64, vocab=40):
    config = Config.from_hugging_face(settings.hugging_face_config(chosen, vocab, 0, 0))
    parameters = Parameters(config)
    parameters.begin(3, config.layers)
    with torch.no_grad():
        for leaf in parameters.leaves.values():
            leaf.mul_(4 if leaf.ndim > 1 else 1)
    return config, parameters, parameters.weights(dtype)


def packed(rng, lengths, rows=2):
    segments = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)])
    return rng.integers(0, 40, (rows, len(segments))), np.stack([segments] * rows)


@pytest.mark.parametrize("shape", [{}, {"window": 5}, {"qk_norm": True}, {"qk_norm": True, "window": 5}])
def test_a_document_in_a_packed_row_reads_as_if_alone(shape):
    config, _, weights = made(dataclasses.replace(CHOSEN, **shape))
    ids, segments = packed(np.random.default_rng(0), [5, 1, 7, 3])
    together = model.forward(torch.tensor(ids), weights, config, segments_BT=torch.tensor(segments))
    for document in range(4):
        place = segments[0] == document
        alone = model.forward(torch.tensor(ids[:, place]), weights, config)
        # Rotary angles are rounded to float32 at other positions: a few of its steps, of angles up to 16.
        torch.testing.assert_close(together[:, place], alone, rtol=0, atol=64 * 2**-24)


def test_numpy_reads_packed_rows_too():
    config, parameters, _ = made()
    ids, segments = packed(np.random.default_rng(1), [6, 10])
    weights = {name: tensor.double().numpy() for name, tensor in parameters.named()}
    ours = model.forward(ids, weights, config, segments_BT=segments)
    theirs = model.forward(
        torch.tensor(ids), parameters.weights(torch.float64), config, segments_BT=torch.tensor(segments)
    )
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-12)


def test_segments_that_cannot_be_honoured_are_refused():
    config, _, weights = made()
    ids = torch.zeros((1, 4), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"segments must be \(1, 4\)"):
        model.forward(ids, weights, config, segments_BT=ids[:, :3])
    learned = dataclasses.replace(config, rope=None)
    with pytest.raises(ValueError, match="learned positions"):
        model.forward(ids, weights, learned, segments_BT=ids)


def test_gradients_agree_with_differences():
    config, parameters, _ = made(vocab=20)
    ids, segments = packed(np.random.default_rng(2), [4, 4], rows=1)
    batch = data.Batch(ids % 20, segments, (ids + 1) % 20)
    chosen = dataclasses.replace(CHOSEN)

    def value(shift=None, at=None):
        whole = {n: leaf.detach().double() for n, leaf in parameters.leaves.items()}
        if at is not None:
            whole[at] = whole[at] + shift
        weights = {n: whole[p.leaf][p.first : p.last] for n, p in parameters.places.items()}
        return loop.batch_loss(weights, config, chosen, batch)

    loss = loop.batch_loss(parameters.weights(torch.float64), config, chosen, batch)
    loss.backward()
    rng = torch.Generator().manual_seed(0)
    for name, leaf in parameters.leaves.items():
        direction = torch.randn(leaf.shape, generator=rng, dtype=torch.float64)
        h = 1e-6
        slope = (value(h * direction, name) - value(-h * direction, name)) / (2 * h)
        # The gradient is rounded to float32 on its way into the leaf; differences err by h² and ε/h.
        expected = (leaf.grad.double() * direction).sum()
        torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-5 * float(leaf.grad.norm()))


def test_recomputed_activations_give_the_same_bits():
    config, parameters, _ = made()
    ids, segments = packed(np.random.default_rng(3), [9, 7])
    batch = data.Batch(ids, segments, np.roll(ids, -1, axis=1))
    gradients = []
    for recompute in (False, True):
        chosen = dataclasses.replace(CHOSEN, recompute=recompute)
        loop.batch_loss(parameters.weights(), config, chosen, batch).backward()
        gradients.append({name: leaf.grad.clone() for name, leaf in parameters.leaves.items()})
        for leaf in parameters.leaves.values():
            leaf.grad = None
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=0, atol=0)


# torch's tracer asks for it and hides the warning; as an error it cannot be hidden.
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_it_is_one_graph_for_all_layers_and_the_same_numbers(monkeypatch):
    """Traced and differentiated as for the compiler, and run without it: C++ takes a minute."""
    config, parameters, _ = made(dataclasses.replace(CHOSEN, layers=3))
    ids, segments = packed(np.random.default_rng(3), [9, 7])
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    loop._compiled.cache_clear()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for segments_BT in (segments, np.zeros_like(segments), segments):
        batch = data.Batch(ids, segments_BT, np.roll(ids, -1, axis=1))
        gradients, losses = [], []
        for compiled in (False, True):
            chosen = dataclasses.replace(CHOSEN, layers=3, compile=compiled)
            loss = loop.batch_loss(parameters.weights(torch.float64), config, chosen, batch)
            loss.backward()
            losses.append(loss.detach())
            gradients.append({name: leaf.grad.clone() for name, leaf in parameters.leaves.items()})
            for leaf in parameters.leaves.values():
                leaf.grad = None
        torch.testing.assert_close(losses[0], losses[1], rtol=2**-44, atol=0)
        for name, gradient in gradients[0].items():  # rounded to float32 on its way into the leaf
            torch.testing.assert_close(gradient, gradients[1][name], rtol=2**-22, atol=0)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    loop._compiled.cache_clear()


def test_one_product_serves_projections_of_one_input():
    _, parameters, weights = made()
    assert len(parameters.leaves) == 2 + 6 * 2
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    from regardant.lm.blas import rows_of_one

    whole = rows_of_one([weights[name] for name in names])
    assert whole.shape == (64, 32)
    assert rows_of_one([weights[name] for name in reversed(names)]) is None
    assert rows_of_one([weights[name] for name in names[:2]]) is None


def test_how_weights_begin():
    chosen = settings.settings("nano", {"width": 256, "heads": 8, "layers": 2, "ffn": 512})
    config = Config.from_hugging_face(settings.hugging_face_config(chosen, 4096, 0, 0))
    parameters = Parameters(config)
    parameters.begin(3, config.layers)
    first = {name: tensor.clone() for name, tensor in parameters.named()}
    embeddings = first.pop("model.embed_tokens.weight")
    common = embeddings.mean(0)
    # Within five deviations of what is drawn: 256 and a million numbers.
    assert float(common.square().mean().sqrt()) == pytest.approx(3 / 16, rel=5 / math.sqrt(2 * 256))
    assert float((embeddings - common).std()) == pytest.approx(
        1 / 16, rel=5 / math.sqrt(2 * embeddings.numel())
    )
    for name, tensor in first.items():
        if tensor.ndim == 1:
            assert bool((tensor == 1).all())
            continue
        into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        want = 0.5 / 16 / (2 if into_stream else 1)
        assert float(tensor.std()) == pytest.approx(want, rel=5 / math.sqrt(2 * tensor.numel())), name
    parameters.begin(4, config.layers)
    changed = [
        name for name, tensor in parameters.named() if not torch.equal(tensor, first.get(name, embeddings))
    ]
    assert len(changed) == 1 + 2 * 7


def test_decay_falls_on_matrices_only():
    _, parameters, _ = made()
    adamw = optimiser.adamw(parameters, CHOSEN)
    decayed, free = adamw.param_groups
    assert {leaf.ndim for leaf in decayed["params"]} == {2}
    assert {leaf.ndim for leaf in free["params"]} == {1}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)


def test_schedules():
    chosen = dataclasses.replace(CHOSEN, steps=100, warmup=10, lr=1.0)
    rates = [optimiser.learning_rate(step, chosen) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (n + 1) for n in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.001)
    flat = dataclasses.replace(chosen, schedule="trapezoid")
    rates = [optimiser.learning_rate(step, flat) for step in range(100)]
    assert set(rates[10:81]) == {1.0}
    assert rates[80:] == pytest.approx([n / 20 for n in range(20, 0, -1)])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"width": 30, "heads": 4}, "--width must be a multiple of --heads 4; got 30"),
        ({"heads": 4, "kv_heads": 3}, "--heads must be a multiple of --kv-heads 3; got 4"),
        ({"lr": 0.0}, "--lr must be greater than 0"),
        ({"lr": math.nan}, "--lr must be greater than 0"),
        ({"steps": 0}, "--steps must be from 1"),
        ({"vocab_size": 200}, "--vocab-size must be from 257"),
        ({"valid_share": 1.0}, "--valid-share must be at least 0 and less than 1"),
        ({"schedule": "linear"}, "--schedule must be cosine or trapezoid"),
        ({"dtype": "float16"}, "--dtype must be float32 or bfloat16"),
    ],
)
def test_settings_out_of_range_are_refused_by_their_flag(given, sentence):
    with pytest.raises(UserError, match=sentence):
        settings.settings(None, given)


def test_every_size_is_sound():
    for size in settings.SIZES:
        chosen = settings.settings(size, {})
        Config.from_hugging_face(settings.hugging_face_config(chosen, chosen.vocab_size, 0, 0))
    with pytest.raises(UserError, match="--size must be one of nano, micro"):
        settings.settings("huge", {})
