"""Watching a model: the same bits, and what was looked at is what eager attention's matrices say."""

import copy
import gc

import numpy as np
import pytest
import torch
import transformers as hf

import regardant.transformers as rt
import tiny_models
from regardant.errors import UserError
from regardant.looks import Look
from tiny_models import assert_in_budget

STARTS = (4, 0)
WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "in chunks": {"prefill_chunk_size": 5},
}
NAMES = ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "gpt_neox", "opt", "llama4", "deepseek_v3", "phi3"]


def prompt(seed=1, rows=2, length=14):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, tiny_models.VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, start in enumerate(STARTS[:rows]):
        mask[row, :start] = 0
    return ids, mask


def generate(model, ids, mask, **more):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **more,
    )  # fmt: skip


@torch.no_grad()
def eager_weights(model, ids, mask=None):
    """Each layer's matrices (L, B, H, T, T) by eager attention, in float32 and in float64.

    In rows of padding there is nothing.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    said = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    found = []
    for twin in (copy.deepcopy(model), tiny_models.exact(model)):
        twin.set_attn_implementation("eager")
        with tiny_models.wide_softmax():
            weights = torch.stack(twin(ids, output_attentions=True, **said).attentions)
        found.append(torch.where(mask[:, None, :, None].bool(), weights, 0))
    return found


def near(eager, exact, terms=1):
    """How far a sum of so many numbers may be from the exact one: twice as far as eager's, plus one rounding."""
    error = float((eager.double() - exact.double()).abs().max())
    return {"rtol": 0, "atol": terms * (2 * error + np.finfo(np.float32).eps)}


def near_sums(look, eager, exact):
    """How far column sums may be off: their weights are made again, with scores rounded otherwise than in lse.

    A score and an lse are each rounded a few times to the largest score's digits, and e to that is a factor.
    """
    largest = float(look.max_logit[look.max_logit.isfinite()].abs().max())
    return near(eager, exact, eager.shape[-1]) | {"rtol": 4 * np.finfo(np.float32).eps * largest}


def build(name, **more):
    model = tiny_models.build(name, **more)
    model.set_attn_implementation("regardant")
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_generation_is_the_same_and_what_was_looked_at_is_right(name, way):
    model, (ids, mask) = build(name), prompt()
    unwatched = generate(model, ids, mask, **WAYS[way])
    with rt.watch(model, top=4, received=True) as w:
        watched = generate(model, ids, mask, **WAYS[way])
    again = generate(model, ids, mask, **WAYS[way])
    for one, two, three in zip(unwatched.logits, watched.logits, again.logits, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)

    read, T = watched.sequences[:, :-1], watched.sequences.shape[1] - 1
    mask = torch.nn.functional.pad(mask, (0, T - mask.shape[1]), value=1)
    eager, exact = eager_weights(model, read, mask)
    looks = list(w.layers.values())
    assert [look.number for look in looks] == list(w.layers) == [0, 1]
    assert all(isinstance(look, Look) for look in looks)

    def statistics(a_BHTT):
        """What a look says of these matrices."""
        sunk = torch.where(mask[:, None].bool(), 1 - a_BHTT.sum(dim=-1), 0).clamp(min=0)
        outcomes = torch.cat([a_BHTT, sunk[..., None]], dim=-1)
        heaviest = a_BHTT.sort(dim=-1, descending=True).values[..., :4]
        return [a_BHTT, heaviest, sunk, torch.special.entr(outcomes).sum(dim=-1)]

    for look, one, other in zip(looks, eager, exact, strict=True):
        seen = [look.rows(range(T)), look.top_weights, look.sink_weight, look.entropy]
        assert_in_budget(seen, statistics(one), statistics(other))
        torch.testing.assert_close(look.received.double(), other.sum(dim=2), **near_sums(look, one, other))
        some = [-1, 3, 4, 16]
        part = one[:, [2, 0]][:, :, some]
        torch.testing.assert_close(look.rows(some, heads=[2, 0]), part, **near(one, other, 2))
        at_keys = one.gather(-1, look.top_keys.clamp(min=0)) * (look.top_keys >= 0)
        torch.testing.assert_close(look.top_weights, at_keys, **near(one, other, 2))
        assert look.lse.shape == look.max_logit.shape == one.shape[:3]
        assert (look.lse.isneginf() == (mask[:, None] == 0)).all()


