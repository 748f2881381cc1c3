"""Where a token drew from, against transformers' eager attention, and against what shares must add up to."""

import html.parser
import json

import numpy as np
import pytest
import torch
import transformers

from regardant import runs
from regardant.lm import config as configs
from regardant.lm.errors import ContextError, UserError
from regardant.lm.language_model import LanguageModel
from regardant.lm.run import written_norms

TEXT = "The trophy did not fit in the brown suitcase because it was too big."


class Words:
    """Words split at spaces stand for their place in a list: a tokenizer with nothing to go wrong."""

    bos = None
    eos = frozenset()
    has_chat = False

    def spans(self, text, *, special=True):  # noqa: ARG002
        ids, spans, at = [], [], 0
        for word in text.split(" ") if text else []:
            ids.append(sum(word.encode()) % 100)
            spans.append((at, at + len(word)))
            at += len(word) + 1
        return ids, spans

    def pieces(self, ids):
        return [f"w{i}" for i in ids]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request):
    """A tiny random transformers model with loud attention, and the same as ours."""
    torch.manual_seed(1)
    if request.param == "llama":
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=100, hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=6,
                num_key_value_heads=2, head_dim=4, max_position_embeddings=64, attn_implementation="eager",
            )
        )  # fmt: skip
    else:
        theirs = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=100, n_embd=24, n_layer=3, n_head=6, n_positions=64, attn_implementation="eager"
            )
        )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim > 1 else 1))
    theirs.eval()
    config = configs.Config.from_hugging_face(theirs.config.to_dict())
    weights = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    return theirs, LanguageModel(config, weights, Words(), f"tiny {request.param}")


def text_of(count):
    return " ".join("abcdefghij"[i % 10] * (1 + i % 7) for i in range(count))


