"""Attention over caches that TensorScatter appends to, as opset 24 has them, as FlashAttentionKVCache."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.attention_op import check_types, read_operator
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.facts import Facts

_SAME = frozenset(["Identity", "Cast"])
_KEPT = ("is_causal", "left_window_size", "right_window_size", "scale", "softcap")


@dataclasses.dataclass(frozen=True)
class Scattered:
    """A cache after TensorScatter wrote `new` into `cache`, (batch, heads, capacity, size), from `places` on."""

    node: ir.Node
    cache: ir.Value
    new: ir.Value
    places: ir.Value


class ScatteredCache(Rule):
    """Attention of four dimensions whose K and V are caches that TensorScatter has just written new keys into.

    Accepts linear caches, one place a sentence for keys and values, and nonpad_kv_seqlen that is that place plus the
    number of new keys: then the queries stand beside the new keys in both operators. Masks stay as they are. Of all
    else the Attention alone is fused, over the caches that TensorScatter makes.
    """

    kinds = ("Attention",)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        site, facts = read_operator(candidate, fusion.opset), fusion.facts
        keys, values = (_scattered(facts, site.inputs[name]) for name in "KV")
        if keys is None or values is None:
            raise RefusalError("")
        check_types(fusion, site)
        query, lengths = site.inputs["Q"], site.inputs["nonpad_kv_seqlen"]
        q, new = (facts.dims(value) for value in (query, keys.new))
        if len(site.outputs) > 1:
            raise RefusalError("the present of a cache that TensorScatter has written is asked for")
        if q is None or new is None or len(q) != 4 or len(new) != 4 or q[2] != new[2]:
            raise RefusalError("nothing shows that there are as many new keys in the cache as queries")
        if _origin(keys.places) is not _origin(values.places):
            raise RefusalError("keys and values are written to different places")
        if lengths is None or not _is_sum(facts, lengths, keys.places, q[2]):
            raise RefusalError(
                "nothing shows that nonpad_kv_seqlen is the place of the new keys plus their number (write it as Add "
                "of write_indices and the size of an axis of Q or K)"
            )
        builder = fusion.builder(site.node)
        inputs: dict[str, ir.Value | None] = {
            "Q": query, "K": keys.new, "V": values.new, "key_cache": keys.cache, "value_cache": values.cache,
            "cache_lengths": keys.places, "attn_mask": site.inputs["attn_mask"],
        }  # fmt: skip
        attributes: dict[str, Any] = {"is_causal": 0} | {
            name: site.attributes[name] for name in _KEPT if name in site.attributes
        }
        made = fusion.cached(builder, KV_CACHE, inputs, attributes, 4, outputs=3)
        node = made.producer()
        assert node is not None
        replaced = {site.outputs[0]: made}
        for scattered, present in zip((keys, values), node.outputs[1:], strict=True):
            old = scattered.node.outputs[0]
            replaced[old] = present
            dims = facts.dims(old)
            if dims is not None:
                facts.set_dims(present, dims)
        return Rewrite(builder, replaced, (site.node, keys.node, values.node), "", made)


def _scattered(facts: Facts, value: ir.Value | None) -> Scattered | None:
    node = value.producer() if value is not None else None
    if node is None or (node.domain, node.op_type) != ("", "TensorScatter") or len(node.inputs) < 3:
        return None
    cache, new, places = node.inputs[:3]
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -2
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "linear"
    if cache is None or new is None or places is None or mode != "linear" or facts.rank(cache) != 4:
        return None
    users = {use.node for use in node.outputs[0].uses()}
    return Scattered(node, cache, new, places) if axis in (-2, 2) and len(users) == 1 else None


def _origin(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type in _SAME and not node.domain and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _is_sum(facts: Facts, value: ir.Value, places: ir.Value, count: object) -> bool:
    """Whether `value` is `places` plus `count`."""
    node = _origin(value).producer()
    if node is None or (node.domain, node.op_type) != ("", "Add"):
        return False
    a, b = node.inputs
    for first, second in ((a, b), (b, a)):
        if first is not None and _origin(first) is _origin(places):
            numbers = facts.ints(second)
            return numbers is not None and len(numbers) == 1 and numbers[0] == count
    return False
