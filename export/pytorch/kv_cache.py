"""Decoders of transformers whose keys and values stay in caches: one model for prompts and for single tokens.

The module that is exported has the caches among its inputs and outputs, and hands an object to the model for a cache
that gives new keys and values back as they are. So the attention function gets the new ones alone, and its operator
appends them to the cache and attends to all. No mask has a size, as the operator counts from the cache's lengths.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from flashonnx.export.model import configuration
from flashonnx.export.pytorch import transformers_route
from flashonnx.export.pytorch.transformers_route import Route

if TYPE_CHECKING:
    import onnx_ir as ir

_ONE_NUMBER = (
    ", and sentences have different ones; it is expected to take positions from position_ids alone, and its mask from "
    "transformers' create_causal_mask without an attention_mask of its own. fuse(kv_cache=) may take an export with a "
    "DynamicCache as inputs and outputs"
)
NO_NUMBER = "flashonnx.export::NoNumber"  # stands for a number that nothing may depend on
_EXAMPLE = {"batch": 2, "sequence": 3, "capacity": 16, "pages": 5, "page_size": 4, "pages_per_sequence": 2}


class CacheExportError(ValueError):
    """A model that cannot be exported with its caches as inputs and outputs, in words that say why."""


class CacheRoute(Route):
    """The route, with an attention function for caches.

    Attributes:
        cache: the caches of the call that is traced.
        is_asked: whether the model wants to know how many tokens its cache has.
    """

    cache: Any = None
    is_asked = False

    def _attention(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, lengths: Any, sinks: Any, **attributes: Any
    ) -> Any:
        layer = type(module).__name__
        if mask is not None or lengths is not None:
            raise self._refuse(f"{layer} has a mask that is more than a triangle or a window, or a bias")
        index = self.cache.layer_of(key, value)
        if index is None:
            raise self._refuse(
                f"{layer} attends to other keys and values than it gave its cache, such as those that are made of "
                "latents (MLA), for which there is no operator; without kv_cache its attention is fused"
            )
        attributes.pop("empty_row")  # every query sees itself
        y, keys, values = _operator()(
            query, key, value, self.cache.keys[index], self.cache.values[index], self.cache.lengths,
            self.cache.block_table, sinks, **attributes,
        )  # fmt: skip
        self.cache.presents[index] = (keys, values)
        return y


class Caches:
    """What a model takes for a cache while it is traced.

    Attributes:
        keys: of each layer, (batch, heads, capacity, size) or (pages, page_size, heads, size).
        values: likewise.
        lengths: (batch,) int64, keys there are.
        block_table: (batch, pages of a sequence) int32, or None.
        presents: keys and values after the call, by layer.
    """

    is_compileable = False

    def __init__(self, route: CacheRoute, caches: tuple[Any, ...], lengths: Any, block_table: Any) -> None:
        self.keys, self.values = caches[::2], caches[1::2]
        self.lengths, self.block_table = lengths, block_table
        self.presents: dict[int, tuple[Any, Any]] = {}
        self.is_sliding = self.is_linear = self.is_dummy = [False] * len(self.keys)
        self._route = route
        self._given: dict[int, tuple[Any, Any]] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The new keys and values of a layer, as they are."""
        if not 0 <= layer_idx < len(self.keys) or layer_idx in self._given:
            raise self._route._refuse(f"layer {layer_idx} has no cache of its own")
        self._given[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def layer_of(self, key: Any, value: Any) -> int | None:
        """The layer that gave these."""
        return next((i for i, given in self._given.items() if given[0] is key and given[1] is value), None)

    def get_seq_length(self, *_: Any) -> Any:
        """One number that every sentence has: there is none, so a model may ask but not use it."""
        import torch

        self._route.is_asked = True
        return torch.onnx.ops.symbolic(NO_NUMBER, (self.lengths,), dtype=torch.int64, shape=(), version=1).item()

    def get_query_offset(self, *_: Any) -> int:
        """Masks are made for the new tokens alone."""
        return 0

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[Any, int]:
        """Likewise: as many keys as queries, from the first on."""
        return query_length, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._route._refuse(f"the model asks its cache for '{name}', which is not known before it runs")


@functools.cache
def _module() -> type:
    import torch

    class WithCaches(torch.nn.Module):
        """input_ids (batch, sequence), cache_lengths (batch,), the block table if there are pages, the caches."""

        def __init__(self, model: Any, route: CacheRoute, kind: str, more: dict[str, Any]) -> None:
            super().__init__()
            self.model, self.route, self.kind, self.more = model, route, kind, more
            parameters = inspect.signature(model.forward).parameters
            self.name = "cache" if "cache" in parameters else "past_key_values"
            self.training = model.training

        def forward(self, input_ids: Any, cache_lengths: Any, *rest: Any) -> Any:
            paged = self.kind == "paged"
            cache = Caches(self.route, rest[paged:], cache_lengths, rest[0] if paged else None)
            self.route.cache = cache
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            given = {"input_ids": input_ids, "position_ids": cache_lengths[:, None] + places, self.name: cache}
            out = self.model(**given, use_cache=True, **self.more)
            missing = [i for i in range(len(cache)) if i not in cache.presents]
            if missing:
                raise self.route._refuse(f"layer {missing[0]} does not attend through its attention function")
            presents = (x for i in range(len(cache)) for x in cache.presents[i])
            return out[0], *presents

    return WithCaches


def prepared(
    model: Any, args: tuple[Any, ...], kind: str, more: dict[str, Any]
) -> tuple[Any, CacheRoute, dict[str, Any]]:
    """What is exported instead of `model`, the route to enter, and the arguments of torch.onnx.export.

    Args:
        model: a decoder of transformers.
        args: nothing, or (input_ids,): its type is taken.
        kind: one of KV_CACHES.
        more: arguments for every call of the model that are no tensors.

    Raises:
        CacheExportError: the model is none that has caches.
    """
    import torch

    if len(args) > 1 or any(isinstance(x, torch.Tensor) for x in more.values()):
        raise CacheExportError(
            "export_onnx: with kv_cache the inputs are input_ids, cache_lengths and the caches; give (input_ids,) or ()"
        )
    if changing := _changing_rotation(model.config):
        raise CacheExportError(
            f"export_onnx: kv_cache: rotary embeddings of type '{changing}' change with the longest of all sequences"
        )
    layers = _layers(model, more)
    dtype = args[0].dtype if args else torch.int64
    device = next(model.parameters()).device
    size = _EXAMPLE
    inputs = [
        torch.zeros(size["batch"], size["sequence"], dtype=dtype, device=device),
        torch.zeros(size["batch"], dtype=torch.int64, device=device),
    ]
    axes: list[Any] = [{0: "batch", 1: "sequence"}, {0: "batch"}]
    names, rest = ["input_ids", "cache_lengths"], []
    if kind == "paged":
        rest.append(torch.zeros(size["batch"], size["pages_per_sequence"], dtype=torch.int32, device=device))
        names.append("block_table")
    caches = [x for pair in layers for x in pair]
    for heads, width, kept in caches:
        shape = (size["batch"], heads, size["capacity"], width)
        if kind == "paged":
            shape = (size["pages"], size["page_size"], heads, width)
        rest.append(torch.zeros(shape, dtype=kept, device=device))
    one = {0: "pages", 1: "page_size"} if kind == "paged" else {0: "batch", 2: "capacity"}
    table = [{0: "batch", 1: "pages_per_sequence"}] if kind == "paged" else []
    axes.append((*table, *(one for _ in caches)))
    numbered = [f"{i}.{name}" for i in range(len(layers)) for name in ("key", "value")]
    route = CacheRoute(model)
    arguments = {
        "args": (*inputs, *rest),
        "dynamic_shapes": tuple(axes),
        "input_names": [*names, *(f"past_key_values.{name}" for name in numbered)],
        "output_names": ["logits", *(f"present.{name}" for name in numbered)],
    }
    return _module()(model, route, kind, more), route, arguments


def without_interface(model: Any, reason: str) -> str:
    """Why a model that does not attend through transformers' interface is refused, `reason`, and what to do instead."""
    name = type(model).__name__
    if not reason:
        return f"kv_cache is for models of transformers: {name} is none"
    if _has_alibi(model):
        return (
            f"kv_cache: {name} has ALiBi, a bias on its scores that grows with the keys, for which a cache has no "
            "input. Export it without kv_cache and with model.config.use_cache = False: its attention is fused with "
            "the bias as a mask, and every token computes the whole sequence"
        )
    more = ""
    if reason.endswith("its attention function"):
        more = (
            ". An export whose inputs and outputs hold a DynamicCache may be turned into the same file by "
            "flashonnx.fuse(path, kv_cache=...)"
        )
    return f"kv_cache is for models that attend through transformers' interface: {reason}{more}"


def _has_alibi(model: Any) -> bool:
    """Whether its code builds such biases and its configuration does not say that it does not use them."""
    config = getattr(model, "config", None)
    inner = getattr(config, "attn_config", None)
    said = getattr(config, "alibi", getattr(inner, "alibi", True))
    return bool(said) and "alibi" in transformers_route.source_of(type(model))


def _changing_rotation(config: Any) -> str | None:
    """The type of rotary embeddings whose angles depend on how long a sequence has become, if they are such."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    pending = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    for entry in pending:
        if isinstance(entry, dict):
            kind = entry.get("rope_type", entry.get("type"))
            if kind in ("dynamic", "longrope"):
                return str(kind)
            pending += entry.values()  # one for each type of layer
    return None


def positions(model: Any) -> int | None:
    """How many positions a model of transformers has, by its configuration; None if that gives no bound."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    return configuration.positions(config.get_text_config(decoder=True))


def _layers(model: Any, more: dict[str, Any]) -> list[tuple[Any, Any]]:
    """For each layer heads, size and type of keys and of values, as the model itself fills a cache."""
    import torch

    try:
        with torch.no_grad():
            tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
            out = model(input_ids=tokens, use_cache=True, **more)
    except Exception as error:
        raise CacheExportError(f"export_onnx: kv_cache is for decoders that take input_ids alone: {error}") from error
    cache = getattr(out, "cache", None)
    cache = getattr(out, "past_key_values", None) if cache is None else cache
    layers = getattr(cache, "layers", None)
    if not layers:
        raise CacheExportError(f"export_onnx: {type(model).__name__} keeps no keys and values that kv_cache could be")
    found = []
    for i, layer in enumerate(layers):
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        for x in (keys, values):
            if x is None or x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != 2:
                kind = type(layer).__name__
                raise CacheExportError(f"export_onnx: kv_cache: layer {i} keeps a {kind}, not keys of every token")
        of_keys, of_values = ((x.shape[1], x.shape[3], x.dtype) for x in (keys, values) if x is not None)
        found.append((of_keys, of_values))
    return found


def check_numbers(model: ir.Model, route: CacheRoute) -> None:
    """Requires that an exported model only asked how many tokens its cache has, and does nothing with it.

    Raises:
        RouteRefusalError: something depends on it.
    """
    domain, _, name = NO_NUMBER.partition("::")
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) == (domain, name):
            users = [use.node for use in node.outputs[0].uses()]
            read = f" ({users[0].op_type} '{users[0].name}' reads it)" if users else ""
            raise route._refuse(f"the model computes with the number of tokens in its cache{read}{_ONE_NUMBER}")


