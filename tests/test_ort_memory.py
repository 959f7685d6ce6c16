"""Memory that callers of ONNX Runtime bind themselves: anywhere, and of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import flashonnx
import numpy as np
import pytest
from cases import Case
from nodes import asked_for, one_node, open_session, run
from onnx import TensorProto, helper
from seam import Buffer, address, check_outputs
from test_kernels import on_devices

from benchmarks.memory import peak

ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
_BY_ID = {case.id: case for case in cases.ALL}


@pytest.fixture(autouse=True)
def _needs_provider(request: pytest.FixtureRequest, library_path: str) -> None:
    if request.node.get_closest_marker("gpu") and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")


def _run_bound(model: Any, device: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Runs over memory of ours: (dtype, shape, address) by name."""
    session = open_session(model, device)
    binding = session.io_binding()
    for memory, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
        for name, (dtype, shape, where) in memory.items():
            bind(name, device, 0, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape, where)
    if device == "cuda":
        import torch

        torch.cuda.synchronize()  # what fills the memory is on PyTorch's stream
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()


def _bound(buffers: dict[str, Buffer]) -> dict[str, Any]:
    return {name: (buffer.dtype, buffer.shape, address(buffer.view)) for name, buffer in buffers.items()}


@on_devices(
    *(_BY_ID[f"{i}{t}"] for i in ("d64-s128-", "layout-3hd-") for t in ("float32", "float16")),
    *(_BY_ID[i] for i in ("mask-bhqk-T", "mask-float32-float16", "past-bhsd-3", "past-bhsd-64", "everything")),
)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_unaligned_memory(device: str, case: Case, shift: int) -> None:
    """Tensors begin some elements after an aligned address (flash-attention#1347); nothing else is written."""
    given = case.inputs()
    inputs = {name: Buffer(x.shape, x.dtype, device, array=x, shift=shift) for name, x in given.items()}
    kinds = {"lse": np.dtype(np.float32)}
    outputs = {
        name: Buffer(case.output_shapes()[name], kinds.get(name, cases.numpy_dtype(case.dtype)), device, shift=shift)
        for name in filter(None, asked_for(case))
    }
    _run_bound(one_node(case, given), device, _bound(inputs), _bound(outputs))
    check_outputs(case, given, {name: buffer.numpy() for name, buffer in outputs.items()})
    for name, buffer in inputs.items():
        assert buffer.numpy().tobytes() == given[name].tobytes(), f"{name} was written"


def test_strides_beyond_32_bits(device: str, tmp_path: Path) -> None:
    """The second entry of K begins more than 2^31 elements after the first (flash-attention#2214), mostly untouched."""
    case = Case("far", dtype="float16", heads=(1, 1), q_length=3, kv_length=5, head_dim=16, value_dim=1,
                lengths=(3, 5), is_causal=1)  # fmt: skip
    given = case.inputs()
    length = 2**27 + 8
    buffers = {n: Buffer(x.shape, x.dtype, device, array=x) for n, x in given.items() if n not in ("K", "V")}
    bound, kept = _bound(buffers), []
    for name in ("K", "V"):
        x = given[name]
        shape = (x.shape[0], length, x.shape[2])
        if device == "cpu":  # a file with a hole
            far: Any = np.memmap(tmp_path / name, x.dtype, "w+", shape=shape)
            far[:, : x.shape[1]] = x
        else:
            import torch

            far = torch.empty(shape, dtype=torch.float16, device=device)
            far[:, : x.shape[1]] = torch.from_numpy(x)
        bound[name] = (x.dtype, shape, address(far))
        kept.append(far)
    outputs = {n: Buffer(s, np.float32 if n == "lse" else np.float16, device)
               for n, s in case.output_shapes().items() if n in asked_for(case)}  # fmt: skip
    _run_bound(one_node(case, given, dynamic=True), device, bound, _bound(outputs))
    check_outputs(case, given, {name: buffer.numpy() for name, buffer in outputs.items()})


def test_one_after_another(device: str) -> None:
    """Kernels with little and much shared memory, in one process, back and forth (onnxruntime#28388)."""
    for name in (f"after-one-another-{i}" for i in (0, 1, 2, 1, 0)):
        case = _BY_ID[name]
        given = case.inputs()
        check_outputs(case, given, run(open_session(one_node(case, given), device), case, given))


MOST = 40 << 20  # bytes; float32 scores of all heads would have 2 GiB on the GPU, 256 MiB on the CPU


def _within(model: Any, device: str, memory: int) -> Any:
    """A session whose CUDA provider may take so many bytes."""
    options = {"arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": str(memory)}
    cuda = [("CUDAExecutionProvider", options)] if device == "cuda" else []
    return flashonnx.session(model, [*cuda, "CPUExecutionProvider"])