@pytest.fixture(scope="module")
def eager(pair):
    """(our run, all weights (L, H, T, T), written norms of each weight (L, H, T, T)) for one text."""
    theirs, ours = pair
    run = ours.look(text_of(30), top=4)
    ids = torch.tensor([[token.id for token in run.tokens]])
    values = []
    hooks = []
    blocks = theirs.transformer.h if ours.config.family == "gpt2" else theirs.model.layers
    for block in blocks:
        taken = block.attn.c_attn if ours.config.family == "gpt2" else block.self_attn.v_proj
        hooks.append(taken.register_forward_hook(lambda _m, _i, out: values.append(out[0])))
    with torch.no_grad():
        weights = theirs(ids, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    written = []
    for block, a_1HTS, v_SO in zip(blocks, weights, values, strict=True):
        if ours.config.family == "gpt2":
            v_SHD = v_SO[:, 48:].reshape(-1, 6, 4)
            wo_HDC = block.attn.c_proj.weight.reshape(6, 4, 24)
        else:
            v_SHD = v_SO.reshape(-1, 2, 4).repeat_interleave(3, dim=1)
            wo_HDC = block.self_attn.o_proj.weight.T.reshape(6, 4, 24)
        moved_HTSC = a_1HTS[0][..., None] * torch.einsum("shd,hdc->hsc", v_SHD, wo_HDC)[:, None]
        written.append(moved_HTSC.norm(dim=-1))
    return run, torch.cat(weights).double().numpy(), torch.stack(written).double().detach().numpy()


def test_rows_are_the_weights_of_eager_attention(eager):
    run, weights, _ = eager
    for number, layer in run.layers.items():
        np.testing.assert_allclose(layer.rows(range(30)), weights[number], rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(
            layer.top_weights_HTK, -np.sort(-weights[number], -1)[..., :4], rtol=2e-4, atol=1e-6
        )


@pytest.mark.parametrize("token", [0, 1, 17, -1])
def test_sources_average_the_weights_and_add_up_what_was_written(eager, token):
    run, weights, written = eager
    sources = run.sources(token, top=5)
    mean = weights[:, :, token].mean(axis=(0, 1))
    moved = written[:, :, token].sum(axis=(0, 1))
    moved /= moved.sum()
    for item in sources.items:
        np.testing.assert_allclose(item.weight, mean[item.token.index], rtol=1e-4)
        np.testing.assert_allclose(item.written, moved[item.token.index], rtol=1e-4)
    heaviest = np.sort(mean)[::-1][: len(sources.items)]
    np.testing.assert_allclose([item.weight for item in sources.items], heaviest, rtol=1e-4)
    np.testing.assert_allclose(sources.sink, mean[0], rtol=1e-4)
    np.testing.assert_allclose(sources.sink_written, moved[0], rtol=1e-4)
    np.testing.assert_allclose(sum(i.weight for i in sources.items) + sources.rest, 1, rtol=1e-6)
    np.testing.assert_allclose(sum(i.written for i in sources.items) + sources.rest_written, 1, rtol=1e-6)


def test_sources_of_chosen_layers_and_heads(eager):
    run, weights, written = eager
    sources = run.sources(20, top=3, layers=[0, 2], heads=[1, 5])
    mean = weights[np.ix_([0, 2], [1, 5], [20])].mean(axis=(0, 1, 2))
    moved = written[np.ix_([0, 2], [1, 5], [20])].sum(axis=(0, 1, 2))
    for item in sources.items:
        np.testing.assert_allclose(item.weight, mean[item.token.index], rtol=1e-4)
        np.testing.assert_allclose(item.written, moved[item.token.index] / moved.sum(), rtol=1e-4)


def test_page_data_says_the_same_for_every_token(eager):
    run, weights, written = eager
    done = []
    data = run.page_data(focus=3, progress=lambda *at: done.append(at))
    assert done[-1] == (30, 30)
    mean, moved = weights.mean(axis=(0, 1)), written.sum(axis=(0, 1))
    moved /= moved.sum(axis=-1, keepdims=True)
    per_layer = weights.mean(axis=1)
    for part, want in (
        (data["all"]["weight"], mean), (data["all"]["written"], moved), (data["per_layer"], per_layer)
    ):  # fmt: skip
        keys, kept = part["keys"], part["weights"]
        known = np.where(keys < 0, 0, np.take_along_axis(want, np.maximum(keys, 0), axis=-1))
        np.testing.assert_allclose(kept, known, rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(
            kept, -np.sort(-want, axis=-1)[..., : kept.shape[-1]], rtol=2e-4, atol=1e-6
        )
        np.testing.assert_allclose(kept.sum(axis=-1) + part["rest"], 1, rtol=1e-5)
    np.testing.assert_allclose(data["all"]["weight"]["sink"], mean[:, 0], rtol=1e-4)
    assert data["focus"] == 3
    assert data["title"] == run.text[:59] + "…"


def test_narrowing_to_layers_changes_no_answer(pair):
    _, ours = pair
    whole, some = ours.look(text_of(20)), ours.look(text_of(20), layers=[2, 0])
    assert list(some.layers) == [0, 2]
    assert some.sources(-1, layers=2) == whole.sources(-1, layers=2)
    with pytest.raises(UserError, match="layers must be among those looked at, 0, 2; got 1"):
        some.sources(-1, layers=1)


def test_what_a_run_holds_grows_linearly(pair):
    _, ours = pair

    def held(count):
        layers = ours.look(text_of(count), top=2).layers.values()
        arrays = [v for layer in layers for v in vars(layer).values() if isinstance(v, np.ndarray)]
        inner = [
            a for layer in layers for a in vars(layer._rows.args[0]).values() if isinstance(a, np.ndarray)
        ]
        problems = [
            getattr(layer._rows.args[0]._problem, n)
            for layer in layers
            for n in ("q_BHTD", "k_BGSD", "v_BGSE")
        ]
        return sum({a.__array_interface__["data"][0]: a.nbytes for a in arrays + inner + problems}.values())

    assert held(60) <= 2 * held(30)
    layers, heads, kv_heads, width, top = 3, 6, ours.config.kv_heads, 4, 2
    said = layers * ((heads + 2 * kv_heads) * width * 4 + 12 * top * heads + 20 * heads)
    assert held(60) <= 60 * said


def test_written_norms_are_the_lengths_of_what_is_written():
    rng = np.random.default_rng(0)
    v, wo = rng.standard_normal((2, 9, 4)), rng.standard_normal((6, 4, 20))
    want = [np.linalg.norm(v[h // 3] @ wo[h], axis=-1) for h in range(6)]
    np.testing.assert_allclose(written_norms(v, wo), want, rtol=1e-12)


def test_a_page_is_written_whole_or_not_at_all(pair, tmp_path, monkeypatch):
    _, ours = pair
    run = ours.look(text_of(12))
    page = tmp_path / "look.html"
    run.save(page)
    first = page.read_text()

    class Scripts(html.parser.HTMLParser):
        found = ()

        def handle_starttag(self, tag, attrs):
            self.json = tag == "script" and ("type", "application/json") in attrs

        def handle_data(self, data):
            if getattr(self, "json", False) and data.lstrip().startswith("{"):
                self.found = (*self.found, json.loads(data))

    scripts = Scripts()
    scripts.feed(first)
    assert scripts.found[0]["texts"] == [token.text for token in run.tokens]
    monkeypatch.setattr(runs.export, "render", lambda _: "\u00e9 is not ASCII")
    with pytest.raises(UnicodeEncodeError):
        run.save(page)
    assert page.read_text() == first
    assert list(tmp_path.iterdir()) == [page]
    with pytest.raises(UserError, match="cannot write"):
        run.save(tmp_path / "missing" / "look.html")


def test_showing_opens_the_page(pair, monkeypatch, tmp_path):
    _, ours = pair
    opened = []
    monkeypatch.setattr(runs.webbrowser, "open", opened.append)
    monkeypatch.setattr(runs.tempfile, "tempdir", str(tmp_path))
    path = ours.look(text_of(5)).show()
    assert opened == [path.as_uri()]
    assert path.read_text().startswith("<!")


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"text": ""}, UserError, "the text is empty: there is nothing to look at"),
        ({"text": text_of(65)}, ContextError, "the text has 65 tokens, more than the 64 that tiny"),
        ({"layers": [3]}, UserError, "layers must lie between 0 and 2"),
        ({"layers": []}, UserError, "be at least one"),
        ({"top": 0}, UserError, "top must be at least 1; got 0"),
    ],
)
def test_bad_requests_are_named(pair, asked, error, says):
    _, ours = pair
    with pytest.raises(error, match=says):
        ours.look(**({"text": text_of(3)} | asked))


def test_bad_questions_are_named(pair):
    run = pair[1].look(text_of(4))
    with pytest.raises(UserError, match="token must lie between -4 and 3; got 4"):
        run.sources(4)
    with pytest.raises(UserError, match="top must be at least 1; got 0"):
        run.sources(0, top=0)
    with pytest.raises(UserError, match="heads must lie between -6 and 5; got 6"):
        run.sources(0, heads=6)
    with pytest.raises(UserError, match="focus must lie between -4 and 3; got 9"):
        run.page_data(focus=9)


def test_tensors_as_weights_are_refused(pair):
    theirs, ours = pair
    tensors = LanguageModel(ours.config, theirs.state_dict(), Words(), "tensors")
    with pytest.raises(TypeError, match="weights must be NumPy arrays"):
        tensors.look("a b")


def test_smollm2_looks_back_at_the_noun(smollm2):
    run = smollm2.look(TEXT)
    assert "".join(TEXT[t.start : t.end] for t in run.tokens) == TEXT
    it = next(t.index for t in run.tokens if t.text == " it")
    sources = run.sources(it, top=len(run.tokens))
    assert sources.rest == 0
    by_written = sorted((s for s in sources.items if 0 < s.token.index < it), key=lambda s: -s.written)
    assert {" suitcase", " because", " trophy"} & {s.token.text for s in by_written[:3]}
