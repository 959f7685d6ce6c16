"""Memory that callers of ONNX Runtime bind themselves: anywhere, and of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from cases import Case
from nodes import asked_for, one_node, open_session, run
from onnx import helper
from seam import Buffer, address, check_outputs
from test_kernels import on_devices

ort = pytest.importorskip("onnxruntime")
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
