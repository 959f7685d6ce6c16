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

import functools
import inspect
import re
import sys
from types import TracebackType
from typing import Any, Self

from flashonnx.export.pytorch.transformers_functions import NAME, PACKED, Functions, Meaning
from flashonnx.export.pytorch.transformers_masks import MODULE, is_consecutive

# Code that would make other masks, or none, for a name that it has never heard of.
_SWITCH = re.compile(r"""_attn_implementation[^\n]*["']sdpa["']""")


class RouteRefusalError(Exception):
    """A model that the route cannot take, in words that say what it is about."""


class Route(Functions):
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
        self._registered: list[tuple[Any, str, Any]] = []
        self._packed = {id(config) for config in _packing(model)}

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        for interface, function in zip(_interfaces(), (self.attend, self.mask), strict=True):
            for name in (NAME, PACKED):
                self._registered.append((interface, name, interface._global_mapping.get(name)))
                interface.register(name, function)
        for config in self._configs:
            name = PACKED if id(config) in self._packed else NAME
            self._set(config, "_attn_implementation_internal", name)
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
        while self._registered:
            interface, name, function = self._registered.pop()
            if function is None:
                interface._global_mapping.pop(name, None)
            else:
                interface.register(name, function)

    def _set(self, holder: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end."""
        self._before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def _token(self, meaning: Meaning, batch: Any, queries: Any, keys: Any, device: Any) -> Any:
        import torch

        token = _token_op()(torch.empty(0, dtype=torch.bool, device=device), batch, queries, keys)
        token.flashonnx = meaning
        return token

    def _refuse(self, reason: str) -> RouteRefusalError:
        self.refusal = self.refusal or reason
        return RouteRefusalError(reason)

    def _remark(self, remark: str) -> None:
        self.remarks[remark] = None

    def _dropped(self, layer: str, probability: float) -> None:
        from flashonnx.export.pytorch.nodes import warn_of_dropout

        warn_of_dropout(probability)

    def _attended(self, module: Any) -> None:
        self.layers.add(module)

    def _was_eager(self, module: Any) -> bool:
        config = getattr(module, "config", None)
        return id(config) in self._eager if config is not None else bool(self._eager)


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
        if _SWITCH.search(source_of(type(module))):
            return f"{type(module).__name__} does something else depending on the name of its attention function"
        if reason := _foreign(module.config._attn_implementation_internal):
            return f"{type(module).__name__} attends through {reason}"
        if getattr(module.config, "output_attentions", False):
            return f"{type(module).__name__} gives its attention weights; set output_attentions to False"
    return None


def _foreign(name: Any) -> str:
    """What behind the name is neither transformers' own attention or mask function nor ours; empty if nothing is."""
    if name == NAME and all(isinstance(getattr(f.get(NAME), "__self__", None), Functions) for f in _interfaces()):
        return ""
    if name not in (None, "eager", "sdpa"):
        return f"'{name}', whose meaning the route does not know; set attn_implementation to sdpa"
    for kind, functions in zip(("attention", "mask"), _interfaces(), strict=True):
        function = functions._global_mapping.get(name or "sdpa")
        if function is not None and not function.__module__.startswith("transformers."):
            return f"the {kind} function '{name or 'sdpa'}', which is not transformers' own"
    return ""


def source_of(kind: type) -> str:
    """The file that a class stands in; empty if it is not at hand."""
    try:
        return inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):
        return ""


def _packing(model: Any) -> list[Any]:
    """The configurations of layers that attend within packed sequences, and only for flash attention as a whole."""
    kinds = {type(module) for module in model.modules()}
    packing = {kind for kind in kinds if "cu_seq_lens_q=" in _source_of(kind)}
    layers = [module for module in model.modules() if type(module) in packing]
    return [module.config for module in layers if hasattr(module, "config")]


def _source_of(kind: type) -> str:
    """The text of a class; empty if it is not at hand."""
    if not kind.__module__.startswith("transformers."):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
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
