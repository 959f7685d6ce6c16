"""The way from the product of queries and keys to the softmax, and on to the product with V."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir
from flashonnx.export.layout.products import Product, product_of
from flashonnx.export.layout.steps import LAYOUT_OPERATORS, is_repetition
from flashonnx.export.layout.views import scaling
from flashonnx.export.masks.reducer import largest
from flashonnx.export.model.build import called
from flashonnx.export.rules.guards import find_even, find_guard, over_keys
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts


class RefusalError(Exception):
    """A rule's reason not to fuse, in words for the user."""


@dataclasses.dataclass(frozen=True)
class Term:
    """A step that changes scores by position, as seen from the scores.

    A bias is added after multiplication by `number`; a mask replaces the scores by `number` where
    `value` is true (or, `inverted`, where it is false). The scores had the shape from which
    `layouts` operators make that of the softmax.
    """

    value: ir.Value
    number: float
    is_bias: bool
    inverted: bool = False
    layouts: int = 0


@dataclasses.dataclass(frozen=True)
class Scores:
    """softcap * tanh(scale / softcap * product), then `terms` in order, then softmax.

    `layouts` reshape the scores, from the softmax back; `sink` is a column that is put behind them
    before the softmax, or before them if it `leads`; `even`: in rows of nothing but -inf all keys weigh the same;
    `rows` multiply the product, one number for each query of each head or for all of its queries.
    """

    product: Product
    scale: float
    softcap: float
    terms: tuple[Term, ...]
    nodes: tuple[ir.Node, ...]
    layouts: tuple[ir.Node, ...] = ()
    sink: ir.Value | None = None
    leads: bool = False
    even: bool = False
    rows: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Weights:
    """The product with V, and whether a guard turns rows of NaN into zeros on the way there.

    `layouts` reshape the probabilities, from the softmax on.
    """

    product: Product
    probabilities: ir.Value
    guarded: bool
    nodes: tuple[ir.Node, ...]
    layouts: tuple[ir.Node, ...] = ()


_FLOATS = {
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
}


def read_scores(facts: Facts, softmax: ir.Node) -> Scores:
    """What happens between the first product and `softmax`.

    Raises:
        RefusalError: something there has no place in the operator.
    """
    walk = _Walk(facts)
    start = softmax.inputs[0]
    assert start is not None
    return walk.back(start, _State())


@dataclasses.dataclass(frozen=True)
class _State:
    """What was met so far on the way back from the softmax."""

    factor: float = 1.0  # the product of the multipliers since the softmax, or since the tanh
    softcap: float = 0.0
    terms: tuple[Term, ...] = ()
    nodes: tuple[ir.Node, ...] = ()
    layouts: tuple[ir.Node, ...] = ()
    sink: ir.Value | None = None
    leads: bool = False
    even: bool = False
    floor: _Floor | None = None
    rows: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class _Floor:
    """A Max of scores of a type and its lowest number, and how many terms come behind it."""

    name: str
    kind: ir.DataType
    terms: int


