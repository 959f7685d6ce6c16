"""What a rule is given and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import onnx_ir as ir
from flashonnx.export.masks.reducer import MaskReducer
from flashonnx.export.model.build import Builder, Names
from flashonnx.export.operator import schema
from flashonnx.export.values.facts import Facts, opset_of


class Fusion:
    """One run of fusion over one model: what is known, and how fused nodes are made."""

    def __init__(self, model: ir.Model, *, shared_cache: bool = False) -> None:
        self.model = model
        self.shared_cache = shared_cache
        self.facts = Facts(model)
        self.names = Names(model)
        self.reducer = MaskReducer(self.facts, self.names)
        self.opset = opset_of(model.opset_imports)
        self.masks: dict[Hashable, Any] = {}  # mask inputs that fused sites have, for others alike

    def builder(self, node: ir.Node) -> Builder:
        """A builder for the nodes that will replace the site of `node`."""
        return Builder(self.names, node.name or node.outputs[0].name or node.op_type)

    def attention(
        self,
        builder: Builder,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        rank: int,
        outputs: int = 1,
    ) -> ir.Value:
        """Adds a fused node; its first output."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        return builder.op(
            schema.OP_TYPE,
            *given,
            domain=schema.DOMAIN,
            outputs=outputs,
            dtype=self.facts.dtype(inputs[0]),
            shape=[None] * rank,
            **schema.without_defaults(attributes),
        )

    def cached(
        self,
        builder: Builder,
        op_type: str,
        inputs: Mapping[str, ir.Value | None],
        attributes: Mapping[str, Any],
        rank: int,
        outputs: int,
    ) -> ir.Value:
        """Adds a node of an operator for caches or packed sentences, its inputs by name; its first output."""
        given = [inputs.get(name) for name in schema.inputs_of(op_type)]
        while given[-1] is None:
            given.pop()
        return builder.op(
            op_type,
            *given,
            domain=schema.DOMAIN,
            outputs=outputs,
            dtype=self.facts.dtype(given[0]),
            shape=[None] * rank,
            **schema.without_defaults(attributes, op_type),
        )


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A proved replacement, not yet carried out.

    Attributes:
        builder: the new nodes.
        replaced: old values and the new ones that take their place.
        nodes: the old nodes at the site; they go when nothing uses them.
        remark: what the user should know about it.
        output: the fused node's first output.
    """

    builder: Builder
    replaced: Mapping[ir.Value, ir.Value]
    nodes: Sequence[ir.Node]
    remark: str
    output: ir.Value


class Rule(Protocol):
    """Turns sites of some kinds into fused nodes."""

    kinds: tuple[str, ...]

    def rewrite(self, fusion: Fusion, candidate: Any) -> Rewrite:
        """The replacement of `candidate`.

        Raises:
            RefusalError: nothing proves that a fused node would compute the same.
        """
        ...
