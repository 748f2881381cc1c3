"""What torch.compile, torch.export and torch.library see: single operators, right in shape, type and gradient."""

import pathlib

import numpy as np
import pytest
import torch

import regardant.torch as rt
from op import OPTION_NAMES, option_sets, tensors
from regardant.torch.options import Options
from torch_op import JIT_IS_DEPRECATED, leaf, to_torch

OPS = torch.ops.regardant
pytestmark = JIT_IS_DEPRECATED


def positional(options):
    """Options in the order of the operators' schemas."""
    named = dict.fromkeys(Options._fields) | {"causal": True, "impl": "auto"} | options
    named["q_segments"], named["k_segments"] = named.pop("segments", (None, None))
    return Options(**named)


def inputs(seed, name, *, requires_grad=True):
    q, k, v = (leaf(x) for x in tensors(seed, 2, 4, 2, 5, 6, dtype=np.float64))
    options = to_torch(option_sets(seed, 2, 4, 5, 6)[name])
    for learned in {"sinks", "bias"} & options.keys():
        options[learned] = options[learned].double().requires_grad_(requires_grad)
    return [x.requires_grad_(requires_grad) for x in (q, k, v)], options


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_opcheck_of_attention(name):
    qkv, options = inputs(1, name)
    torch.library.opcheck(OPS.attention.default, (*qkv, *positional(options)))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_opcheck_of_the_other_operators(name):
    qkv, options = inputs(2, name)
    given = positional(options)
    torch.library.opcheck(OPS.look.default, (*qkv, *given, 3, True, [2, 3]))
    torch.library.opcheck(OPS.look.default, (*qkv, *given, 0, False, None))
    qkv, options = inputs(2, name, requires_grad=False)
    given = positional(options)
    out, lse = OPS.attention(*qkv, *given)
    for dlse, wants_bias in ((None, False), (torch.ones_like(lse), "bias" in options)):
        dout = torch.ones(()).double().expand(out.shape)
        torch.library.opcheck(
            OPS.attention_backward.default, (*qkv, out, lse, dout, dlse, wants_bias, *given)
        )
    queries, heads = torch.tensor([0, 4]), torch.tensor([1])
    torch.library.opcheck(OPS.rows.default, (*qkv, lse, queries, heads, *given))


def operators(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_export_sees_one_operator_for_any_length():
    class Model(torch.nn.Module):
        def forward(self, q, k, v, starts):
            return rt.attention(q, k, v, window=3, starts=starts, softcap=2.0)

    T = torch.export.Dim("T", min=2, max=64)
    q, k, v = to_torch(tensors(3))
    starts = torch.tensor([0, 2])
    exported = torch.export.export(Model(), (q, k, v, starts), dynamic_shapes=({2: T}, {2: T}, {2: T}, None))
    assert operators(exported.graph)[0] == "regardant.attention.default"
    assert len([name for name in operators(exported.graph) if "getitem" not in name]) == 1
    longer = to_torch(tensors(4, T=17, S=17))
    assert torch.equal(exported.module()(*longer, starts), Model()(*longer, starts))


class Recorder:
    """A backend that runs what it is given and remembers it."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, _inputs):
        self.graphs.append(module.graph)
        return module


def test_compile_sees_one_operator_and_gives_the_same_bits():
    recorder = Recorder()
    q, k, v = to_torch(tensors(5))
    compiled = torch.compile(rt.attention, fullgraph=True, backend=recorder)
    for options in (
        {},
        {"window": 3, "sinks": torch.zeros(4), "return_lse": True},
        {"starts": [0, 1], "offset": 0},
    ):
        got, want = compiled(q, k, v, **options), rt.attention(q, k, v, **options)
        for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert torch.equal(ours, theirs)
    for graph in recorder.graphs:
        assert sum("regardant.attention" in name for name in operators(graph)) == 1
    assert len(recorder.graphs) == 3


def test_inductor_compiles_forward_and_backward():
    def loss(q, k, v, bias, sinks):
        out, lse = rt.attention(q * 2, k, v.sin(), bias=bias, sinks=sinks, return_lse=True)
        return (out.cos() * lse[..., None]).sum()

    made = tensors(6, dtype=np.float64)
    bias, sinks = np.ones((4, 1, 9)), np.zeros(4)
    leaves = [[leaf(x) for x in (*made, bias, sinks)] for _ in range(2)]
    compiled = torch.compile(loss, fullgraph=True)
    results = [function(*given) for function, given in zip((loss, compiled), leaves, strict=True)]
    for result in results:
        result.backward()
    bound = 64 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(*results, rtol=bound, atol=0)
    for eager, inductor in zip(*leaves, strict=True):
        torch.testing.assert_close(
            inductor.grad, eager.grad, rtol=bound, atol=bound * float(eager.grad.abs().max())
        )


def test_a_look_compiles():
    recorder = Recorder()
    q, k, v = to_torch(tensors(7))
    compiled = torch.compile(
        lambda *x: rt.look(*x, received=True, pooled=(2, 2)), fullgraph=True, backend=recorder
    )
    got, want = compiled(q, k, v), rt.look(q, k, v, received=True, pooled=(2, 2))
    for name in ("out", "entropy", "top_keys", "received", "pooled"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert torch.equal(got.rows([0, 3]), want.rows([0, 3]))
    assert sum("regardant.look" in name for name in operators(recorder.graphs[0])) == 1


def test_shapes_that_do_not_fit_are_refused_while_tracing():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(
        torch._dynamo.exc.TorchRuntimeError, match=r"attention: k must be \(1, G, S, 4\) to match q"
    ):
        torch.compile(rt.attention, fullgraph=True, backend="eager", dynamic=False)(q, q[..., :2], q)


def test_the_readmes_lines_on_torch_run():
    readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (lines,) = (block for block in readme.split("```python\n")[1:] if "import regardant.torch as rt" in block)
    names = {}
    exec(compile(lines.split("```")[0], "README.md", "exec"), names)  # noqa: S102 - our own page
    q, k, v = (names[name] for name in "qkv")
    assert q.grad.shape == q.shape
    assert torch.equal(names["fast"](q, k, v), rt.attention(q, k, v))
    assert names["look"].rows(-1).shape == (2, 8, 1, 256)
    assert names["layer"].q_proj.weight.grad is not None