@torch.no_grad()
def written(model, name, read, mask):
    """‖v_j W_O‖ (L, B, H, S) from the modules themselves: each head's part of the projection applied to values."""
    found, positions = [], (mask.cumsum(-1) - 1).clamp(min=0)
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    for block in blocks:
        module = block.attn if name == "gpt2" else block.self_attn
        values, taken = {}, module.c_attn if name == "gpt2" else module.v_proj
        hook = taken.register_forward_hook(lambda _m, _i, out, values=values: values.update(v=out))
        model(read, attention_mask=mask, position_ids=positions)
        hook.remove()
        if name == "gpt2":
            v = values["v"][..., 64:].unflatten(-1, (4, 8))
            wo = module.c_proj.weight.unflatten(0, (4, 8))
        else:
            v = values["v"].unflatten(-1, (2, 8)).repeat_interleave(2, dim=2)
            wo = module.o_proj.weight.T.unflatten(0, (4, 8))
        found.append(torch.einsum("bshd,hdc->bhsc", v, wo).norm(dim=-1))
    return torch.stack(found)


def measures(a_LBHTT, norms_LBHS, row, start):
    """A row's matrices of both measures, (T, T), over all layers and heads."""
    weight_TT = a_LBHTT[:, row, :, start:, start:].mean(dim=(0, 1))
    written_TT = (a_LBHTT * norms_LBHS[..., None, :])[:, row, :, start:, start:].sum(dim=(0, 1))
    return weight_TT, written_TT / written_TT.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sources_received_and_page_data_are_sums_of_the_matrices(name, tmp_path):
    model, (ids, mask) = build(name), prompt()
    with rt.watch(model, top=4) as w:
        read = generate(model, ids, mask).sequences[:, :-1]
    mask = torch.nn.functional.pad(mask, (0, 6), value=1)
    eager, exact = eager_weights(model, read, mask)
    norms = written(model, name, read, mask)
    exact_norms = written(tiny_models.exact(model), name, read, mask)
    w.name_span("begin", tokens=(0, 3))
    w.name_span("prompt's end", tokens=(-9, -6), row=1)
    for row, start in enumerate(STARTS):
        plain, plain_written = measures(eager, norms, row, start)
        weight, moved = measures(exact, exact_norms, row, start)
        near_weight, near_written = near(plain, weight, 3), near(plain_written, moved, 3)
        weight, moved = weight.numpy(), moved.numpy()
        run = w.run(row)
        assert [token.id for token in run.tokens] == read[row, start:].tolist()
        assert run.prompt == 14 - start
        sources = w.sources(-2, top=3, row=row)
        for item in sources.items:
            np.testing.assert_allclose(item.weight, weight[-2, item.token.index], **near_weight)
            np.testing.assert_allclose(item.written, moved[-2, item.token.index], **near_written)
        np.testing.assert_allclose(sources.sink, weight[-2, 0], **near_weight)
        np.testing.assert_allclose(sources.spans["begin"].weight, weight[-2, :3].sum(), **near_weight)
        np.testing.assert_allclose(sources.spans["begin"].written, moved[-2, :3].sum(), **near_written)
        assert set(sources.spans) == ({"begin", "prompt's end"} if row else {"begin"})
        # One for each of the 7 generated tokens: what the token before it drew.
        np.testing.assert_allclose(w.received("begin", row=row), weight[-7:, :3].sum(axis=-1), **near_weight)
        drawn = w.received("begin", tokens=[2, -1], measure="written", row=row)
        np.testing.assert_allclose(drawn, moved[[2, -1], :3].sum(axis=-1), **near_written)
        one = w.received("begin", layers=1, heads=[3, 0], row=row)
        want = exact[1, row][[3, 0], start:, start:].mean(dim=0)[-7:, :3].sum(dim=-1)
        np.testing.assert_allclose(one, want, **near(eager[1], exact[1], 3))
        data = run.page_data()["all"]["weight"]
        known = np.take_along_axis(weight, np.maximum(data["keys"], 0), axis=-1)
        np.testing.assert_allclose(data["weights"], np.where(data["keys"] < 0, 0, known), **near_weight)
        page = tmp_path / f"{row}.html"
        w.save(page, row=row, focus=3)
        assert page.read_text().startswith("<!")
    end = w.received("prompt's end", row=1)
    np.testing.assert_allclose(end, weight[-7:, 11:14].sum(axis=-1), **near_weight)
    with pytest.raises(UserError, match=r"span must be one that has a name .*'begin'.*; got .prompt's end"):
        w.received("prompt's end", row=0)


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_a_page_of_a_model_with_sinks_counts_them_among_the_rest(name, tmp_path):
    model, (ids, mask) = build(name), prompt()
    with rt.watch(model) as w:
        model(ids, attention_mask=mask)
    w.save(tmp_path / "page.html", row=1)
    data = w.run(1).page_data()["all"]["weight"]
    sums = data["weights"].sum(axis=-1)
    np.testing.assert_allclose(sums + data["rest"], 1, rtol=1e-6)
    assert (sums < 0.99).any()


