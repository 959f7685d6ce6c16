"""Where attention is, whatever the rules can do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.sites.flow import Axis, Flow, subgraphs
from flashonnx.export.values.facts import Facts

WRITTEN_OUT = "Exp / ReduceSum"
LOG_SOFTMAX = "LogSoftmax, Exp"

_SOFTMAXES = {("", "Softmax"), ("com.microsoft", "BiasSoftmax"), ("com.microsoft", "QLinearSoftmax")}
_WITHOUT_SOFTMAX = frozenset(["LinearAttention"])
# What a sum of exponentials goes through before it divides: an epsilon, a bound, a sink, its shape.
_ON_THE_WAY = frozenset(
    ["Add", "Cast", "Clip", "Expand", "Identity", "Max", "Reciprocal", "Reshape", "Squeeze", "Sum", "Unsqueeze"]
)
_STEPS = 8
_LONGEST_CHAIN = 512


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A place in the model that computes attention.

    Attributes:
        node: the Softmax or its like, or the attention operator.
        kind: what it is, as rules name it.
        where: the subgraphs or functions that hold it, with " / " behind each.
        scores: the tensor that is normalised, None for an operator that does not show it.
        products: the two products around it, none for an operator.
    """

    node: ir.Node
    kind: str
    where: str = ""
    scores: ir.Value | None = None
    products: tuple[ir.Node, ...] = ()

    @property
    def name(self) -> str:
        """What the report calls it."""
        outputs = [value.name for value in self.node.outputs if value.name]
        return self.where + (self.node.name or (outputs[0] if outputs else self.node.op_type))

    def chain(self) -> list[ir.Node]:
        """The operators from the first product to the second, on the shortest way."""
        if not self.products:
            return [self.node]
        first, second = self.products
        came: dict[ir.Node, ir.Node] = {}
        pending = [first]
        for node in pending:
            for user in (use.node for value in node.outputs for use in value.uses()):
                if user not in came and len(came) < _LONGEST_CHAIN:
                    came[user] = node
                    pending.append(user)
            if second in came:
                chain = [second]
                while chain[-1] is not first:
                    chain.append(came[chain[-1]])
                return chain[::-1]
        return [first, self.node, second]  # through a subgraph


class Finder:
    """Finds the attention of one model."""

    def __init__(self, model: ir.Model, facts: Facts) -> None:
        self._model = model
        self._facts = facts
        self._parents: dict[ir.Graph, ir.Node] = {}
        self.flow = Flow(facts, self._parents)

    def find(self) -> list[Candidate]:
        """Every attention of the model, its subgraphs and its functions, in order."""
        functions = [function for function in self._model.functions.values() if function.domain != schema.DOMAIN]
        holders: list[tuple[ir.Graph | ir.Function, str]] = [
            (self._model.graph, ""),
            *((function, f"function {function.domain}::{function.name} / ") for function in functions),
        ]
        places = [place for holder, where in holders for place in self._places(holder, where)]
        found = ((self._candidate(node), where) for node, where in places)
        return [dataclasses.replace(candidate, where=where) for candidate, where in found if candidate is not None]

    def _places(self, nodes: ir.Graph | ir.Function, where: str) -> Iterator[tuple[ir.Node, str]]:
        """All nodes and where they are, subgraphs before the nodes that have them."""
        for node in nodes:
            for graph, name in subgraphs(node):
                self._parents[graph] = node
                yield from self._places(graph, f"{where}{node.op_type} {node.name} {name} / ")
            yield node, where

    def _candidate(self, node: ir.Node) -> Candidate | None:
        kind = self._operator(node)
        if kind is not None:
            return Candidate(node, kind)
        if (node.domain, node.op_type) in _SOFTMAXES:
            kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            return self._between(node, kind, node.inputs[0] if node.inputs else None, node, _axis(self._facts, node))
        if node.op_type == "Exp" and not node.domain and node.inputs:
            return self._written_out(node)
        return None

    def _operator(self, node: ir.Node) -> str | None:
        """The kind of an operator that is attention as a whole; a call of a function is not, its body tells."""
        if node.domain == schema.DOMAIN:
            return node.op_type if node.op_type in schema.OPERATORS else None
        if "Attention" not in node.op_type or node.op_type in _WITHOUT_SOFTMAX:
            return None
        if node.op_identifier() in self._model.functions:
            return None
        return node.op_type if node.domain == "" else f"{node.domain}::{node.op_type}"

    def _between(
        self, node: ir.Node, kind: str, scores: ir.Value | None, weights: ir.Node, axis: Axis
    ) -> Candidate | None:
        """A site if `scores` come from a product and what `weights` makes goes into another one."""
        first = self.flow.source(scores, axis)
        if first is None or not weights.outputs:
            return None
        second = self.flow.target(weights.outputs[0], axis)
        if second is None:
            return None
        return Candidate(node, kind, scores=scores, products=(first, second))

    def _written_out(self, exp: ir.Node) -> Candidate | None:
        """A softmax of which `exp` is the exponential."""
        source = exp.inputs[0].producer() if exp.inputs[0] is not None else None
        if source is not None and source.op_type == "LogSoftmax" and not source.domain:
            return self._between(exp, LOG_SOFTMAX, source.inputs[0], exp, _axis(self._facts, source))
        division = self._division(exp)
        return self._between(division[0], WRITTEN_OUT, exp.inputs[0], exp, division[1]) if division else None

    def _division(self, exp: ir.Node) -> tuple[ir.Node, Axis] | None:
        """Where something that derives from `exp` is divided by a sum of it, and the axis of that sum."""
        sums = [use.node for use in exp.outputs[0].uses() if use.node.op_type in ("ReduceSum", "Cast")]
        sums += [use.node for node in sums if node.op_type == "Cast" for use in node.outputs[0].uses()]
        for total in [node for node in sums if node.op_type == "ReduceSum" and not node.domain]:
            pending = [(total.outputs[0], False, 0)]
            for value, inverse, steps in pending:
                for node, index in [(use.node, use.idx) for use in value.uses() if not use.node.domain]:
                    divides = index == 1 if node.op_type == "Div" else inverse and node.op_type == "Mul"
                    if divides and self.flow.derives(node.inputs[1 - index], exp):
                        return node, _reduced_axis(self._facts, total)
                    if node.op_type in _ON_THE_WAY and steps < _STEPS:
                        pending.append((node.outputs[0], inverse or node.op_type == "Reciprocal", steps + 1))
        return None


def find(model: ir.Model, facts: Facts) -> list[Candidate]:
    """Every attention of `model`, its subgraphs and its functions, in order."""
    return Finder(model, facts).find()


def _axis(facts: Facts, node: ir.Node) -> Axis:
    """A softmax's axis, counted from the last."""
    attribute = node.attributes.get("axis")
    axis = attribute.value if attribute is not None else -1
    if not isinstance(axis, int):
        return None
    rank = facts.rank(node.inputs[0]) if node.inputs else None
    return axis if axis < 0 else axis - rank if rank is not None else None


def _reduced_axis(facts: Facts, node: ir.Node) -> Axis:
    attribute = node.attributes.get("axes")
    array = facts.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = list(attribute.as_ints()) if attribute is not None else [] if array is None else array.reshape(-1).tolist()
    rank = facts.rank(node.inputs[0])
    if len(axes) != 1:
        return None
    return axes[0] if axes[0] < 0 else axes[0] - rank if rank is not None else None
