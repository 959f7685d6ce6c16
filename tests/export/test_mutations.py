"""Models of several attentions with something odd about each, drawn at random; fused and not, they answer alike.

Extra readers of scores and probabilities, outputs in the middle, shared and equal K and V, constants as Q, K or V,
dropout, pasts, second products with the same probabilities, softmax written out, functions and branches around a site.
Nothing need be fused here, but whatever is must give the same answers at every size, and the report must account for
every attention that was drawn.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse, unfuse
from models import TOLERANCE, has_library, run
from onnx import TensorProto, helper, numpy_helper

HEADS, SIZE = 2, 4
SIZES = ({"b": 2, "s": 3, "t": 5}, {"b": 1, "s": 4, "t": 2})
EVERYDAY, MANY = 45, 3000
FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


class Site:
    """The nodes of one attention, as they grow; constants are nodes, so that all of it may move into a function."""

    def __init__(self, draw: random.Random, prefix: str, opset: int) -> None:
        self.draw, self.prefix, self.opset = draw, prefix, opset
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, str] = {}  # by role: what other nodes may read, too

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{self.prefix}{op_type}{len(self.nodes)}{'_' * i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, names[0], **attributes))
        return names[0]

    def constant(self, value: object) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def number(self, *choices: float) -> str:
        return self.constant(np.float32(self.draw.choice(choices)))

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def operator(self, q: str, k: str, v: str, masks: list[str], is_square: bool) -> str:
        """An Attention; its scores may be read, too."""
        attributes: dict[str, Any] = {"is_causal": 1} if is_square and self.chance(0.5) else {}
        attributes |= {"scale": 0.3} if self.chance(0.3) else {}
        attributes |= {"softcap": 3.0} if self.chance(0.2) else {}
        outputs = 4 if self.chance(0.2) else 1
        y = self.op("Attention", q, k, v, *masks[:1], outputs=outputs, **attributes)
        if outputs == 4:
            for index in (1, 2):
                self.nodes[-1].output[index] = ""
            self.values["scores"] = self.nodes[-1].output[3]
        return y

    def attention(self, q: str, k: str, v: str, masks: dict[str, int]) -> str:
        if self.chance(0.3):
            q = self.op(self.draw.choice(["Mul", "Div"]), q, self.number(0.5, 2.0))
        if self.chance(0.15):
            past = self.op("Slice", k, *(self.constant([n]) for n in (0, 1, 2)))
            k, v = self.op("Concat", past, k, axis=2), self.op("Concat", past, v, axis=2)
        if self.chance(0.15):
            k, v = (self.repeated(x) for x in (k, v))
        if self.chance(0.2):
            scores = self.op("Einsum", q, k, equation="bhqd,bhkd->bhqk")
        else:
            self.values["kt"] = kt = self.op("Transpose", k, perm=[0, 1, 3, 2])
            scores = self.op("MatMul", q, kt)
        self.values["product"] = scores
        scores = self.between(scores, masks, (q, k))
        self.values["scores"] = scores
        weights = self.softmax(scores)
        self.values["probabilities"] = weights
        if self.chance(0.25):
            outputs = 2 if self.chance(0.3) else 1
            weights = self.op("Dropout", weights, self.number(0.1, 0.5), *self.training(), outputs=outputs)
        if self.chance(0.1):
            weights = self.op("Where", self.op("IsNaN", weights), self.number(0.0), weights)
        self.values["weights"] = weights
        y = self.op("MatMul", weights, v)
        if self.chance(0.1):  # a second V under the same probabilities
            y = self.op("Add", y, self.op("MatMul", weights, self.op("Neg", v)))
        return y

    def training(self) -> list[str]:
        return [self.constant(np.array(False))] if self.chance(0.5) else []

    def repeated(self, x: str) -> str:
        """One head for all."""
        one = self.op("Slice", x, *(self.constant([n]) for n in (0, 1, 1)))
        return self.op("Expand", one, self.constant(np.array([1, HEADS, 1, 1])))

    def between(self, scores: str, masks: dict[str, int], ends: tuple[str, str]) -> str:
        if self.chance(0.6):
            scores = self.op(self.draw.choice(["Mul", "Div"]), scores, self.number(0.5, 2.0))
        if self.chance(0.15):
            cap = self.number(3.0)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        if self.chance(0.1):
            scores = self.op(self.draw.choice(["Sin", "Relu", "Neg", "Identity"]), scores)
        for name, kind in masks.items():
            if self.chance(0.5):
                if kind == BOOL:
                    fill = self.number(-np.inf, float(np.finfo(np.float32).min), -1e4)
                    pair = (scores, fill) if self.chance(0.7) else (fill, scores)
                    scores = self.op("Where", name, *pair)
                else:
                    scores = self.op("Add", *self.draw.sample([scores, name], 2))
        if self.chance(0.3):
            scores = self.causal(scores, ends)
        return scores

    def causal(self, scores: str, ends: tuple[str, str]) -> str:
        if self.chance(0.2):
            shape = self.op("Shape", scores)
            rows, columns = (self.op("Gather", shape, self.constant(n)) for n in (2, 3))
        else:
            rows, columns = (self.op("Gather", self.op("Shape", end), self.constant(2)) for end in ends)
        zero, one = self.constant(0), self.constant(1)
        row = self.op("Unsqueeze", self.op("Range", zero, rows, one), self.constant([1]))
        keep = self.op(self.draw.choice(["LessOrEqual", "Less"]), self.op("Range", zero, columns, one), row)
        return self.op("Where", keep, scores, self.number(-np.inf, float(np.finfo(np.float32).min)))

    def softmax(self, scores: str) -> str:
        form = self.draw.choice(["Softmax"] * 6 + ["axis", "exp", "maximum", "log", "double"])
        last = self.constant([-1])
        if form == "axis":
            return self.op("Softmax", scores, axis=self.draw.choice([1, 2, 3, -2]))
        if form == "log":
            return self.op("Exp", self.op("LogSoftmax", scores, axis=-1))
        if form == "double":
            wide = self.op("Softmax", self.op("Cast", scores, to=TensorProto.DOUBLE), axis=-1)
            return self.op("Cast", wide, to=FLOAT)
        if form in ("exp", "maximum"):
            if form == "maximum":
                scores = self.op("Sub", scores, self.op("ReduceMax", scores, last))
            e = self.op("Exp", scores)
            total = self.op("ReduceSum", e, last)
            return self.op("Div", e, self.op("Add", total, self.number(1e-6)) if self.chance(0.2) else total)
        return self.op("Softmax", scores, axis=self.draw.choice([-1, 3]))


class Drawing:
    """A model of one to three sites, each with its mutations."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)
        self.opset = self.draw.choice([18, 18, 23])
        self.nodes: list[onnx.NodeProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.inputs: dict[str, tuple[list[Any], int]] = {"x": (["b", HEADS, "s", SIZE], FLOAT), "on": ([], BOOL)}
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[str] = []
        self.expected = 0
        value, shared = "x", None
        for number in range(self.draw.choice([1, 1, 2, 3])):
            value, shared = self.site(f"n{number}_", value, shared)
        self.outputs.insert(0, value)

    def site(self, prefix: str, x: str, shared: tuple[str, str, str] | None) -> tuple[str, tuple[str, str, str]]:
        site = Site(self.draw, prefix, self.opset)
        q = self.weight(prefix, "q", "s") if site.chance(0.07) else x
        if shared is None or site.chance(0.5):
            length = self.draw.choice(["s", "t"])
            k, v = (self.keys(prefix, name, length, x) for name in "kv")
            shared = (k, k if site.chance(0.15) else v, length)
        k, v, length = shared
        masks = {}
        for number in range(self.draw.choice([0, 1, 2])):
            shape = self.draw.choice([["b", 1, 1, length], ["b", 1, "s", length], ["s", length], [length], [1, 1]])
            masks[f"{prefix}m{number}"] = kind = self.draw.choice([FLOAT, BOOL])
            self.inputs[f"{prefix}m{number}"] = (shape, kind)
        if self.opset >= 23 and site.chance(0.4):  # ONNX Runtime's CPU provider takes masks with all rows only
            full = [name for name in masks if self.inputs[name][0][-2:] == ["s", length]]
            y = site.operator(q, k, v, full, length == "s")
        else:
            y = site.attention(q, k, v, masks)
        self.expected += 1
        self.outputs.append(y)
        self.mutate(site)
        self.place(site, prefix, y, [q, k, v, *masks])
        return (self.op(prefix, "Add", y, x) if site.chance(0.5) else y), shared

    def keys(self, prefix: str, name: str, length: str, x: str) -> str:
        if self.draw.random() < 0.08:
            return self.weight(prefix, name, length)
        if length == "s" and self.draw.random() < 0.4:
            return self.op(prefix, self.draw.choice(["Neg", "Tanh"]), x)
        self.inputs[f"{prefix}{name}"] = (["b", HEADS, length, SIZE], FLOAT)
        return f"{prefix}{name}"

    def weight(self, prefix: str, name: str, length: str) -> str:
        """A constant in an input's place: with the sizes of a batch of one, or an initializer that broadcasts."""
        if self.draw.random() < 0.5:
            self.inputs[f"{prefix}{name}_sizes"] = (["b", HEADS, length, SIZE], FLOAT)
            one = self.tensor(f"{prefix}{name}", np.full((1, HEADS, 1, SIZE), 0.5, np.float32))
            return self.op(prefix, "Expand", one, self.op(prefix, "Shape", f"{prefix}{name}_sizes"))
        self.inputs["x"] = ([1, HEADS, "s", SIZE], FLOAT)
        return self.op(prefix, "Add", self.tensor(f"{prefix}{name}", np.ones((1, HEADS, 1, SIZE), np.float32)), "x")

    def tensor(self, name: str, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def op(self, prefix: str, op_type: str, *inputs: str) -> str:
        output = f"{prefix}outer{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], output))
        return output

    def mutate(self, site: Site) -> None:
        """Somebody else reads a value in the middle, or it is an output."""
        if not site.values or not site.chance(0.35):
            return
        role = self.draw.choice(list(site.values))
        value = site.values[role]
        self.outputs.append(value if site.chance(0.5) else site.op("Relu", value))

    def place(self, site: Site, prefix: str, y: str, inputs: list[str]) -> None:
        """The site's nodes where they are, in a function, or in both branches of an If."""
        made = {name for node in site.nodes for name in node.output if name}
        wanted = list(dict.fromkeys([y, *(name for name in self.outputs if name in made)]))
        inputs = list(dict.fromkeys(inputs))
        where = self.draw.random()
        if where < 0.15:
            imports = [helper.make_opsetid("", self.opset)]
            name = f"{prefix}site"
            self.functions.append(helper.make_function("mine", name, inputs, wanted, site.nodes, imports))
            self.nodes.append(helper.make_node(name, inputs, wanted, f"{prefix}call", domain="mine"))
        elif where < 0.25:
            branches = {}
            for branch in ("then", "else"):
                nodes = [renamed(node, made, branch) for node in site.nodes]
                values = [helper.make_tensor_value_info(f"{branch}{name}", FLOAT, [None] * 4) for name in wanted]
                branches[f"{branch}_branch"] = helper.make_graph(nodes, branch, [], values)
            self.nodes.append(helper.make_node("If", ["on"], wanted, f"{prefix}if", **branches))
            self.expected += 1
        else:
            self.nodes += site.nodes

    def model(self) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(name, FLOAT, [None] * 4) for name in dict.fromkeys(self.outputs)]
        graph = helper.make_graph(self.nodes, "mutant", inputs, outputs, self.constants)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("mine", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=self.functions)

    def feeds(self, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
        numbers = np.random.default_rng(seed)
        if self.inputs["x"][0][0] == 1:
            sizes = sizes | {"b": 1}
        feeds = {}
        for name, (shape, kind) in self.inputs.items():
            dims = [sizes.get(dim, dim) for dim in shape]
            if kind == BOOL:
                feeds[name] = numbers.random(dims) < 0.7
            else:
                feeds[name] = numbers.standard_normal(dims).astype(np.float32)
        return {name: np.asarray(x) for name, x in feeds.items()}


def renamed(node: onnx.NodeProto, made: set[str], branch: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for names in (copy.input, copy.output):
        names[:] = [f"{branch}{name}" if name in made else name for name in names]
    return copy


def difference(want: np.ndarray, got: np.ndarray) -> str:
    """What is wrong with `got`; where `want` is NaN anything goes."""
    defined, finite = ~np.isnan(want), np.isfinite(want)
    if want.shape != got.shape or not np.array_equal(np.isfinite(got) & defined, finite):
        return "has other sizes, or is not finite elsewhere"
    if not np.array_equal(want[defined & ~finite], got[defined & ~finite]):
        return "has other infinities"
    error = np.abs(want[finite] - got[finite]).max(initial=0)
    return (
        f"is off by {error:.3g}" if error > TOLERANCE["float32"] * max(1, np.abs(want[finite]).max(initial=0)) else ""
    )


def check(seeds: range) -> collections.Counter[str]:
    """Fuses and compares the models of these seeds; how many there were of what."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        drawing = Drawing(f"mutation {seed}")
        model = drawing.model()
        feeds = [drawing.feeds(sizes, seed) for sizes in SIZES]
        try:
            for given in feeds:
                run(model, given)
        except Exception:  # sizes that do not go together
            seen["not runnable"] += 1
            continue
        fused, report = fuse(model)
        assert report.total == drawing.expected, f"seed {seed}: {drawing.expected} drawn, {report}"
        assert "failed" not in str(report), f"seed {seed}: {report}"
        seen["sites"] += report.total
        seen["fused"] += report.fused
        if not report.fused:
            assert fused is model
            continue
        onnx.checker.check_model(fused, full_check=True)
        back, way_back = unfuse(fused)
        compared = [(fused, False), (fused, has_library())]
        if "the most negative number throughout" not in str(way_back):  # which ONNX Runtime takes for -inf
            compared.append((back, False))
        for given in feeds:
            if report.total > 1 and any(np.isnan(output).any() for output in run(model, given)):
                continue  # where NaN came out anything may, and what is behind that has other inputs
            expected = run(model, given)
            for result, library in compared:
                for output, want, got in zip(
                    fused.graph.output, expected, run(result, given, library=library), strict=True
                ):
                    wrong = difference(want, got)
                    assert not wrong, f"seed {seed}: '{output.name}' {wrong} ({library=})\n{report}"
        seen["models"] += 1
    return seen


@pytest.mark.parametrize("part", range(3))
def test_same_answers(part: int) -> None:
    share = EVERYDAY // 3
    seen = check(range(part * share, (part + 1) * share))
    assert seen["not runnable"] <= share // 3
    assert seen["fused"] > seen["sites"] // 4, seen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_same_answers_of_many(part: int) -> None:
    share = MANY // 20
    check(range(EVERYDAY + part * share, EVERYDAY + (part + 1) * share))
