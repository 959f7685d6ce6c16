"""A decoder's session, its caches bound once, and what goes in and comes out at each run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashonnx._exchange import Exchange, pages, reader
from flashonnx._last_logits import GREATEST, LOGITS, ROWS, TOKENS, bring, find_greatest, take_last
from flashonnx._library import LibraryError
from flashonnx._runtime import checked_onnxruntime, cuda_unavailable, default_providers, session
from flashonnx._sampling import greatest
from flashonnx._weights import Weights

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import onnxruntime

_TYPES: dict[str, Any] = {"FLOAT": np.float32, "FLOAT16": np.float16, "INT64": np.int64, "INT32": np.int32}
_PAST, _PRESENT = "past_key_values.", "present."
_POSITIONS = "flashonnx:max_positions"  # export_onnx notes in the model how many it has
_EAGER, _GRAPH = "-1", "1"  # ONNX Runtime's gpu_graph_id: no graph, and ours
_FAST_ARGMAX = (1, 31)  # ONNX Runtime 1.28 gives each row of it to one thread of a GPU: milliseconds
_FOLDER = "session.model_external_initializers_file_folder_path"
_SMALL = 1024  # bytes
_BFLOAT16 = 16  # of onnx.TensorProto, which ONNX Runtime takes where NumPy has no type
_NO_BFLOAT16 = (
    "Generator: a model in bfloat16 runs on CUDA alone, as ONNX Runtime's CPU provider has no MatMul, Add or Mul of "
    "bfloat16: use device='cuda', or load the model with dtype=torch.float32 (or torch.float16) and export that"
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
        options = session_options if session_options is not None else self._ort.SessionOptions()
        prepared, folder = self._prepared(model)
        graph = cuda_graph and device == "cuda"
        given = {"device_id": str(device_id), "enable_cuda_graph": str(int(graph)), **(provider_options or {})}
        cuda = [("CUDAExecutionProvider", given)] if device == "cuda" else []
        self._providers = [*cuda, "CPUExecutionProvider"]
        with _weights_in(folder, options, session_options is not None):
            self.session = session(prepared, self._providers, options)
        if cuda and "CUDAExecutionProvider" not in self.session.get_providers():
            raise LibraryError(
                "Generator: device='cuda': ONNX Runtime could not load its CUDA provider; it says why above"
            )
        self._prompt_options, self._single_options = self._ort.RunOptions(), self._ort.RunOptions()
        # On the CPU, too: ONNX Runtime looks for it at each run; not finding it cost 28 us (1.32).
        self._prompt_options.add_run_config_entry("gpu_graph_id", _EAGER)
        self._single_options.add_run_config_entry("gpu_graph_id", _GRAPH)

    def _prepared(self, model: Any) -> tuple[onnx.ModelProto, Path | None]:
        """The model as it is run (see _last_logits.py), after its checks; what is external stays so."""
        import onnx
        import onnx_ir as ir

        from flashonnx.export.model.files import load

        if isinstance(model, (bytes, bytearray, memoryview)):
            try:
                model = onnx.load_from_string(bytes(model))
            except Exception as error:  # protobuf's own exceptions differ between its versions
                raise ValueError(f"Generator: the bytes are not an ONNX model: {error}") from error
        source = load(model)
        graph = source.model.graph
        logits = self._check(graph)
        noted = source.model.metadata_props.get(_POSITIONS, "")
        self.positions = int(noted) if noted.isdecimal() and int(noted) else None
        take_last(graph, logits)
        if self._place[0] == "cuda":
            bring(next(value for value in graph.inputs if value.name == "cache_lengths"))
        self._on_device = self._chooses()
        if self._on_device:
            find_greatest(graph)
        self._inputs = {value.name: _kind(value) for value in graph.inputs if not value.is_initializer()}
        if source.folder is not None:
            _inline_small(source.model)
        return ir.to_proto(source.model), source.folder

    def _chooses(self) -> bool:
        """Whether nodes of the graph find the greatest logits."""
        version = tuple(int(part) for part in re.findall(r"\d+", self._ort.__version__)[:2])
        return self._place[0] == "cuda" and version >= _FAST_ARGMAX

    def _check(self, graph: ir.Graph) -> ir.Value:
        """Its logits, if it is a decoder that this module knows."""
        given = [value for value in graph.inputs if not value.is_initializer()]
        inputs, outputs = ({value.name or "": value for value in values} for values in (given, graph.outputs))
        caches = [name for name in inputs if name.startswith(_PAST)]
        self.paged = "block_table" in inputs
        expected = {"input_ids", "cache_lengths", *caches, *(["block_table"] if self.paged else [])}
        results = {"logits", *(_PRESENT + name.removeprefix(_PAST) for name in caches)}
        if not caches or set(inputs) != expected or not results <= set(outputs):
            raise ValueError(
                "Generator: the model is expected to have the inputs and outputs that export_onnx(..., kv_cache=...) "
                "or, for a file with past keys, fuse(..., kv_cache=...) gives it, got "
                f"{', '.join(inputs)} -> {', '.join(outputs)}"
            )
        logits = outputs["logits"]
        for value in (*inputs.values(), logits):
            kind = _kind(value)
            if kind == "BFLOAT16" and self._place[0] == "cpu":
                raise ValueError(_NO_BFLOAT16)
            if kind not in (*_TYPES, "BFLOAT16"):
                raise ValueError(
                    f"Generator: '{value.name}' is expected to be float32, float16 or bfloat16, got {kind.lower()}"
                )
        shape, ids = logits.shape, inputs["input_ids"].shape
        if shape is None or len(shape) != 3 or not isinstance(shape[2], int) or ids is None:
            raise ValueError(f"Generator: 'logits' is expected to be (batch, sequence, words), got {shape}")
        if shape[1] != ids[1]:
            raise ValueError(
                f"Generator: 'logits' is expected to have a row for every token of 'input_ids' {ids}, got {shape}: "
                "export without logits_to_keep, which keeps the last rows alone, padding's in uneven batches; the "
                "generator has logits made of no other tokens than those it asks for"
            )
        self.words, self._logits_type = shape[2], _TYPES.get(_kind(logits), np.float32)
        self._shapes = {name: [_size(dim) for dim in inputs[name].shape or ()] for name in caches}
        return logits

    def bind(self, batch: int, capacity: int, page_count: int, page_size: int, pages_per_request: int) -> None:
        """Everything at its place, in both bindings all but the tokens of prompts."""
        sizes = {"batch": batch, "capacity": capacity, "pages": page_count, "page_size": page_size}
        self._prompt, self._single = self.session.io_binding(), self.session.io_binding()
        shapes = {"cache_lengths": (batch,), "input_ids": (batch, 1), ROWS: (batch, 1)}
        fields = {name: (shape, _TYPES[self._inputs[name]]) for name, shape in shapes.items()}
        found: dict[str, Any] = {}
        if self._on_device:
            found = {TOKENS: ((batch, 1, 1), np.int64), GREATEST: ((batch, 1, 1), self._logits_type)}
        self._exchange = Exchange(self._ort, self._place, fields | found)
        arrays = self._exchange.arrays
        self._ids, self._lengths, self._rows = arrays["input_ids"], arrays["cache_lengths"], arrays[ROWS][:, 0]
        self._order, self._width = np.arange(batch), 2  # width: of the run before
        array = pages((batch, 1, self.words), self._logits_type)
        logits = self._ort.OrtValue.ortvalue_from_numpy(array, *self._place)
        self._read, self._logits = reader(array, logits, self._place[0]), logits
        self._weights: Weights | None = None
        bound: dict[str, Any] = {}
        if self.paged:
            self.table = np.zeros((batch, pages_per_request), _TYPES[self._inputs["block_table"]])
            bound["block_table"] = self._ort.OrtValue.ortvalue_from_numpy(self.table, *self._place)
            self._table = bound["block_table"]
        self.caches: dict[str, Any] = {}
        for name, value in self._shapes.items():
            shape = [size if isinstance(size, int) else sizes[size] for size in value]
            make = self._ort.OrtValue.ortvalue_from_shape_and_type
            self.caches[name] = make(shape, _TYPES.get(self._inputs[name], _BFLOAT16), *self._place)
        for binding in (self._prompt, self._single):
            for name, value in (bound | self.caches).items():
                binding.bind_ortvalue_input(name, value)
            for name, value in self.caches.items():
                binding.bind_ortvalue_output(_PRESENT + name.removeprefix(_PAST), value)
            binding.bind_ortvalue_output(LOGITS, logits)
            for name in ("cache_lengths", ROWS):
                self._exchange.bind_input(binding, name)
            for name in found:
                self._exchange.bind_output(binding, name)
        self._exchange.bind_input(self._single, "input_ids")

    def write_table(self) -> None:
        """After a change of `table`; on the CPU it is the model's own memory."""
        if self._place[0] != "cpu":
            self._table.update_inplace(self.table)

    def given(self, width: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """For the next run, to be filled: ids (batch, width) and lengths (batch,), all 0.

        And of which token each request wants logits, (batch,), counted over all: now the first of each.
        """
        self._lengths.fill(0)
        if width > 1 or self._width > 1:
            np.multiply(self._order, width, out=self._rows)
        self._width = width
        if width > 1:
            return np.zeros((len(self._rows), width), self._ids.dtype), self._lengths, self._rows
        self._ids.fill(0)
        return self._ids, self._lengths, self._rows

    def run(self, ids: NDArray[Any]) -> None:
        """A run with what `given` gave."""
        self._exchange.give()
        if ids is self._ids:
            self.repeat()
        else:
            self._prompt.bind_ortvalue_input("input_ids", self._ort.OrtValue.ortvalue_from_numpy(ids, *self._place))
            self.session.run_with_iobinding(self._prompt, self._prompt_options)
        self._exchange.take()

    def repeat(self) -> None:
        """The last run of single tokens once more, for a benchmark."""
        self.session.run_with_iobinding(self._single, self._single_options)

    def logits(self, places: Sequence[int]) -> NDArray[Any]:
        """(places, words) of the last run, valid until the next."""
        logits = self._read()[:, 0]
        return logits if len(places) == len(logits) else logits[places]

    def rows(self, places: Sequence[int], few: bool, temperature: float) -> tuple[NDArray[Any], bool]:
        """For draws: chances up to a factor, and True, where the device makes them; else `logits`, and False.

        Those are enough, and half as many bytes, where a `few` of the greatest are looked at.
        """
        if few or not self._on_device:
            return self.logits(places), False
        if self._weights is None:
            self._weights = Weights(
                self._ort, self._place, self._providers, self._logits, self._logits_type, self._exchange,
                self._single_options,
            )  # fmt: skip
        weights = self._weights(temperature)
        return weights if len(places) == len(weights) else weights[places], True

    def greatest(self, places: Sequence[int]) -> tuple[list[int], list[float]]:
        """Where the greatest logit of these requests is, of equal ones the first; and how great."""
        if not self._on_device:
            return greatest(self.logits(places))
        tokens, values = self._exchange.arrays[TOKENS], self._exchange.arrays[GREATEST]
        return [tokens.item(b) for b in places], [values.item(b) for b in places]


@contextlib.contextmanager
def _weights_in(folder: Path | None, options: onnxruntime.SessionOptions, lent: bool) -> Iterator[None]:
    """Has a session look for external weights there while it is made; options that are lent are as before then."""
    if folder is None:
        yield
        return
    before = ""
    with contextlib.suppress(RuntimeError):  # there is none
        before = options.get_session_config_entry(_FOLDER)
    options.add_session_config_entry(_FOLDER, str(Path(folder).absolute()))
    try:
        yield
    finally:
        if lent:
            options.add_session_config_entry(_FOLDER, before)


def _need_cuda(providers: list[str]) -> None:
    """Raises a LibraryError unless ONNX Runtime, the library and the machine have CUDA."""
    why = cuda_unavailable()
    if "CUDAExecutionProvider" not in providers:
        why = f"pip install onnxruntime-gpu; and {why}" if why else "pip install onnxruntime-gpu"
    if why is not None:
        raise LibraryError(f"Generator: device='cuda' is not to be had with providers {', '.join(providers)}: {why}")


def _kind(value: ir.Value) -> str:
    return value.dtype.name if value.dtype is not None else "no type"


def _inline_small(model: ir.Model) -> None:
    """Shapes and the like, which ONNX Runtime reads before it opens files where the model itself is none."""
    import onnx_ir as ir

    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if isinstance(value.const_value, ir.ExternalTensor) and value.const_value.nbytes <= _SMALL:
            (value.const_value,) = ir.external_data.convert_tensors_from_external([value.const_value])


def _size(dim: Any) -> int | str:
    return dim if isinstance(dim, int) else str(dim.value)
