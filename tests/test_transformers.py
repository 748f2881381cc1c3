"""Models of transformers on regardant against their own eager attention: logits, gradients, generation, refusals.

Errors are measured against eager attention in float64: regardant in float32 may err twice as much as eager attention
in float32, plus one rounding.
"""

import pytest
import torch
import transformers as hf

import regardant.torch as rt
import regardant.transformers
import tiny_models
from regardant.transformers.interface import attention_forward
from tiny_models import assert_in_budget, wide_softmax

T = 14
NAMES = list(tiny_models.BUILDERS)


def tokens(seed=1, rows=2, length=T):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny_models.VOCABULARY, (rows, length), generator=generator)


def padding(kind, rows=2, length=T):
    mask = torch.ones((rows, length), dtype=torch.long)
    if kind == "left":
        mask[0, :4] = 0
    elif kind == "right":
        mask[1, -3:] = 0
    elif kind == "holes":
        mask[0, 2:5] = 0
    return mask


def three_ways(name, compute, **more):
    """`compute` of a model on regardant, with eager attention, and with eager attention in float64."""
    model = tiny_models.build(name, **more)
    exact_model = tiny_models.exact(model)
    eager = compute(model)
    model.set_attn_implementation("regardant")
    ours = compute(model)
    with wide_softmax():
        exact = compute(exact_model)
    return ours, eager, exact


@pytest.mark.parametrize("name", NAMES)
def test_logits(name):
    @torch.no_grad()
    def compute(model):
        found = []
        for seed, kind in enumerate(("none", "left", "right", "holes")):
            mask = padding(kind)
            logits = model(tokens(seed), attention_mask=None if kind == "none" else mask).logits
            assert logits.isfinite().all()
            found.append(logits[mask.bool()])
        return found

    assert_in_budget(*three_ways(name, compute))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_loss(name):
    mask = padding("right")

    def compute(model):
        model.zero_grad()
        ids = tokens()
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        return [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]

    assert_in_budget(*three_ways(name, compute))


WAYS = {
    "dynamic": {},
    "left-padded": {"attention_mask": padding("left")},
    "static": {"cache_implementation": "static", "attention_mask": padding("left")},
    "in chunks": {"prefill_chunk_size": 5},
    "without a cache": {"use_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_generation(name, way):
    model = tiny_models.build(name)
    said = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0} | WAYS[way]
    with torch.no_grad():
        want = model.generate(tokens(), **said)
        model.set_attn_implementation("regardant")
        got = model.generate(tokens(), **said)
    assert got.tolist() == want.tolist()


PLANTED = {
    "window": ("mistral", lambda window: window + 1),
    "softcap": ("gemma2", lambda softcap: softcap * 1.01),
    "sinks": ("gpt_oss", lambda sinks: sinks + 0.01),
    "segments": ("llama4", lambda ids: (ids[0], torch.zeros_like(ids[1]))),
    "starts": ("gpt2", lambda starts: (starts - 1).clamp(min=0)),
    "scale": ("deepseek_v3", lambda scale: scale * 1.001),
    "offset": ("opt", lambda offset: offset + 1),
}


@pytest.mark.parametrize("option", PLANTED)
def test_a_planted_error_shows(option, monkeypatch):
    name, spoil = PLANTED[option]
    attention = rt.attention

    @torch.no_grad()
    def compute(model):
        return [model(tokens(), attention_mask=padding("left")).logits[padding("left").bool()]]

    _, eager, exact = three_ways(name, compute)

    spoilt = []

    def spoiling(*tensors, **options):
        if option in options:  # some layers have it
            spoilt.append(option)
            options[option] = spoil(options[option])
        return attention(*tensors, **options)

    monkeypatch.setattr(rt, "attention", spoiling)
    ours, _, _ = three_ways(name, compute)
    assert spoilt
    with pytest.raises(AssertionError):
        assert_in_budget(ours, eager, exact)


# ------------------------------------------------------------------------------------------------ packed documents


# Without experts, whose matrix products have other sizes when other tokens are sent to them.
DENSE = {
    "llama": {},
    "mistral": {},
    "gemma2": {},
    "llama4": {"moe_layers": []},
    "deepseek_v3": {"first_k_dense_replace": 2},
}


@pytest.mark.parametrize("name", DENSE)
def test_packed_documents_do_not_touch_each_other(name):
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None]
    firsts, second = [tokens(seed, rows=1, length=8) for seed in (1, 2)], tokens(3, rows=1, length=6)

    def compute(model):
        """The second document's logits and its loss's gradients, behind either first document."""
        found = []
        for first in firsts:
            embedded = (
                model.get_input_embeddings()(torch.cat([first, second], dim=1)).detach().requires_grad_()
            )
            logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits[0, 8:]
            torch.nn.functional.cross_entropy(logits[:-1], second[0, 1:]).backward()
            found += [logits.detach(), embedded.grad[0, 8:]]
            assert not embedded.grad[0, :8].any()
        return found

    ours, eager, exact = three_ways(name, compute, **DENSE[name])
    assert_in_budget(ours, eager, exact)
    logits, gradient, other_logits, other_gradient = ours
    assert torch.equal(logits, other_logits)
    assert torch.equal(gradient, other_gradient)


