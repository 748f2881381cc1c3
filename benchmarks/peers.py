"""Other libraries' attention, each called in its own way with as many threads as regardant, one function each.

A peer is handed all copies of the inputs and gives a call that goes through them in turn, and a way to read its
result as an array (B, H, T, E). One that does not offer a case says why. Nothing here is imported before it is
asked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import answers
from benchmarks.timing import Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.answers import Array, Sample, Work

LARGEST_MATRIX = 4 * 10**9  # bytes of scores that a peer is let hold


class NotOfferedError(Exception):
    """Why a peer cannot do a case, in a few words."""


class Ready(NamedTuple):
    """A peer set up for a case: one call, how to read what it returns, and what a reader must know of it."""

    run: Callable[[], Any]
    read: Callable[[Any], Array]
    note: str = ""


def in_turn(call: Callable[..., Any], inputs: Sequence[Sequence[Any]]) -> Callable[[], Any]:
    """A function of no arguments that calls with the first inputs, then the second, ..., then the first again."""
    turn = itertools.cycle(inputs)
    return lambda: call(*next(turn))


def tensor(array: Array) -> Any:
    """The same memory as a torch tensor; bfloat16 goes by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def read_tensor(result: Any) -> Array:
    """A torch tensor's numbers."""
    return np.asarray(result.double().numpy())


