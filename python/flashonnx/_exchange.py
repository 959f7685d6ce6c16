"""Memory that the host and a session share: what both see at once where that can be, else copies of it."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNED = 256  # bytes, as ONNX Runtime's own allocations


class Exchange:
    """Small arrays in one piece of memory: of the host, locked, which a GPU reads and writes over the bus.

    Without cuda-python a GPU has a piece of its own, which `give` and `take` copy as a whole.

    Attributes:
        arrays: by name, the host's.
    """

    def __init__(self, ort: Any, place: tuple[str, int], fields: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        self._place, self._offsets, end = place, {}, 0
        for name, (shape, dtype) in fields.items():
            self._offsets[name] = end
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        self._piece = pages((end,), np.uint8)
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in fields.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.arrays[name] = self._piece[self._offsets[name] :][:size].view(dtype).reshape(shape)
        self._copy: Any = None
        address = self._piece.ctypes.data if place[0] == "cpu" else _mapped(self._piece)
        if address is None:
            self._copy = ort.OrtValue.ortvalue_from_numpy(self._piece, *place)
            address = self._copy.data_ptr()
        self._address = address

    def bind_input(self, binding: Any, name: str) -> None:
        binding.bind_input(name, *self._bound(name))

    def bind_output(self, binding: Any, name: str) -> None:
        binding.bind_output(name, *self._bound(name))

    def give(self) -> None:
        """Before a run: the device sees what the host wrote."""
        if self._copy is not None:
            self._copy.update_inplace(self._piece)

    def take(self) -> None:
        """After a run: the host sees what the device wrote."""
        if self._copy is not None:
            self._piece[:] = self._copy.numpy()

    def _bound(self, name: str) -> tuple[Any, ...]:
        array = self.arrays[name]
        return *self._place, array.dtype.type, list(array.shape), self._address + self._offsets[name]


def pages(shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Zeros in pages of their own: pages that are locked for one array cannot be for another."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), np.uint8).view(dtype).reshape(shape)


def reader(array: NDArray[Any], value: Any, device: str) -> Callable[[], NDArray[Any]]:
    """What gives an OrtValue's numbers after a run.

    On the CPU they are in the array already. From a GPU they come into the array if cuda-python can lock its pages,
    which takes a quarter of the time of a copy to others.
    """
    if device == "cpu":
        return lambda: array
    if _mapped(array) is None:
        return lambda: np.asarray(value.numpy())
    from cuda.bindings import runtime as cuda

    address, source, to_host = array.ctypes.data, value.data_ptr(), cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def read() -> NDArray[Any]:
        (error,) = cuda.cudaMemcpy(address, source, array.nbytes, to_host)
        if error != cuda.cudaError_t.cudaSuccess:
            raise RuntimeError(f"Generator: the logits did not come from the device: {error.name}")
        return array

    return read


def _mapped(array: NDArray[Any]) -> int | None:
    """Where a GPU finds an array of the host, whose pages are locked as long as it lives; None without cuda-python."""
    try:
        from cuda.bindings import runtime as cuda
    except ImportError:
        return None
    success, address = cuda.cudaError_t.cudaSuccess, array.ctypes.data
    flags = cuda.cudaHostRegisterPortable | cuda.cudaHostRegisterMapped
    if cuda.cudaHostRegister(address, array.nbytes, flags)[0] != success:
        return None
    weakref.finalize(array, cuda.cudaHostUnregister, address).atexit = False
    error, mapped = cuda.cudaHostGetDevicePointer(address, 0)
    return int(mapped) if error == success else None