def test_packed_documents_by_bounds():
    model = tiny_models.build("llama", seed=3)
    ids, bounds = tokens(rows=1), torch.tensor([0, 5, 5, 11, T], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(n)) for n in bounds.diff()])[None]
    with torch.no_grad():
        model.set_attn_implementation("regardant")
        want = model(ids, position_ids=positions, use_cache=False).logits
        got = model(
            ids, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
        ).logits
        assert torch.equal(got, want)
        mask = torch.ones_like(ids)  # with a mask, transformers does not look for documents
        got = model(ids, position_ids=positions, attention_mask=mask, cu_seq_lens_q=bounds).logits
        assert torch.equal(got, want)
        with pytest.raises(ValueError, match="cu_seq_lens_q must divide one row of as many queries as keys"):
            model(tokens(), cu_seq_lens_q=bounds)


# ------------------------------------------------------------------------------------------------- kinds of masks


@pytest.mark.parametrize("kind", ["boolean", "additive", "additive with −∞"])
def test_a_mask_of_the_callers_own(kind):
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand((2, 1, T, T), generator=generator) < 0.5
    seen |= torch.eye(T, dtype=torch.bool)

    @torch.no_grad()
    def compute(model):
        hidden = -torch.inf if kind.endswith("∞") else torch.finfo(model.dtype).min
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, hidden)
        eager = model.config._attn_implementation == "eager"
        return [model(tokens(), attention_mask=seen if kind == "boolean" and not eager else mask).logits]

    assert_in_budget(*three_ways("llama", compute))


def test_position_bias_of_an_encoder_and_a_decoder():
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config).eval()
    tiny_models.loud(model)
    ids, mask = tokens(), padding("right")
    seen = {}
    for name in ("eager", "regardant"):
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=ids[:, :9].contiguous())
        out.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            written = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        seen[name] = out.logits.detach(), gradients, written
    for got, want in zip(seen["regardant"][:2], seen["eager"][:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    assert seen["regardant"][2].tolist() == seen["eager"][2].tolist()


def test_a_mask_that_is_missing_means_what_it_means_to_torch():
    module = torch.nn.Module()
    q, k, v = (torch.randn(shape) for shape in ((1, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)))

    def ours(module=module, q=q, **more):
        return attention_forward(module, q, k, v, None, **more)[0].transpose(1, 2)

    def theirs(q=q, **more):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q.expand(2, -1, -1, -1), k, v, enable_gqa=True, **more)

    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours(), theirs(is_causal=True), **near)
    torch.testing.assert_close(ours(is_causal=False), theirs(), **near)
    torch.testing.assert_close(ours(q=q[:, :, :1]), theirs(q[:, :, :1]), **near)
    module.is_causal = False
    torch.testing.assert_close(ours(), theirs(), **near)
    torch.testing.assert_close(ours(is_causal=True), theirs(is_causal=True), **near)
    distance = torch.arange(5)[:, None] - torch.arange(7)
    window = theirs(attn_mask=(distance >= 0) & (distance < 2))
    torch.testing.assert_close(ours(is_causal=True, sliding_window=2), window, **near)
    with pytest.raises(ValueError, match="sliding_window needs a mask"):
        ours(is_causal=False, sliding_window=2)


