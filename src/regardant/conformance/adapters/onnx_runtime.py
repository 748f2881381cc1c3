"""ONNX Runtime's operator `Attention` (opset 24) on the CPU: causality, a past, mask, bias, lengths, softcap, scale.

An offset is what ONNX has a past for: so many keys are given as the past. Lengths are `nonpad_kv_seqlen`. Not
offered: offsets that are no past, windows (opset 25), starts, documents, ALiBi, sinks, lse, gradients, bfloat16 on
the CPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from regardant.conformance.case import NotOffered
from regardant.conformance.target import Convention, adapter

if TYPE_CHECKING:
    from regardant.problem import Array

ELEMENTS = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "float64": onnx.TensorProto.DOUBLE,
    "bool": onnx.TensorProto.BOOL,
    "int64": onnx.TensorProto.INT64,
}
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")

CONVENTIONS = (
    Convention(
        "causal mask aligned top-left",
        "is_causal without a past aligns top-left (offset 0)",
        "ONNX's operator Attention",
    ),
    Convention(
        "lengths move the diagonal",
        "with nonpad_kv_seqlen, the last query sees the last valid key of each batch row",
        "ONNX's operator Attention, opset 24",
    ),
)


@functools.cache
def _session(
    given: tuple[tuple[str, str, int], ...], settings: tuple[tuple[str, Any], ...], threads: int
) -> Any:
    """A model of the one operator, for the inputs (name, type, rank) and attributes of a call."""
    names = {name for name, _, _ in given}
    used = [name if name in names else "" for name in INPUTS]
    while not used[-1]:
        used.pop()
    element = ELEMENTS[given[0][1]]
    infos = [
        onnx.helper.make_tensor_value_info(name, ELEMENTS[kind], [None] * rank) for name, kind, rank in given
    ]
    outputs = ["Y", *(("present_key", "present_value") if "past_key" in names else ())]
    results = [onnx.helper.make_tensor_value_info(name, element, [None] * 4) for name in outputs]
    node = onnx.helper.make_node("Attention", used, outputs, **dict(settings))
    graph = onnx.helper.make_graph([node], "attention", infos, results)
    opsets = [onnx.helper.make_opsetid("", 24)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@adapter(types=("float32", "float16", "float64"), packages=("onnxruntime", "onnx"), conventions=CONVENTIONS)
def target(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    offset: int | None = None,
    lengths: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> Array:
    """One node `Attention`; what is causal by default is its `is_causal`."""
    if mask is not None and bias is not None:
        raise NotOffered("mask and bias together")
    if scale is not None and scale <= 0:
        raise NotOffered("a scale that is not above 0")
    if 0 in {*q.shape, *k.shape}:
        raise NotOffered("axes of length 0")
    settings: dict[str, Any] = {"is_causal": int(causal)}
    settings |= {name: given for name, given in (("softcap", softcap), ("scale", scale)) if given is not None}
    inputs = {"Q": q, "K": k, "V": v}
    added = bias if mask is None else mask
    if added is not None:
        inputs["attn_mask"] = added if added.ndim > 1 else added[None]
    if lengths is not None:
        inputs["nonpad_kv_seqlen"] = lengths.astype(np.int64)
    if causal and offset not in {None, 0}:
        _give_past(inputs, int(offset or 0))
    given = tuple((name, array.dtype.name, array.ndim) for name, array in inputs.items())
    try:
        session = _session(given, tuple(settings.items()), threads or 0)
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        raise NotOffered(f"{q.dtype.name} on the CPU") from None
    result: Array = session.run(None, {name: np.ascontiguousarray(array) for name, array in inputs.items()})[
        0
    ]
    return result


def _give_past(inputs: dict[str, Array], offset: int) -> None:
    """Hand over the first keys and values as the past."""
    if not 0 <= offset <= inputs["K"].shape[2]:
        raise NotOffered(f"offset {offset}")
    if "nonpad_kv_seqlen" in inputs:
        raise NotOffered("offset and lengths together")
    for name, past in (("K", "past_key"), ("V", "past_value")):
        inputs[past], inputs[name] = inputs[name][:, :, :offset], inputs[name][:, :, offset:]
