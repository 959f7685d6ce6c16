"""ONNX models for the tests of the TensorRT plugin."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx
from nodes import DOMAIN
from onnx import TensorProto, helper


def two_nodes(
    elem_type: int = TensorProto.FLOAT16, *, mask_type: int = TensorProto.BOOL, **attributes: Any
) -> onnx.ModelProto:
    """Attention, Add, attention: dynamic batch and sequences, grouped heads, a padding mask of booleans."""
    attributes = {"q_num_heads": 4, "kv_num_heads": 2} | attributes
    shapes = {"q": ("B", "S", 256), "k": ("B", "T", 128), "v": ("B", "T", 128)}
    inputs = [helper.make_tensor_value_info(name, elem_type, shape) for name, shape in shapes.items()]
    inputs.append(helper.make_tensor_value_info("mask", mask_type, ("B", 1, 1, "T")))
    nodes = [
        helper.make_node("FlashAttention", ["q", "k", "v"], ["a"], "first", domain=DOMAIN, **attributes),
        helper.make_node("Add", ["a", "q"], ["b"]),
        helper.make_node(
            "FlashAttention", ["b", "k", "v", "mask"], ["y"], "second", domain=DOMAIN, **({"is_causal": 1} | attributes)
        ),
    ]
    output = helper.make_tensor_value_info("y", elem_type, ("B", "S", 256))
    graph = helper.make_graph(nodes, "two_nodes", inputs, [output])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def calls_of_functions(function_opset: int = 21) -> onnx.ModelProto:
    """Outer(q, mask) calls Inner, which attends; it is called with a boolean and with a float mask. Same is neither."""
    opsets = [helper.make_opsetid("", function_opset), helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("mine", 1)]
    pass_on = helper.make_node("Identity", ["m"], ["passed"])
    attend = helper.make_node("FlashAttention", ["q", "q", "q", "passed"], ["y"], domain=DOMAIN)
    plain = helper.make_node("FlashAttention", ["x", "x", "x"], ["r"], domain=DOMAIN)
    functions = [
        helper.make_function("mine", "Outer", ["q", "m"], ["y"],
                             [helper.make_node("Inner", ["q", "m"], ["y"], domain="mine")], opsets),
        helper.make_function("mine", "Inner", ["q", "m"], ["y"], [pass_on, attend], opsets),
        helper.make_function("mine", "Same", ["x"], ["r"], [plain], opsets),
    ]  # fmt: skip
    calls = [helper.make_node("Outer", ["q", f"m{i}"], [f"y{i}"], domain="mine") for i in (0, 1)]
    calls.append(helper.make_node("Same", ["q"], ["z"], domain="mine"))
    q, z, *ys = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 2, 4, 4]) for n in ("q", "z", "y0", "y1"))
    masks = [
        helper.make_tensor_value_info(n, t, [4, 4]) for n, t in (("m0", TensorProto.BOOL), ("m1", TensorProto.FLOAT))
    ]
    graph = helper.make_graph(calls, "calls", [q, *masks], [*ys, z])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}


_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = {**_SIZES, "vocab_size": 99, "max_position_embeddings": 64}
# Of transformers: class and configuration.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "minilm": ("Bert", _TEXT),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
    "vit": ("ViT", {**_SIZES, "image_size": 16, "patch_size": 4}),
    "llama": ("Llama", {**_TEXT, "num_key_value_heads": 2}),
}


def transformer(name: str, dtype: str) -> onnx.ModelProto:
    """A model of that architecture with few and random weights, exported and fused; batch and sequence are dynamic."""
    import flashonnx
    import torch
    import transformers

    prefix, sizes = TRANSFORMERS[name]
    config = getattr(transformers, f"{prefix}Config")(**sizes, attn_implementation="sdpa")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    inner = getattr(transformers, f"{prefix}Model")(config).eval().to(kind)

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any, attention_mask: Any = None) -> Any:
            if name == "vit":
                return self.inner(x).last_hidden_state
            cache = {} if name == "minilm" else {"use_cache": False}
            return self.inner(input_ids=x, attention_mask=attention_mask, **cache).last_hidden_state

    axes = {0: "batch"} if name == "vit" else {0: "batch", 1: "sequence"}
    if name == "vit":
        arguments: tuple[Any, ...] = (torch.randn(2, 3, 16, 16, dtype=kind),)
    else:
        arguments = (torch.randint(2, 99, (2, 7)), torch.ones(2, 7, dtype=torch.long))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        flashonnx.export_onnx(Last().eval(), arguments, path, dynamic_shapes=(axes,) * len(arguments))
        return onnx.load(path)
