"""ONNX Runtime's best graph of a Llama: as onnxruntime-genai's builder writes it for CUDA in float16.

That builder makes graphs from weights, not from exports: one projection for Q, K and V, GroupQueryAttention that also
turns queries and keys (do_rotary) and fills its cache, and normalisations fused with the additions before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.end_to_end import weights
from benchmarks.end_to_end.models import Subject

if TYPE_CHECKING:
    import onnx
    import torch

OPSET = 20


def build(subject: Subject, module: torch.nn.Module, places: Mapping[str, weights.Matrix]) -> onnx.ModelProto:
    """The prefill from input_ids to the last token's logits, with the names and weights of `module`."""
    return _Builder(subject, module, places).model()


class _Builder:
    def __init__(self, subject: Subject, module: torch.nn.Module, places: Mapping[str, weights.Matrix]) -> None:
        from onnx import helper

        self._subject, self._config, self._places = subject, subject.config, places
        self._parameters = dict(module.named_parameters())
        self._kind = helper.np_dtype_to_tensor_dtype(np.dtype(subject.dtype))
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._columns: dict[str, int] = {}  # the last dimension of weights and activations
        self._known: list[onnx.ValueInfoProto] = []  # ONNX knows no shapes behind ONNX Runtime's operators

    def model(self) -> onnx.ModelProto:
        from onnx import TensorProto, helper

        subject = self._subject
        self._angles()
        self._constant("last", np.full(subject.batch, subject.length - 1, np.int32))
        self._constant("total", np.array(subject.length, np.int32))
        x = self._node("Gather", [self._weight("model.model.embed_tokens"), "input_ids"])
        delta = ""
        for i in range(self._config["num_hidden_layers"]):
            x, delta = self._layer(f"model.model.layers.{i}", x, delta)
        _, x = self._normalised("model.model.norm", x, delta)
        newest = self._constant("newest", np.array([-1]))
        self._nodes.append(helper.make_node("Gather", [x, newest], ["newest_x"], axis=1))
        self._nodes.append(helper.make_node("MatMul", ["newest_x", self._weight("model.lm_head")], ["y"]))
        shape = [subject.batch, subject.length]
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
            [helper.make_tensor_value_info("y", self._kind, [subject.batch, 1, self._config["vocab_size"]])],
            list(self._constants.values()),
            value_info=self._known,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _layer(self, name: str, x: str, delta: str) -> tuple[str, str]:
        """The residual before the layer's last addition, and what is to be added."""
        x, normal = self._normalised(f"{name}.input_layernorm", x, delta)
        joined = [self._weight(f"{name}.self_attn.{part}_proj") for part in "qkv"]
        weight = self._joined(f"{name}.self_attn.qkv_proj.weight", joined)
        packed = self._node("MatMul", [normal, weight])
        heads, kv_heads = self._subject.heads
        inputs = [packed, "", "", "", "", "last", "total", "cosines", "sines"]
        outputs = [f"{name}.attention", f"{name}.present_key", f"{name}.present_value"]
        attention = self._node(
            "GroupQueryAttention", inputs, outputs, "com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
            columns=heads * self._config["head_dim"], do_rotary=1, rotary_interleaved=0,
            scale=self._config["head_dim"] ** -0.5,
        )  # fmt: skip
        delta = self._node("MatMul", [attention, self._weight(f"{name}.self_attn.o_proj")])
        x, normal = self._normalised(f"{name}.post_attention_layernorm", x, delta)
        gate, up = (self._node("MatMul", [normal, self._weight(f"{name}.mlp.{part}_proj")]) for part in ("gate", "up"))
        gate = self._node("Mul", [gate, self._node("Sigmoid", [gate])])
        product = self._node("Mul", [gate, up])
        return x, self._node("MatMul", [product, self._weight(f"{name}.mlp.down_proj")])

    def _normalised(self, name: str, x: str, delta: str) -> tuple[str, str]:
        """The sum of both, and that normalised."""
        weight, epsilon = self._weight(name), self._config["rms_norm_eps"]
        if not delta:
            out = self._node("SimplifiedLayerNormalization", [x, weight], epsilon=epsilon, axis=-1, stash_type=1)
            return x, out
        outputs = [f"{name}.out", "", "", f"{name}.sum"]
        kind = "SkipSimplifiedLayerNormalization"
        out = self._node(kind, [x, delta, weight], outputs, "com.microsoft", epsilon=epsilon)
        return f"{name}.sum", out

    def _angles(self) -> None:
        size = self._config["head_dim"]
        theta = self._config.get("rope_theta", 10000.0) ** (-np.arange(0, size, 2) / size)
        angles = np.arange(self._subject.length)[:, None] * theta
        self._constant("cosines", np.cos(angles).astype(self._subject.dtype))
        self._constant("sines", np.sin(angles).astype(self._subject.dtype))

    def _weight(self, module: str) -> str:
        from onnx import numpy_helper

        name = f"{module}.weight"
        if name in self._places:
            self._constants[name] = weights.tensor(name, self._places[name], self._subject.weights, self._kind)
            self._columns[name] = self._places[name].shape[-1]
        elif name not in self._constants:
            value = self._parameters[name].numpy()
            is_linear = value.ndim == 2 and "embed" not in name
            value = np.ascontiguousarray(value.T if is_linear else value)
            self._constants[name] = numpy_helper.from_array(value, name)
            self._columns[name] = value.shape[-1]
        return name

    def _constant(self, name: str, value: np.ndarray) -> str:
        from onnx import numpy_helper

        self._constants[name] = numpy_helper.from_array(value, name)
        return name

    def _joined(self, name: str, matrices: list[str]) -> str:
        """Matrices side by side, which ONNX Runtime computes once, when it loads the model."""
        from onnx import helper

        self._nodes.append(helper.make_node("Concat", matrices, [name], axis=1))
        self._columns[name] = sum(self._columns[matrix] for matrix in matrices)
        return name

    def _node(
        self,
        kind: str,
        inputs: list[str],
        outputs: list[str] | None = None,
        domain: str = "",
        columns: int = 0,
        **attributes: Any,
    ) -> str:
        """Appends a node on all tokens; its first output."""
        from onnx import helper

        outputs = outputs or [f"{kind}.{len(self._nodes)}"]
        self._nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        columns = columns or self._columns[inputs[1 if kind == "MatMul" else 0]]
        shape = [self._subject.batch, self._subject.length, columns]
        for name in outputs:
            if name and "present" not in name:
                self._columns[name] = columns
                self._known.append(helper.make_tensor_value_info(name, self._kind, shape))
        return outputs[0]
