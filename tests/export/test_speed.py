"""Fusion's work grows with the model, not with its square, and weights are never read.

Work is counted, in calls of Python functions, not timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from flashonnx.export import fuse, unfuse
from flashonnx.export.model import build
from flashonnx.export.sites.finder import Finder
from flashonnx.export.values.facts import Facts
from onnx import TensorProto, helper, numpy_helper

HEADS, KEY_HEADS, SIZE = 4, 2, 8
WIDTH = HEADS * SIZE


class Decoder:
    """A decoder as exporters write Llama: rotary positions, grouped keys, one mask computed from the padding."""

    def __init__(self, layers: int, *, named: bool = True, weights: str = "", width: int = WIDTH) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.named, self.file, self.width, self.end = named, weights, width, 0
        self.size = width // HEADS
        x = self.op("Gather", self.weight("embedding", 50, width), "ids")
        mask = self.mask()
        for number in range(layers):
            x = self.op("Add", x, self.attention(self.norm(x), number, mask))
            up = self.op("MatMul", self.norm(x), self.weight(f"up_{number}", width, 4 * width))
            down = self.weight(f"down_{number}", 4 * width, width)
            x = self.op("Add", x, self.op("MatMul", self.op("Mul", up, self.op("Sigmoid", up)), down))
        self.op("Identity", x, output="y")

    def op(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"v{len(self.nodes)}"
        name = f"node_{len(self.nodes)}" if self.named else ""
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def constant(self, value: object) -> str:
        array = np.asarray(value)
        name = f"c_{array.dtype}_{'_'.join(map(str, array.reshape(-1)))}_{array.ndim}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def weight(self, name: str, *shape: int) -> str:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        size = int(np.prod(shape)) * 4
        if self.file:
            tensor.data_location = TensorProto.EXTERNAL
            for key, text in (("location", self.file), ("offset", str(self.end)), ("length", str(size))):
                tensor.external_data.add(key=key, value=text)
        else:
            tensor.raw_data = bytes(size)
        self.end += size
        self.constants[name] = tensor
        return name

    def mask(self) -> str:
        length = self.op("Gather", self.op("Shape", "ids"), self.constant(1))
        place = self.op("Range", self.constant(0), length, self.constant(1))
        row = self.op("Unsqueeze", place, self.constant([1]))
        causal = self.op("LessOrEqual", self.op("Unsqueeze", place, self.constant([0])), row)
        seen = self.op("Unsqueeze", self.op("Cast", "padding", to=TensorProto.BOOL), self.constant([1, 2]))
        both = self.op("And", seen, self.op("Unsqueeze", causal, self.constant([0, 1])))
        angle = self.op("Cast", row, to=TensorProto.FLOAT)
        self.cos, self.sin = self.op("Cos", angle), self.op("Sin", angle)
        least = self.constant(np.finfo(np.float32).min)
        return self.op("Where", both, self.constant(np.float32(0)), least)

    def norm(self, x: str) -> str:
        square = self.op("ReduceMean", self.op("Mul", x, x), self.constant([-1]))
        return self.op("Div", x, self.op("Sqrt", self.op("Add", square, self.constant(np.float32(1e-6)))))

    def attention(self, x: str, number: int, mask: str) -> str:
        q, k, v = (
            self.op(
                "Transpose",
                self.op(
                    "Reshape",
                    self.op("MatMul", x, self.weight(f"{name}_{number}", self.width, heads * self.size)),
                    self.constant([0, 0, heads, self.size]),
                ),
                perm=[0, 2, 1, 3],
            )
            for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS))
        )
        q, k = (
            self.op("Add", self.op("Mul", t, self.cos), self.op("Mul", self.op("Neg", t), self.sin)) for t in (q, k)
        )
        k, v = (self.repeat(t) for t in (k, v))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Add", self.op("Mul", scores, self.constant(np.float32(0.3))), mask)
        y = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        flat = self.op("Reshape", y, self.constant([0, 0, self.width]))
        return self.op("MatMul", flat, self.weight(f"o_{number}", self.width, self.width))

    def repeat(self, x: str) -> str:
        sizes = [self.op("Gather", self.op("Shape", "ids"), self.constant([i])) for i in (0, 1)]
        size, group = self.constant([self.size]), HEADS // KEY_HEADS
        wide = self.op("Concat", sizes[0], self.constant([KEY_HEADS, group]), sizes[1], size, axis=0)
        flat = self.op("Concat", sizes[0], self.constant([HEADS]), sizes[1], size, axis=0)
        return self.op("Reshape", self.op("Expand", self.op("Unsqueeze", x, self.constant([2])), wide), flat)

    def model(self) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", "s"]) for n in ("ids", "padding")]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "s", self.width])]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, list(self.constants.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions are called meanwhile."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def grows_linearly(work: Callable[[int], int], size: int) -> None:
    """Work is a + b * size: what the step from two to four sizes adds is twice what that from one to two does."""
    first, second, last = (work(size * factor) for factor in (1, 2, 4))
    assert second > first > 0
    assert last - second <= 2.2 * (second - first), (first, second, last)


def test_work_grows_with_the_number_of_layers() -> None:
    def work(layers: int) -> int:
        model = ir.from_proto(Decoder(layers).model())

        def fuse_all() -> None:
            _, report = fuse(model)
            assert report.fused == report.total == layers

        return calls(fuse_all)

    grows_linearly(work, 2)


def test_work_of_unfuse() -> None:
    def work(layers: int) -> int:
        fused, _ = fuse(Decoder(layers).model())
        model = ir.from_proto(fused)
        return calls(lambda: unfuse(model))

    grows_linearly(work, 2)


def test_names_of_nodes_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all stems are alike, a new name is not looked for among all that there are."""

    class Counting(set):
        looks = 0

        def __contains__(self, item: object) -> bool:
            Counting.looks += 1
            return super().__contains__(item)

    ordinary = build.Names.__init__

    def counted(self: build.Names, model: ir.Model) -> None:
        ordinary(self, model)
        self._taken = Counting(self._taken)

    monkeypatch.setattr(build.Names, "__init__", counted)

    def work(layers: int) -> int:
        Counting.looks = 0
        _, report = fuse(Decoder(layers, named=False).model())
        assert report.fused == layers
        return Counting.looks

    grows_linearly(work, 3)


