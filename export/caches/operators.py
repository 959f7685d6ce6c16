"""FlashAttention over past and new keys as FlashAttentionKVCache over a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
from flashonnx.export.caches.pairs import CacheError, Pair, same
from flashonnx.export.masks.forms import Affine
from flashonnx.export.masks.positions import form_of
from flashonnx.export.masks.reducer import is_true, is_zero
from flashonnx.export.model.build import Builder, Names, called
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import CACHE_INPUTS, KV_CACHE
from flashonnx.export.values.dims import Dim, product
from flashonnx.export.values.facts import Facts

_HEADS_FIRST = [0, 2, 1, 3]
_HEADS = ("q_num_heads", "kv_num_heads")
_KEPT = ("scale", "softcap", "left_window_size", "right_window_size")


@dataclasses.dataclass(frozen=True)
class Cache:
    """One cache: an input and an output of the model, and which it is, such as "0.key"."""

    past: ir.Value
    present: ir.Value
    role: str


class CacheAttention:
    """Replaces the attentions of one model that read pasts.

    Args:
        model: its attentions fused.
        facts: of it.
        pairs: its pasts.
        count: new tokens of each sentence.
        before: past keys.

    Attributes:
        caches: those that were made.
    """

    def __init__(self, model: ir.Model, facts: Facts, pairs: list[Pair], count: Dim, before: Dim) -> None:
        self.model, self.facts, self.count, self.before = model, facts, count, before
        self.names = Names(model)
        self.caches: list[Cache] = []
        self.by_whole = {value: pair for pair in pairs for value in same(pair.whole)}

    def replace(self, lengths: ir.Value, block_table: ir.Value | None) -> None:
        """Replaces all.

        Raises:
            CacheError: one is not the same, or reads no past.
        """
        for node in [node for node in self.model.graph if node.op_identifier()[:2] == (schema.DOMAIN, schema.OP_TYPE)]:
            inputs: dict[str, ir.Value | None] = dict(zip(schema.INPUTS, node.inputs, strict=False))
            pair = self._pairs_of(node, inputs)
            if pair is not None and inputs.get("bias") is not None:
                raise CacheError(f"'{called(node)}' has a bias for Q, K and V whose heads and sizes are not known")
            if pair is not None:
                self._check(node, inputs)
                self._replace(node, inputs, pair, lengths, block_table)
        unread = [pair for pair in self.by_whole.values() if pair.present in self.model.graph.outputs]
        if unread:
            raise CacheError(f"no attention reads '{unread[0].past.name}' with new keys behind it")

    def _pairs_of(self, node: ir.Node, inputs: dict[str, ir.Value | None]) -> tuple[Pair, Pair] | None:
        if inputs.get("past_key") is not None:
            found = [self.by_whole.get(value) for value in node.outputs[1:3]]
        else:
            found = [self._read(inputs.get(name)) for name in "KV"]
        keys, values = (*found, None, None)[:2]
        if keys is None and values is None:
            return None
        if keys is None or values is None:
            raise CacheError(f"'{called(node)}' reads past {'values' if keys is None else 'keys'} alone")
        return keys, values

    def _read(self, value: ir.Value | None) -> Pair | None:
        """The pair that K or V is, through what puts tokens before heads and makes one axis of heads and size."""
        while value is not None and value not in self.by_whole:
            node = value.producer()
            if node is None or node.domain or not self._is_layout(node):
                return None
            value = node.inputs[0]
        return self.by_whole[value] if value is not None else None

    def _is_layout(self, node: ir.Node) -> bool:
        if node.op_type == "Transpose":
            return "perm" in node.attributes and list(node.attributes["perm"].as_ints()) == _HEADS_FIRST
        if node.op_type != "Reshape":
            return False
        before, after = (self.facts.dims(value) for value in (node.inputs[0], node.outputs[0]))
        source = node.inputs[0].producer() if node.inputs[0] is not None else None
        return (
            source is not None
            and source.op_type == "Transpose"
            and before is not None
            and after == (before[0], before[1], before[2] * before[3])
        )

    def _check(self, node: ir.Node, inputs: dict[str, ir.Value | None]) -> None:
        """Its scores are masked by a triangle or window that ends at the last key, and by nothing else."""
        mask, lengths = inputs.get("attn_mask"), inputs.get("nonpad_kv_seqlen")
        if mask is not None and not self._sees_all(mask):
            raise CacheError(
                f"'{called(node)}' has a mask or bias that is more than a triangle or a window ('{mask.name}', "
                f"{self.facts.dims(mask)}): masks of padding are expected to come from an input called attention_mask, "
                "and biases that grow with the keys have no place beside a cache"
            )
        if lengths is not None:
            form = form_of(self.facts, lengths)
            if not isinstance(form, Affine) or any(form.steps) or form.offset != self.before + self.count:
                raise CacheError(f"'{called(node)}' has lengths of keys of its own, '{lengths.name}'")
        ends_last = lengths is not None or inputs.get("past_key") is not None
        causal = self._number(node, "is_causal", 0) or self._number(node, "right_window_size", -1) == 0
        if not causal and self.count != 1:
            raise CacheError(
                f"'{called(node)}' lets a token see those behind it, and so the padding of a shorter sentence beside it"
            )
        windows = [self._number(node, f"{side}_window_size", -1) for side in ("left", "right")]
        if not ends_last and (causal or windows != [-1, -1]):
            raise CacheError(f"'{called(node)}' counts its triangle or window from the first past key")

    def _sees_all(self, mask: ir.Value) -> bool:
        """Whether a mask over all keys hides none, as one of padding does that was fused before."""
        dims = self.facts.dims(mask)
        if not dims or dims[-1] != self.before + self.count:
            return False
        return (is_true if self.facts.dtype(mask) == ir.DataType.BOOL else is_zero)(self.facts, mask)

    @staticmethod
    def _number(node: ir.Node, name: str, default: int) -> int:
        return node.attributes[name].as_int() if name in node.attributes else default

    def _replace(
        self,
        node: ir.Node,
        inputs: dict[str, ir.Value | None],
        pairs: tuple[Pair, Pair],
        lengths: ir.Value,
        block_table: ir.Value | None,
    ) -> None:
        builder = Builder(self.names, node.name or "attention")
        query, (keys, values) = inputs["Q"], pairs
        new = [pair.new or inputs.get(name) for pair, name in zip(pairs, "KV", strict=True)]
        is_packed = "qkv_layout" in node.attributes and inputs.get("K") is None
        heads = {n: node.attributes[n].value for n in _HEADS if n in node.attributes}
        if is_packed:
            query, heads = self._side_by_side(builder, node, heads)
        is_flat = is_packed or self.facts.rank(query) == 3
        if is_flat:
            new = [self._flat(builder, value) if self.facts.rank(value) == 4 else value for value in new]
        attributes: dict[str, Any] = {n: node.attributes[n].value for n in _KEPT if n in node.attributes}
        attributes["is_causal"] = self._number(node, "is_causal", 0)
        attributes |= {"qkv_layout": "gqa"} if is_packed else {}
        attributes |= heads if is_flat else {}
        given = {
            "Q": query, "K": new[0], "V": new[1], "key_cache": keys.past, "value_cache": values.past,
            "cache_lengths": lengths, "block_table": block_table, "sinks": inputs.get("sinks"),
        }  # fmt: skip
        ordered = [given.get(name) for name in CACHE_INPUTS]
        while ordered[-1] is None:
            ordered.pop()
        y = builder.op(
            KV_CACHE, *ordered, domain=schema.DOMAIN, outputs=3, dtype=self.facts.dtype(query),
            **schema.without_defaults(attributes, KV_CACHE),
        )  # fmt: skip
        made = y.producer()
        assert made is not None
        made.name = node.name
        y.type, y.shape, y.name = node.outputs[0].type, node.outputs[0].shape, node.outputs[0].name
        node.outputs[0].name = self.names.fresh(f"{y.name}_before")
        self.model.graph.insert_before(node, builder.nodes)
        ir.convenience.replace_all_uses_with(node.outputs[0], y, replace_graph_outputs=True)
        layer = len(self.caches) // 2
        for pair, present, role in zip(pairs, made.outputs[1:], ("key", "value"), strict=True):
            self.caches.append(Cache(pair.past, present, f"{layer}.{role}"))
            name = pair.present.name
            present.type, present.name = pair.present.type, name
            pair.present.name = self.names.fresh(f"{name}_before")
            outputs = self.model.graph.outputs
            if pair.present not in outputs:
                raise CacheError(f"two attentions take the past keys or values '{pair.past.name}'")
            outputs[outputs.index(pair.present)] = present

    def _side_by_side(self, builder: Builder, node: ir.Node, heads: dict[str, Any]) -> tuple[ir.Value, dict[str, Any]]:
        """Packed projections with each token's heads of Q, of K and of V in a row, as caches take them; the heads."""
        packed, layout = node.inputs[0], node.attributes["qkv_layout"].as_string()
        dims, kind = self.facts.dims(packed), self.facts.dtype(packed)
        if packed is None or dims is None or layout == "time_major":
            raise CacheError(f"'{called(node)}' has its tokens before the batch, or tensors of unknown rank")
        if len(dims) == 5:
            heads = dict.fromkeys(_HEADS, dims[3 if layout == "3hd" else 2].value)
        if layout == "h3d":
            if len(dims) == 3:
                packed = builder.op("Reshape", packed, builder.ints([0, 0, heads["q_num_heads"], 3, -1]), dtype=kind)
            packed = builder.op("Transpose", packed, perm=[0, 1, 3, 2, 4], dtype=kind)
        width = product(dims[2:]).value
        if width is None or None in heads.values():
            raise CacheError(f"'{called(node)}' has packed projections of unknown sizes, {dims}")
        if len(dims) == 5 or layout == "h3d":
            packed = builder.op("Reshape", packed, builder.ints([0, 0, width]), dtype=kind)
        return packed, heads

    def _flat(self, builder: Builder, value: ir.Value | None) -> ir.Value | None:
        """(batch, tokens, heads * size), of (batch, heads, tokens, size)."""
        dims = self.facts.dims(value)
        if value is None or dims is None or (width := (dims[1] * dims[3]).value) is None:
            raise CacheError("the heads of new keys and their sizes are not known")
        kind = self.facts.dtype(value)
        turned = builder.op("Transpose", value, perm=_HEADS_FIRST, dtype=kind)
        return builder.op("Reshape", turned, builder.ints([0, 0, width]), dtype=kind)
