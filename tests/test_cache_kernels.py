"""FlashAttentionKVCache through the C seam, on the CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import CacheCase
from cache_seam import CacheProblem, check_cache_outputs
from cases import numpy_dtype
from flashonnx._capi import Library, ParallelFor

_BY_ID = {case.id: case for case in cache_cases.ALL}


def on_devices(*chosen: CacheCase) -> Any:
    """Parametrises a test by (device, case), each with its markers."""
    parameters = []
    for case in chosen:
        if not case.gpu:
            parameters.append(pytest.param("cpu", case, id=f"cpu-{case.id}"))
        parameters.append(pytest.param("cuda", case, id=f"cuda-{case.id}", marks=pytest.mark.gpu))
    return pytest.mark.parametrize(("device", "case"), parameters)


@on_devices(*cache_cases.ALL)
def test_case(library: Library, device: str, case: CacheCase) -> None:
    CacheProblem(library, case, device).check()


@on_devices(*(_BY_ID[i] for i in (
    "append-half-8of2-float32", "append-page4-interleaved-8of2-float16", "append-half-ragged-8of2-bfloat16",
    "read-half-2of2-float16", "elsewhere", "elsewhere-paged", "everything", "partial-rotary-half-6",
    "table-float32-half-bfloat16", "mask-b1qk-T-8",
)))  # fmt: skip
@pytest.mark.parametrize("shift", [1, 3])
def test_unaligned_memory(library: Library, device: str, case: CacheCase, shift: int) -> None:
    """Every tensor begins some elements after an aligned address (flash-attention#1347)."""
    CacheProblem(library, case, device, shift=shift).check()


@on_devices(CacheCase("far", dtype="bfloat16", lengths=(5, 9), rotary="half"),
            CacheCase("far-page", dtype="bfloat16", lengths=(2, 5), page_size=8, capacity=8, q_length=3))  # fmt: skip
def test_strides_beyond_32_bits(library: Library, device: str, case: CacheCase) -> None:
    """Batch entries of a cache, or pages, more than 2^31 elements apart, in memory that is mostly never touched."""
    problem = CacheProblem(library, case, device)
    stride, dtype, views = 2**31 + 64, numpy_dtype("bfloat16"), {}
    for name, field in (("key_cache", "cache_k"), ("value_cache", "cache_v")):
        given = problem.given[name]
        pages = given.shape[0]
        if device == "cpu":
            far: Any = np.empty((pages - 1) * stride + given[0].size, dtype)
            address = far.ctypes.data
            views[name] = [far[i * stride : i * stride + given[0].size] for i in range(pages)]
        else:
            import torch

            far = torch.empty((pages - 1) * stride + given[0].size, dtype=torch.bfloat16, device=device)
            address = far.data_ptr()
            views[name] = [far[i * stride : i * stride + given[0].size] for i in range(pages)]
        for view, page in zip(views[name], problem.inputs[name].view, strict=True):
            view[...] = page.reshape(-1)
        tensor = getattr(problem.params, field)
        tensor.data, tensor.stride[0] = address, stride
        problem.inputs.pop(name)
    problem.case = replace(case, in_place=True)
    outputs = problem.run()
    for name, parts in views.items():
        raw = [p if device == "cpu" else p.cpu().view(__import__("torch").int16).numpy().view(dtype) for p in parts]
        outputs[f"present_{name}"] = np.stack(raw).reshape(problem.given[name].shape)
    check_cache_outputs(case, problem.given, outputs)


@on_devices(*(_BY_ID[i] for i in ("append-half-8of2-float32", "prefill-and-decode", "page16-bfloat16", "everything")))
def test_runs_are_bit_equal(library: Library, device: str, case: CacheCase) -> None:
    """The same input gives the same bits, in place or not."""
    first = CacheProblem(library, case, device).run()
    for i in range(20):
        again = CacheProblem(library, replace(case, in_place=i % 2 == 0), device, inputs=case.inputs()).run()
        for name, out in again.items():
            assert out.tobytes() == first[name].tobytes(), f"{name} of run {i}"


@on_devices(CacheCase("mates", ragged=(3, 1, 17, 1), lengths=(0, 130, 30, 5), capacity=160, rotary="half"),
            CacheCase("mates-paged", ragged=(3, 1, 17, 1), lengths=(0, 130, 30, 5), capacity=160, page_size=16,
                      dtype="float16", head_dim=64))  # fmt: skip
def test_fixed_split_ignores_batch_mates(library: Library, device: str, case: CacheCase) -> None:
    """A sequence gives the same bits whether it is alone or among others."""
    together = CacheProblem(library, case, device)
    together.params.fixed_split = 1
    expected = together.run()
    assert case.ragged is not None
    ends = np.cumsum((0, *case.ragged))
    for b in range(case.batch):
        alone = replace(case, lengths=case.lengths[b : b + 1], ragged=case.ragged[b : b + 1])
        inputs = {n: x for n, x in together.given.items() if n not in ("key_cache", "value_cache")}
        inputs |= {n: x[ends[b] : ends[b + 1]] for n, x in inputs.items() if n in ("Q", "K", "V")}
        inputs["cache_lengths"] = inputs["cache_lengths"][b : b + 1]
        inputs["cu_seqlens_q"] = np.array([0, case.ragged[b]], np.int32)
        whole = case.page_size > 0
        inputs |= {
            n: together.given[n] if whole else together.given[n][b : b + 1] for n in ("key_cache", "value_cache")
        }
        if whole:
            inputs["block_table"] = inputs["block_table"][b : b + 1]
        problem = CacheProblem(library, replace(alone, in_place=True), device, inputs=inputs)
        problem.params.fixed_split = 1
        found = problem.run()
        assert found["Y"].tobytes() == expected["Y"][ends[b] : ends[b + 1]].tobytes(), f"sequence {b}"
        assert found["lse"].tobytes() == expected["lse"][:, ends[b] : ends[b + 1]].tobytes(), f"sequence {b}"


def test_any_number_of_threads(library: Library) -> None:
    """A caller's parallel loop, in any order."""
    case = replace(_BY_ID["prefill-and-decode"], id="threads")
    first = CacheProblem(library, case).run()

    def backwards(_context: Any, count: int, body: Any, data: Any) -> None:
        for i in reversed(range(count)):
            body(data, i)

    def pooled(_context: Any, count: int, body: Any, data: Any) -> None:
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda i: body(data, i), range(count)))

    for loop in (backwards, pooled):
        found = CacheProblem(library, case, parallel_for=ParallelFor(loop)).run()
        assert all(out.tobytes() == first[name].tobytes() for name, out in found.items())
