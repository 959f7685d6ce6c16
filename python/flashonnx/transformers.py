"""The kernels of flashonnx as an attention implementation of transformers, for models that run in PyTorch.

    import flashonnx.transformers

    model = AutoModel.from_pretrained(..., attn_implementation=flashonnx.transformers.NAME)
    model.set_attn_implementation(flashonnx.transformers.NAME)  # or of a model that is there

Importing it registers an attention and a mask function with transformers under `NAME`. Keys keep their heads, masks are
never queries x keys where they are padding, triangles and windows, and softcaps, sinks and position biases are the
operator's own; a query that sees no key gives 0, as with "sdpa". It is for inference (torch.no_grad(), eval mode), on
the CPU and on CUDA devices, and generates with a cache. `export_onnx` needs none of this: it sets models up itself.

Refused with a NotImplementedError that says why are models that read their masks elsewhere than in an attention
function (torch.compile is one), arguments that the operator has not, dropout and attention weights.
"""

from __future__ import annotations

from typing import Any

import torch

import flashonnx.torch  # noqa: F401  registers the operator
from flashonnx.export.pytorch.transformers_functions import NAME, Functions, Meaning

__all__ = ["NAME"]

_DESCRIBES = ("shape", "device", "dtype", "ndim", "requires_grad", "is_cuda", "layout")


class MaskToken(torch.Tensor):
    """Stands for a mask of (batch, 1, queries, keys), of which it has the shape and nothing else."""

    flashonnx: Meaning

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("dim", "size", "numel") or getattr(func, "__self__", None) in _DESCRIPTORS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(f"a mask is read by other code than the attention function ({name}), a model or torch.compile")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"MaskToken({self.flashonnx})"


_DESCRIPTORS = frozenset(getattr(torch.Tensor, name) for name in _DESCRIBES)


class _InPyTorch(Functions):
    """The functions for models that run."""

    def _token(self, meaning: Meaning, batch: int, queries: int, keys: int, device: Any) -> MaskToken:
        nothing = torch.empty(1, dtype=torch.bool, device=device).expand(batch, 1, queries, keys)
        token = nothing.as_subclass(MaskToken)
        token.flashonnx = meaning
        return token

    def _refuse(self, reason: str) -> NotImplementedError:
        return _refusal(reason)


def _refusal(reason: str) -> NotImplementedError:
    return NotImplementedError(f"flashonnx.transformers: {reason}; or use attn_implementation='sdpa'")


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"flashonnx.transformers needs transformers 4.53 or newer ({error}): pip install --upgrade transformers"
        ) from error
    functions = _InPyTorch()
    AttentionInterface.register(NAME, functions.attend)
    AttentionMaskInterface.register(NAME, functions.mask)


_register()
