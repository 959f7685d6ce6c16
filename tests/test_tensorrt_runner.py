"""The runner of engines: what it does between arrays and TensorRT, which is played here.

On a GPU the memory, the stream and the graphs are real; with real engines it is tested by test_tensorrt_full.py.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashonnx.tensorrt import EngineError
from flashonnx.tensorrt._runner import Device, Runner


class Kind(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class Place(enum.Enum):
    DEVICE = 0
    HOST = 1


TRT = SimpleNamespace(TensorIOMode=Kind, TensorLocation=Place)


class HostBuffer:
    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 255, np.uint8)
        self.handle, self.size, self.closed = self.bytes.ctypes.data, size, False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class HostDevice:
    """Device memory is host memory, a graph is the function that was captured."""

    stream_handle = 7

    def __init__(self) -> None:
        self.buffers: dict[int, HostBuffer] = {}
        self.captures = 0

    def allocate(self, size: int) -> HostBuffer:
        buffer = HostBuffer(size)
        self.buffers[buffer.handle] = buffer
        return buffer

    def upload(self, buffer: HostBuffer, array: Any) -> None:
        assert not buffer.closed
        buffer.bytes[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def download(self, array: Any, buffer: HostBuffer) -> None:
        array.reshape(-1).view(np.uint8)[...] = buffer.bytes[: array.nbytes]

    def capture(self, enqueue: Any) -> Any:
        self.captures += 1
        return enqueue

    def launch(self, graph: Any) -> None:
        graph()

    def synchronize(self) -> None:
        pass


class Engine:
    """y = x, z = two times x's rows; x is (at most 8, 3) of bfloat16, on whichever device copies."""

    num_io_tensors = 3

    def __init__(self, copy: Any) -> None:
        self.copy = copy

    def get_tensor_name(self, index: int) -> str:
        return "xyz"[index]

    def get_tensor_mode(self, name: str) -> Kind:
        return Kind.INPUT if name == "x" else Kind.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="BF16")

    def get_tensor_location(self, name: str) -> Place:
        return Place.DEVICE

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return (0, 3), (4, 3), (8, 3)

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    active_optimization_profile = 0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shape: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}
        self.runs = 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return len(shape) == 2 and shape[0] <= 8 and shape[1] == 3

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address
        self.addresses[name] = address

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        rows, columns = self.shape
        return (2 * rows, columns) if name == "z" else self.shape

    def execute_async_v3(self, stream: int) -> bool:
        self.runs += 1
        size = 2 * self.shape[0] * self.shape[1]
        x = self.addresses["x"]
        for target in (self.addresses["y"], self.addresses["z"], self.addresses["z"] + size):
            self.engine.copy(target, x, size, stream)
        return True


def host_copy(device: HostDevice) -> Any:
    def find(address: int) -> tuple[HostBuffer, int]:
        for handle, buffer in device.buffers.items():
            if not buffer.closed and handle <= address < handle + max(buffer.size, 1):
                return buffer, address - handle
        raise AssertionError("no such memory")

    def copy(target: int, source: int, size: int, stream: int) -> None:
        assert stream == device.stream_handle
        if size:
            (to, at), (come, begin) = find(target), find(source)
            to.bytes[at : at + size] = come.bytes[begin : begin + size]

    return copy


def device_copy(target: int, source: int, size: int, stream: int) -> None:
    from cuda.bindings import driver

    if size:
        assert int(driver.cuMemcpyDtoDAsync(target, source, size, stream)[0]) == 0


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu":
        return HostDevice()
    pytest.importorskip("cuda.core", reason="tier gpu: no cuda-python")
    return Device()


both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@both
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_shapes_come_and_go(device: Any, cuda_graphs: bool) -> None:
    copy = host_copy(device) if isinstance(device, HostDevice) else device_copy
    with Runner(Engine(copy), TRT, device, cuda_graphs=cuda_graphs) as run:
        assert run.inputs == ("x",)
        assert run.outputs == ("y", "z")
        for rows in (2, 2, 8, 0, 2, 5, 8):
            x = np.arange(3.0 * rows).reshape(rows, 3).astype(ml_dtypes.bfloat16)
            outputs = run({"x": x + 1})
            assert outputs["y"].dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(outputs["y"], x + 1)
            np.testing.assert_array_equal(outputs["z"], np.concatenate((x + 1, x + 1)))
        if cuda_graphs and isinstance(device, HostDevice):
            # 2; 8 moves the memory, so 2 again; 0, 5 and 8 as they come.
            assert device.captures == 5
    if isinstance(device, HostDevice):
        assert all(buffer.closed for buffer in device.buffers.values())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "the engine's inputs are x, got none"),
        ({"x": np.zeros((1, 3), ml_dtypes.bfloat16), "w": np.zeros(1)}, "the engine's inputs are x, got x, w"),
        ({"x": np.zeros((1, 3), np.float32)}, "input 'x' is expected to be bfloat16, got float32"),
        (
            {"x": np.zeros((9, 3), ml_dtypes.bfloat16)},
            r"input 'x' is expected to have a shape from \(0, 3\) to \(8, 3\), got \(9, 3\)",
        ),
    ],
)
def test_wrong_inputs(inputs: dict[str, Any], message: str) -> None:
    device = HostDevice()
    run = Runner(Engine(host_copy(device)), TRT, device)
    with pytest.raises(ValueError, match=message):
        run(inputs)


def test_failures_of_tensorrt_are_errors() -> None:
    device = HostDevice()
    engine = Engine(host_copy(device))
    run = Runner(engine, TRT, device)
    run._context.execute_async_v3 = lambda stream: False
    with pytest.raises(EngineError, match="could not run the engine"):
        run({"x": np.zeros((1, 3), ml_dtypes.bfloat16)})
    engine.create_execution_context = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(EngineError, match="cannot make an execution context"):
        Runner(engine, TRT, device)