# --------------------------------------------------------------------------------------------- text and its parts


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte, as GPT-2 would have it without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)} | {"he": 256, "<end>": 257}, [("h", "e")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")  # noqa: S106


def test_tokens_as_text(tokenizer):
    from regardant.transformers.tokens import tokens_of

    text = "the é\n\U0001f600 <end>\u202e!"
    ids = tokenizer(text)["input_ids"]
    found, tokens = tokens_of(ids, tokenizer)
    assert found == text
    assert [token.index for token in tokens] == list(range(len(ids)))
    shown = [token.text for token in tokens]
    assert shown[:3] == ["t", "he", " "]
    assert "⏎" in shown
    for token in tokens:
        assert text[token.start : token.end]
    smile = [token for token in tokens if text[token.start : token.end] == "\U0001f600"]
    assert len(smile) == 4  # its bytes
    broken = tokens_of([*ids[:2], smile[0].id, ids[0]], tokenizer)
    assert broken[0] == "the\ufffdt"
    assert tokens_of([3, -1], tokenizer)[1][1].text == "⟨?⟩"
    assert tokens_of([3, 4], None) == ("", tokens_of([3, 4], None)[1])


def test_parts_named_by_their_text(tokenizer):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        attn_implementation="regardant",
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    texts = ["system: be kind. question: who?", "question: why? he said so, he did"]
    tokenizer.padding_side, tokenizer.pad_token = "left", "<end>"
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with rt.watch(model, tokenizer=tokenizer) as w:
        w.name_span("question", text="question: w")  # before anything was run
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    w.name_span("he", characters=(15, 17), row=1)
    for row, text in enumerate(texts):
        run = w.run(row)
        assert run.text.startswith(text)
        span = run.spans["question"]
        assert "".join(token.text for token in run.tokens[span.start : span.stop]) == "question: w"
        shares = w.sources(-1, top=999, row=row)
        within = sum(item.weight for item in shares.items if item.token.index in span)
        np.testing.assert_allclose(shares.spans["question"].weight, within, rtol=1e-6)
        assert w.received("question", row=row).shape == (3,)
    assert len(w.run(1).spans["he"]) == 1  # one token
    w.name_span("he", text="he", row=1)
    with pytest.raises(UserError, match="the text must hold 'he' once; it does so 2 times"):
        w.sources(row=1)


# -------------------------------------------------------------------------------------------- how forwards follow


def forward_pieces(model, ids, cache, *cuts):
    for first, stop in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        model(ids[:, first:stop], cache=cache)


@torch.no_grad()
def test_pieces_of_a_text_and_a_text_that_is_begun_anew():
    model, (ids, _) = build("mistral"), prompt()
    eager, exact = eager_weights(model, ids)
    with rt.watch(model, received=True) as w:
        model(prompt(seed=9, rows=1)[0])  # forgotten
        forward_pieces(model, ids, hf.DynamicCache(config=model.config), 3, 4, 10)
    looks = list(w.layers.values())
    assert_in_budget([look.rows(range(14)) for look in looks], eager, exact)
    for look, one, wide in zip(looks, eager, exact, strict=True):
        torch.testing.assert_close(look.received.double(), wide.sum(dim=2), **near_sums(look, one, wide))


@torch.no_grad()
def test_a_cache_that_is_cropped_takes_what_was_seen_with_it():
    model, (ids, _) = build("llama"), prompt()
    other = torch.cat([ids[:, :6], prompt(seed=4)[0][:, 6:]], dim=1)
    eager, exact = eager_weights(model, other)
    cache = hf.DynamicCache()
    with rt.watch(model, received=True, keep_rows=5) as w:
        forward_pieces(model, ids, cache, 8)
        cache.crop(-8)
        model(other[:, 6:], cache=cache)
        assert [token.id for token in w.run(0).tokens] == other[0].tolist()
    for look, one, wide in zip(w.layers.values(), eager, exact, strict=True):
        assert look.entropy.shape[2] == 14
        assert_in_budget([look.rows(range(9, 14))], [one[:, :, 9:]], [wide[:, :, 9:]])
        torch.testing.assert_close(look.rows([4, 5]), one[:, :, 4:6], **near(one, wide, 2))
        with pytest.raises(UserError, match="query of token 2 was not kept in layer 0: keep_rows=5"):
            w.layers[0].rows(2)
        assert look.received is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_watch_that_is_opened_upon_a_cache(name):
    model, (ids, _) = build(name), prompt()
    eager, exact = eager_weights(model, ids)
    cache = hf.DynamicCache(config=model.config)
    model(ids[:, :9], cache=cache)
    with rt.watch(model) as w:
        model(ids[:, 9:13], cache=cache)
        model(ids[:, 13:], cache=cache)
    assert [look.first for look in w.layers.values()] == [9, 9]
    assert_in_budget(
        [look.rows(range(5)) for look in w.layers.values()], eager[..., 9:, :], exact[..., 9:, :]
    )
    rows = w.run(1).layers[0].rows([10, -1])
    np.testing.assert_allclose(rows, exact[0, 1][:, [10, -1]], **near(eager[0], exact[0]))
    with pytest.raises(UserError, match="token 3 was read before the watch was opened"):
        w.sources(3)


@torch.no_grad()
def test_keeping_less():
    model, (ids, mask) = build("gpt_oss"), prompt()
    with rt.watch(model, layers=1, heads=[3, 0], keep_rows=1, top=2) as w:
        read = generate(model, ids, mask).sequences[:, :-1]
    mask = torch.nn.functional.pad(mask, (0, 6), value=1)
    eager, exact = (weights[1][:, [0, 3]] for weights in eager_weights(model, read, mask))
    assert list(w.layers) == [1]
    look = w.layers[1]
    assert_in_budget([look.rows(range(13, 20))], [eager[:, :, 13:]], [exact[:, :, 13:]])
    torch.testing.assert_close(look.rows(-1, heads=1), eager[:, 1:, -1:], **near(eager, exact, 2))
    heaviest = eager.sort(dim=-1, descending=True).values[..., :2]
    torch.testing.assert_close(look.top_weights, heaviest, **near(eager, exact, 2))
    assert look.received is None
    w.name_span("all", tokens=(0, 20), row=1)
    drawn = exact[1].mean(dim=0)[13:].sum(dim=-1)
    np.testing.assert_allclose(w.received("all", row=1), drawn, **near(eager, exact, 20))
    with pytest.raises(
        UserError, match="query of token 2 was not kept in layer 1: keep_rows=1 kept those from 13 on"
    ):
        look.rows(2)
    with pytest.raises(UserError, match="watch with heads=None to save one"):
        w.save("never.html")


def test_training_is_watched_without_changing_a_gradient():
    model, (ids, mask) = build("gpt_oss"), prompt()
    model.train()
    found = []
    for watched in (False, True, True):
        model.zero_grad()
        if watched:
            with rt.watch(model) as w:
                model(ids, attention_mask=mask, labels=ids).loss.backward()
        else:
            model(ids, attention_mask=mask, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
    before = w.layers[0].rows(range(14))
    assert not before.requires_grad
    eager, exact = eager_weights(model.eval(), ids, mask)
    assert_in_budget([before], [eager[0]], [exact[0]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(w.layers[0].rows(range(14)), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_for_gradients_is_not_seen_twice(reentrant):
    model, (ids, _) = build("llama"), prompt()
    model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
    with rt.watch(model) as w:
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert w.layers[1].entropy.shape == (2, 4, 14)


@torch.no_grad()
def test_every_mode_of_torch_may_be_mixed():
    model, (ids, _) = build("llama"), prompt()
    cache = hf.DynamicCache()
    with rt.watch(model) as w:
        with torch.inference_mode():
            model(ids[:, :9], cache=cache)
            model(ids[:, 9:10], cache=cache)
        model(ids[:, 10:11], cache=cache)
        with torch.inference_mode():
            model(ids[:, 11:], cache=cache)
    eager, exact = eager_weights(model, ids)
    assert_in_budget([look.rows(range(14)) for look in w.layers.values()], eager, exact)
    assert not w.layers[1].entropy.is_inference()


@torch.no_grad()
def test_what_is_kept_grows_linearly_and_is_what_the_documentation_says():
    model = build("llama")

    def held(length):
        with rt.watch(model, top=2) as w:
            model(prompt(rows=1, length=length)[0], use_cache=False)
        gc.collect()
        tensors = {}
        for layer in w._layers.values():
            stores = [*layer._statistics.values(), layer._queries, layer._keys, layer._written]
            for store in stores:
                storage = store.whole().untyped_storage()
                tensors[storage.data_ptr()] = storage.nbytes()
        return sum(tensors.values())

    layers, heads, kv_heads, width = 2, 4, 2, 8
    said = layers * (heads * (16 + 8 * 2 + 4 + 4 * width) + kv_heads * 4 * width)
    assert held(60) == 60 * said
    assert held(30) == 30 * said


# ------------------------------------------------------------------------------------------------------ refusals


def test_wrong_models_are_refused_in_one_sentence():
    with pytest.raises(TypeError, match="model must be a model of transformers; got Linear"):
        rt.watch(torch.nn.Linear(1, 1))
    model = tiny_models.build("llama")
    with pytest.raises(UserError, match=r'must be loaded with attn_implementation="regardant".*has "eager"'):
        rt.watch(model)
    config = hf.T5Config(
        vocab_size=9, d_model=8, d_kv=4, num_layers=1, num_heads=2, attn_implementation="regardant"
    )
    with pytest.raises(UserError, match="only decoders can be watched"):
        rt.watch(hf.T5ForConditionalGeneration(config))


def test_a_model_that_computes_attention_by_itself_is_refused():
    config = hf.MambaConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=1, attn_implementation="regardant"
    )
    model = hf.MambaForCausalLM(config).eval()
    with rt.watch(model), pytest.raises(UserError, match=r"computes attention by itself.*nothing to see"):
        model(prompt()[0])


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"layers": [2]}, UserError, "layers must lie between 0 and 1"),
        ({"layers": []}, UserError, "at least one"),
        ({"heads": [4]}, UserError, "heads must lie between -4 and 3; got 4"),
        ({"heads": []}, UserError, "heads must name at least one"),
        ({"top": -1}, ValueError, "watch: top must be at least 0"),
        ({"received": 1}, TypeError, "watch: received must be True or False"),
        ({"keep_rows": -1}, ValueError, "watch: keep_rows must be at least 0; got -1"),
    ],
)
def test_wrong_settings_are_named(asked, error, says):
    with pytest.raises(error, match=says):
        rt.watch(build("llama"), **asked)


