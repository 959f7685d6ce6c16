"""The operators: their schema, their run through the C seam, their fake run for tracing."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashonnx._capi import CPU, CUDA, Device, Library, attention_params
from flashonnx._library import library_path
from flashonnx.torch._shapes import Problem, check_numbers, describe

_ARGUMENTS = (
    "Tensor query, Tensor? key=None, Tensor? value=None, Tensor? attn_mask=None, Tensor? past_key=None, "
    "Tensor? past_value=None, Tensor? nonpad_kv_seqlen=None, Tensor? sinks=None, Tensor? bias=None, *, "
    "bool is_causal=False, float? scale=None, float softcap=0.0, int left_window_size=-1, int right_window_size=-1, "
    'str empty_row="zero", int? q_num_heads=None, int? kv_num_heads=None, str qkv_layout="separate"'
)


def _attention(query: Tensor, *inputs: Tensor | None, **attributes: Any) -> Tensor:
    """Y; `flashonnx.torch` explains the arguments."""
    problem, options = _prepare(query, *inputs, **attributes)
    y, y_heads = problem.empty_y()
    _run(problem, y_heads, options)
    return y


def _attention_outputs(
    query: Tensor, *inputs: Tensor | None, present: bool = False, lse: bool = False, **attributes: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y, present_key, present_value and lse; likewise."""
    problem, options = _prepare(query, *inputs, **attributes)
    y, y_heads = problem.empty_y()
    present_key, present_value = problem.empty_present(present)
    sums = problem.empty_lse(lse)
    if present:
        options |= {"present_k": present_key, "present_v": present_value}
    if lse:
        options["lse"] = sums
    _run(problem, y_heads, options)
    return y, present_key, present_value, sums


def _prepare(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    empty_row: str = "zero",
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qkv_layout: str = "separate",
) -> tuple[Problem, dict[str, Any]]:
    """The problem, and the options of `attention_params` that are not tensors."""
    check_numbers(softcap, left_window_size, right_window_size, empty_row, sinks is not None)
    problem = describe(
        query, key, value, attn_mask, past_key, past_value, nonpad_kv_seqlen, sinks, bias,
        q_num_heads=q_num_heads, kv_num_heads=kv_num_heads, scale=scale, qkv_layout=qkv_layout,
    )  # fmt: skip
    options = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "empty_row": empty_row}
    return problem, options | {"window_left": left_window_size, "window_right": right_window_size}


def _run(p: Problem, y: Tensor, options: dict[str, Any]) -> None:
    library, device = _library(), p.q.device
    q, k, v, past_k, past_v = (_dense_rows(x) for x in (p.q, p.k, p.v, p.past_key, p.past_value))
    sinks = None if p.sinks is None else p.sinks.float()
    biases: dict[str, Any] = {}
    if p.biases is not None:
        biases = dict(zip(("q_bias", "k_bias", "v_bias"), map(_dense_rows, p.biases), strict=True))
    params = attention_params(
        library, _device(device.type, device.index or 0), q, k, v, y, mask=p.mask, past_k=past_k, past_v=past_v,
        key_lengths=p.lengths, sinks=sinks, **biases, **options,
    )  # fmt: skip
    workspace = torch.empty(library.workspace(params), dtype=torch.uint8, device=device)
    # The library itself makes the stream's device the current one while it launches.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    library.run(params, workspace.data_ptr(), stream)


def _dense_rows(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)  # whose strides may be anything


@functools.cache
def _library() -> Library:
    return Library(library_path())


@functools.cache
def _device(kind: str, ordinal: int) -> Device:
    return _library().device(CPU) if kind == "cpu" else _library().device(CUDA, ordinal)


def _fake_attention(query: Tensor, *inputs: Tensor | None, **attributes: Any) -> Tensor:
    return _prepare(query, *inputs, **attributes)[0].empty_y()[0]


def _fake_outputs(
    query: Tensor, *inputs: Tensor | None, present: bool = False, lse: bool = False, **attributes: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, _ = _prepare(query, *inputs, **attributes)
    return problem.empty_y()[0], *problem.empty_present(present), problem.empty_lse(lse)


def _refuse_gradient(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Stands for setting up the context of a backward call, which PyTorch asks for when an input requires grad.

    So it is the forward call that fails, not the backward one later. Only a trace gets past this: an export has
    parameters but no backward call, and torch.compile traces the backward call, which fails then.
    """
    if all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in inputs if isinstance(tensor, Tensor)):
        _no_gradient()


def _no_gradient(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "FlashAttention: an input requires grad, and torch.ops.flashonnx.attention has no gradient (it is for "
        "inference): call it under torch.no_grad() or torch.inference_mode(), or detach the inputs"
    )


def _define(name: str, run: Any, fake: Any, arguments: str, returns: str) -> Any:
    op = torch.library.custom_op(f"flashonnx::{name}", run, mutates_args=(), schema=f"({arguments}) -> {returns}")
    op.register_fake(fake)
    op.register_autograd(_no_gradient, setup_context=_refuse_gradient)
    return op


attention = _define("attention", _attention, _fake_attention, _ARGUMENTS, "Tensor")
attention_outputs = _define(
    "attention_outputs",
    _attention_outputs,
    _fake_outputs,
    f"{_ARGUMENTS}, bool present=False, bool lse=False",
    "(Tensor, Tensor, Tensor, Tensor)",
)
