"""torch.ops.flashonnx.attention_varlen: attention within sequences that are packed without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashonnx._capi_cache import varlen_params
from flashonnx.torch._ops import _dense_rows, _device, _library, _no_gradient, _refuse_gradient
from flashonnx.torch._shapes import FLOATS, check_numbers

VARLEN = "FlashAttentionVarlen"
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, Tensor? sinks=None, *, "
    "bool is_causal=False, float? scale=None, float softcap=0.0, int left_window_size=-1, int right_window_size=-1, "
    "int max_q_length=0, int max_kv_length=0"
)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    left_window_size: int = -1,
    right_window_size: int = -1,
    **options: Any,
) -> Tensor:
    windows = {"left_window_size": left_window_size, "right_window_size": right_window_size}
    y = _empty(query, key, value, cu_seqlens_q, cu_seqlens_k, sinks, **windows, **options)
    of_queries = cu_seqlens_q.int()
    of_keys = of_queries if cu_seqlens_k is None else cu_seqlens_k.int()
    q, k, v = (_dense_rows(x) for x in (query, key, value))
    logits = None if sinks is None else sinks.float()  # kept until the library has run: it knows the address alone
    library = _library()
    params = varlen_params(
        library, _device(query.device.type, query.device.index or 0), q, k, v, y, of_queries, of_keys,
        sinks=logits, window_left=left_window_size, window_right=right_window_size,
        **options,
    )  # fmt: skip
    workspace = torch.empty(library.workspace(params), dtype=torch.uint8, device=query.device)
    stream = torch.cuda.current_stream(query.device).cuda_stream if query.device.type == "cuda" else 0
    library.run(params, workspace.data_ptr(), stream)
    return y


def _empty(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    softcap: float = 0.0,
    scale: float | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    **_: Any,
) -> Tensor:
    """Y, not yet filled; the inputs are checked.

    Raises:
        ValueError: they contradict each other.
    """
    check_numbers(softcap, left_window_size, right_window_size, "zero", False)
    # As float32 has it: what rounds to 0 there would mean the default.
    if scale is not None and not 2.0**-149 <= scale < 2.0**128:
        raise ValueError(f"{VARLEN}: attribute 'scale' is expected to be positive and finite, got {scale:g}")
    for name, x in (("Q", query), ("K", key), ("V", value)):
        if x.ndim != 3 or x.dtype not in FLOATS or x.dtype != query.dtype or x.device != query.device:
            raise ValueError(
                f"{VARLEN}: input '{name}' is expected to be (tokens, heads, size) in float32, float16 or bfloat16, as "
                f"all of Q, K and V on one device, got {tuple(x.shape)} of {x.dtype} on {x.device}"
            )
    if value.shape[:2] != key.shape[:2] or key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{VARLEN}: Q, K and V are expected to be (Tq, Hq, D), (Tk, Hkv, D) and (Tk, Hkv, Dv), where Hkv divides "
            f"Hq, got {', '.join(str(tuple(x.shape)) for x in (query, key, value))}"
        )
    ends = {"cu_seqlens_q": cu_seqlens_q} | ({} if cu_seqlens_k is None else {"cu_seqlens_k": cu_seqlens_k})
    for name, x in ends.items():
        if x.ndim != 1 or x.dtype not in (torch.int32, torch.int64) or x.device != query.device:
            raise ValueError(
                f"{VARLEN}: input '{name}' is expected to be (sequences + 1,) int32 beside Q, got {tuple(x.shape)} of "
                f"{x.dtype} on {x.device}"
            )
        if x.shape[0] < 1 or x.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"{VARLEN}: input '{name}' is expected to have one number more than there are sequences, as many as "
                f"cu_seqlens_q, got {x.shape[0]} beside {cu_seqlens_q.shape[0]}"
            )
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ValueError(f"{VARLEN}: input 'sinks' is expected to be ({query.shape[1]},), got {tuple(sinks.shape)}")
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


attention_varlen = torch.library.custom_op(
    "flashonnx::attention_varlen", _run, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)
attention_varlen.register_fake(_empty)
attention_varlen.register_autograd(_no_gradient, setup_context=_refuse_gradient)
