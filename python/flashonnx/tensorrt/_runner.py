"""Running an engine on NumPy arrays: device memory, a stream and CUDA graphs of cuda-python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from flashonnx.tensorrt._build import EngineError, polygraphy_backend
from flashonnx.tensorrt._register import modules, register

# By the names of trt.DataType's members: trt.nptype knows no bfloat16.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "INT64": "int64", "INT32": "int32", "INT8": "int8", "UINT8": "uint8",
           "BOOL": "bool"}  # fmt: skip

_EMBEDDED = b"flashonnx_tensorrt_register"  # a symbol of the library


def runner(
    engine: bytes | str | os.PathLike[str] | Any,
    *,
    tensorrt: ModuleType | None = None,
    cuda_graphs: bool = False,
    profile: int = 0,
    allow_code: bool = False,
) -> Runner:
    """An engine, ready to run: the result is called with input arrays by name, and is a context manager.

    Args:
        engine: a serialised engine, the path of one, or an `ICudaEngine`.
        tensorrt: the module `tensorrt` or `tensorrt_rtx`. Default: the one that is imported, else the first that can
            be.
        cuda_graphs: capture the engine once for each combination of input shapes, then replay. Worth it for small
            problems, whose kernels are shorter than their launches.
        profile: number of the optimisation profile to use.
        allow_code: whether code inside the engine may run (`build_engine(embed_plugin=True)` puts it there). Say so
            only for an engine that you trust as you would trust a program.

    Raises:
        EngineError: TensorRT cannot load the engine here.
        ModuleNotFoundError: TensorRT or cuda-python is not installed.
    """
    trt = tensorrt or modules()[0]
    return Runner(_load(trt, engine, allow_code), trt, Device(), cuda_graphs=cuda_graphs, profile=profile)


def polygraphy_runner(engine: bytes | str | os.PathLike[str], *, tensorrt: ModuleType | None = None) -> Any:
    """The same engine as a runner of Polygraphy's, for its `Comparator` and the other tools there.

    Raises:
        ModuleNotFoundError: TensorRT or Polygraphy is not installed.
    """
    trt = tensorrt or modules()[0]
    backend = polygraphy_backend(trt)
    register(trt, parser=False)
    return backend.TrtRunner(backend.EngineFromBytes(_bytes(engine)))


class Runner:
    """Runs one engine in one execution context on one stream; not for several threads at once."""

    def __init__(
        self, engine: Any, trt: ModuleType, device: Any, *, cuda_graphs: bool = False, profile: int = 0
    ) -> None:
        self._trt, self._engine, self._device, self._cuda_graphs = trt, engine, device, cuda_graphs
        self._context = engine.create_execution_context()
        if self._context is None:
            raise EngineError("TensorRT cannot make an execution context; its log says why")
        if profile and not self._context.set_optimization_profile_async(profile, device.stream_handle):
            raise EngineError(f"the engine has no optimisation profile {profile}")
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = tuple(name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        self.outputs = tuple(name for name in names if name not in self.inputs)
        self._buffers: dict[str, Any] = {}  # of the device, each as large as was ever needed
        self._shape_values: dict[str, np.ndarray[Any, Any]] = {}  # inputs that TensorRT reads on the host
        self._graphs: dict[tuple[Any, ...], Any] = {}
        self._shapes: tuple[Any, ...] = ()

    def __call__(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Runs and waits.

        Args:
            inputs: an array for each of `self.inputs`, of the engine's dtype (bfloat16: `ml_dtypes.bfloat16`) and a
                shape within its profile.

        Returns:
            A new array for each of `self.outputs`.

        Raises:
            ValueError: a missing or unknown input, a dtype or a shape that the engine does not take.
            EngineError: TensorRT failed; its log says why.
        """
        arrays = self._check(inputs)
        if self._set_shapes(arrays):
            self._graphs.clear()  # they hold addresses
        for name, array in arrays.items():
            if name not in self._shape_values:
                self._device.upload(self._buffers[name], array)
        self._execute()
        outputs = {name: np.empty(self._output_shape(name), self.dtype(name)) for name in self.outputs}
        for name, array in outputs.items():
            self._device.download(array, self._buffers[name])
        self._device.synchronize()
        return outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the device memory, the context and the engine."""
        self._device.synchronize()
        self._graphs.clear()
        self._context = self._engine = None
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def dtype(self, name: str) -> np.dtype[Any]:
        """NumPy's dtype of an input or output."""
        kind = self._engine.get_tensor_dtype(name).name
        if kind == "BF16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        if kind not in _DTYPES:
            raise ValueError(f"{name!r} is of TensorRT's type {kind}, for which NumPy has none")
        return np.dtype(_DTYPES[kind])

    def _check(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        if set(inputs) != set(self.inputs):
            raise ValueError(f"the engine's inputs are {', '.join(self.inputs)}, got {', '.join(inputs) or 'none'}")
        arrays = {}
        for name in self.inputs:
            arrays[name] = np.ascontiguousarray(inputs[name])
            if arrays[name].dtype != self.dtype(name):
                raise ValueError(f"input {name!r} is expected to be {self.dtype(name)}, got {arrays[name].dtype}")
        return arrays

    def _set_shapes(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> bool:
        """Shapes, addresses and memory for them; whether an address has changed."""
        moved = False
        for name, array in arrays.items():
            if not self._context.set_input_shape(name, array.shape):
                minimum, _, maximum = self._engine.get_tensor_profile_shape(
                    name, self._context.active_optimization_profile
                )
                raise ValueError(
                    f"input {name!r} is expected to have a shape from {tuple(minimum)} to {tuple(maximum)}, "
                    f"got {array.shape}"
                )
            if self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:
                moved |= not np.array_equal(self._shape_values.get(name, ()), array)
                self._shape_values[name] = array
                self._context.set_tensor_address(name, array.ctypes.data)
            else:
                moved |= self._reserve(name, array.nbytes)
        missing = self._context.infer_shapes()
        if missing:
            raise EngineError(f"TensorRT cannot tell the output shapes without {', '.join(missing)}")
        for name in self.outputs:
            shape = self._output_shape(name)
            if min(shape, default=0) < 0:
                raise EngineError(f"the shape of output {name!r} depends on data: use polygraphy_runner")
            moved |= self._reserve(name, int(np.prod(shape)) * self.dtype(name).itemsize)
        self._shapes = tuple(array.shape for array in arrays.values())
        return moved

    def _reserve(self, name: str, size: int) -> bool:
        """Device memory for a tensor; whether it is another than before."""
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.size >= size:
            return False
        if buffer is not None:
            self._device.synchronize()
            buffer.close()
        self._buffers[name] = self._device.allocate(max(size, 1))  # TensorRT wants an address for empty tensors too
        self._context.set_tensor_address(name, int(self._buffers[name].handle))
        return True

    def _execute(self) -> None:
        if not self._cuda_graphs:
            self._enqueue()
            return
        if self._shapes not in self._graphs:
            self._enqueue()  # what TensorRT does once for new shapes must not be captured
            self._graphs[self._shapes] = self._device.capture(self._enqueue)
        self._device.launch(self._graphs[self._shapes])

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._device.stream_handle):
            raise EngineError("TensorRT could not run the engine; its log says why")

    def _output_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._context.get_tensor_shape(name))