def pytorch(works: Sequence[Work], threads: int) -> Ready:
    """`scaled_dot_product_attention`: is_causal, enable_gqa; a boolean mask for a window."""
    import torch

    torch.set_num_threads(threads)
    _, H, G, T, S, *_ = works[0].sizes
    options: dict[str, Any] = {"enable_gqa": H != G}
    if works[0].window is None:
        options["is_causal"] = T > 1
    else:
        options["attn_mask"] = tensor(answers.visible(T, S, works[0].window))

    @torch.inference_mode()
    def call(*qkv: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    return Ready(in_turn(call, [[tensor(array) for array in work[:3]] for work in works]), read_tensor)


def flex(works: Sequence[Work], threads: int) -> Ready:
    """`torch.compile(flex_attention)` with a block mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.set_num_threads(threads)
    torch.compiler.reset()  # each case is compiled for its own shapes
    _, H, G, T, S, *_ = works[0].sizes
    window = S if works[0].window is None else works[0].window

    def sees(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < window)

    def sees_past(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        return i >= j

    blocks = None  # one query sees every key
    if T > 1:
        rule = sees_past if works[0].window is None else sees
        blocks = create_block_mask(rule, None, None, T, S, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    @torch.inference_mode()
    def call(*qkv: Any) -> Any:
        return compiled(*qkv, block_mask=blocks, enable_gqa=H != G)

    return Ready(in_turn(call, [[tensor(array) for array in work[:3]] for work in works]), read_tensor)


def onnxruntime(works: Sequence[Work], threads: int) -> Ready:
    """A model of the one operator `Attention` (opset 23); a boolean mask for a window."""
    import onnxruntime as ort

    check_matrix(works[0], 1)
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = threads
    try:
        session = ort.InferenceSession(
            _onnx_model(works[0]), session_options, providers=["CPUExecutionProvider"]
        )
    except ort.capi.onnxruntime_pybind11_state.NotImplemented as error:
        raise NotOfferedError(f"no {works[0].dtype} on the CPU") from error
    _, _, _, T, S, *_ = works[0].sizes
    mask = [] if works[0].window is None else [answers.visible(T, S, works[0].window)]

    def call(*inputs: Array) -> Any:
        return session.run(None, dict(zip("QKVM", inputs, strict=False)))[0]

    inputs, note = _contiguous(works)
    return Ready(in_turn(call, [[*qkv, *mask] for qkv in inputs]), np.asarray, note)


def _onnx_model(work: Work) -> bytes:
    """The model's file, for the types and options of a case."""
    import onnx

    number = onnx.TensorProto
    element = {"float32": number.FLOAT, "float16": number.FLOAT16, "bfloat16": number.BFLOAT16}[work.dtype]
    windowed = work.window is not None
    infos = [onnx.helper.make_tensor_value_info(name, element, [None] * 4) for name in "QKVY"]
    masks = [onnx.helper.make_tensor_value_info("M", number.BOOL, [None] * 2)] if windowed else []
    causal = work.sizes[3] > 1 and not windowed
    node = onnx.helper.make_node(
        "Attention", ["Q", "K", "V", *("M" * windowed)], ["Y"], is_causal=int(causal)
    )
    graph = onnx.helper.make_graph([node], "attention", infos[:3] + masks, infos[3:])
    opsets = [onnx.helper.make_opsetid("", 23)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def openvino(works: Sequence[Work], threads: int) -> Ready:
    """`ScaledDotProductAttention` (13): causal, or a boolean mask; grouped heads by broadcasting one more axis."""
    import ml_dtypes
    import openvino as ov
    from openvino import opset13

    _, H, G, T, S, *_ = works[0].sizes
    element = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}[works[0].dtype]
    inner = [-1] * (4 if H == G else 5)
    parameters = [opset13.parameter(inner, element) for _ in range(3)]
    mask = []
    if works[0].window is not None:
        parameters.append(opset13.parameter([-1, -1], ov.Type.boolean))
        mask.append(ov.Tensor(answers.visible(T, S, works[0].window)))
    node = opset13.scaled_dot_product_attention(*parameters, causal=T > 1 and not mask)
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": element.to_string(),
    }
    compiled = ov.Core().compile_model(ov.Model([node], parameters), "CPU", settings)
    request = compiled.create_infer_request()

    def held(array: Array) -> Any:
        bits = array.view(np.uint16) if array.dtype.itemsize == 2 else array
        return ov.Tensor(bits, ov.Shape(array.shape), element)

    def grouped(array: Array) -> Array:
        B, heads, rows, width = array.shape
        return array if H == G else array.reshape(B, G, heads // G, rows, width)

    def call(*inputs: Any) -> Any:
        return request.infer(inputs, share_inputs=True)[0]

    def read(result: Array) -> Array:
        # A bfloat16 result comes with the name of another type of two bytes.
        dtype = ml_dtypes.finfo(works[0].dtype).dtype
        return result.view(dtype).reshape((*works[0].q_BHTD.shape[:3], -1))

    inputs, note = _contiguous(works)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    notes = [note] if note else []
    if used != element.to_string():
        notes.append(f"computed in {used}")
    runs = [[*(held(grouped(array)) for array in qkv), *mask] for qkv in inputs]
    return Ready(in_turn(call, runs), read, ", ".join(notes))


def jax(works: Sequence[Work], threads: int) -> Ready:
    """`jax.nn.dot_product_attention`, compiled, on arrays in its own layout (B, T, heads, width)."""
    check_matrix(works[0], 3)
    os.environ.setdefault("NPROC", str(threads))  # the one way to tell it; read when it starts
    import jax as library

    _, _, _, T, *_ = works[0].sizes
    window = works[0].window
    options: dict[str, Any] = {"is_causal": T > 1}
    if window is not None:
        options["local_window_size"] = (window - 1, 0)

    @library.jit
    def compiled(q: Any, k: Any, v: Any) -> Any:
        return library.nn.dot_product_attention(q, k, v, **options)

    def call(*qkv: Any) -> Any:
        return compiled(*qkv).block_until_ready()

    def read(result: Any) -> Array:
        return np.asarray(result).swapaxes(1, 2)

    inputs = [[library.numpy.asarray(array.swapaxes(1, 2)) for array in work[:3]] for work in works]
    try:
        compiled.lower(*inputs[0])
    except ValueError as error:
        raise NotOfferedError(f"no products of {works[0].dtype} on the CPU") from error
    return Ready(in_turn(call, inputs), read, "own layout")


def check_matrix(work: Work, copies: int) -> None:
    """Refuse a case of which a peer that holds all scores in memory would hold too much."""
    B, H, _, T, S, *_ = work.sizes
    size = copies * B * H * T * S * 4
    if size > LARGEST_MATRIX:
        raise NotOfferedError(f"holds the whole matrix, {size / 1e9:.0f} GB here")


def _contiguous(works: Sequence[Work]) -> tuple[list[list[Array]], str]:
    """The inputs for a peer that reads no slices in place: copied beforehand, outside of the time, where need be."""
    inputs = [[np.ascontiguousarray(array) for array in work[:3]] for work in works]
    copied = not all(array.flags.c_contiguous for work in works for array in work[:3])
    return inputs, "given copies without gaps" if copied else ""


PEERS: dict[str, Callable[[Sequence[Work], int], Ready]] = {
    "torch": pytorch,
    "flex": flex,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "jax": jax,
}
PACKAGES = {
    "torch": ("torch",),
    "flex": ("torch",),
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("openvino",),
    "jax": ("jax",),
}


def installed(name: str) -> bool:
    """Whether what a peer needs is there."""
    return all(importlib.util.find_spec(package) for package in PACKAGES[name])


def version(package: str) -> str:
    """A package's version, or that it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def contenders(
    names: Sequence[str], works: Sequence[Work], sample: Sample, threads: int
) -> dict[str, Contender | str]:
    """Each peer named, having answered once, or the reason why it does not take part."""
    return {name: contender(PEERS[name], works, sample, threads) for name in names}


def contender(
    peer: Callable[[Sequence[Work], int], Ready], works: Sequence[Work], sample: Sample, threads: int
) -> Contender | str:
    """One peer, having answered once, or the reason why it does not take part."""
    try:
        ready = peer(works, threads)
        error = sample.error_in(ready.read(ready.run()))
    except NotOfferedError as reason:
        return f"not offered: {reason}"
    except Exception as raised:  # noqa: BLE001 - whatever another library raises is its answer to the case
        return f"failed: {type(raised).__name__}: {str(raised).partition(chr(10))[0][:80]}"
    return Contender(ready.run, error, sample.budget, ready.note)
