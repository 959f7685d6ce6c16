"""A decoder's session, its caches bound once, and what goes in and comes out at each run."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashonnx._library import LibraryError
from flashonnx._runtime import checked_onnxruntime, cuda_unavailable, default_providers, session

if TYPE_CHECKING:
    import onnx
    import onnxruntime

_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
_PAST, _PRESENT = "past_key_values.", "present."
_POSITIONS = "flashonnx:max_positions"  # export_onnx notes in the model how many it has
_EAGER, _GRAPH = "-1", "1"  # ONNX Runtime's gpu_graph_id: no graph, and ours
_MUCH = 8 << 20  # bytes of logits
_ALIGNED = 256  # bytes, as ONNX Runtime's own allocations
_NO_BFLOAT16 = (
    "Generator: logits and caches are expected to be float32 or float16, got bfloat16: load the model with "
    "dtype=torch.float16"
)


class Decoder:
    """A session with its caches, which `bind` makes; see `flashonnx.generate.Generator` for the arguments.

    Attributes:
        session: ONNX Runtime's.
        positions: how many the model has, None if its export did not note it.
        words: how many tokens it knows.
        paged: whether its caches are in pages.
        caches: by the names of the inputs, OrtValues.
        table: (batch, pages of a request) int32, which `write_table` gives to the model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | onnx.ModelProto,
        device: str | None,
        device_id: int,
        cuda_graph: bool,
        provider_options: dict[str, str] | None,
        session_options: onnxruntime.SessionOptions | None,
    ) -> None:
        self._ort = checked_onnxruntime()
        if device is None:
            device = "cuda" if "CUDAExecutionProvider" in default_providers() else "cpu"
        elif device == "cuda":
            _need_cuda(self._ort.get_available_providers())
        self._place = (device, device_id if device == "cuda" else 0)
        graph = cuda_graph and device == "cuda"
        options = {"device_id": str(device_id), "enable_cuda_graph": str(int(graph)), **(provider_options or {})}
        cuda = [("CUDAExecutionProvider", options)] if device == "cuda" else []
        try:
            self.session = session(model, [*cuda, "CPUExecutionProvider"], session_options)
        except Exception as error:
            if "NOT_IMPLEMENTED" in str(error) and _has_bfloat16(model):
                raise ValueError(_NO_BFLOAT16) from error
            raise
        if cuda and "CUDAExecutionProvider" not in self.session.get_providers():
            raise LibraryError(
                "Generator: device='cuda': ONNX Runtime could not load its CUDA provider; it says why above"
            )
        self._prompt_options, self._single_options = self._ort.RunOptions(), self._ort.RunOptions()
        # On the CPU, too: ONNX Runtime looks for it at each run; not finding it cost 28 us (1.32).
        self._prompt_options.add_run_config_entry("gpu_graph_id", _EAGER)
        self._single_options.add_run_config_entry("gpu_graph_id", _GRAPH)
        self._inputs = {value.name: value for value in self.session.get_inputs()}
        self._check()
        noted = self.session.get_modelmeta().custom_metadata_map.get(_POSITIONS, "")
        self.positions = int(noted) if noted.isdecimal() and int(noted) else None

    def _check(self) -> None:
        outputs = {value.name: value for value in self.session.get_outputs()}
        caches = [name for name in self._inputs if name.startswith(_PAST)]
        self.paged = "block_table" in self._inputs
        inputs = {"input_ids", "cache_lengths", *caches, *(["block_table"] if self.paged else [])}
        results = {"logits", *(_PRESENT + name.removeprefix(_PAST) for name in caches)}
        if not caches or set(self._inputs) != inputs or not results <= set(outputs):
            raise ValueError(
                "Generator: the model is expected to have the inputs and outputs that export_onnx(..., kv_cache=...) "
                "or, for a file with past keys, fuse(..., kv_cache=...) gives it, got "
                f"{', '.join(self._inputs)} -> {', '.join(outputs)}"
            )
        for value in (*self._inputs.values(), outputs["logits"]):
            if value.type == "tensor(bfloat16)":
                raise ValueError(_NO_BFLOAT16)
            if value.type not in _TYPES:
                raise ValueError(f"Generator: '{value.name}' is expected to be float32 or float16, got {value.type}")
        shape = outputs["logits"].shape
        if len(shape) != 3 or not isinstance(shape[2], int) or shape[1] != self._inputs["input_ids"].shape[1]:
            raise ValueError(f"Generator: 'logits' is expected to be (batch, sequence, words), got {shape}")
        self.words, self._logits_type = shape[2], _TYPES[outputs["logits"].type]

    def bind(self, batch: int, capacity: int, pages: int, page_size: int, pages_per_request: int) -> None:
        """Everything at its place: the caches in both bindings, and all of a run of single tokens."""
        sizes = {"batch": batch, "capacity": capacity, "pages": pages, "page_size": page_size}
        self._prompt, self._single = self.session.io_binding(), self.session.io_binding()
        self._bind_step(batch)
        self._logits = self._array((batch, 1, self.words), self._logits_type)
        self._read = _reader(*self._logits, self._place[0])
        self._single.bind_ortvalue_output("logits", self._logits[1])
        self._prompt.bind_output("logits", *self._place)  # the first output: its shape differs
        bound: dict[str, Any] = {}
        if self.paged:
            self._table = self._array((batch, pages_per_request), _TYPES[self._inputs["block_table"].type])
            self.table, bound["block_table"] = self._table
        self.caches: dict[str, Any] = {}
        for name, value in self._inputs.items():
            if name.startswith(_PAST):
                shape = [size if isinstance(size, int) else sizes[size] for size in value.shape]
                make = self._ort.OrtValue.ortvalue_from_shape_and_type
                self.caches[name] = make(shape, _TYPES[value.type], *self._place)
        for binding in (self._prompt, self._single):
            for name, value in (bound | self.caches).items():
                binding.bind_ortvalue_input(name, value)
            for name, value in self.caches.items():
                binding.bind_ortvalue_output(_PRESENT + name.removeprefix(_PAST), value)

    def _bind_step(self, batch: int) -> None:
        """Lengths and single tokens lie in one piece of memory, so that one copy brings both to the device."""
        types = [np.dtype(_TYPES[self._inputs[name].type]) for name in ("cache_lengths", "input_ids")]
        second = -(-batch * types[0].itemsize // _ALIGNED) * _ALIGNED
        self._step = self._array((second + batch * types[1].itemsize,), np.uint8)
        array, value = self._step
        self._lengths = array[: batch * types[0].itemsize].view(types[0])
        self._ids = array[second:].view(types[1]).reshape(batch, 1)
        for binding in (self._prompt, self._single):
            binding.bind_input("cache_lengths", *self._place, types[0].type, [batch], value.data_ptr())
        self._single.bind_input("input_ids", *self._place, types[1].type, [batch, 1], value.data_ptr() + second)

    def _array(self, shape: Sequence[int], dtype: Any) -> tuple[NDArray[Any], Any]:
        """An array and its OrtValue, which on the CPU is the array's memory."""
        array = np.zeros(shape, dtype)
        return array, self._ort.OrtValue.ortvalue_from_numpy(array, *self._place)

    def _write(self, given: tuple[NDArray[Any], Any]) -> None:
        if self._place[0] != "cpu":
            given[1].update_inplace(given[0])

    def write_table(self) -> None:
        """After a change of `table`."""
        self._write(self._table)

    def distant(self, tokens: int) -> bool:
        """Whether the logits of so many tokens of each request take longer to the host than one more run would."""
        batch, _, words = self._logits[0].shape
        return self._place[0] != "cpu" and batch * tokens * words * self._logits[0].itemsize > _MUCH

    def given(self, width: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """For the next run: ids (batch, width) and lengths (batch,), all 0, to be filled."""
        self._lengths.fill(0)
        if width > 1:
            return np.zeros((len(self._lengths), width), self._ids.dtype), self._lengths
        self._ids.fill(0)
        return self._ids, self._lengths

    def run(self, ids: NDArray[Any]) -> Callable[[], NDArray[Any]]:
        """Of ids and lengths as `given`: what gives their logits (batch, sequence, words), valid until the next run."""
        self._write(self._step)
        if ids is self._ids:
            self.repeat()
            return self._read
        tokens = self._ort.OrtValue.ortvalue_from_numpy(ids, *self._place)
        self._prompt.bind_ortvalue_input("input_ids", tokens)
        self._prompt.bind_output("logits", *self._place)
        self.session.run_with_iobinding(self._prompt, self._prompt_options)
        return lambda: self._prompt.get_outputs()[0].numpy()

    def repeat(self) -> None:
        """The last run of single tokens once more, for a benchmark."""
        self.session.run_with_iobinding(self._single, self._single_options)


def _reader(array: NDArray[Any], value: Any, device: str) -> Callable[[], NDArray[Any]]:
    """What gives an OrtValue's numbers after a run.

    On the CPU they are in the array already. From a GPU they come into the array if cuda-python can lock its pages,
    which takes a quarter of the time of a copy to others.
    """
    if device == "cpu":
        return lambda: array
    try:
        from cuda.bindings import runtime as cuda
    except ImportError:
        return lambda: np.asarray(value.numpy())
    success, address = cuda.cudaError_t.cudaSuccess, array.ctypes.data
    if cuda.cudaHostRegister(address, array.nbytes, cuda.cudaHostRegisterPortable)[0] != success:
        return lambda: np.asarray(value.numpy())
    source, to_host = value.data_ptr(), cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def read() -> NDArray[Any]:
        (error,) = cuda.cudaMemcpy(address, source, array.nbytes, to_host)
        if error != success:
            raise RuntimeError(f"Generator: the logits did not come from the device: {error.name}")
        return array

    weakref.finalize(read, cuda.cudaHostUnregister, address).atexit = False
    return read


def _need_cuda(providers: list[str]) -> None:
    """Raises a LibraryError unless ONNX Runtime, the library and the machine have CUDA."""
    why = "pip install onnxruntime-gpu" if "CUDAExecutionProvider" not in providers else cuda_unavailable()
    if why is not None:
        raise LibraryError(f"Generator: device='cuda' is not to be had with providers {', '.join(providers)}: {why}")


def _has_bfloat16(model: Any) -> bool:
    """Whether an input is bfloat16: ONNX Runtime's own error names a node instead."""
    import onnx

    if isinstance(model, (str, os.PathLike)):
        model = onnx.load(model, load_external_data=False)
    elif not isinstance(model, onnx.ModelProto):
        model = onnx.load_from_string(bytes(model))
    return any(value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16 for value in model.graph.input)
