"""The kernels through the C seam, on the CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
from cases import Case
from flashonnx._capi import Library, ParallelFor, attention_params
from seam import Buffer, Problem, check_outputs, query_device


def on_devices(*chosen: Case) -> Any:
    """Parametrises a test by (device, case), each with its markers."""
    parameters = []
    for case in chosen:
        marks = [pytest.mark.slow] if case.slow else []
        if not case.gpu:
            parameters.append(pytest.param("cpu", case, id=f"cpu-{case.id}", marks=marks))
        parameters.append(pytest.param("cuda", case, id=f"cuda-{case.id}", marks=[*marks, pytest.mark.gpu]))
    return pytest.mark.parametrize(("device", "case"), parameters)


_BY_ID = {case.id: case for case in cases.ALL}


@on_devices(*cases.ALL)
def test_case(library: Library, device: str, case: Case) -> None:
    Problem(library, case, device).check()


@on_devices(
    *(replace(_BY_ID[f"d64-s128-{t}"], id=f"d64-{t}") for t in cases.DTYPES),
    _BY_ID["mask-bhqk-T"],
    _BY_ID["mask-float32-float16"],
    _BY_ID["layout-3hd-float16"],
    _BY_ID["past-bhsd-3"],
    _BY_ID["past-bhsd-64"],
    _BY_ID["everything"],
)
def test_unaligned_memory(library: Library, device: str, case: Case) -> None:
    """Every tensor begins one element after an aligned address (flash-attention#1347)."""
    Problem(library, case, device, shift=1).check()


@on_devices(*(Case(f"{m}-{t}", mask=m, mask_dtype=t, mask_fill="first row" if "q" in m else "random")
              for m in ("bhqk", "b11k", "1hqk") for t in ("int8", "int32")))  # fmt: skip
def test_integer_masks(library: Library, device: str, case: Case) -> None:
    """Only at the seam: any value but 0 means attend."""
    Problem(library, case, device).check()


@on_devices(
    *(Case(f"wide-{d}-{dv}-s{s}-causal{c}-{t}", dtype=t, heads=(4, 2), q_length=s, kv_length=s, head_dim=d,
           value_dim=dv, is_causal=c, gpu=True)
      for t in ("float16", "bfloat16") for d, dv in ((192, 128), (136, 72)) for s in (65, 300) for c in (0, 1)),
    *(Case(f"wide-lengths-{p}-{t}", dtype=t, q_length=140, kv_length=300, head_dim=192, value_dim=128, lengths=(5, 170),
           poison=p, gpu=True)
      for t in ("float16", "bfloat16") for p in (None, np.nan)),
)  # fmt: skip
def test_values_narrower_than_keys(library: Library, device: str, case: Case) -> None:
    """Over several tiles, as in DeepSeek's prefill."""
    Problem(library, case, device).check()


@on_devices(*(Case(f"{m}-{mask}-{t}", dtype=t, mask=m, mask_dtype=mask, q_length=70, kv_length=130)
              for m in ("b1qk", "b11k") for t, mask in (("bfloat16", "float16"), ("float16", "bfloat16"))))  # fmt: skip
def test_masks_of_the_other_16_bits(library: Library, device: str, case: Case) -> None:
    """Only at the seam: a mask of two bytes that is not of Q's type."""
    Problem(library, case, device).check()


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize("changes", [
    {}, {"lse": False}, {"lengths": (500, 130)}, {"mask": "b11k", "mask_fill": "padding"}, {"left": 40, "right": 90},
    {"q_length": 1100, "is_causal": 1},
], ids=lambda changes: "-".join(changes) or "full")  # fmt: skip
def test_many_tiles(library: Library, changes: dict[str, Any], multiprocessors: int) -> None:
    """More than the multiprocessors take at once: tiles of sm90 are of 192 queries then, else of 128."""
    case = replace(cases.square("many-tiles", 500, dtype="float16", heads=(3, 3), head_dim=64), **changes)
    problem = Problem(library, case, "cuda")
    problem.params.device.sm_count = multiprocessors
    problem.check()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_infinite_and_largest_elements(library: Library, device: str, dtype: str) -> None:
    """Where a query sees them: as IEEE arithmetic has it. Products of split numbers would make NaN of them."""
    case = Case(f"infinite-{dtype}", dtype=dtype, q_length=40, kv_length=40, head_dim=64, is_causal=1, lse=False)
    inputs = case.inputs()
    inputs["V"][0, 1, 2:4] = np.inf, -np.inf
    inputs["V"][1, 1, 2] = inputs["V"].dtype.type(3.4e38 if dtype == "float32" else 6e4)
    inputs["K"][1, 3, 0] = -np.inf  # a score of -inf: the key has no weight
    inputs["Q"][..., 0] = np.abs(inputs["Q"][..., 0])
    expected = case.reference(inputs)["Y"]
    assert np.isinf(expected).sum() == 2 * 39
    assert np.isfinite(expected[1]).all()
    y = Problem(library, case, device, inputs=inputs).run()["Y"].astype(np.float64)
    tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64, 160])