def why_not(route: CacheRoute, error: BaseException) -> str:
    """What made an export with caches fail, in one line."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if route.is_asked and not route.refusal and type(cause).__name__ == "GuardOnDataDependentSymNode":
        return f"the model does something else depending on the number of tokens in its cache{_ONE_NUMBER}"
    return transformers_route.why_not(route, error)


@functools.cache
def _operator() -> Any:
    """An operator for traces, which becomes a FlashAttentionKVCache; it runs nowhere else."""
    import torch

    def run(*_: Any, **__: Any) -> Any:
        raise RuntimeError("attention over caches of an export was used outside it")

    op = torch.library.custom_op(
        "flashonnx::traced_kv_cache",
        run,
        mutates_args=(),
        schema="(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor cache_lengths, "
        "Tensor? block_table, Tensor? sinks, *, float? scale=None, float softcap=0.0, bool is_causal=False, "
        "int left_window_size=-1, int right_window_size=-1) -> (Tensor, Tensor, Tensor)",
    )

    def fake(query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, *_: Any, **__: Any) -> Any:
        y = query.new_empty((*query.shape[:3], value.shape[3]))
        return y, torch.empty_like(key_cache), torch.empty_like(value_cache)

    op.register_fake(fake)
    return torch.ops.flashonnx.traced_kv_cache


def table() -> dict[Any, Any]:
    """The entry of the translation table."""
    return {_operator().default: translate}


def translate(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    cache_lengths: Any,
    block_table: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = False,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Any:
    """The operator as a FlashAttentionKVCache node: Y and the caches after the call."""
    import onnxscript
    from flashonnx.export.operator import schema
    from flashonnx.export.operator.cache_schema import CACHE_INPUTS, KV_CACHE

    if sinks is not None and sinks.dtype.name != "FLOAT":
        sinks = onnxscript.opset18.Cast(sinks, to=1)  # TensorProto.FLOAT
    given = {
        "Q": query, "K": key, "V": value, "key_cache": key_cache, "value_cache": value_cache,
        "cache_lengths": cache_lengths, "block_table": block_table, "sinks": sinks,
    }  # fmt: skip
    inputs = [given.get(name) for name in CACHE_INPUTS]
    while inputs[-1] is None:
        inputs.pop()
    attributes = schema.without_defaults(
        {
            "is_causal": int(is_causal),
            "scale": scale,
            "softcap": softcap,
            "left_window_size": left_window_size,
            "right_window_size": right_window_size,
        },
        KV_CACHE,
    )
    made = onnxscript.values.Opset(schema.DOMAIN, schema.VERSION).FlashAttentionKVCache(*inputs, **attributes)
    return made[0], made[1], made[2]
