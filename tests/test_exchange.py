"""flashonnx._exchange: memory that host and device share, and where they cannot, what is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

_exchange = pytest.importorskip("flashonnx._exchange")
FIELDS = {"lengths": ((3,), np.int64), "ids": ((3, 1), np.int32), "results": ((3, 1, 1), np.float16)}


class Value:
    """An OrtValue whose memory is another than the host's."""

    def __init__(self, array: np.ndarray, *_: Any) -> None:
        self.memory = array.copy()

    def data_ptr(self) -> int:
        return self.memory.ctypes.data

    def update_inplace(self, array: np.ndarray) -> None:
        self.memory[:] = array

    def numpy(self) -> np.ndarray:
        return self.memory.copy()


class Binding:
    """Sees arrays where they are bound."""

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}

    def bind_input(self, name: str, device: str, number: int, kind: Any, shape: list[int], address: int) -> None:
        import ctypes

        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        memory = (ctypes.c_uint8 * size).from_address(address)
        self.seen[name] = np.frombuffer(memory, np.uint8).view(kind).reshape(shape)

    bind_output = bind_input


class Ort:
    class OrtValue:
        ortvalue_from_numpy = Value


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_see_what_was_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once on the CPU; on a device that cannot read the host's memory after a copy."""
    monkeypatch.setattr(_exchange, "_mapped", lambda array: None)
    exchange, binding = _exchange.Exchange(Ort, (device, 0), FIELDS), Binding()
    exchange.bind_input(binding, "lengths")
    exchange.bind_input(binding, "ids")
    exchange.bind_output(binding, "results")
    assert all(array.ctypes.data % 256 == 0 for array in exchange.arrays.values())
    for name, (shape, dtype) in FIELDS.items():
        assert exchange.arrays[name].shape == binding.seen[name].shape == shape
        assert exchange.arrays[name].dtype == dtype
    exchange.arrays["lengths"][:], exchange.arrays["ids"][:, 0] = [5, 2**40, 7], [1, 2, 3]
    assert (binding.seen["ids"][:, 0].tolist() == [1, 2, 3]) == (device == "cpu")
    exchange.give()
    assert binding.seen["lengths"].tolist() == [5, 2**40, 7] and binding.seen["ids"][:, 0].tolist() == [1, 2, 3]
    binding.seen["results"][:, 0, 0] = [0.5, -2, np.inf]
    exchange.take()
    assert exchange.arrays["results"].ravel().tolist() == [0.5, -2, np.inf]
    assert exchange.arrays["lengths"].tolist() == [5, 2**40, 7]


def test_pages_of_their_own() -> None:
    """What is locked for one array is not locked for its neighbour."""
    arrays = [_exchange.pages((3, 5), np.float16) for _ in range(4)]
    assert all(array.ctypes.data % 4096 == 0 and not array.any() and array.flags.writeable for array in arrays)
    assert len({array.ctypes.data // 4096 for array in arrays}) == 4
