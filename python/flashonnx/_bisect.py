"""Where two models part: values that both have become outputs, and the interval is narrowed until one node is left.

Fusion keeps the names of the values that it does not make anew, so what both graphs call the same is compared by the
rule of `verify`. First come the values behind the fused nodes, which also tell how the error grows along the model.
If the models differ, a value that differs is taken, and what it derives from is tried in equal steps: of those that
differ the first one takes its place, behind those that agree nothing is looked for. It ends with a value that differs
while the nearest ones before it agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flashonnx import _float64
from flashonnx._candidate import Candidate, first_line
from flashonnx._compare import ALL, OutputError, measure, rows_of
from flashonnx._inputs import Array, Feeds
from flashonnx._progress import step

if TYPE_CHECKING:
    import onnx

QUANTILES = (0.5, 0.9, 0.99, 1.0)
_PROBES = 16  # values that are looked at in one run
_ROUNDS = 24
_AXES = (1, 2, 3)  # of an intermediate value, that may be the sequence


@dataclass
class NodeError:
    """A value that both models have, and what makes it in the fused one.

    Attributes:
        value: its name.
        node: the fused model's node, as "FlashAttention 'name'", also where more nodes of its own follow.
        original_node: what makes it in the original.
        error: what was found, as for an output.
        distribution: the quantiles `QUANTILES` of |fused - truth| in the case in which they are largest.
        original_distribution: those of |original - truth|.
    """

    value: str
    node: str
    original_node: str
    error: OutputError
    distribution: tuple[float, ...] = (0.0,) * len(QUANTILES)
    original_distribution: tuple[float, ...] = (0.0,) * len(QUANTILES)

    @property
    def ok(self) -> bool:
        return self.error.ok

    def __str__(self) -> str:
        origin = "" if self.original_node == self.node else f" (in the original: {self.original_node})"
        return f"{self.node}{origin}, value {self.error}"


@dataclass
class Bisection:
    """What was found.

    Attributes:
        nodes: the values behind the fused nodes, in the fused model's order.
        parted: where the models part; None if they agree, or if it was not found.
        note: why it was not found; "" otherwise.
    """

    nodes: list[NodeError] = field(default_factory=list)
    parted: NodeError | None = None
    note: str = ""


def bisect(original: Candidate, fused: Candidate, feeds: Sequence[Feeds], wrong: Sequence[str]) -> Bisection:
    """Compares the models at the fused nodes and, where outputs are `wrong`, looks for the first node that is."""
    search = _Search(original, fused, feeds)
    found = Bisection()
    sites = search.sites()
    step(f"comparing behind {len(sites)} fused nodes")
    for part in _parts(sites, _PROBES):
        search.look(part)
    found.nodes = [search.known[name] for name in sites if name in search.known]
    if not wrong:
        return found
    search.look([name for name in wrong if name in search.common])
    last = search.first_wrong([*sites, *wrong])
    if last is None:
        found.note = (
            "no node was found: with values between the nodes as outputs, which keeps the runtime from joining nodes, "
            "the models agree"
            if any(name in search.known for name in wrong)
            else "no node was found: the outputs that differ are not values that nodes of both models make"
        )
        return found
    error = search.known[last].error
    only = range(len(feeds)) if error.special else [error.worst[0]]  # a case in which it shows
    for count in range(_ROUNDS):
        before = search.before(last)
        if not before:
            break
        step(f"looking for the node, step {count + 1}: {len(before)} values left")
        search.look(_spaced(before, _PROBES), only)
        last = search.first_wrong(before) or last
    found.parted = search.known[last]
    if found.parted not in found.nodes:
        found.nodes = sorted([*found.nodes, found.parted], key=lambda node: search.order[node.value])
    return found


_SIZES = ("Shape", "Size")  # they agree whatever the numbers are


class _Search:
    """Two models, what was compared between them, and what need not be any more."""

    def __init__(self, original: Candidate, fused: Candidate, feeds: Sequence[Feeds]) -> None:
        self._original, self._fused, self._feeds = original, fused, feeds
        self._makers = _makers(fused.proto.graph)
        self._original_makers = _makers(original.proto.graph)
        kinds = _element_types(original.proto)
        usable = (name for name in self._makers if name in self._original_makers and kinds.get(name, 0) is not None)
        self.common = {name: kinds.get(name) or 0 for name in usable}  # in the fused model's order
        self.order = {name: i for i, name in enumerate(self._makers)}
        self.known: dict[str, NodeError] = {}
        self._useless: set[str] = set()  # cannot be compared
        self._agreed: set[str] = set()  # values that agree, and all that they derive from

    def sites(self) -> list[str]:
        """The first common value behind each node of flashonnx."""
        users: dict[str, list[str]] = {}
        for name, node in self._makers.items():
            for value in _inputs(node):
                users.setdefault(value, []).append(name)
        found = []
        for name, node in self._makers.items():
            if node.domain != "flashonnx" or name != node.output[0]:
                continue
            pending = [name]
            for value in pending:  # breadth first
                if value in self.common:
                    found.append(value)
                    break
                pending += [user for user in users.get(value, []) if user not in pending]
        return list(dict.fromkeys(found))

    def before(self, name: str) -> list[str]:
        """Common values that `name` derives from in the fused model, and of which nothing is known yet."""
        settled = self._agreed | self._useless
        return [value for value in self._ancestors(name) if value in self.common and value not in settled]

    def first_wrong(self, names: Iterable[str]) -> str | None:
        """The first of those that differ, in the fused model's order."""
        wrong = [name for name in names if name in self.known and not self.known[name].ok]
        return min(wrong, key=lambda name: self.order.get(name, len(self.order)), default=None)

    def look(self, names: Iterable[str], cases: Sequence[int] | None = None) -> None:
        """Compares these values, in all cases or some."""
        cases = range(len(self._feeds)) if cases is None else cases
        names = [name for name in names if name not in self.known and name not in self._useless]
        for name, node in self._measured(names, cases).items():
            if node is None:
                self._useless.add(name)
                continue
            self.known[name] = node
            if node.ok:
                self._agreed |= {name, *self._ancestors(name, numbers=True)}

    def _ancestors(self, name: str, numbers: bool = False) -> list[str]:
        """What `name` derives from, without itself and graph inputs, in the fused model's order.

        With `numbers` only what its numbers show: no sizes, and nothing behind what is rounded to integers.
        """
        seen, pending = {name}, [name]
        while pending:
            value = pending.pop()
            maker = self._makers.get(value)
            if numbers and maker is not None and (maker.op_type in _SIZES or self._is_integer(value)):
                continue
            for value in _inputs(maker) if maker is not None else ():
                if value not in seen and value in self._makers:
                    seen.add(value)
                    pending.append(value)
        return sorted(seen - {name}, key=self.order.__getitem__)

    def _is_integer(self, name: str) -> bool:
        from onnx import TensorProto

        floating = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        return self.common.get(name, TensorProto.UNDEFINED) not in (TensorProto.UNDEFINED, *floating)

    def _measured(self, names: list[str], cases: Sequence[int]) -> dict[str, NodeError | None]:
        """None for what cannot be compared: no tensor, other shapes under one name, or a part that does not run."""
        if not names:
            return {}
        found: dict[str, NodeError | None] = {name: self._described(name) for name in names}
        probes = {name: self.common[name] for name in names}
        try:
            for i, values in zip(cases, self._values(probes, cases), strict=True):
                for j, name in enumerate(names):
                    node = found[name]
                    if node is not None and not _add(node, i, self._feeds[i], [x[j] for x in values]):
                        found[name] = None
        except Exception:
            if len(names) == 1:  # a runtime that cannot give this value
                return {names[0]: None}
            middle = len(names) // 2
            return self._measured(names[:middle], cases) | self._measured(names[middle:], cases)
        return {name: node if node is not None and node.error.compared else None for name, node in found.items()}

    def _values(self, probes: dict[str, int], cases: Sequence[int]) -> Iterator[tuple[list[Any], ...]]:
        """For each case: the fused model's, the truth's, the original's, and those of its plain run."""
        fused, original = self._fused.exposing(probes), self._original.exposing(probes)
        session, run = fused.open(), original.runner([])
        truths: list[Any] | None = None
        plain = None
        with contextlib.suppress(Exception):  # else onnx's evaluator runs the original
            plain = original.open(optimised=False)
        with contextlib.suppress(Exception):  # else measured against the original itself, as the outputs are
            truths = _float64.run(_float64.widen(original.proto), [self._feeds[i] for i in cases])
        for j, feeds in enumerate(self._feeds[i] for i in cases):
            expected = run(feeds)
            try:
                again = original.run(plain, feeds) if plain is not None else expected
            except Exception:
                again = expected
            yield fused.run(session, feeds), truths[j] if truths else expected, expected, again

    def _described(self, name: str) -> NodeError:
        maker, new = self._makers[name], []
        pending, seen = [maker], {name}
        for node in pending:  # back to what both have
            new += [node] if node.domain == "flashonnx" else []
            for value in _inputs(node):
                if value not in seen and value not in self.common and value in self._makers:
                    seen.add(value)
                    pending.append(self._makers[value])
        node = (new or [maker])[0]
        return NodeError(name, _label(node), _label(self._original_makers[name]), OutputError(name))