class Device:
    """The current CUDA device and a stream of it, by cuda-python."""

    def __init__(self) -> None:
        try:
            from cuda import core
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "engines are run with cuda-python, which is not installed: pip install cuda-python", name=error.name
            ) from error
        self._device = core.Device()
        self._device.set_current()
        self._stream = self._device.create_stream()
        self.stream_handle = int(self._stream.handle)

    def allocate(self, size: int) -> Any:
        """A buffer of `size` bytes with `handle`, `size` and `close()`."""
        return self._device.allocate(size, stream=self._stream)

    def upload(self, buffer: Any, array: np.ndarray[Any, Any]) -> None:
        """Copies a contiguous array to the beginning of the buffer, in the stream's order."""
        from cuda.bindings import driver

        if array.nbytes:
            _check(driver.cuMemcpyHtoDAsync(int(buffer.handle), array.ctypes.data, array.nbytes, self.stream_handle))

    def download(self, array: np.ndarray[Any, Any], buffer: Any) -> None:
        """Fills a contiguous array from the beginning of the buffer, in the stream's order."""
        from cuda.bindings import driver

        if array.nbytes:
            _check(driver.cuMemcpyDtoHAsync(array.ctypes.data, int(buffer.handle), array.nbytes, self.stream_handle))

    def capture(self, enqueue: Any) -> Any:
        """A graph of what `enqueue` puts into the stream."""
        builder = self._stream.create_graph_builder()
        builder.begin_building()
        enqueue()
        return builder.end_building().complete()

    def launch(self, graph: Any) -> None:
        """Puts the graph into the stream."""
        graph.launch(self._stream)

    def synchronize(self) -> None:
        """Waits for the stream."""
        self._stream.sync()


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise EngineError(f"CUDA driver: {result[0].name}")


def _bytes(engine: bytes | str | os.PathLike[str]) -> bytes:
    return Path(engine).read_bytes() if isinstance(engine, (str, os.PathLike)) else engine


def _load(trt: ModuleType, engine: Any, allow_code: bool) -> Any:
    if isinstance(engine, trt.ICudaEngine):
        return engine
    data = _bytes(engine)
    trt_runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    if _EMBEDDED not in data:
        register(trt, parser=False)
    elif not allow_code:
        raise EngineError(
            "the engine carries libflashonnx.so inside: if you trust it, say runner(..., allow_code=True)"
        )
    trt_runtime.engine_host_code_allowed = allow_code
    loaded = trt_runtime.deserialize_cuda_engine(data)
    if loaded is None:
        raise EngineError(f"{trt.__name__} {trt.__version__} cannot load the engine on this machine; its log says why")
    return loaded