# ------------------------------------------------------------------------------------------------------ refusals


def attention(mask=None, **more):
    q = torch.randn(1, 2, 3, 4)
    return attention_forward(torch.nn.Module(), q, q, q, mask, **more)


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"dropout": 0.1}, ValueError, "attention dropout must be 0; got 0.1"),
        ({"output_attentions": True}, ValueError, "output_attentions is refused.*watch"),
        ({"indices": torch.zeros(1, 3, 2)}, ValueError, "sparse attention by indices"),
        ({"block_indices": torch.zeros(1)}, ValueError, "sparse attention by blocks"),
        ({"sinks": torch.zeros(1, 2, 3, 1)}, ValueError, "sinks that differ from query to query"),
        ({"mask": {"full_attention": None}}, TypeError, "attention_mask must be a tensor; got dict"),
        ({"mask": torch.ones(1, 1, 3, 4, dtype=torch.bool)}, ValueError, "mask must broadcast to"),
        ({"softcap": 0.0}, ValueError, "softcap must be greater than 0"),
        ({"s_aux": torch.zeros(3)}, ValueError, "sinks must be"),
    ],
)
def test_refused(asked, error, says):
    with pytest.raises(error, match=says):
        attention(**asked)


def test_a_mask_of_another_size_is_refused():
    made = regardant.transformers.masks.mask(1, 3, 5)
    with pytest.raises(ValueError, match=r"made for \(3, 5\) queries and keys; got \(3, 3\)"):
        attention(mask=made)


def test_mixed_types_are_refused_but_autocast_makes_them_one():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="k must be float32 to match q; got bfloat16"):
        attention_forward(torch.nn.Module(), q, k, k, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attention_forward(torch.nn.Module(), q, k, k, None)
    want = rt.attention(q.bfloat16(), k, k)
    assert torch.equal(out.transpose(1, 2), want)


def test_dropout_in_training_is_refused_by_the_models_name_for_it():
    model = tiny_models.build("llama", attention_dropout=0.2).train()
    model.set_attn_implementation("regardant")
    with pytest.raises(ValueError, match="set it to 0 in the model's configuration, or call model"):
        model(tokens())
    model.eval()
    assert model(tokens()).logits.isfinite().all()
    q = torch.randn(1, 2, 3, 4)
    attention_forward(
        torch.nn.Module().eval(), q, q, q, None, dropout=0.2
    )  # which eager attention then leaves out


def test_a_model_that_computes_attention_by_itself_is_refused():
    config = hf.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=1, n_head=4, attn_implementation="regardant"
    )
    with pytest.raises(ValueError, match="this model computes attention by itself"):
        hf.BloomForCausalLM(config).eval()(tokens())


# ----------------------------------------------------------------------------------------- ways of running a model


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model = tiny_models.build("mistral").train()
    model.set_attn_implementation("regardant")
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(tokens(), attention_mask=padding("left"), labels=tokens(), use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_without_memory_tells_its_shapes():
    model = tiny_models.build("llama").to("meta")
    model.set_attn_implementation("regardant")
    assert model(torch.zeros(2, 5, dtype=torch.int64, device="meta")).logits.shape[:2] == (2, 5)


def test_half_precision_and_autocast_run():
    model = tiny_models.build("llama")
    model.set_attn_implementation("regardant")
    with torch.no_grad():
        want = model(tokens()).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = model(tokens()).logits
        half = model.to(torch.bfloat16)(tokens()).logits
    for got in (cast, half):
        assert got.dtype == torch.bfloat16
        assert float((got - want).norm() / want.norm()) < 0.1


@torch.no_grad()
def test_torch_compile_sees_one_graph():
    model = tiny_models.build("mistral")
    model.set_attn_implementation("regardant")
    ids, mask = tokens(), padding("left")
    want = model(ids, attention_mask=mask).logits
    got = torch.compile(model, backend="eager", fullgraph=True)(ids, attention_mask=mask).logits
    torch.testing.assert_close(
        got[mask.bool()], want[mask.bool()], rtol=1e-5, atol=1e-5 * float(want.abs().max())
    )
    said = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    written = model.generate(ids, cache_implementation="static", **said)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, cache_implementation="static", **said), written)
