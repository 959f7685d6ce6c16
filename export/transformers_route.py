"""Models of transformers through their own door: its attention interface and its mask interface.

While `Route` is active, every attention layer that asks transformers for an attention function gets
`torch.ops.flashonnx.attention`: K and V keep their heads, softcaps, sinks and position biases arrive as what they are,
and masks as what they mean: (batch, keys) padding, is_causal, windows, never queries x keys. Where a mask function is
more than that the full mask is made, and where anything at all is not understood the export is done without the route.

What may go wrong silently is that a layer reads a mask without asking for the attention function (BLOOM adds it to its
scores, say). So masks with a meaning are handed out as tokens: a token has no ONNX form, so if anything but our
attention function has used one the export fails, and is repeated without the route.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from types import TracebackType
from typing import Any, Self

from flashonnx.export.transformers_masks import MODULE, Bounds, bounds_of, describe, is_consecutive

# Not the name of a kernel: transformers looks up names with "flash" in them on its hub.
NAME = "onnx_fused"

# What attention functions are given besides, and what none of transformers' own eager ones looks at.
_HARMLESS = frozenset(
    [
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",  # the mask has it
        "use_cache",
    ]
)
# Code that would make other masks, or none, for a name that it has never heard of.
_SWITCH = re.compile(r"""_attn_implementation[^\n]*["']sdpa["']""")


class RouteRefusalError(Exception):
    """A model that the route cannot take, in words that say what it is about."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a mask token stands for.

    Attributes:
        bounds: by position.
        padding: (batch, keys) bool, True where the key counts; None: everywhere.
        lengths: (batch,) the number of keys, where the last query stands at the last key; None: where the first query
            stands at the first key.
    """

    bounds: Bounds
    padding: Any = None
    lengths: Any = None


class Route:
    """A context in which `model` attends through `torch.ops.flashonnx.attention`; its configuration is restored.

    Attributes:
        layers: the attention layers (modules) that came through.
        remarks: what the user should know, e.g. why a mask is full.
        refusal: why the route cannot be taken, "" as long as it can.
    """

    def __init__(self, model: Any) -> None:
        self.layers: set[Any] = set()
        self.remarks: dict[str, None] = {}
        self.refusal = ""
        self._configs = _configs(model)
        self._eager = {id(config) for config in self._configs if config._attn_implementation_internal == "eager"}
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        functions, masks = _interfaces()
        functions.register(NAME, self.attend)
        masks.register(NAME, self.mask)
        for config in self._configs:
            self._set(config, "_attn_implementation_internal", NAME)
        masking = sys.modules[MODULE]
        find_packed = masking.find_packed_sequence_indices
        # Positions that the model has counted out itself hold one sequence; transformers looks for more in a trace.
        self._set(masking, "find_packed_sequence_indices", lambda p: None if is_consecutive(p) else find_packed(p))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            holder, name, before = self._before.pop()
            setattr(holder, name, before)
        for interface in _interfaces():
            interface._global_mapping.pop(NAME, None)

    def _set(self, holder: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end."""
        self._before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def _refuse(self, reason: str) -> RouteRefusalError:
        self.refusal = self.refusal or reason
        return RouteRefusalError(reason)

    def mask(
        self,
        batch_size: Any,
        q_length: Any,
        kv_length: Any,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Any = None,
        attention_mask: Any = None,
        use_vmap: bool = False,
        device: Any = "cpu",
        **kwargs: Any,
    ) -> Any:
        """The mask interface: a token if the mask is all structure, else transformers' own (B, 1, Sq, Sk) bool mask."""
        import torch
        from torch.fx.experimental.symbolic_shapes import statically_known_true as known
        from transformers.masking_utils import prepare_padding_mask, sdpa_mask

        bounds = None if use_vmap else bounds_of(mask_function)
        offset = q_offset - kv_offset
        at_end = isinstance(offset, torch.Tensor) or not known(offset == 0)
        why = ""
        if bounds is None:
            why = f"{describe(mask_function)} is more than a triangle, a window and padding"
        elif at_end and (isinstance(offset, torch.Tensor) or not known(offset == kv_length - q_length)):
            why = "the queries stand neither at the first nor at the last keys"
        elif attention_mask is not None and attention_mask.ndim != 2:
            why = f"the attention mask has {attention_mask.ndim} dimensions"
        if bounds is None or why:
            self.remarks[f"a mask stays queries x keys: {why}"] = None
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            return sdpa_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
                use_vmap=use_vmap, device=device, **kwargs,
            )  # fmt: skip
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        lengths = None
        if at_end and bounds != Bounds():
            lengths = torch.full((batch_size,), kv_length, dtype=torch.int64, device=device)
        token = _token_op()(torch.empty(0, dtype=torch.bool, device=device), batch_size, q_length, kv_length)
        token.flashonnx = Meaning(bounds, padding, lengths)
        return token

    def attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: Any = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        """The attention interface: query (B, Hq, Sq, D), key and value (B, Hkv, Sk, D), the result (B, Sq, Hq, Dv)."""
        import torch

        layer = type(module).__name__
        if kwargs.pop("output_attentions", None) or _weights_are_wanted():
            raise self._refuse(f"{layer} is to give its attention weights; export without output_attentions")
        for name, argument in kwargs.items():
            if name not in _HARMLESS and argument is not None and argument is not False:
                raise self._refuse(f"{layer} passes '{name}', which the route does not know")
        if dropout:
            from flashonnx.export.torch_nodes import warn_of_dropout

            warn_of_dropout(dropout)
        if scaling is not None and not (isinstance(scaling, (int, float)) and scaling > 0):
            query, scaling = query * scaling, 1.0
        meaning = getattr(attention_mask, "flashonnx", None)
        if meaning is None and attention_mask is None:
            meaning = self._without_mask(module, query, key, is_causal)
        lengths, attributes = None, {}
        if meaning is not None:
            attributes, lengths = meaning.bounds.attributes(), meaning.lengths
            attention_mask = None if meaning.padding is None else meaning.padding[:, None, None, :]
        elif attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise self._refuse(f"{layer} has a mask of dtype {attention_mask.dtype}, neither bool nor additive")
        attention_mask = _with_bias(attention_mask, position_bias, key)
        sinks = None if s_aux is None else s_aux.reshape(-1).float()
        # Eager layers add finfo.min where others leave out: a query that sees no key then gets the mean of V.
        mean = self._was_eager(module) and sinks is None
        if mean and attention_mask is not None and query.dtype != torch.float32:
            self.remarks["queries that see no key get the mean of V, which eager layers in 16 bits give nearly"] = None
        y = torch.ops.flashonnx.attention(
            query, key, value, attention_mask, None, None, lengths, sinks,
            scale=scaling, softcap=softcap or 0.0, empty_row="mean" if mean else "zero", **attributes,
        )  # fmt: skip
        self.layers.add(module)
        return y.transpose(1, 2), None

    def _was_eager(self, module: Any) -> bool:
        config = getattr(module, "config", None)
        return id(config) in self._eager if config is not None else bool(self._eager)

    def _without_mask(self, module: Any, query: Any, key: Any, is_causal: bool | None) -> Meaning:
        """What a missing mask means: to transformers' own sdpa function the layer's word, to eager ones nothing."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true as known

        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal:
            return Meaning(Bounds())
        # The former is causal then but for a single query, which sees all keys.
        if self._was_eager(module) or not known(query.shape[2] == key.shape[2]):
            raise self._refuse(f"{type(module).__name__} is causal but gives no mask")
        return Meaning(Bounds(right=0))


def _with_bias(mask: Any, bias: Any, key: Any) -> Any:
    """One mask input for both: bool, or additive in K's dtype."""
    import torch

    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(key.dtype)
    if mask is not None and mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], key.shape[2])  # PyTorch broadcasts it, the operator would pad it
    if bias is None:
        return mask
    bias = bias.to(key.dtype)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def why_not(route: Route | None, error: BaseException) -> str:
    """What made an export through the route fail, in one line; `route` is None where it did not even begin."""
    if route is not None and route.refusal:
        return route.refusal
    while error.__cause__ is not None:
        error = error.__cause__
    line = str(error).strip().partition("\n")[0]
    if "mask_token" in line:
        return "a mask is read by other code than the attention function"
    return f"{type(error).__name__}: {line}"