@pytest.mark.parametrize("page_size", [0, 64])
def test_a_long_context_takes_its_cache(device: str, page_size: int) -> None:
    """A prompt's last chunk and one token more after 128k keys: nothing grows with them but the cache that is there."""
    keys, tokens, heads, kv_heads, size = 131072, 128, *((32, 8, 128) if device == "cuda" else (4, 1, 64))
    dtype = np.dtype(np.float16 if device == "cuda" else np.float32)
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    shape = (keys // page_size, page_size, kv_heads, size) if page_size else (1, kv_heads, keys, size)
    names = ["Q", "K", "V", "key_cache", "value_cache", "cache_lengths", *(["block_table"] if page_size else [])]
    widths = {"Q": heads * size, "K": kv_heads * size, "V": kv_heads * size}
    infos = [helper.make_tensor_value_info(name, kind, [1, "tokens", width]) for name, width in widths.items()]
    infos += [helper.make_tensor_value_info(name, kind, shape) for name in names[3:5]]
    infos += [helper.make_tensor_value_info("cache_lengths", TensorProto.INT32, [1])]
    if page_size:
        infos += [helper.make_tensor_value_info("block_table", TensorProto.INT32, [1, keys // page_size])]
    results = ["Y", "present_key", "present_value"]
    node = helper.make_node("FlashAttentionKVCache", names, results, domain="flashonnx", q_num_heads=heads,
                            kv_num_heads=kv_heads)  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in results]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("flashonnx", 1)]
    graph = helper.make_graph([node], "long", infos, outputs)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = _within(model, device, MOST)
    place = torch.device(device)
    caches = [torch.randn(shape, dtype=getattr(torch, dtype.name), device=place) for _ in range(2)]
    table = torch.randperm(keys // page_size, dtype=torch.int32, device=place)[None] if page_size else None
    gathered = [x if table is None else x[table[0].long()].flatten(0, 1).transpose(0, 1)[None] for x in caches]
    for length, new in ((keys - tokens - 1, tokens), (keys - 1, 1)):
        q, k, v = (torch.randn(1, new, w, dtype=caches[0].dtype, device=place) for w in widths.values())
        y, lengths = torch.empty_like(q), torch.tensor([length], dtype=torch.int32, device=place)

        def call(session: Any, given: Any = (q, k, v, *caches, lengths, table), made: Any = (y, *caches)) -> Any:
            binding = session.io_binding()
            for bind, which, tensors in ((binding.bind_input, names, given), (binding.bind_output, results, made)):
                for name, x in zip(which, tensors, strict=False):
                    element = np.int32 if x.dtype == torch.int32 else dtype.type
                    bind(name, device, 0, element, list(x.shape), x.data_ptr())
            session.run_with_iobinding(binding)
            return made[0]

        if device == "cuda":  # its provider gets no more
            torch.cuda.synchronize()
            call(session)
        else:
            _, grown = peak(lambda call=call: call(session), device)
            if grown is None:
                pytest.skip("this system does not tell a process's peak memory")
            assert grown < MOST, f"{grown >> 20} MiB for {new} tokens of {heads} heads"
        rows = [x.double() for x in gathered]
        for cache, x in zip(rows, (k, v), strict=True):
            cache[:, :, length : length + new] = x.view(1, new, kv_heads, size).transpose(1, 2)
        last = q[:, -1].double().view(kv_heads, heads // kv_heads, size)
        scores = last @ rows[0][0, :, : length + new].transpose(1, 2) / size**0.5
        expected = (scores.softmax(-1) @ rows[1][0, :, : length + new]).flatten()
        assert (y[0, -1].double() - expected).abs().max() < (2e-3 if device == "cuda" else 1e-5)
        gathered = [x if table is None else x[table[0].long()].flatten(0, 1).transpose(0, 1)[None] for x in caches]


@pytest.mark.gpu
def test_what_takes_more_than_that_fails() -> None:
    """The bound above binds: as many bytes between two nodes are refused."""
    count = helper.make_tensor("count", TensorProto.INT64, [1], [MOST // 4 + 1])
    nodes = [helper.make_node("Expand", ["x", "count"], ["many"]), helper.make_node("ReduceMax", ["many"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph(nodes, "more", [x], [y], [count])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(Exception, match=r"(?i)memory|alloc"):
        _within(model, "cuda", MOST).run(None, {"x": np.ones(1, np.float32)})
    assert _within(model, "cuda", 4 * MOST).run(None, {"x": np.ones(1, np.float32)})[0] == 1
