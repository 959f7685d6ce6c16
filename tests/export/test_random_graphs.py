"""Attention and near misses drawn at random, with every dimension of one size so that no mistake shows in a shape.

Whatever fuse makes of such a graph must give the same answers; most of them it must fuse.
"""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import run
from onnx import TensorProto, helper, numpy_helper

N = 2  # of every dimension
GRAPHS = 16  # of a seed


class Drawing:
    """A graph that grows node by node, and the draws that decide how."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: dict[str, tuple[list[int], int]] = {}

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def input(self, shape: list[int], kind: int = TensorProto.FLOAT) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = (shape, kind)
        return name

    def shuffled(self, items: str | range) -> list:
        return self.draw.sample(items, len(items))

    def layout(self, value: str, steps: int, scales: bool = True) -> str:
        """Up to `steps` operators that leave four dimensions."""
        for _ in range(self.draw.randint(0, steps)):
            match self.draw.choice(["transpose", "merge", "unsqueeze", "scale"]):
                case "transpose":
                    value = self.op("Transpose", value, perm=self.shuffled(range(4)))
                case "merge":
                    value = self.reshape(value, self.draw.choice([[4, N, N], [N, 4, N], [N, N, 4]]))
                    value = self.op("Transpose", value, perm=self.shuffled(range(3)))
                    value = self.reshape(value, [N] * 4)
                case "unsqueeze":
                    axis, perm = self.draw.randrange(5), self.shuffled(range(5))
                    value = self.op("Unsqueeze", value, self.constant([axis]))
                    value = self.op("Transpose", value, perm=perm)
                    value = self.op("Squeeze", value, self.constant([perm.index(axis)]))
                case "scale" if scales:
                    number = self.constant(np.float32(self.draw.choice([0.5, 2.0])))
                    value = self.op(self.draw.choice(["Mul", "Div"]), value, number)
        return value

    def reshape(self, value: str, shape: list[int]) -> str:
        return self.op("Reshape", value, self.constant(np.array(shape, np.int64)))

    def mask(self, scores: str, rank: int) -> str:
        """`scores` with a mask of some broadcast shape, perhaps expanded on the way, added or filled in."""
        shape = [self.draw.choice([1, N]) for _ in range(self.draw.randint(1, rank))]
        kind = self.draw.choice([TensorProto.FLOAT, TensorProto.BOOL])
        mask = self.input(shape, kind)
        if self.draw.random() < 0.5:
            wide = [self.draw.choice([size, N]) for size in shape]
            mask = self.op("Expand", mask, self.constant(np.array(wide, np.int64)))
            if len(wide) == 4:
                mask = self.op("Transpose", mask, perm=self.shuffled(range(4)))
        if kind == TensorProto.FLOAT:
            return self.op("Add", *self.shuffled([scores, mask]))  # type: ignore[arg-type]
        fill = self.constant(np.float32(self.draw.choice([-np.inf, -3.4e38])))
        return self.op("Where", mask, *self.shuffled([scores, fill]))  # type: ignore[arg-type]

    def attention(self) -> str:
        """Two products with a softmax between them, by MatMul in four or three dimensions or by Einsum."""
        q, k, v = (self.layout(self.input([N] * 4), 3, scales=name != "v") for name in "qkv")
        if self.draw.random() < 0.2:  # heads, or something else, repeated
            axis = self.constant([self.draw.randrange(4)])
            for name in "kv":
                one = self.op("Slice", k if name == "k" else v, self.constant([0]), self.constant([1]), axis)
                wide = self.op("Expand", one, self.constant([N] * 4))
                k, v = (wide, v) if name == "k" else (k, wide)
        kind = self.draw.choice(["matmul", "merged", "einsum"])
        rank = 3 if kind == "merged" else 4
        labels = ""
        if kind == "einsum":  # a and b are batch and heads, c queries, e keys
            labels = "".join(self.shuffled("abc")) + "e"
            first = f"{''.join(self.shuffled('abcd'))},{''.join(self.shuffled('abed'))}->{labels}"
            scores = self.op("Einsum", q, k, equation=first)
        else:
            if kind == "merged":
                q, k, v = (self.reshape(value, [N * N, N, N]) for value in (q, k, v))
            if self.draw.random() < 0.7:
                k = self.op("Transpose", k, perm=[0, 2, 1] if rank == 3 else [0, 1, 3, 2])
            scores = self.op("MatMul", q, k)
        for _ in range(self.draw.choice([0, 1, 1, 2])):
            scores = self.mask(scores, rank)
        axis = -1 if self.draw.random() < 0.9 else self.draw.randrange(rank - 1)
        weights = self.op("Softmax", scores, axis=axis)
        if kind == "einsum":
            second = f"{labels},{''.join(self.shuffled('abef'))}->{''.join(self.shuffled('abcf'))}"
            return self.layout(self.op("Einsum", weights, v, equation=second), 2, scales=False)
        output = self.op("MatMul", weights, v)
        return self.layout(self.reshape(output, [N] * 4) if rank == 3 else output, 2, scales=False)

    def model(self) -> onnx.ModelProto:
        output = self.op("Identity", self.attention())
        inputs = [helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [N] * 4)]
        graph = helper.make_graph(self.nodes, "random", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("seed", range(6))
def test_same_answers(seed: int) -> None:
    fused_graphs = 0
    for number in range(GRAPHS):
        drawing = Drawing(f"{seed} {number}")
        model = drawing.model()
        numbers = np.random.default_rng(number)
        inputs = {
            name: numbers.random(shape) < 0.6
            if kind == TensorProto.BOOL
            else numbers.standard_normal(shape, np.float32)
            for name, (shape, kind) in drawing.inputs.items()
        }
        fused, report = fuse(model)
        assert "failed" not in str(report), f"graph {number}: {report}"
        if not report.fused:
            assert fused is model
            continue
        fused_graphs += 1
        onnx.checker.check_model(fused, full_check=True)
        (want,), (got,) = run(model, inputs), run(fused, inputs)
        defined = ~np.isnan(want)
        np.testing.assert_allclose(got[defined], want[defined], atol=1e-4, err_msg=f"graph {number}: {report}")
    assert fused_graphs >= GRAPHS // 2
