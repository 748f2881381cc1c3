"""A model on torch: the same file and weights as on NumPy, the same greedy text, rounded to bfloat16, and trained."""

import numpy as np
import pytest
import torch
import transformers
from checkpoints import CONFIGS, random_model, write_folder

from regardant.lm import model as calculation
from regardant.lm.config import Config
from regardant.lm.errors import UserError
from regardant.lm.load import load

PROMPT = [5, 40, 7, 7, 120, 3, 9, 250, 11, 64, 8, 33]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("engine") / "tiny"
    return write_folder(made, random_model(request.param))


def test_greedy_text_is_the_same(folder):
    texts = []
    for engine in ("numpy", "torch"):
        made = load(folder, engine=engine)
        generation = made.generate(PROMPT, max_tokens=40)
        generation.text()
        texts.append(generation.ids)
    assert texts[0] == texts[1]


def test_weights_are_shared_with_the_file_and_have_its_numbers(folder):
    arrays, tensors = load(folder).weights, load(folder, engine="torch").weights
    assert arrays.keys() == tensors.keys()
    for name, array in arrays.items():
        assert tensors[name].dtype == torch.float32
        np.testing.assert_array_equal(tensors[name].numpy(), array)
    for name, tensor in load(folder, engine="torch", dtype="bfloat16").weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.from_numpy(arrays[name].copy()).bfloat16())
    assert load(folder, engine="torch", dtype="float64").weights.popitem()[1].dtype == torch.float64


def test_bfloat16_is_near_float32_and_keeps_its_text_between_runs(folder):
    wide, narrow = (load(folder, engine="torch", dtype=dtype) for dtype in ("float32", "bfloat16"))
    want, got = (made.logits(PROMPT)[0].float() for made in (wide, narrow))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = reference(torch.tensor([PROMPT])).logits[0].float()
    # As far from float32 as another calculation in the same type, within a factor of two.
    assert (got - want).abs().mean() <= 2 * (theirs - want).abs().mean()
    texts = [narrow.generate(PROMPT, max_tokens=10) for _ in range(2)]
    assert texts[0].text() == texts[1].text()


def test_gradients_are_those_of_transformers(folder):
    """Through the model's one file, by rows and all, with the loss of the next token."""
    made = load(folder, engine="torch", dtype="float64")
    weights = {name: tensor.clone().requires_grad_() for name, tensor in made.weights.items()}
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    hidden = calculation.forward(ids, weights, made.config)
    scores = calculation.logits(hidden, weights, made.config)
    loss = torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    reference(ids, labels=ids).loss.backward()
    theirs = dict(reference.named_parameters())
    assert weights.keys() <= theirs.keys()
    for name, weight in weights.items():
        want = theirs[name].grad
        # transformers computes norms and positions of a float64 model in float32.
        bound = 2e3 * torch.finfo(torch.float32).eps * float(want.abs().max())
        torch.testing.assert_close(weight.grad, want, rtol=0, atol=bound)


def test_many_rows_train_as_few_do():
    """More rows than are worked on at a time: a batch's gradient is the sum of its texts'."""
    config = Config.from_hugging_face(CONFIGS["llama"]().to_dict())
    torch.manual_seed(0)
    weights = {
        name: (torch.randn(shape, dtype=torch.float64) * 0.1).requires_grad_()
        for name, shape in calculation.expected_weights(config).items()
    }
    ids = torch.randint(300, (4, 100))

    def gradients(ids):
        scores = calculation.logits(calculation.forward(ids, weights, config), weights, config)
        return torch.autograd.grad(scores.logsumexp(-1).sum(), list(weights.values()))

    together, apart = gradients(ids), [gradients(row[None]) for row in ids]
    for whole, parts in zip(together, zip(*apart, strict=True), strict=True):
        bound = 400 * 96 * torch.finfo(torch.float64).eps * float(whole.abs().max())
        torch.testing.assert_close(whole, sum(parts), rtol=0, atol=bound)


def test_smollm2_writes_the_same_on_both(smollm2, smollm2_gguf):
    prompt = "The capital of France is"
    on_torch = load(smollm2_gguf, engine="torch")
    texts = [made.generate(prompt, max_tokens=24).text() for made in (smollm2, on_torch)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(" Paris")


@pytest.mark.parametrize(
    ("engine", "dtype", "sentence"),
    [
        ("jax", "float32", 'load: engine must be "numpy" or "torch"; got \'jax\''),
        (None, "float32", 'load: engine must be "numpy" or "torch"; got None'),
        ("numpy", "bfloat16", 'load: dtype must be "float32" or "float64", or engine "torch"; got \'bfloat16\''),
        ("numpy", "float16", 'load: dtype must be "float32" or "float64"; got \'float16\''),
        ("torch", "float16", 'load: dtype must be "float32", "float64" or "bfloat16"; got \'float16\''),
        ("torch", np.float32, "got <class 'numpy.float32'>"),
    ],
)  # fmt: skip
def test_what_there_is_none_of_is_refused_before_loading(engine, dtype, sentence):
    with pytest.raises(UserError) as raised:
        load("there/is/no/such/model.gguf", engine=engine, dtype=dtype)
    assert str(raised.value).startswith("load: ")
    assert str(raised.value).endswith(sentence)


def test_torch_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(
        UserError, match=r'load: engine "torch" needs torch: pip install "regardant\[torch\]"'
    ):
        load("smollm2", engine="torch")
