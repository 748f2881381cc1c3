"""Generation: the filters against transformers' own, the draw against its distribution, the stream against UTF-8.

Greedy text is checked twice over: against the same model without a cache, and against transformers' `generate`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from regardant.lm import generate
from regardant.lm.config import Config
from regardant.lm.errors import ContextError, UserError
from regardant.lm.generate import Generation, Sampling, TextStream, generate_ids, probabilities, sample
from regardant.lm.language_model import LanguageModel

EOS = 0


class Bytes:
    """A tokenizer whose token i is the byte i; token 0 ends a text."""

    eos = frozenset({EOS})
    bos = None
    vocab_size = 256
    has_chat = False

    def encode(self, text, *, special):
        del special
        return list(text.encode())

    def token_bytes(self, i):
        return bytes([i])


@dataclasses.dataclass
class Sizes:
    context: int
    vocab_size: int = 256


class Script:
    """A model that writes the given bytes, whatever it reads; it keeps what it was asked to run."""

    name = "script"

    def __init__(self, text: bytes, context: int = 1000) -> None:
        self.tokenizer, self.config = Bytes(), Sizes(context)
        self.script, self.runs = iter(text), []

    def new_cache(self, batch, capacity):
        assert batch == 1
        return dataclasses.make_dataclass("Cache", ["length", "capacity"])(0, capacity)

    def step(self, ids, cache):
        cache.length += len(ids)
        assert cache.length <= cache.capacity
        self.runs.append(len(ids))
        scores = np.zeros(256, dtype=np.float32)
        if cache.length >= self.prompt_length:
            scores[next(self.script)] = 1
        return scores

    def write(self, prompt=(1,), **options):
        self.prompt_length = len(prompt)
        return Generation(self, prompt, **options)


# ------------------------------------------------------------------------------------ filters, against transformers


def scores_of(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=size) * 4
    if kind == "impossible":
        scores[rng.random(size) < 0.5] = -np.inf
        scores[rng.integers(size)] = 1.0
    return scores


def theirs(processor: transformers.LogitsProcessor, scores: np.ndarray, ids=(0,)) -> np.ndarray:
    return processor(torch.tensor([ids]), torch.from_numpy(scores)[None].clone())[0].numpy()


CASES = list(itertools.product(["plain", "impossible"], [1, 2, 3, 17, 300, 5000], range(3)))


@pytest.mark.parametrize(("kind", "size", "seed"), CASES)
@pytest.mark.parametrize("k", [1, 2, 5, 40, 100_000])
def test_top_k_keeps_what_transformers_keeps(kind, size, seed, k):
    scores = scores_of(kind, size, seed)
    np.testing.assert_array_equal(
        generate.keep_top_k(scores, k), theirs(transformers.TopKLogitsWarper(k), scores)
    )


def test_top_k_keeps_ties_as_transformers_does():
    scores = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    ours = generate.keep_top_k(scores, 2)
    np.testing.assert_array_equal(ours, theirs(transformers.TopKLogitsWarper(2), scores))
    np.testing.assert_array_equal(np.isfinite(ours), [0, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(("kind", "size", "seed"), CASES)
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_what_transformers_keeps(kind, size, seed, p):
    scores = scores_of(kind, size, seed)
    np.testing.assert_array_equal(
        generate.keep_top_p(scores, p), theirs(transformers.TopPLogitsWarper(p), scores)
    )


def test_of_equally_likely_tokens_the_nucleus_keeps_the_lowest_ids():
    kept = np.isfinite(generate.keep_top_p(np.zeros(8), 0.5))
    # Transformers, too, keeps four of the eight; which four is left open there.
    assert np.isfinite(theirs(transformers.TopPLogitsWarper(0.5), np.zeros(8))).sum() == kept.sum()
    np.testing.assert_array_equal(np.flatnonzero(kept), [0, 1, 2, 3])


@pytest.mark.parametrize(("kind", "size", "seed"), CASES)
@pytest.mark.parametrize("p", [0.0, 1e-6, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(kind, size, seed, p):
    scores = scores_of(kind, size, seed)
    np.testing.assert_array_equal(
        generate.keep_min_p(scores, p), theirs(transformers.MinPLogitsWarper(p), scores)
    )


@pytest.mark.parametrize(("kind", "size", "seed"), CASES)
@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_is_penalised_as_transformers_does_it(kind, size, seed, penalty):
    scores = scores_of(kind, size, seed)
    ids = np.random.default_rng(seed).integers(size, size=20).tolist()
    np.testing.assert_array_equal(
        generate.penalise(scores, ids, penalty),
        theirs(transformers.RepetitionPenaltyLogitsProcessor(penalty), scores, ids),
    )


@pytest.mark.parametrize("seed", range(20))
def test_all_filters_together_give_the_probabilities_of_transformers(seed):
    rng = np.random.default_rng(seed)
    scores = scores_of("plain", 2000, seed)
    ids = rng.integers(2000, size=50).tolist()
    k, t, p = int(rng.integers(1, 200)), float(rng.uniform(0.2, 3)), float(rng.uniform(0.2, 1))
    chain = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.4),
            transformers.TemperatureLogitsWarper(t),
            transformers.TopKLogitsWarper(k),
            transformers.TopPLogitsWarper(p),
            transformers.MinPLogitsWarper(0.02),
        ]
    )
    want = torch.softmax(torch.from_numpy(theirs(chain, scores, ids)), 0).numpy()
    settings_ = Sampling(temperature=t, top_k=k, top_p=p, min_p=0.02, repetition_penalty=1.4)
    got = probabilities(scores, settings_, ids)
    np.testing.assert_array_equal(got > 0, want > 0)
    # The scores carry a rounding or two (division, shift) of at most 60 units before exp: 2 · 60 · 2⁻⁵³, doubled.
    np.testing.assert_allclose(got, want, rtol=2 * 2 * 60 * 2**-53)


def test_the_scores_given_are_left_as_they_were():
    scores = scores_of("plain", 50, 0)
    before = scores.copy()
    scores.flags.writeable = False
    probabilities(
        scores, Sampling(temperature=2, top_k=9, top_p=0.5, min_p=0.1, repetition_penalty=2), [1, 2]
    )
    np.testing.assert_array_equal(scores, before)


# ---------------------------------------------------------------------------------------------------- the draw


def test_draws_follow_the_distribution():
    scores = np.array([0.0, 1.0, 2.0, -1.0, -np.inf, 0.5, 1.5])
    settings_ = Sampling(temperature=1.5)
    n, rng = 50_000, np.random.default_rng(7)
    counts = np.bincount([sample(scores, settings_, rng) for _ in range(n)], minlength=len(scores))
    want = n * np.exp(scores / 1.5) / np.exp(scores / 1.5).sum()
    assert counts[4] == want[4] == 0
    live = want > 0
    chi2 = ((counts[live] - want[live]) ** 2 / want[live]).sum()
    # Laurent & Massart (2000): P(chi2 >= d + 2 sqrt(d x) + 2 x) <= exp(-x), here one in a million.
    d, x = live.sum() - 1, math.log(1e6)
    assert chi2 < d + 2 * math.sqrt(d * x) + 2 * x


@pytest.mark.parametrize("end", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(end):
    class Fixed:
        def random(self):
            return end

    scores = np.array([-np.inf, 0.3, -np.inf, 0.1, -np.inf])
    assert sample(scores, Sampling(temperature=1), Fixed()) == (1 if end == 0 else 3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(dtype, temperature):
    scores = np.array([-60000, 3, 60000, 3, -np.inf], dtype=dtype)
    assert sample(scores, Sampling(temperature=temperature), np.random.default_rng(0)) == 2


def test_equal_scores_give_the_lowest_id_at_temperature_0():
    assert sample(np.array([1.0, 2.0, 2.0]), Sampling(), np.random.default_rng(0)) == 1


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf], []])
@pytest.mark.parametrize("temperature", [0, 1])
def test_scores_without_a_choice_are_refused(bad, temperature):
    with pytest.raises(UserError, match="weights may be damaged"):
        sample(np.array(bad), Sampling(temperature=temperature), np.random.default_rng(0))


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("temperature", -0.1, UserError),
        ("temperature", math.nan, UserError),
        ("temperature", math.inf, UserError),
        ("temperature", "hot", TypeError),
        ("top_k", 0, UserError),
        ("top_k", 2.5, TypeError),
        ("top_k", True, TypeError),
        ("top_p", 0.0, UserError),
        ("top_p", 1.01, UserError),
        ("top_p", math.nan, UserError),
        ("min_p", -0.1, UserError),
        ("min_p", 1.1, UserError),
        ("min_p", math.nan, UserError),
        ("repetition_penalty", 0.0, UserError),
        ("repetition_penalty", -1.0, UserError),
        ("repetition_penalty", math.nan, UserError),
        ("repetition_penalty", math.inf, UserError),
    ],
)
def test_a_setting_without_meaning_is_refused_in_one_sentence(name, value, kind):
    with pytest.raises(kind, match=f"^{name} must be .*; got {value!r}$"):
        Sampling(**{name: value})


@pytest.mark.parametrize("seed", [-1, 1.5, "x"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises((UserError, TypeError), match=r"^seed must be a whole number of at least 0"):
        generate.random_generator(seed)


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_a_stop_is_text(stop):
    with pytest.raises((UserError, TypeError), match=r"^stop must"):
        generate.stop_strings(stop)


@pytest.mark.parametrize("most", [0, -1, 1.5, math.nan])
def test_max_tokens_is_a_whole_number(most):
    with pytest.raises((UserError, TypeError), match=r"^max_tokens must be a whole number of at least 1"):
        Script(b"").write(max_tokens=most)


# ------------------------------------------------------------------------------------------------- text, streamed


def stream(data: bytes, stops, cuts) -> tuple[list[str], bool]:
    flow = TextStream(stops)
    pieces = []
    for low, high in itertools.pairwise([0, *cuts, len(data)]):
        pieces.append(flow.push(data[low:high]))
        if flow.stopped:
            return pieces, True
    pieces.append(flow.finish())
    return pieces, flow.stopped


@st.composite
def cut_bytes(draw):
    text = draw(st.text(st.sampled_from("abcé€😀\n"), max_size=30))
    data = text.encode()
    return data, sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))


STOPS = st.lists(st.text(st.sampled_from("abé€"), min_size=1, max_size=4), max_size=3)


@given(cut_bytes(), STOPS)
@settings(deadline=None, max_examples=300)
def test_the_text_shown_does_not_depend_on_the_tokens_it_came_in(case, stops):
    data, cuts = case
    text = data.decode()
    pieces, stopped = stream(data, stops, cuts)
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)
    assert stopped == bool(ends)


@given(cut_bytes(), STOPS)
@settings(deadline=None, max_examples=300)
def test_what_may_be_shown_is_shown_at_once(case, stops):
    data, cuts = case
    flow, shown = TextStream(stops), ""
    for low, high in itertools.pairwise([0, *cuts, len(data)]):
        shown += flow.push(data[low:high])
        if flow.stopped:
            return
        known = data[:high].decode(errors="ignore")
        tails = [known[at:] for at in range(len(known)) if any(s.startswith(known[at:]) for s in stops)]
        assert shown == known.removesuffix(max(tails, key=len, default=""))


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
@settings(deadline=None)
def test_any_bytes_come_out_as_python_decodes_them(data, cuts):
    pieces, _ = stream(data, (), sorted(cut for cut in cuts if cut <= len(data)))
    assert "".join(pieces) == data.decode(errors="replace")


def test_no_piece_holds_half_a_character():
    model = Script("a€😀".encode() + b"\0")
    assert list(model.write()) == ["a", "€", "😀"]


def test_bytes_left_over_at_the_end_show_as_one_replacement_character():
    text = Script("é€".encode()[:-1] + b"\0").write()
    assert list(text) == ["é", "\ufffd"]
    assert text.finish_reason == "eos"


# --------------------------------------------------------------------------------------------- why a text ends


def test_the_end_token_ends_and_is_not_shown():
    text = Script(b"one\0two").write(max_tokens=50)
    assert text.finish_reason is None
    assert "".join(text) == "one"
    assert text.finish_reason == "eos"
    assert bytes(text.ids) == b"one\0"


def test_a_stop_string_over_several_tokens_ends_and_is_not_shown():
    text = Script(b"one, two, three").write(stops=(", th", "zzz"))
    assert "".join(text) == "one, two"
    assert text.finish_reason == "stop"
    assert bytes(text.ids) == b"one, two, th"


def test_what_only_began_a_stop_string_is_shown_in_the_end():
    text = Script(b"one, t\0").write(stops=(", three",))
    assert list(text) == ["o", "n", "e", ", t"]
    assert text.finish_reason == "eos"


def test_a_stop_string_in_the_prompt_does_not_stop():
    text = Script(b"abc").write(prompt=tuple(b"ab"), stops=("ba",), max_tokens=3)
    assert "".join(text) == "abc"


def test_max_tokens_ends():
    text = Script(b"abcdefgh").write(max_tokens=3)
    assert "".join(text) == "abc"
    assert text.finish_reason == "length"


def test_the_context_ends_and_is_filled_to_the_last_position():
    text = Script(b"abcdefgh", context=7).write(prompt=(1, 2, 3))
    assert "".join(text) == "abcd"
    assert text.finish_reason == "context"


@pytest.mark.parametrize(
    ("most", "reason"), [(3, "length"), (4, "length"), (5, "context"), (None, "context")]
)
def test_the_limit_that_is_met_first_is_the_reason(most, reason):
    text = Script(b"abcdefgh", context=7).write(prompt=(1, 2, 3), max_tokens=most)
    assert len(text.text()) == min(most or 4, 4)
    assert text.finish_reason == reason


def test_a_prompt_that_fills_the_context_leaves_no_room():
    model = Script(b"a", context=3)
    text = model.write(prompt=(1, 2, 3))
    assert (text.text(), text.finish_reason, model.runs) == ("", "context", [])


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(ContextError, match="the prompt has 11 tokens, more than the 10 that script can read"):
        Script(b"", context=10).write(prompt=(1,) * 11)


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="the prompt is empty: give it at least one character"):
        Script(b"").write(prompt=())


# ---------------------------------------------------------------------------------------- what is run, and when


def test_a_long_prompt_is_read_in_chunks_and_every_token_is_run_once(monkeypatch):
    monkeypatch.setattr(generate, "PREFILL_CHUNK", 4)
    model, seen = Script(b"abc"), []
    text = model.write(prompt=(1,) * 10, max_tokens=3, progress=lambda *done: seen.append(done))
    assert model.runs == []
    assert next(text) == "a"
    assert model.runs == [4, 4, 2]
    assert seen == [(4, 10), (8, 10), (10, 10)]
    assert text.text() == "bc"
    assert model.runs == [4, 4, 2, 1, 1]


# ------------------------------------------------------------------------------------------------- real models


def tiny(family: str) -> transformers.PreTrainedModel:
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    ends = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": EOS}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "mistral": lambda: transformers.MistralConfig(**sizes, sliding_window=7),
        "qwen2": lambda: transformers.Qwen2Config(**sizes),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, head_dim=8),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=96, **ends
        ),
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(configs[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights as small as the initial ones make every token alike: errors would not show.
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter if parameter.ndim == 1 else 0))
    return model


def ours(model: transformers.PreTrainedModel, *, tensors: bool = False) -> LanguageModel:
    weights = {name: w if tensors else w.numpy() for name, w in model.state_dict().items()}
    return LanguageModel(Config.from_hugging_face(model.config.to_dict()), weights, Bytes(), "tiny")


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2"]
PROMPT = tuple(np.random.default_rng(1).integers(1, 256, size=21).tolist())


def greedy_by_transformers(model, **options) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            max_new_tokens=40,
            **options,
        )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, monkeypatch):
    monkeypatch.setattr(generate, "PREFILL_CHUNK", 8)
    model = tiny(family)
    want = greedy_by_transformers(model)
    assert list(generate_ids(ours(model), PROMPT, max_tokens=40)) == want
    assert len(set(want)) > 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_tokens_with_a_penalty_are_those_of_transformers(family):
    model = tiny(family)
    want = greedy_by_transformers(model, repetition_penalty=1.3)
    got = generate_ids(ours(model), PROMPT, max_tokens=40, sampling=Sampling(repetition_penalty=1.3))
    assert list(got) == want


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensors", [False, True])
def test_cached_greedy_tokens_are_those_of_computing_everything_anew(family, tensors):
    model = ours(tiny(family), tensors=tensors)
    ids = list(PROMPT)
    for chosen in generate_ids(model, PROMPT, max_tokens=30):
        assert chosen == int(np.argmax(np.asarray(model.logits(ids))[0, -1]))
        ids.append(chosen)
    assert len(ids) > len(PROMPT)


def test_the_same_seed_writes_the_same_text_and_another_seed_another():
    model = ours(tiny("llama"))
    texts = [
        model.generate(PROMPT, temperature=1.0, seed=seed, max_tokens=30).text() for seed in (5, 5, 6, 7)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_a_text_may_fill_the_whole_context():
    model = ours(tiny("gpt2"))
    text = model.generate(PROMPT, max_tokens=None, temperature=1.0, seed=0, repetition_penalty=2.0)
    text.text()
    assert text.finish_reason in {"context", "eos"}
    assert len(PROMPT) + len(text.ids) <= model.config.context


# ---------------------------------------------------------------------------------------------- LanguageModel


def test_logits_take_text_ids_and_batches():
    model = ours(tiny("llama"))
    one = np.asarray(model.logits("hello"))
    assert one.shape == (1, 5, 256)
    np.testing.assert_array_equal(one, model.logits(list(b"hello")))
    np.testing.assert_array_equal(one, model.logits(np.array([list(b"hello")], dtype=np.uint8)))


def test_logits_are_those_of_transformers_with_left_padding():
    reference = tiny("llama")
    rows, starts = [[0, 0, 0, 5, 6], [1, 2, 3, 4, 5]], [3, 0]
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 0, 1], [0, 1, 2, 3, 4]])
    with torch.no_grad():
        want = reference(torch.tensor(rows), attention_mask=mask, position_ids=positions).logits.numpy()
    got = np.asarray(ours(reference).logits(rows, starts=starts))
    for row, start in enumerate(starts):
        error = np.abs(got[row, start:] - want[row, start:]).max()
        assert error <= 1e-4 * np.abs(want[row, start:]).max()


@pytest.mark.parametrize("ids", [[0, 256], [-1], [[1, 2], [3, 300]]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(UserError, match=r"^ids must lie between 0 and 255 for tiny; got"):
        ours(tiny("llama")).logits(ids)


@pytest.mark.parametrize("ids", [[], [[]], [[[1]]], 3])
def test_ids_of_no_shape_are_refused(ids):
    with pytest.raises(UserError, match=r"^ids must be"):
        ours(tiny("llama")).logits(ids)


def test_rows_of_several_lengths_are_refused():
    with pytest.raises(UserError, match="ids must be rows of one length"):
        ours(tiny("llama")).logits([[1], [1, 2]])


def test_ids_that_are_no_whole_numbers_are_refused():
    with pytest.raises(TypeError, match=r"^ids must be whole numbers; got float64"):
        ours(tiny("llama")).logits([1.5])


@pytest.mark.parametrize("starts", [[1], [0, 6], [-1, 0]])
def test_starts_that_do_not_fit_are_refused(starts):
    with pytest.raises(UserError, match=r"^starts must be 2 positions between 0 and 5"):
        ours(tiny("llama")).logits([[1] * 5] * 2, starts=starts)


def test_logits_of_a_text_beyond_the_context_are_refused_with_both_numbers():
    with pytest.raises(ContextError, match="the text has 97 tokens, more than the 96 that tiny can read"):
        ours(tiny("llama")).logits([1] * 97)


def test_generate_refuses_before_it_runs():
    model = ours(tiny("llama"))
    with pytest.raises(UserError, match="temperature"):
        model.generate("x", temperature=-1)
    with pytest.raises(ContextError, match="97 tokens, more than the 96"):
        model.generate("x" * 97)
    with pytest.raises(UserError, match="the prompt is empty: give it at least one character"):
        model.generate("")
    with pytest.raises(UserError, match="the prompt is empty"):
        model.generate([])


class Chat(Bytes):
    has_chat = True

    def chat(self, messages, *, add_generation_prompt):
        assert add_generation_prompt
        return "".join(f"{m['role']}:{m['content']}\n" for m in messages)


def test_chat_takes_words_or_messages():
    model = dataclasses.replace(ours(tiny("llama")), tokenizer=Chat())
    assert bytes(model.generate("hi", chat=True).prompt_ids) == b"user:hi\n"
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert bytes(model.generate(talk, chat=True).prompt_ids) == b"system:be brief\nuser:hi\n"


@pytest.mark.parametrize("talk", [[], ["hi"], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_messages_of_another_form_are_refused(talk):
    model = dataclasses.replace(ours(tiny("llama")), tokenizer=Chat())
    with pytest.raises((UserError, TypeError), match="message"):
        model.generate(talk, chat=True)