def test_softmaxes_that_are_none() -> None:
    """Each walk ends after a number of values, however large the graph around it."""

    def work(count: int) -> int:
        steps, value = [], "x"
        for number in range(200 * count):
            steps.append(helper.make_node("Add", [value, "x"], [f"a{number}"]))
            value = f"a{number}"
        steps += [helper.make_node("Softmax", [f"a{200 * n + 199}"], [f"p{n}"]) for n in range(count)]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "p0")]
        graph = helper.make_graph(steps, "sums", values[:1], values[1:])
        model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
        finder = Finder(model, Facts(model))
        assert not finder.find()
        return finder.flow.visits

    grows_linearly(work, 3)


def test_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion parameters in a file that is all holes: fused, written beside it, unfused, without a look into it."""
    decoder = Decoder(22, weights="weights.bin", width=2048)
    assert decoder.end > 4e9
    path, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    onnx.save(decoder.model(), path)
    with open(weights, "wb") as file:
        file.truncate(decoder.end)
    blocks = weights.stat().st_blocks

    def fail(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", fail)
    monkeypatch.setattr(ir.ExternalTensor, "tobytes", fail)
    monkeypatch.setattr(ir.ExternalTensor, "_load", fail)
    _, report = fuse(path, tmp_path / "fused.onnx")
    assert (report.fused, report.total) == (22, 22)
    unfuse(tmp_path / "fused.onnx", tmp_path / "back.onnx")
    assert sorted(os.listdir(tmp_path)) == ["back.onnx", "fused.onnx", "model.onnx", "weights.bin"]
    assert weights.stat().st_blocks == blocks
    assert sum((tmp_path / name).stat().st_size for name in ("fused.onnx", "back.onnx")) < 1e6
    kept = onnx.load(tmp_path / "fused.onnx", load_external_data=False).graph.initializer
    (up,) = [tensor for tensor in kept if tensor.name == "up_3"]
    assert {entry.key: entry.value for entry in up.external_data}["location"] == "weights.bin"
