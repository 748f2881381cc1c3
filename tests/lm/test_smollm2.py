"""The real model, end to end: text through our tokenizer and our calculation against transformers' calculation."""

import numpy as np
import pytest
import torch
import transformers

TEXTS = [
    "The capital of France is",
    "The trophy did not fit in the suitcase because it was too big. What was too big? The",
    'def area(r):\n    """Area of a circle."""\n    return 3.14159 * r ** 2\n\nprint(area(2))  # 12.57\n',
    "Ça va? Näin on ¡olé! 東京 is 2,194 km² … 🦊🦊   three   spaces",
]


@pytest.fixture(scope="module")
def theirs(smollm2):
    """transformers' model of the same weights; that they are the file's is tested where files are read."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {name: torch.asarray(array, copy=True) for name, array in smollm2.weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("text", TEXTS)
def test_logits_equal_transformers(smollm2, theirs, text):
    ids = smollm2.tokenizer.encode(text, special=True)
    with torch.no_grad():
        expected = theirs(torch.asarray([ids])).logits[0].numpy()
    difference = np.abs(smollm2.logits(ids)[0] - expected).max(-1)
    assert (difference / np.abs(expected).max(-1)).max() <= 1e-4


def test_left_padding_in_a_batch(smollm2, theirs):
    rows = [smollm2.tokenizer.encode(text, special=True) for text in TEXTS[:3]]
    longest = max(map(len, rows))
    starts = [longest - len(row) for row in rows]
    ids = np.asarray([[2] * start + row for start, row in zip(starts, rows, strict=True)])
    ours = smollm2.logits(ids, starts=starts)
    assert np.isfinite(ours).all()
    for row, start, padded in zip(rows, starts, ours, strict=True):
        with torch.no_grad():
            expected = theirs(torch.asarray([row])).logits[0].numpy()
        difference = np.abs(padded[start:] - expected).max(-1)
        assert (difference / np.abs(expected).max(-1)).max() <= 1e-4


def test_the_capital_of_france_is_paris(smollm2):
    assert int(smollm2.logits("The capital of France is")[0, -1].argmax()) == 7042
    assert smollm2.tokenizer.decode([7042]) == " Paris"
