"""CausalSelfAttention: its formulas; whole = chunks = stepwise with a cache; padding, packing, training."""

import math
import re

import pytest
import torch

import regardant as rg
from regardant.torch import CausalSelfAttention
from torch_op import JIT_IS_DEPRECATED

KINDS = {
    "plain": {},
    "shared heads": {"kv_heads": 2},
    "wide heads": {"head_width": 10, "kv_heads": 1},
    "window": {"window": 3},
    "rope": {"rope_theta": 100.0},
    "qk_norm": {"qk_norm": True, "rope_theta": 100.0},
    "bias": {"bias": True},
    "sinks": {"sinks": True, "softcap": 3.0, "scale": 0.7},
    "all": {"kv_heads": 2, "window": 4, "rope_theta": 50.0, "qk_norm": True, "bias": True, "sinks": True,
            "softcap": 4.0, "head_width": 6},
}  # fmt: skip
# Float64 sums in another order: weights and activations below 2³, sums of up to 32.
BOUND = 2**3 * 32 * torch.finfo(torch.float64).eps


def layer(kind, **more):
    torch.manual_seed(0)
    made = CausalSelfAttention(16, 4, dtype=torch.float64, **(KINDS[kind] | more))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (parameter if parameter.ndim == 1 else 0))
    return made


def tokens(B=2, T=9):
    torch.manual_seed(1)
    return torch.randn(B, T, 16, dtype=torch.float64)


def by_the_formulas(made, x):
    """One sequence, one head after another, one query after another."""
    D, group = made.head_width, made.heads // made.kv_heads
    out = []
    q, k, v = made.q_proj(x), made.k_proj(x), made.v_proj(x)
    for h in range(made.heads):
        g = h // group
        rows_q, rows_k, rows_v = (
            q[:, h * D : (h + 1) * D],
            k[:, g * D : (g + 1) * D],
            v[:, g * D : (g + 1) * D],
        )
        if made.q_norm is not None:
            rows_q, rows_k = (
                r / (r.square().mean(-1, keepdim=True) + torch.finfo(r.dtype).eps).sqrt() * norm.weight
                for r, norm in ((rows_q, made.q_norm), (rows_k, made.k_norm))
            )
        if made.rope_theta is not None:
            rows_q, rows_k = (turned(r, made.rope_theta) for r in (rows_q, rows_k))
        mixed = []
        for i in range(len(x)):
            first = 0 if made.window is None else max(0, i - made.window + 1)
            s = (rows_k[first : i + 1] @ rows_q[i]) * (made.scale or 1 / math.sqrt(D))
            if made.softcap is not None:
                s = made.softcap * torch.tanh(s / made.softcap)
            if made.sinks is not None:
                s = torch.cat([s, made.sinks[h][None]])
            a = torch.softmax(s, 0)[: i + 1 - first]
            mixed.append(a @ rows_v[first : i + 1])
        out.append(torch.stack(mixed))
    return made.o_proj(torch.cat(out, -1))


