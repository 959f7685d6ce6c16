"""ONNX models of one attention, in each form that ONNX Runtime knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.backends.base import UnsupportedError
from benchmarks.backends.step import paged, shuffled
from benchmarks.problems import Problem

if TYPE_CHECKING:
    import onnx
    from torch import Tensor

OPSET = 23  # the first with Attention, and the newest whose Attention ONNX Runtime's CUDA provider has through 1.31


@dataclass
class Graph:
    """A model, and the tensors that its inputs and outputs are bound to. The first output is Y, (B, Sq, Hq*D)."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    note: str = ""

    def node(
        self, kind: str, inputs: Iterable[str], outputs: Iterable[str], domain: str = "", **attributes: Any
    ) -> None:
        """Appends a node."""
        from onnx import helper

        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), domain=domain, **attributes))

    def constant(self, name: str, kind: int, values: list[Any], shape: tuple[int, ...] | None = None) -> str:
        """Adds an initializer; its name."""
        from onnx import helper

        self.constants.append(helper.make_tensor(name, kind, (len(values),) if shape is None else shape, values))
        return name

    def model(self) -> onnx.ModelProto:
        """The model, with fixed shapes."""
        from onnx import helper

        def infos(tensors: dict[str, Tensor]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(n, element_type(x), list(x.shape)) for n, x in tensors.items()]

        graph = helper.make_graph(self.nodes, "attention", infos(self.inputs), infos(self.outputs), self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        opsets.append(helper.make_opsetid("flashonnx", 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def element_type(tensor: Tensor) -> int:
    """The ONNX type of a tensor's elements."""
    from onnx import TensorProto

    name = str(tensor.dtype).removeprefix("torch.")
    names = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "bool": "BOOL", "int32": "INT32"}
    return int(getattr(TensorProto, names[name]))


def flashonnx(problem: Problem) -> Graph:
    """Our operator: the mask as it is."""
    graph, heads = _start(problem), _heads(problem)
    names = [*"QKV"]
    if problem.mask is not None:
        graph.inputs["mask"] = problem.mask
        names.append("mask")
    if problem.workload.window:
        heads["left_window_size"] = problem.workload.window - 1
    graph.node("FlashAttention", names, ["Y"], "flashonnx", is_causal=int(problem.workload.causal), **heads)
    return graph


def attention(problem: Problem) -> Graph:
    """ONNX's Attention. Its queries must not be broadcast in a mask, so such a mask is given written out.

    Windows come with opset 25: here they are masks.
    """
    graph, heads = _start(problem), _heads(problem)
    if problem.workload.window:
        hidden = problem.hidden()
        assert hidden is not None and problem.mask is None
        graph.inputs["mask"], graph.note = ~hidden[None, None], "its window is a mask"
        graph.node("Attention", [*"QKV", "mask"], ["Y"], **heads)
        return graph
    names = [*"QKV"]
    if problem.mask is not None:
        names.append(_expanded_mask(problem, graph))
    graph.node("Attention", names, ["Y"], is_causal=int(problem.workload.causal), **heads)
    return graph


def multi_head_attention(problem: Problem) -> Graph:
    """com.microsoft MultiHeadAttention: a (B, 1, 1, Sk) bool mask as its key_padding_mask, any other as a bias."""
    import torch

    workload = problem.workload
    if workload.heads[0] != workload.heads[1]:
        raise UnsupportedError("has as many key heads as query heads")
    if workload.window:
        raise UnsupportedError("has no windows")
    graph = _start(problem)
    names = [*"QKV"]
    if workload.mask == "b11k" and workload.mask_dtype == "bool" and problem.mask is not None:
        graph.inputs["padding"] = problem.mask[:, 0, 0].to(torch.int32)
        names += ["", "padding"]
    elif problem.mask is not None:
        if workload.mask_dtype == "bool":
            raise UnsupportedError("takes bool masks of keys alone")
        names += ["", "", _expanded_mask(problem, graph)]
    heads, causal = workload.heads[0], int(workload.causal)
    graph.node("MultiHeadAttention", names, ["Y"], "com.microsoft", num_heads=heads, unidirectional=causal)
    return graph


def group_query_attention(problem: Problem) -> Graph:
    """com.microsoft GroupQueryAttention: a first prompt, or a step that appends to a cache of full length.

    A prompt is causal and fills an empty cache. In a step past and present are the same memory, as ONNX Runtime wants
    for generation.
    """
    import torch

    workload = problem.workload
    step = workload.cache and workload.lengths[0] == 1
    if not (workload.causal or step) or problem.mask is not None:
        raise UnsupportedError("is measured on causal prompts, and steps with a cache, without a mask")
    last = slice(-1 if step else 0, None)
    graph = Graph(
        {name: x[:, last].flatten(2) for name, x in zip("QKV", (problem.q, problem.k, problem.v), strict=True)},
        {"Y": problem.new_output().flatten(2)},
    )
    length, device = workload.lengths[1], problem.q.device
    past = ["", ""]
    for kind, x in (("key", problem.k), ("value", problem.v)):
        cache = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        if step:
            graph.inputs[f"past_{kind}"] = cache
            past = ["past_key", "past_value"]
        graph.outputs[f"present_{kind}"] = cache if step else cache.fill_(float("nan"))
    graph.inputs["last"] = torch.full((workload.batch,), length - 1, dtype=torch.int32, device=device)
    graph.inputs["total"] = torch.full((1,), length, dtype=torch.int32)  # on the host, whatever the device
    attributes = dict(zip(("num_heads", "kv_num_heads"), workload.heads, strict=True))
    if workload.window:
        attributes["local_window_size"] = workload.window
    names, outputs = [*"QKV", *past, "last", "total"], list(graph.outputs)
    graph.node("GroupQueryAttention", names, outputs, "com.microsoft", **attributes)
    graph.note = "appends to its cache" if step else "writes its cache"
    return graph


def paged_attention(problem: Problem) -> Graph:
    """com.microsoft PagedAttention: a step that appends to pages of 256 slots, shuffled."""
    import torch

    graph = _paged(problem)
    batch, (heads, kv_heads) = problem.workload.batch, problem.workload.heads
    for tensors in (graph.inputs, graph.outputs):  # it takes packed tokens
        tensors.update({name: x.flatten(0, 1) for name, x in tensors.items() if name in "QKVY"})
    graph.inputs["sequences"] = torch.arange(batch + 1, dtype=torch.int32, device=problem.q.device)
    names = (*"QKV", "key_cache", "value_cache", "sequences", "lengths", "table")
    graph.node("PagedAttention", names, graph.outputs, "com.microsoft", num_heads=heads, kv_num_heads=kv_heads)
    return graph


def flashonnx_pages(problem: Problem) -> Graph:
    """Our FlashAttentionKVCache on the same pages."""
    graph = _paged(problem)
    names = (*"QKV", "key_cache", "value_cache", "lengths", "table")
    graph.node("FlashAttentionKVCache", names, graph.outputs, "flashonnx", **_heads(problem))
    return graph


def _paged(problem: Problem) -> Graph:
    """The tensors of a step on pages."""
    import torch

    workload, size = problem.workload, 256  # ONNX Runtime's pages are multiples of it
    (queries, keys), device = workload.lengths, problem.q.device
    if not workload.cache or queries != 1 or problem.mask is not None or keys % size:
        raise UnsupportedError(f"is measured on steps with a cache of whole pages of {size}")
    parts = zip("QKV", (problem.q, problem.k, problem.v), strict=True)
    graph = Graph({name: x[:, -1:].flatten(2) for name, x in parts}, {"Y": problem.new_output().flatten(2)})
    order, graph.inputs["table"] = shuffled(workload.batch, keys, size, device.type)
    for kind, x in (("key", problem.k), ("value", problem.v)):
        graph.inputs[f"{kind}_cache"] = graph.outputs[f"{kind}_cache_out"] = paged(x, size, order)
    graph.inputs["lengths"] = torch.full((workload.batch,), keys - 1, dtype=torch.int32, device=device)
    graph.note = "appends to its cache"
    return graph


def unfused(problem: Problem) -> Graph:
    """MatMul, Softmax, MatMul as exporters write them, from and to (B, S, H*D), with a causal mask of Sq by Sk."""
    from onnx import TensorProto

    workload = problem.workload
    (q_heads, kv_heads), dim, dtype = workload.heads, workload.head_dim, element_type(problem.q)
    graph = _start(problem)
    for name, heads, order in (
        ("Q", q_heads, (0, 2, 1, 3)),
        ("K", kv_heads, (0, 2, 3, 1)),
        ("V", kv_heads, (0, 2, 1, 3)),
    ):
        shape = graph.constant(f"{name}_shape", TensorProto.INT64, [0, 0, heads, dim])
        graph.node("Reshape", [name, shape], [f"{name}_4d"])
        graph.node("Transpose", [f"{name}_4d"], [f"{name}_heads"], perm=order)
        if heads != q_heads:
            _repeat(graph, f"{name}_heads", workload.batch, heads, q_heads // heads)
    graph.node("MatMul", ["Q_heads", "K_heads"], ["products"])
    graph.constant("scale", dtype, [1 / math.sqrt(dim)], ())
    graph.node("Mul", ["products", "scale"], ["scores"])
    scores = "scores"
    hidden = problem.hidden()
    if hidden is not None:
        scores = _hide(graph, scores, "triangle", ~hidden, dtype)
    if problem.mask is not None:
        scores = _hide(graph, scores, "mask", problem.mask, dtype)
    graph.node("Softmax", [scores], ["weights"], axis=-1)
    graph.node("MatMul", ["weights", "V_heads"], ["heads"])
    graph.node("Transpose", ["heads"], ["tokens"], perm=(0, 2, 1, 3))
    graph.node("Reshape", ["tokens", graph.constant("Y_shape", TensorProto.INT64, [0, 0, q_heads * dim])], ["Y"])
    return graph


FORMS: dict[str, Callable[[Problem], Graph]] = {
    form.__name__: form
    for form in (
        flashonnx,
        flashonnx_pages,
        attention,
        multi_head_attention,
        group_query_attention,
        paged_attention,
        unfused,
    )
}
STEPS = frozenset({"flashonnx_pages", "paged_attention"})


def _start(problem: Problem) -> Graph:
    inputs = {name: x.flatten(2) for name, x in zip("QKV", (problem.q, problem.k, problem.v), strict=True)}
    return Graph(inputs, {"Y": problem.new_output().flatten(2)})


def _heads(problem: Problem) -> dict[str, Any]:
    return {"q_num_heads": problem.workload.heads[0], "kv_num_heads": problem.workload.heads[1]}


def _expanded_mask(problem: Problem, graph: Graph) -> str:
    mask = problem.mask
    assert mask is not None
    if mask.shape[2] != problem.workload.lengths[0]:
        mask = mask.expand(-1, -1, problem.workload.lengths[0], -1).contiguous()
        graph.note = "its mask is given written out for all queries"
    graph.inputs["mask"] = mask
    return "mask"


def _repeat(graph: Graph, name: str, batch: int, heads: int, times: int) -> None:
    """Each key head `times` times, by Unsqueeze, Expand and Reshape; renames the value."""
    from onnx import TensorProto

    source = f"{name}_few"
    graph.nodes[-1].output[0] = source
    axis = graph.constant(f"{name}_axis", TensorProto.INT64, [2])
    graph.node("Unsqueeze", [source, axis], [f"{name}_5d"])
    more = graph.constant(f"{name}_more", TensorProto.INT64, [1, 1, times, 1, 1])
    graph.node("Expand", [f"{name}_5d", more], [f"{name}_repeated"])
    rows, columns = graph.inputs[name[0]].shape[1], graph.inputs[name[0]].shape[2] // heads
    last = [columns, rows] if name[0] == "K" else [rows, columns]
    shape = graph.constant(f"{name}_flat", TensorProto.INT64, [batch, heads * times, *last])
    graph.node("Reshape", [f"{name}_repeated", shape], [name])


def _hide(graph: Graph, scores: str, name: str, mask: Tensor, dtype: int) -> str:
    """The scores with a mask applied: Where for a bool one, Add for a bias."""
    graph.inputs[name] = mask
    out = f"{scores}_{name}"
    if str(mask.dtype) == "torch.bool":
        graph.constant(f"{name}_hidden", dtype, [-math.inf], ())
        graph.node("Where", [name, scores, f"{name}_hidden"], [out])
    else:
        graph.node("Add", [scores, name], [out])
    return out
