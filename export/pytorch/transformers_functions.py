"""What transformers asks of an attention implementation: a mask function and an attention function, on our operator.

Keys and values keep their heads, softcaps, sinks and position biases arrive as what they are, and masks as what they
mean. `Route` gives them to an export, `flashonnx.transformers` to models that run in PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flashonnx.export.pytorch.transformers_masks import Bounds, bounds_of, describe

# Not the name of a kernel: transformers looks up names with "flash" in them on its hub.
NAME = "onnx_fused"
# For layers that attend within packed sequences as a whole only if the name has "flash" in it, and else one by one.
PACKED = "onnx_fused_flash"

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


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a mask token stands for.

    Attributes:
        bounds: by position.
        padding: (batch, keys) bool, True where the key counts; None: everywhere.
        lengths: (batch,) the number of keys, where the last query stands at the last key; None: where the first query
            stands at the first key.
        packed: makes the full mask where several sequences are packed into one, for layers that are not told which.
    """

    bounds: Bounds
    padding: Any = None
    lengths: Any = None
    packed: Callable[[], Any] | None = None


class Functions:
    """The two functions; what a mask with a meaning is handed out as, and what is done with refusals, vary."""

    def _token(self, meaning: Meaning, batch: Any, queries: Any, keys: Any, device: Any) -> Any:
        """What stands for a mask until it reaches `attend`: a tensor, as some models ask for its shape."""
        raise NotImplementedError

    def _refuse(self, reason: str) -> Exception:
        """What to raise."""
        raise NotImplementedError

    def _remark(self, remark: str) -> None:
        """Takes down what the user may want to know."""

    def _dropped(self, layer: str, probability: float) -> None:
        """Says, or refuses, that dropout is left out."""
        raise self._refuse(f"{layer} drops {probability:.0%} of its weights: put the model into eval mode")

    def _attended(self, module: Any) -> None:
        """Takes down that a layer came through."""

    def _was_eager(self, module: Any) -> bool:
        """Whether the layer's own attention is the eager one, where a row without a key is the mean of V."""
        return False

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

        def full() -> Any:
            self._remark(f"a mask stays queries x keys: {why}")
            skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            return sdpa_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
                use_vmap=use_vmap, device=device, **(kwargs | skip),
            )  # fmt: skip

        within = None if use_vmap or at_end or attention_mask is not None else bounds_of(mask_function, packed=True)
        if bounds is None and within is not None:
            return self._token(Meaning(within, packed=functools.cache(full)), batch_size, q_length, kv_length, device)
        if bounds is None or why:
            return full()
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        lengths = None
        if at_end and bounds != Bounds():
            lengths = torch.full((batch_size,), kv_length, dtype=torch.int64, device=device)
        return self._token(Meaning(bounds, padding, lengths), batch_size, q_length, kv_length, device)

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
        starts, ends = (kwargs.pop(f"cu_seq_lens_{name}", None) for name in "qk")
        if starts is not None:  # bounds of their lengths would be those of the example
            kwargs = {name: x for name, x in kwargs.items() if name not in ("max_length_q", "max_length_k")}
        if kwargs.pop("output_attentions", None) or _weights_are_wanted():
            raise self._refuse(f"{layer} is to give its attention weights; set output_attentions to False")
        for name, argument in kwargs.items():
            if name not in _HARMLESS and argument is not None and argument is not False:
                raise self._refuse(f"{layer} passes '{name}', which the route does not know")
        if dropout:
            self._dropped(layer, dropout)
        if scaling is not None and not (isinstance(scaling, (int, float)) and scaling > 0):
            query, scaling = query * scaling, 1.0
        meaning = getattr(attention_mask, "flashonnx", None)
        if meaning is None and attention_mask is None:
            meaning = self._without_mask(module, query, key, is_causal)
        lengths, attributes = None, {}
        if meaning is not None and meaning.packed is not None and starts is None:
            attention_mask, meaning = meaning.packed(), None
        if meaning is not None:
            attributes, lengths = meaning.bounds.attributes(), meaning.lengths
            attention_mask = None if meaning.padding is None else meaning.padding[:, None, None, :]
        elif attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise self._refuse(f"{layer} has a mask of dtype {attention_mask.dtype}, neither bool nor additive")
        attention_mask = _with_bias(attention_mask, position_bias, key)
        if starts is not None and (attention_mask is not None or lengths is not None or query.shape[0] != 1):
            raise self._refuse(f"{layer} packs sequences (cu_seq_lens_q) and has a mask, a bias or a batch besides")
        sinks = None if s_aux is None else s_aux.reshape(-1).float()
        # Eager layers add finfo.min where others leave out: a query that sees no key then gets the mean of V.
        mean = self._was_eager(module) and sinks is None
        if mean and attention_mask is not None and query.dtype != torch.float32:
            self._remark("queries that see no key get the mean of V, which eager layers in 16 bits give nearly")
        if starts is not None:
            packed = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
            y = torch.ops.flashonnx.attention_varlen(
                *packed,
                starts,
                starts if ends is None else ends,
                sinks,
                scale=scaling,
                softcap=softcap or 0.0,
                **attributes,
            )
            self._attended(module)
            return y.unsqueeze(0), None
        y = self._attention(
            module, query, key, value, attention_mask, lengths, sinks,
            scale=scaling, softcap=softcap or 0.0, empty_row="mean" if mean else "zero", **attributes,
        )  # fmt: skip
        self._attended(module)
        return y.transpose(1, 2), None

    def _attention(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, lengths: Any, sinks: Any, **attributes: Any
    ) -> Any:
        """Y (B, Hq, Sq, Dv), by the operator."""
        import torch

        return torch.ops.flashonnx.attention(query, key, value, mask, None, None, lengths, sinks, **attributes)

    def _without_mask(self, module: Any, query: Any, key: Any, is_causal: bool | None) -> Meaning:
        """What a missing mask means: to transformers' own sdpa function the layer's word, to eager ones nothing."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true as known

        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if not causal:
            return Meaning(Bounds())
        # The former is causal then but for a single query, which sees all keys.
        if not self._was_eager(module):
            if known(query.shape[2] == 1):
                return Meaning(Bounds())
            if known(query.shape[2] == key.shape[2]):
                return Meaning(Bounds(right=0))
        raise self._refuse(f"{type(module).__name__} is causal but gives no mask")


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
    if mask.dtype != torch.bool:
        return bias + mask
    return torch.where(mask, bias, torch.finfo(key.dtype).min)  # as transformers does: a row without a key is a mean


def _weights_are_wanted() -> bool:
    """Whether transformers collects attention weights, which fused attention never forms, in this forward call."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())
