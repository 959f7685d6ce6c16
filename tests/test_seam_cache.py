"""The seam's word on caches, rotary embeddings and ragged batches: validation, workspace, log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_cases import CacheCase
from cache_seam import CacheProblem
from flashonnx._capi import CPU, Device, Library, Params, Tensor
from test_seam import HOPPER, _has_kernels, _tensor
from varlen_cases import VarlenCase

NONE = Tensor()
CACHE = CacheCase("cache", rotary="half", capacity=24)
PAGED = CacheCase("paged", page_size=8, capacity=24)
RAGGED = CacheCase("ragged", ragged=(3, 2))
VARLEN = VarlenCase("varlen")
# What is wrong with which problem: fields, and what the message says.
_BROKEN: dict[str, tuple[CacheCase | VarlenCase, dict[str, Any], str]] = {
    "cache_k alone": (CACHE, {"cache_v": NONE}, r"'key_cache'.*'value_cache', got only 'key_cache'"),
    "cache_k dtype": (CACHE, {"cache_k": _tensor("float16")}, r"'key_cache'.*float32, got float16"),
    "cache_v stride": (CACHE, {"cache_v": _tensor("float32", stride=(1, 1, 1, 2))}, r"'value_cache'.*innermost.*got 2"),
    "no lengths": (CACHE, {"cache_lengths": NONE}, r"'cache_lengths' is required"),
    "lengths dtype": (CACHE, {"cache_lengths": _tensor("float32")}, r"'cache_lengths'.*int32 or int64, got float32"),
    "capacity": (CACHE, {"cache_capacity": -1}, r"'cache_capacity'.*between 0 and 2\^31 - 1024, got -1"),
    "capacity 2^31": (CACHE, {"cache_capacity": 2**31}, r"'cache_capacity'.*got 2147483648"),
    "huge cache": (CACHE, {"cache_capacity": 2**30, "batch": 2**25, "q_length": 1, "kv_length": 1},
                   r"'key_cache'.*2\^56"),
    "many tokens": (
        CACHE, {"batch": 2**20, "q_length": 2**12, "kv_length": 2**12}, r"'batch \* q_length'.*1048576 x 4096"
    ),
    "wide token": (CACHE, {"q_heads": 2**24, "head_dim": 2**10}, r"'q_heads \* head_dim'.*at most 2\^29"),
    "past": (CACHE, {"past_k": _tensor("float32"), "past_v": _tensor("float32")}, r"'past_key'.*absent with"),
    "key_lengths": (CACHE, {"key_lengths": _tensor("int32")}, r"'nonpad_kv_seqlen'.*absent with 'key_cache'"),
    "k alone": (CACHE, {"v": NONE}, r"'K' is expected together with 'V', got only 'K'"),
    "k without length": (CACHE, {"k": NONE, "v": NONE}, r"'kv_length' is expected to be 0 without 'K', got 3"),
    "k length": (CACHE, {"kv_length": 2}, r"'K'.*sequence length of 'Q' \(3\).*got 2"),
    "offset": (CACHE, {"causal_offset": 4}, r"'causal_offset'.*0 with 'key_cache', got 4"),
    "mean": (CACHE, {"empty_row": 1}, r"empty_row.*\"zero\" with a cache.*got \"mean\""),
    "present alone": (CACHE, {"present_k": _tensor("float32")}, r"'present_key'.*'present_value'"),
    "mask": (CACHE, {"mask": _tensor("bool"), "mask_keys": 25}, r"'attn_mask'.*at most.*\(24\), got 25"),
    "table": (PAGED, {"block_table": _tensor("int64")}, r"'block_table'.*int32, got int64"),
    "page_size": (PAGED, {"page_size": 0}, r"'page_size' is expected to be between 1 and .*got 0"),
    "page_size without table": (CACHE, {"page_size": 8}, r"'page_size'.*0 without 'block_table', got 8"),
    "pages without table": (CACHE, {"num_pages": 8}, r"'num_pages'.*0 without 'block_table', got 8"),
    "pages": (PAGED, {"num_pages": -1}, r"'num_pages'.*got -1"),
    "capacity of pages": (PAGED, {"cache_capacity": 20}, r"'cache_capacity'.*multiple of 'page_size' \(8\), got 20"),
    "rotary odd": (CACHE, {"rotary_dim": 7}, r"'rotary_dim' is expected to be even.*\(32\), got 7"),
    "rotary wide": (CACHE, {"rotary_dim": 34}, r"'rotary_dim'.*head size \(32\), got 34"),
    "rotary 0": (CACHE, {"rotary_dim": 0}, r"'cos_cache'.*absent with rotary_dim 0"),
    "no cos": (CACHE, {"rotary_cos": NONE}, r"'cos_cache' is required"),
    "no sin": (CACHE, {"rotary_sin": NONE}, r"'sin_cache' is required"),
    "cos dtype": (CACHE, {"rotary_cos": _tensor("float16")}, r"'cos_cache'.*float32 or that of Q, got float16"),
    "cos stride": (CACHE, {"rotary_cos": _tensor("float32", stride=(9, 2, 0, 0))}, r"'cos_cache'.*innermost.*got 2"),
    "rotary_length": (CACHE, {"rotary_length": 0}, r"'rotary_length'.*between 1 and.*got 0"),
    "interleaved": (CACHE, {"rotary_interleaved": 2}, r"'rotary_interleaved'.*0 or 1, got 2"),
    "positions": (CACHE, {"rotary_positions": _tensor("int32")}, r"'position_ids'.*int64, got int32"),
    "positions alone": (PAGED, {"rotary_positions": _tensor("int64")}, r"'position_ids'.*absent with rotary_dim 0"),
    "rotary without cache": (
        VARLEN,
        {"rotary_dim": 8, "rotary_cos": _tensor("float32"), "rotary_sin": _tensor("float32"), "rotary_length": 9},
        r"rotary embeddings \('rotary_dim' 8\) are expected with 'key_cache', got none",
    ),
    "cu_q dtype": (RAGGED, {"cu_seqlens_q": _tensor("int64")}, r"'cu_seqlens_q'.*int32, got int64"),
    "cu_k dtype": (VARLEN, {"cu_seqlens_k": _tensor("float32")}, r"'cu_seqlens_k'.*int32, got float32"),
    "cu_k with cache": (RAGGED, {"cu_seqlens_k": _tensor("int32")}, r"'cu_seqlens_k'.*absent with 'key_cache'"),
    "cu_k alone": (VARLEN, {"cu_seqlens_q": NONE}, r"'cu_seqlens_k'.*absent without 'cu_seqlens_q'"),
    "cu_q alone": (VARLEN, {"cu_seqlens_k": NONE, "offset_from_lengths": 0}, r"'cu_seqlens_k'.*no cache, got none"),
    "q_tokens": (RAGGED, {"q_tokens": -1}, r"'q_tokens'.*got -1"),
    "q_tokens of none": (CACHE, {"q_tokens": 3}, r"'q_tokens'.*0 without 'cu_seqlens_q', got 3"),
    "kv_tokens of none": (CACHE, {"kv_tokens": 3}, r"'kv_tokens'.*0 without 'cu_seqlens_k', got 3"),
    "kv_tokens": (VARLEN, {"kv_tokens": 2**31}, r"'kv_tokens'.*got 2147483648"),
    "ragged mask": (RAGGED, {"mask": _tensor("bool")}, r"'attn_mask'.*absent in a ragged batch"),
    "ragged lengths": (VARLEN, {"key_lengths": _tensor("int32")}, r"'nonpad_kv_seqlen'.*absent in a ragged batch"),
    "ragged past": (VARLEN, {"past_k": _tensor("float32"), "past_v": _tensor("float32")}, r"'past_key'.*ragged batch"),
    "ragged present": (
        VARLEN, {"present_k": _tensor("float32"), "present_v": _tensor("float32")}, r"'present_key'.*ragged batch"
    ),
    "ragged mean": (VARLEN, {"empty_row": 1}, r"empty_row.*ragged batch, got \"mean\""),
    "lengths of none": (VARLEN, {"cache_lengths": _tensor("int32")}, r"'cache_lengths'.*absent without 'key_cache'"),
    "table of none": (VARLEN, {"block_table": _tensor("int32")}, r"'block_table'.*absent without 'key_cache'"),
    "capacity of none": (VARLEN, {"cache_capacity": 9}, r"'cache_capacity'.*0 without 'key_cache', got 9"),
}  # fmt: skip


def _problem(library: Library, case: CacheCase | VarlenCase) -> Params:
    """Valid parameters, and what they point to."""
    if isinstance(case, CacheCase):
        problem = CacheProblem(library, case)
        problem.params.keeps_alive = problem
        return problem.params
    inputs = case.inputs()
    views = inputs | {name: np.zeros(shape, np.float32) for name, shape in case.output_shapes().items()}
    params = case.params(library, "cpu", views)
    params.keeps_alive = views
    return params


@pytest.mark.parametrize("name", _BROKEN)
def test_invalid(library: Library, name: str) -> None:
    """Each function names the field, what was expected and what came; nothing is touched."""
    case, fields, message = _BROKEN[name]
    params = _problem(library, case)
    assert library.supported(params)
    for field, value in fields.items():
        setattr(params, field, value)
    for function in (library.supported, library.workspace, library.workspace_bound, library.run):
        with pytest.raises(ValueError, match=message):
            function(params)


@pytest.mark.parametrize(
    ("case", "field", "name"),
    [
        (CACHE, "cache_k", "key_cache"), (CACHE, "cache_v", "value_cache"), (CACHE, "cache_lengths", "cache_lengths"),
        (CACHE, "rotary_cos", "cos_cache"), (CACHE, "k", "K"), (PAGED, "block_table", "block_table"),
        (RAGGED, "cu_seqlens_q", "cu_seqlens_q"), (VARLEN, "cu_seqlens_k", "cu_seqlens_k"), (VARLEN, "q", "Q"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_null_data(library: Library, case: CacheCase | VarlenCase, field: str, name: str) -> None:
    params = _problem(library, case)
    getattr(params, field).data = None
    assert library.supported(params)  # which never looks at data
    with pytest.raises(ValueError, match=f"'{name}'.*null pointer"):
        library.run(params)


def test_a_present_of_the_same_memory_has_the_same_strides(library: Library) -> None:
    params = _problem(library, CACHE)
    params.present_k, params.present_v = params.cache_k, params.cache_v
    params.present_k.stride[1] += 1
    with pytest.raises(ValueError, match="'present_key_cache' shares the memory of 'key_cache'"):
        library.run(params)


@pytest.mark.parametrize(
    ("same", "message"),
    [
        ({"present_k": "cache_v"}, "'present_key_cache' is written .* other memory than 'value_cache', got the same"),
        ({"present_v": "cache_k"}, "'present_value_cache' is written .* other memory than 'key_cache'"),
        ({"present_v": "present_k"}, "'present_key_cache' is written .* other memory than 'present_value_cache'"),
        ({"present_k": None, "present_v": None, "cache_v": "cache_k"}, "'key_cache' is written .* than 'value_cache'"),
    ],
    ids=["key over values", "value over keys", "both in one", "in place"],
)
@pytest.mark.parametrize("page_size", [0, 8])
def test_what_is_written_has_its_own_memory(
    library: Library, page_size: int, same: dict[str, str | None], message: str
) -> None:
    params = _problem(library, CacheCase("apart", page_size=page_size, in_place=False))
    for name, other in same.items():
        setattr(params, name, getattr(params, other) if other else NONE)
    with pytest.raises(ValueError, match=message):
        library.run(params)


_SIZES = ("batch", "q_length", "head_dim", "value_dim", "cache_capacity", "q_tokens", "num_pages")


@pytest.mark.parametrize("device", [Device(CPU, sm_count=4), HOPPER], ids=["cpu", "hopper"])
@pytest.mark.parametrize("case", [CACHE, PAGED, RAGGED, VARLEN], ids=lambda case: case.id)
def test_workspace_bound(
    library: Library, device: Device, case: CacheCase | VarlenCase, random: np.random.Generator
) -> None:
    """The bound at the maxima holds for every problem of sizes up to these."""
    for _ in range(100):
        maxima = _problem(library, case)
        maxima.device = device
        if not _has_kernels_for(library, maxima):
            pytest.skip("built without kernels for it")
        _resize(maxima, {n: int(random.integers(32 if n.endswith("dim") else 1, 300)) for n in _SIZES})
        bound = library.workspace_bound(maxima)
        assert library.workspace(maxima) <= bound
        smaller = type(maxima).from_buffer_copy(maxima)
        least = {n: 32 if n.endswith("dim") else 0 for n in _SIZES}
        _resize(smaller, {n: int(random.integers(least[n], max(getattr(maxima, n), least[n]) + 1)) for n in _SIZES})
        assert 0 <= library.workspace(smaller) <= bound


def _resize(params: Params, sizes: dict[str, int]) -> None:
    """Those that the problem has; those that depend on them follow."""
    for name, value in sizes.items():
        if getattr(params, name):
            setattr(params, name, value)
    if params.page_size:
        params.cache_capacity -= params.cache_capacity % params.page_size
    if params.k.dtype and params.cache_k.dtype:
        params.kv_length = params.q_length


def _has_kernels_for(library: Library, params: Params) -> bool:
    try:
        library.supported(params)
    except NotImplementedError:
        return False
    return True


def test_memory_of_a_long_context(library: Library) -> None:
    """128k keys are read where they lie: the workspace does not grow with them."""
    for device in (Device(CPU, sm_count=4), HOPPER):
        sizes = []
        for capacity in (1 << 11, 1 << 17):
            params = _problem(library, CacheCase("long", rotary="half", q_length=1))
            params.device = device
            if device is HOPPER and not _has_kernels(library, params):
                continue
            params.cache_capacity = capacity
            sizes.append(library.workspace(params))
        assert not sizes or sizes[1] <= sizes[0] + (4 << 20)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (CacheCase("full", lengths=(-3, 23)), r"sequence 0: cache_lengths -3 .*sequence 1: cache_lengths 23 and 3"),
        (CacheCase("missing", lengths=(17, 9), page_size=8, missing=((1, 1),)), r"sequence 1: slot \d+ has no page"),
        (CacheCase("order", ragged=(3, -2)), r"cu_seqlens_q is out of order, or of \[0, 1\]"),
    ],
    ids=lambda x: x.id if isinstance(x, CacheCase) else "",
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_log_reports_what_does_not_fit(library_path: str, device: str, case: CacheCase, message: str) -> None:
    import re

    program = f"""
import dataclasses
from cache_cases import CacheCase
from cache_seam import CacheProblem
from flashonnx._capi import Library
problem = CacheProblem(Library({library_path!r}), {case!r}, {device!r})
problem.launch()
if {device!r} == "cuda":
    import torch
    torch.cuda.synchronize()
"""
    program = program.replace("poison=nan", 'poison=float("nan")')
    environment = os.environ | {"FLASHONNX_LOG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
    assert re.search(message, done.stderr + done.stdout, re.DOTALL), done.stderr