def _add(node: NodeError, case: int, feeds: Feeds, values: list[Any]) -> bool:
    """Adds one case; False if there is nothing to compare."""
    fused, truth, original, again = values
    if not all(isinstance(x, np.ndarray) and x.shape == fused.shape for x in values) or fused.dtype != original.dtype:
        return False
    where = dict(rows_of(feeds, fused.shape, _AXES))[ALL]
    measure(node.error, case, where, fused, truth, original, again)
    if fused.dtype.kind == "f":
        node.distribution = _larger(node.distribution, _quantiles(fused, truth, where))
        node.original_distribution = _larger(node.original_distribution, _quantiles(original, truth, where))
    return True


def _quantiles(x: Array, truth: Array, where: Array) -> tuple[float, ...]:
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(x.astype(np.float64) - truth.astype(np.float64))[where]
    distance = distance[np.isfinite(distance)]
    return tuple(float(q) for q in np.quantile(distance, QUANTILES)) if distance.size else (0.0,) * len(QUANTILES)


def _larger(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return a if a[-1] >= b[-1] else b


def _makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """The node that makes each value, in order; only of this graph, since values of inner ones cannot be outputs."""
    return {name: node for node in graph.node for name in node.output if name}


def _inputs(node: onnx.NodeProto) -> list[str]:
    """What a node reads, also from within its subgraphs."""
    names = list(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                names += _inputs(inner)
    return [name for name in names if name]


def _element_types(model: onnx.ModelProto) -> dict[str, int | None]:
    """Those that are known; None for what is no tensor of numbers."""
    import onnx

    try:
        model = onnx.shape_inference.infer_shapes(model)
    except Exception as error:  # larger than protobuf allows, or damaged: what the model itself says
        step(f"no shape inference: {first_line(error)}")
    numbers = {onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING}
    kinds: dict[str, int | None] = {}
    for value in (*model.graph.value_info, *model.graph.output):
        tensor = value.type.HasField("tensor_type")
        kind = value.type.tensor_type.elem_type
        kinds[value.name] = kind if tensor and kind not in numbers else None
    return kinds


def _label(node: onnx.NodeProto) -> str:
    name = node.name or next((output for output in node.output if output), "")
    return f"{node.op_type} '{name}'"


def _spaced(names: Sequence[str], count: int) -> list[str]:
    """At most so many, evenly spaced, the last one among them."""
    if len(names) <= count:
        return list(names)
    return [names[round((i + 1) * len(names) / count) - 1] for i in range(count)]


def _parts(names: Sequence[str], count: int) -> list[Sequence[str]]:
    return [names[i : i + count] for i in range(0, len(names), count)]