def test_open_and_closed():
    model, (ids, _) = build("llama"), prompt()
    w = rt.watch(model)
    with pytest.raises(
        UserError, match="nothing has been seen yet; call LlamaForCausalLM while the watch is open"
    ):
        _ = w.layers
    with w:
        with pytest.raises(UserError, match="is being watched already"), rt.watch(model):
            pass
        with pytest.raises(UserError, match="nothing has been seen yet"):
            w.sources()
    assert "closed" in repr(w)
    model(ids)
    with pytest.raises(UserError, match="nothing has been seen yet"):
        _ = w.layers
    with pytest.raises(UserError, match="a watch is opened once"), w:
        pass
    with rt.watch(model) as other:  # the first left nothing behind
        model(ids)
    with pytest.raises(UserError, match="row must lie between -2 and 1; got 2"):
        other.sources(row=2)
    with pytest.raises(UserError, match="token must lie between -14 and 13; got 14"):
        other.sources(14)


def test_a_failed_forward_leaves_the_watch_as_it_was():
    model, (ids, _) = build("llama"), prompt()
    with rt.watch(model) as w:
        with pytest.raises(IndexError):
            model(ids + 1000)
        model(ids)
    assert w.layers[0].entropy.shape == (2, 4, 14)


def test_beams_are_refused():
    model, (ids, mask) = build("llama"), prompt()
    with (
        rt.watch(model),
        pytest.raises(UserError, match="beam search and quantised caches cannot be watched"),
    ):
        model.generate(
            ids, attention_mask=mask, num_beams=3, max_new_tokens=12, do_sample=False, pad_token_id=0
        )


def test_a_layer_without_a_known_output_projection_has_no_page(tmp_path):
    model, (ids, _) = build("llama"), prompt()
    for layer in model.model.layers:
        layer.self_attn.last = layer.self_attn.o_proj
        del layer.self_attn.o_proj
        layer.self_attn.__class__ = type(
            "Renamed", (type(layer.self_attn),), {"o_proj": property(lambda self: self._modules["last"])}
        )
    with rt.watch(model) as w:
        model(ids)
    assert np.isnan(w.sources().items[0].written)
    with pytest.raises(UserError, match="no output projection of Renamed is known"):
        w.save(tmp_path / "page.html")