def test_infinite_values_that_few_queries_see(library: Library, device: str, dtype: str, head_dim: int) -> None:
    """Of two decoded tokens one masks the keys with infinite values and NaN; their tiles lie between others."""
    shape = {"q_length": 2, "kv_length": 300, "heads": (4, 2), "head_dim": head_dim}
    case = Case(f"infinite-few-{dtype}-{head_dim}", dtype=dtype, mask="b1qk", lse=False, **shape)
    inputs = case.inputs()
    inputs["attn_mask"][...] = True
    inputs["attn_mask"][:, :, 0, [3, 140, 299]] = False
    inputs["V"][0, [3, 140], 5] = np.inf
    inputs["V"][1, 299, head_dim - 1] = np.nan
    expected = case.reference(inputs)["Y"]
    assert np.isfinite(expected[:, 0]).all()
    assert np.isinf(expected[0, 1]).sum() == np.isnan(expected[1, 1]).sum() == 2
    y = Problem(library, case, device, inputs=inputs).run()["Y"].astype(np.float64)
    tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rise", [9, 60, 150])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_that_rise(library: Library, device: str, dtype: str, head_dim: int, rise: int) -> None:
    """By e^rise every 300 keys, whichever end a kernel begins at: e^150 is beyond float32's range."""
    keys = np.arange(900)
    for order in (keys, keys[::-1]):
        shape = {"q_length": 70, "kv_length": 900, "head_dim": head_dim, "heads": (1, 1)}
        case = Case(f"rise-{rise}", dtype=dtype, layout="bhsd", **shape)
        inputs = case.inputs()
        inputs["Q"][..., 0] = 4
        inputs["K"][..., 0] = (order // 300 * rise * head_dim**0.5 / 4).astype(inputs["K"].dtype)
        Problem(library, case, device, inputs=inputs).check()


@on_devices(_BY_ID["causal-lengths-float32"], _BY_ID["lengths-clamped-0"], _BY_ID["lengths-float16"])
def test_int32_lengths(library: Library, device: str, case: Case) -> None:
    inputs = case.inputs()
    inputs["nonpad_kv_seqlen"] = inputs["nonpad_kv_seqlen"].astype(np.int32)
    Problem(library, case, device, inputs=inputs).check()


def test_strides_beyond_32_bits(library: Library, device: str) -> None:
    """A batch stride of more than 2^31 elements (flash-attention#2214), of memory that is mostly never touched."""
    case = Case("strides", dtype="bfloat16", q_length=5, kv_length=7, layout="bhsd", is_causal=1, lse=False)
    problem = Problem(library, case, device)
    stride, dtype, kept = 2**31 + 64, cases.numpy_dtype("bfloat16"), []
    for name, field in (("K", "k"), ("V", "v")):
        given = problem.given[name]
        if device == "cpu":
            far: Any = np.empty(stride + given[1].size, dtype)
            address = far.ctypes.data
            far[: given[0].size], far[stride:] = given[0].ravel(), given[1].ravel()
        else:
            import torch

            far = torch.empty(stride + given[1].size, dtype=torch.bfloat16, device=device)
            address = far.data_ptr()
            far[: given[0].size], far[stride:] = problem.inputs[name].view.reshape(2, -1)
        tensor = getattr(problem.params, field)
        tensor.data, tensor.stride[0] = address, stride
        kept.append(far)
    problem.check()


def test_one_after_another(library: Library, device: str) -> None:
    """Kernels with little and much shared memory, in one process, back and forth (onnxruntime#28388)."""
    for name in (f"after-one-another-{i}" for i in (0, 1, 2, 1, 0)):
        for dtype in cases.DTYPES:
            Problem(library, replace(_BY_ID[name], dtype=dtype), device).check()


@pytest.mark.slow
@pytest.mark.gpu
def test_size_beyond_32_bits(library: Library) -> None:
    """(1600, 729, 16, 72) bfloat16 (flash-attention#2214): more bytes than 32 bits count; entries are compared."""
    import torch

    shape, looked_at = (1600, 729, 16, 72), (0, 799, 1023, 1599)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    o = torch.full_like(q, torch.nan)
    params = attention_params(library, query_device(library, "cuda"), *(x.transpose(1, 2) for x in (q, k, v, o)))
    workspace = torch.empty(library.workspace(params), dtype=torch.int8, device="cuda")
    library.run(params, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    assert not o.isnan().any()
    for i in looked_at:
        case = cases.square(f"entry {i}", 729, dtype="bfloat16", batch=1, heads=(16, 16), head_dim=72)
        one = [
            x[i].reshape(1, 729, 16 * 72).cpu().view(torch.int16).numpy().view(cases.numpy_dtype("bfloat16"))
            for x in (q, k, v, o)
        ]
        check_outputs(case, dict(zip("QKV", one, strict=False)), {"Y": one[3]})


@on_devices(_BY_ID["past-bhsd-64"])
def test_present_in_the_memory_of_past(library: Library, device: str, case: Case) -> None:
    """A cache with room to spare: past and present are views of it, and only the new rows are written."""
    problem = Problem(library, case, device)
    assert case.past
    room = case.keys + 5
    caches = {}
    for name in ("key", "value"):
        past = problem.given[f"past_{name}"]
        content = np.full((*past.shape[:2], room, past.shape[3]), 7, past.dtype)
        content[:, :, : case.past] = past
        caches[name] = cache = Buffer(content.shape, past.dtype, device, array=content)
        address = cache.view.data_ptr() if device == "cuda" else cache.view.ctypes.data
        for field in (f"past_{name[0]}", f"present_{name[0]}"):
            tensor = getattr(problem.params, field)
            tensor.data = address
            tensor.stride[0], tensor.stride[1] = room * past.shape[3] * past.shape[1], room * past.shape[3]
    outputs = problem.run()
    check_outputs(case, problem.given, {name: outputs[name] for name in ("Y", "lse")})
    expected = case.reference(problem.given)
    for name, cache in caches.items():
        np.testing.assert_array_equal(cache.numpy()[:, :, : case.keys], expected[f"present_{name}"])
        np.testing.assert_array_equal(cache.numpy()[:, :, case.keys :], 7)


@on_devices(Case("batch-mates", batch=3, q_length=1, kv_length=700, lengths=(3, 700, 64), is_causal=1, heads=(4, 2)))
def test_fixed_split_ignores_batch_mates(library: Library, device: str, case: Case) -> None:
    """With fixed_split a request alone and in a batch give the same bits (flash-attention#1897)."""
    together = Problem(library, case, device)
    together.params.fixed_split = 1
    outputs = together.run()
    assert case.lengths
    for i in range(case.batch):
        inputs = {name: x[i : i + 1] for name, x in together.given.items()}
        alone = Problem(library, replace(case, batch=1, lengths=case.lengths[i : i + 1]), device, inputs=inputs)
        alone.params.fixed_split = 1
        assert alone.run()["Y"].tobytes() == outputs["Y"][i : i + 1].tobytes()


@pytest.mark.gpu
def test_second_device(library: Library) -> None:
    """Kernels run on the arrays' device, whatever the thread's current one is, which stays (onnxruntime#14710)."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    with torch.cuda.device(0):
        for case in (_BY_ID["everything"], _BY_ID["d512-float16"]):
            Problem(library, case, "cuda:1").check()
            assert torch.cuda.current_device() == 0


def test_torch_tensors(library: Library, device: str) -> None:
    """Views of torch tensors go through by address and strides; PyTorch's own attention is the judge."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(2, 65, 3, 4, 40, device=device, generator=generator)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    mask = torch.rand(2, 1, 65, 65, device=device, generator=generator) < 0.7
    o = torch.full((2, 65, 4, 40), torch.nan, device=device).transpose(1, 2)
    params = attention_params(library, query_device(library, device), q, k, v, o, mask=mask)
    workspace = torch.empty(library.workspace(params), dtype=torch.int8, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    library.run(params, workspace.data_ptr(), stream)
    right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("id", ["s577-float32", "everything", "no-queries-bshd", "many-heads-small"])
def test_parallel_for_of_the_caller(library: Library, id: str) -> None:
    """The CPU kernel takes the caller's threads, whatever the order, and covers every index once."""
    seen: list[int] = []
    lock = threading.Lock()

    def parallel_for(context: int | None, count: int, body: Any, data: int) -> None:
        def call(index: int) -> None:
            with lock:
                seen.append(index)
            body(data, index)

        seen.clear()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(call, reversed(range(count))))
        assert sorted(seen) == list(range(count))

    case = _BY_ID[id]
    callback = ParallelFor(parallel_for)
    Problem(library, case, parallel_for=callback).check()
    assert seen or not case.q_length, "the callback was not used"