def candidate(model: Any) -> str | None:
    """None if `model` holds models of transformers that the route may be tried on; else why not ("": it holds none)."""
    if "transformers" not in sys.modules:
        return ""
    from transformers import PreTrainedModel

    models = [module for module in getattr(model, "modules", list)() if isinstance(module, PreTrainedModel)]
    if not models:
        return ""
    try:
        _interfaces()
    except (ImportError, AttributeError) as error:
        return f"this transformers has no attention and mask interfaces ({error}); update it"
    for module in models:
        if not getattr(module, "_can_set_attn_implementation", lambda: False)():
            return f"{type(module).__name__} does not ask transformers for its attention function"
        if _SWITCH.search(_source(type(module))):
            return f"{type(module).__name__} does something else depending on the name of its attention function"
        if reason := _foreign(module.config._attn_implementation_internal):
            return f"{type(module).__name__} attends through {reason}"
        if getattr(module.config, "output_attentions", False):
            return f"{type(module).__name__} gives its attention weights; set output_attentions to False"
    return None


def _foreign(name: Any) -> str:
    """What behind the name is not transformers' own attention or mask function; empty if nothing is."""
    if name not in (None, "eager", "sdpa"):
        return f"'{name}', whose meaning the route does not know; set attn_implementation to sdpa"
    for kind, functions in zip(("attention", "mask"), _interfaces(), strict=True):
        function = functions._global_mapping.get(name or "sdpa")
        if function is not None and not function.__module__.startswith("transformers."):
            return f"the {kind} function '{name or 'sdpa'}', which is not transformers' own"
    return ""


def _source(kind: type) -> str:
    """The file that a class stands in; empty if it is not at hand."""
    try:
        return inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):
        return ""


def _configs(model: Any) -> list[Any]:
    """Every configuration in `model` that says which attention function to take, each once."""
    import transformers

    # Its name up to transformers 4.
    base = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig
    found: dict[int, Any] = {}
    pending = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop()
        if isinstance(config, base) and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _interfaces() -> tuple[Any, Any]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _weights_are_wanted() -> bool:
    """Whether transformers collects attention weights, which fused attention never forms, in this forward call."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


@functools.cache
def _token_op() -> Any:
    """An operator without a meaning or an ONNX form, in the shape of a full mask, which only fake tensors have."""
    import torch

    def run(like: Any, batch: int, queries: int, keys: int) -> Any:
        raise RuntimeError("a mask token of an export was used outside it")

    op = torch.library.custom_op(
        "flashonnx::mask_token",
        run,
        mutates_args=(),
        schema="(Tensor like, SymInt batch, SymInt queries, SymInt keys) -> Tensor",
    )
    op.register_fake(lambda like, batch, queries, keys: like.new_empty((batch, 1, queries, keys)))
    return torch.ops.flashonnx.mask_token