def turned(rows, theta):
    """Pairs as complex numbers, each multiplied by e^(i · position · frequency)."""
    half = rows.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(rows))[:, None] * frequency
    pairs = torch.complex(rows[:, :half], rows[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_formulas_and_so_are_its_gradients(kind):
    made, x = layer(kind), tokens()
    results = []
    for attend in (made, lambda x: torch.stack([by_the_formulas(made, row) for row in x])):
        given = x.clone().requires_grad_()
        out = attend(given)
        made.zero_grad()
        out.square().sum().backward()
        results.append([out.detach(), given.grad] + [p.grad.clone() for p in made.parameters()])
    # That of k_proj.bias is 0 but for rounding: every bound is by the largest gradient.
    largest = max(float(theirs.abs().max()) for theirs in results[1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND * largest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[9], [1] * 9, [4, 5], [3, 1, 1, 4]])
@torch.no_grad()
def test_cached_decoding_equals_the_whole(kind, cuts):
    made, x = layer(kind, layer=1), tokens()
    cache = rg.KVCache(2, 2, made.kv_heads, 9, made.head_width, like=x)
    parts = []
    for part in x.split(cuts, dim=1):
        parts.append(made(part, cache=cache))
        cache.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(parts, 1), made(x), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_left_padding_changes_nothing_for_what_is_real(kind):
    made, x = layer(kind), tokens()
    padded = torch.cat([torch.full((2, 3, 16), torch.nan, dtype=torch.float64), x], 1)
    starts = torch.tensor([3, 3])
    torch.testing.assert_close(made(padded, starts=starts)[:, 3:], made(x), rtol=0, atol=BOUND)
    cache = rg.KVCache(1, 2, made.kv_heads, 12, made.head_width, like=x)
    parts = []
    for part in padded.split([2, 2, 1, 7], dim=1):
        parts.append(made(part, cache=cache, starts=starts))
        cache.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(parts, 1)[:, 3:], made(x), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_if_apart(kind):
    made, x = layer(kind), tokens(1, 9)
    ids = torch.tensor([[0] * 4 + [1] * 5])
    with torch.no_grad():
        packed = made(x, segments=ids)
        apart = torch.cat([made(x[:, :4]), made(x[:, 4:])], 1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=BOUND)


def test_its_parameters_have_plain_names():
    made = layer("all")
    linear = [f"{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")]
    assert sorted(made.state_dict()) == sorted([*linear, "q_norm.weight", "k_norm.weight", "sinks"])
    assert sorted(layer("plain").state_dict()) == sorted(f"{name}_proj.weight" for name in "qkvo")
    other = CausalSelfAttention(16, 4, dtype=torch.float64, **KINDS["all"])
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(tokens()), made(tokens()))
    assert "heads=4, kv_heads=2, head_width=6, window=4, rope_theta=50.0, softcap=4.0" in repr(made)


@JIT_IS_DEPRECATED
def test_it_compiles_whole_and_in_low_precision():
    made = layer("all").float()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    x = tokens().float()
    out = compiled(x)
    torch.testing.assert_close(out, made(x), rtol=0, atol=2**3 * 32 * torch.finfo(torch.float32).eps)
    out.sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert made.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert made.float()(x).dtype == torch.bfloat16


def test_it_learns():
    """To repeat the token before: what no single token can know, and attention can."""
    torch.manual_seed(0)
    attend = CausalSelfAttention(32, 2, rope_theta=100.0)
    embed, head = torch.nn.Embedding(7, 32), torch.nn.Linear(32, 7)
    parameters = [*attend.parameters(), *embed.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(150):
        ids = torch.randint(7, (16, 12))
        scores = head(attend(embed(ids)))
        loss = torch.nn.functional.cross_entropy(scores[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.2 < math.log(7)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"width": 0}, "width must be a whole number of at least 1; got 0"),
        ({"heads": 2.0}, "heads must be a whole number of at least 1; got 2.0"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads; got 4 and 3"),
        ({"width": 18}, "width must divide into 4 heads, or head_width be given; got 18"),
        ({"head_width": True}, "head_width must be a whole number of at least 1; got True"),
        ({"head_width": 5, "rope_theta": 10.0}, "head_width must be even, as rope_theta turns pairs; got 5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, sentence):
    with pytest.raises(ValueError, match=re.escape(f"CausalSelfAttention: {sentence}")):
        CausalSelfAttention(**({"width": 16, "heads": 4} | sizes))


def test_calls_that_make_no_sense_are_refused():
    made, x = layer("plain"), tokens()
    cache = rg.KVCache(1, 2, 4, 9, 4, like=x)
    with pytest.raises(ValueError, match=r"x must be \(B, T, 16\); got \(2, 9, 8\)"):
        made(x[..., :8])
    with pytest.raises(ValueError, match="cache must be None where gradients are recorded"):
        made(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="segments must be None with a cache; got both"):
            made(x, cache=cache, segments=torch.zeros(2, 9).long())
        made(x, cache=cache)
        cache.advance(9)
        with pytest.raises(ValueError, match="KVCache: capacity must hold 18 positions; it was made for 9"):
            made(x, cache=cache)