class _Walk:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def back(self, value: ir.Value, state: _State) -> Scores:
        node = value.producer()
        if node is None:
            raise RefusalError(f"the scores come from '{value.name}', not from a product")
        product = product_of(self.facts, node)
        if product is not None:
            scale = state.factor * product.factor * (state.softcap or 1.0)
            if state.floor is not None:
                self._check_floor(state.floor, state.terms[: len(state.terms) - state.floor.terms])
            return Scores(
                product, scale, state.softcap, state.terms, (*state.nodes, node), state.layouts, state.sink,
                state.leads, state.even, state.rows,
            )  # fmt: skip
        state = dataclasses.replace(state, nodes=(*state.nodes, node))
        scaled = scaling(self.facts, node)
        if scaled is not None:
            factor = state.factor * scaled[1]
            return self.back(scaled[0], dataclasses.replace(state, factor=factor))
        step = getattr(self, f"_{node.op_type.lower()}", None) if not node.domain else None
        if step is None:
            if node.op_type in LAYOUT_OPERATORS and not node.domain and state.rows is None:
                layouts = (*state.layouts, node)
                return self.back(_input(node, 0), dataclasses.replace(state, layouts=layouts))
            raise RefusalError(f"{node.op_type} '{called(node)}' stands between the product and the softmax")
        return step(node, state)

    def _identity(self, node: ir.Node, state: _State) -> Scores:
        return self.back(_input(node, 0), state)

    def _cast(self, node: ir.Node, state: _State) -> Scores:
        if ir.DataType(node.attributes["to"].as_int()) not in _FLOATS:
            raise RefusalError(f"the scores are cast to integers ('{called(node)}')")
        return self.back(_input(node, 0), state)

    def _dropout(self, node: ir.Node, state: _State) -> Scores:
        if not is_inference_dropout(self.facts, node):
            raise RefusalError(f"dropout '{called(node)}' is in training mode")
        return self.back(_input(node, 0), state)

    def _mul(self, node: ir.Node, state: _State) -> Scores:
        """One number for each row of scores, as Swin V2 has one for each head: it may multiply the query as well."""
        for scores, rows in (node.inputs, node.inputs[::-1]):
            dims, known = self.facts.dims(rows), self.facts.dims(scores)
            if scores is None or self.facts.is_fixed(scores) or not dims or not known or known[-1] == 1:
                continue
            if dims[-1] == 1 and len(dims) <= len(known) and state.rows is None:
                return self.back(scores, dataclasses.replace(state, rows=rows))
        raise RefusalError(f"Mul '{called(node)}' stands between the product and the softmax")

    def _tanh(self, node: ir.Node, state: _State) -> Scores:
        if state.rows is not None:
            raise RefusalError(f"scores are multiplied row by row behind the softcap ('{called(node)}')")
        if state.softcap:
            raise RefusalError(f"two Tanh in a row ('{called(node)}') on the scores")
        if state.factor <= 0:
            raise RefusalError("the softcap is not positive")
        # Terms met so far come after the softcap, and their factors are settled.
        return self.back(_input(node, 0), dataclasses.replace(state, softcap=state.factor, factor=1.0))

    def _add(self, node: ir.Node, state: _State) -> Scores:
        return self._bias(node, state, 1.0)

    def _sub(self, node: ir.Node, state: _State) -> Scores:
        top = _input(node, 1).producer()
        if top is None or top.op_type != "ReduceMax" or top.inputs[0] is not node.inputs[0]:
            return self._bias(node, state, -1.0)
        # The softmax does not see what is taken off a whole row, unless some of it was compared with other numbers.
        fills = [term.number for term in state.terms if not term.is_bias]
        if not over_keys(self.facts, top) or state.sink or state.softcap or not all(map(is_minus_infinity, fills)):
            raise RefusalError(f"the maximum that '{called(node)}' takes off the scores is not that of whole rows")
        return self.back(_input(node, 0), dataclasses.replace(state, nodes=(*state.nodes, top)))

    def _max(self, node: ir.Node, state: _State) -> Scores:
        """A floor under the scores, as XGLM has it at the type's lowest number: of all scores it could change -inf."""
        scores, number = _beside_number(self.facts, node)
        kind = self.facts.dtype(scores)
        if is_minus_infinity(number):
            return self.back(scores, state)
        if kind is None or number > float(kind.min) or state.factor != 1.0 or state.softcap or state.floor:
            raise RefusalError(f"Max '{called(node)}' keeps scores above {number:.6g}, which the operator does not")
        floor = _Floor(called(node), kind, len(state.terms))
        return self.back(scores, dataclasses.replace(state, floor=floor))

    def _check_floor(self, floor: _Floor, terms: tuple[Term, ...]) -> None:
        """It is without effect where no score can be -inf: all that `terms` may add is no more than the type has.

        The lowest number of float32 or bfloat16 swallows what it is added to; of float16 -17 and it are -inf.
        """
        if floor.kind not in (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
            kind = floor.kind.name.lower()
            raise RefusalError(
                f"Max '{floor.name}' of {kind} changes scores that became -inf by a mask; export in float32 or bfloat16"
            )
        sizes = [largest(self.facts, term.value) if term.is_bias else 1.0 for term in terms]
        known = [abs(term.number) * size for term, size in zip(terms, sizes, strict=True) if size is not None]
        if len(known) < len(sizes) or not sum(known) <= float(floor.kind.max):
            raise RefusalError(
                f"Max '{floor.name}' changes scores that masks may have set to -inf; use one mask, of finite numbers"
            )

    def _concat(self, node: ir.Node, state: _State) -> Scores:
        """One more column: a sink."""
        rank, axis = self.facts.rank(node.outputs[0]), node.attributes["axis"].as_int()
        if len(node.inputs) != 2 or rank is None or axis not in (-1, rank - 1):
            raise RefusalError(f"Concat '{called(node)}' stands between the product and the softmax")
        changed = (state.terms, state.layouts, state.sink, state.softcap, state.factor != 1.0, state.even, state.floor)
        if any(changed) or state.rows is not None:
            raise RefusalError(f"the scores are changed after a column was put beside them ('{called(node)}')")
        for scores, sink in ((0, 1), (1, 0)):
            dims = self.facts.dims(node.inputs[sink])
            if dims is not None and dims[-1] == 1 and not self.facts.is_fixed(node.inputs[scores]):
                found = dataclasses.replace(state, sink=_input(node, sink), leads=sink == 0)
                return self.back(_input(node, scores), found)
        raise RefusalError(f"Concat '{called(node)}' puts more than a column beside the scores")

    def _bias(self, node: ir.Node, state: _State, sign: float) -> Scores:
        reasons = []
        for scores, bias in ((0, 1), (1, 0)):
            if scores == 1 and sign < 0:
                continue
            if self.facts.is_fixed(node.inputs[scores]):
                continue
            value, factor = self._unscaled(_input(node, bias))
            term = Term(value, sign * state.factor * factor, is_bias=True)
            try:
                return self._with_term(_input(node, scores), term, node, state)
            except RefusalError as reason:
                reasons.append(reason)
        raise reasons[0] if reasons else RefusalError(f"'{called(node)}' adds no scores")

    def _unscaled(self, value: ir.Value) -> tuple[ir.Value, float]:
        """`value` and the number that multiplies it behind a repetition, as baddbmm has it for beta."""
        node = value.producer()
        scaled = scaling(self.facts, node) if node is not None else None
        if scaled is None or scaled[1] <= 0:
            return value, 1.0
        made = scaled[0].producer()
        is_layout = made is not None and not made.domain and made.op_type in LAYOUT_OPERATORS
        is_layout = is_layout or (made is not None and is_repetition(self.facts, made))
        return scaled if is_layout or scaled[1] == 1.0 else (value, 1.0)

    def _where(self, node: ir.Node, state: _State) -> Scores:
        condition = _input(node, 0)
        if state == _State(nodes=state.nodes) and (test := find_even(self.facts, node)) is not None:
            found = dataclasses.replace(state, nodes=(*state.nodes, *test), even=True)
            return self.back(_input(node, 2), found)
        for constant, scores, inverted in ((1, 2, False), (2, 1, True)):
            number = self.facts.uniform(node.inputs[constant])
            if number is not None and not self.facts.is_fixed(node.inputs[scores]):
                dims = self.facts.dims(node.inputs[constant])
                if dims is None or any(size != 1 for size in dims):
                    # a filled tensor might widen the scores; its size must be the scores'
                    known = self.facts.dims(node.inputs[scores])
                    if dims is None or known is None or dims != known[-len(dims) :]:
                        raise RefusalError(f"the size of the fill of Where '{called(node)}' is not known")
                term = Term(condition, number * state.factor, is_bias=False, inverted=inverted)
                return self._with_term(_input(node, scores), term, node, state)
        raise RefusalError(f"Where '{called(node)}' does not fill masked scores with one number")

    def _with_term(self, scores: ir.Value, term: Term, node: ir.Node, state: _State) -> Scores:
        if state.softcap:
            raise RefusalError(
                f"'{called(node)}' changes scores before the softcap; the operator applies softcap first"
            )
        if state.rows is not None:
            raise RefusalError(f"'{called(node)}' changes scores before they are multiplied row by row")
        term = dataclasses.replace(term, layouts=len(state.layouts))
        return self.back(scores, dataclasses.replace(state, terms=(term, *state.terms)))


def _beside_number(facts: Facts, node: ir.Node) -> tuple[ir.Value, float]:
    """The scores that `node` takes beside one number, and that."""
    for scores, other in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
        number, rank, dims = facts.uniform(other), facts.rank(scores), facts.dims(other)
        is_narrow = rank is not None and dims is not None and len(dims) <= rank and all(size == 1 for size in dims)
        if scores is not None and number is not None and is_narrow and not facts.is_fixed(scores):
            return scores, number
    raise RefusalError(f"{node.op_type} '{called(node)}' stands between the product and the softmax")


def read_weights(facts: Facts, softmax: ir.Node, sink: ir.Value | None = None, leads: bool = False) -> Weights:
    """What happens between `softmax` and the product with V; a `sink`'s column must go there.

    Raises:
        RefusalError: the probabilities are used otherwise too, or something else stands there.
    """
    nodes: list[ir.Node] = []
    layouts: list[ir.Node] = []
    value = softmax.outputs[0]
    guarded, drops = False, sink is not None
    while True:
        if value.is_graph_output():
            raise RefusalError(
                f"the probabilities '{value.name}' are an output of the model; export it without output_attentions"
            )
        users = [use.node for use in value.uses() if use.node.op_type != "Shape" or use.node.domain]
        guard = find_guard(facts, softmax, value, users)
        if guard is not None:
            nodes += guard[1]
            guarded, node = True, guard[0]
        elif len(users) != 1:
            names = ", ".join(f"{node.op_type} '{called(node)}'" for node in users)
            raise RefusalError(f"the probabilities are used more than once: {names or 'not at all'}")
        else:
            node = users[0]
        product = product_of(facts, node)
        if product is not None:
            if drops:
                raise RefusalError("the column beside the scores is weighed too")
            return Weights(product, value, guarded, (*nodes, node), tuple(layouts))
        if drops and _drops_column(facts, node, leads):
            drops = False
        elif node.op_type in LAYOUT_OPERATORS and not node.domain and sink is None:
            layouts.append(node)
        elif guard is None and not _passes(facts, node):
            raise RefusalError(f"{node.op_type} '{called(node)}' stands between the softmax and V")
        nodes.append(node)
        value = node.outputs[0]


def _drops_column(facts: Facts, node: ir.Node, leads: bool) -> bool:
    """Whether `node` is a Slice that leaves out the last column, or the first one if the sink `leads`."""
    if node.op_type != "Slice" or node.domain or len(node.inputs) < 4:
        return False
    dims = facts.dims(node.inputs[0])
    start, end, axis = (facts.ints(value) for value in node.inputs[1:4])
    step = facts.ints(node.inputs[4]) if len(node.inputs) > 4 else (Dim.of(1),)
    if dims is None or not (start and end and axis and step) or any(len(x) != 1 for x in (start, end, axis, step)):
        return False
    if axis[0].value not in (-1, len(dims) - 1) or step[0] != 1:
        return False
    if leads:
        return start[0] == 1 and (end[0] == dims[-1] or (end[0].value or 0) >= 2**31 - 1)
    return start[0] == 0 and (end[0] == -1 or end[0] == dims[-1] - 1)


def _passes(facts: Facts, node: ir.Node) -> bool:
    if node.domain:
        return False
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int()) in _FLOATS
    return node.op_type == "Identity" or is_inference_dropout(facts, node)


def is_inference_dropout(facts: Facts, node: ir.Node) -> bool:
    """Whether `node` is a Dropout that passes its input on."""
    if node.op_type != "Dropout" or node.domain:
        return False
    if any(output.is_graph_output() or output.uses() for output in node.outputs[1:]):
        return False
    training = node.inputs[2] if len(node.inputs) > 2 else None
    return training is None or facts.uniform(training) == 0.0


def is_minus_infinity(number: float) -> bool:
    return math.isinf(number) and number < 0


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise RefusalError(f"{node.op_type} '{called(node)}' lacks input {index}")
    return value
