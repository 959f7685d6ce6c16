"""Text from decoders whose keys and values stay in caches: prompts in chunks, then token by token, several at once.

    flashonnx.export_onnx(model, (), "decoder.onnx", kv_cache="static")  # or "paged"
    generator = flashonnx.generate.Generator("decoder.onnx", batch=4, capacity=2048)
    result = generator([[5, 17, 33], [11, 8]], max_new_tokens=100)

The caches are made once and bound as inputs and as outputs, so that nothing is copied. Each run of the model takes the
next tokens of every request: a chunk of its prompt, or its last token. On CUDA, runs of single tokens are one graph
that is captured once and replayed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashonnx._library import LibraryError
from flashonnx._runtime import checked_onnxruntime, cuda_unavailable, default_providers, session
from flashonnx._sampling import choose

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
_CAPACITY = 1024
_EAGER, _GRAPH = "-1", "1"  # ONNX Runtime's gpu_graph_id: no graph, and ours


_NO_BFLOAT16 = "Generator: logits and caches are expected to be float32 or float16, got bfloat16: export model.half()"


@dataclass
class Generation:
    """What was generated, and how fast.

    Attributes:
        tokens: of each prompt, in order, the new tokens; a stop token is the last of them.
        finished: of each prompt "stop" or "length".
        prompt_tokens: how many tokens the prompts had.
        prompt_seconds: time of the runs in which some request read its prompt.
        decode_tokens: new tokens that came from the other runs.
        decode_seconds: time of those, with choosing the tokens.
    """

    tokens: list[list[int]]
    finished: list[str]
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests in a second, while none reads its prompt; 0 if there was no such run."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class _Request:
    """A prompt on its way: `pending` has the tokens that the model has not seen yet."""

    index: int
    pending: NDArray[np.int64]
    slots: int  # keys that it may come to have
    random: np.random.Generator
    length: int = 0
    pages: list[int] = field(default_factory=list)


class Generator:
    """A session with its caches, for `batch` requests at once.

    Args:
        model: a decoder as `export_onnx(model, (), path, kv_cache="static")` or `"paged"` writes it, all logits among
            its outputs: path, bytes or `onnx.ModelProto`. Logits and caches are float32 or float16.
        batch: how many requests run together; more of them wait for their turn.
        capacity: how many keys a request may come to have, prompt and new tokens. Not more than the model has
            positions, which is checked where the export noted them. Default: 1024, or its positions if they are fewer.
            The caches take batch · capacity keys; paged ones `pages` · `page_size`.
        chunk: how many tokens of a prompt are read in one run, at most.
        page_size: keys in a page of a paged cache.
        pages: how many pages there are. Default: enough for `batch` requests of `capacity` keys. With fewer, a request
            waits until those that it may need are free.
        device: "cpu" or "cuda". Default: CUDA where it is to be had.
        device_id: which GPU.
        cuda_graph: capture the runs of single tokens (CUDA).
        provider_options: more options of the CUDA execution provider, say `{"use_tf32": "0"}`.
        session_options: an `onnxruntime.SessionOptions`.

    Attributes:
        capacity: as given, or its default.
        positions: how many the model has, None if its export did not note it.

    Raises:
        ValueError: the model is none of those, or a number is out of range, as is a capacity beyond its positions.
        LibraryError: `device` is "cuda" and CUDA is not to be had; or as `flashonnx.session`.
        FileNotFoundError: as `flashonnx.session`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | onnx.ModelProto,
        *,
        batch: int = 1,
        capacity: int | None = None,
        chunk: int = 128,
        page_size: int = 64,
        pages: int | None = None,
        device: str | None = None,
        device_id: int = 0,
        cuda_graph: bool = True,
        provider_options: dict[str, str] | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        sizes = {"batch": batch, "capacity": capacity, "chunk": chunk, "page_size": page_size, "pages": pages}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"Generator: {name} is expected to be positive, got {size}")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"Generator: device is expected to be 'cpu' or 'cuda', got {device!r}")
        self._ort = checked_onnxruntime()
        if device is None:
            device = "cuda" if "CUDAExecutionProvider" in default_providers() else "cpu"
        elif device == "cuda":
            _need_cuda(self._ort.get_available_providers())
        self._place = (device, device_id if device == "cuda" else 0)
        self._graph = cuda_graph and device == "cuda"
        options = {"device_id": str(device_id), "enable_cuda_graph": str(int(self._graph)), **(provider_options or {})}
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
        self._inputs = {value.name: value for value in self.session.get_inputs()}
        self._check()
        self.positions = self._noted_positions()
        if capacity is None:
            capacity = min(_CAPACITY, self.positions or _CAPACITY)
        if self.positions is not None and capacity > self.positions:
            raise ValueError(
                f"Generator: capacity is expected to be at most the model's {self.positions} positions, got {capacity}"
            )
        per_request = -(-capacity // page_size)
        self.batch, self.capacity, self.chunk, self.page_size = batch, capacity, chunk, page_size
        self.pages = batch * per_request if pages is None else pages
        self._bind(per_request)

    def _noted_positions(self) -> int | None:
        """How many positions the model has, as the export noted it; None if it did not."""
        noted = self.session.get_modelmeta().custom_metadata_map.get(_POSITIONS, "")
        return int(noted) if noted.isdecimal() and int(noted) else None

    def _check(self) -> None:
        outputs = {value.name: value for value in self.session.get_outputs()}
        caches = [name for name in self._inputs if name.startswith(_PAST)]
        self.paged = "block_table" in self._inputs
        inputs = {"input_ids", "cache_lengths", *caches, *(["block_table"] if self.paged else [])}
        results = {"logits", *(_PRESENT + name.removeprefix(_PAST) for name in caches)}
        if not caches or set(self._inputs) != inputs or not results <= set(outputs):
            raise ValueError(
                "Generator: the model is expected to have the inputs and outputs that export_onnx(..., kv_cache=...) "
                f"gives it, got {', '.join(self._inputs)} -> {', '.join(outputs)}"
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

    def _bind(self, per_request: int) -> None:
        """Everything at its place: the caches in both bindings, and all of a run of single tokens."""
        sizes = {"batch": self.batch, "capacity": self.capacity, "pages": self.pages, "page_size": self.page_size}
        self._prompt, self._single = self.session.io_binding(), self.session.io_binding()
        self._lengths = self._value((self.batch,), _TYPES[self._inputs["cache_lengths"].type])
        self._ids = self._value((self.batch, 1), _TYPES[self._inputs["input_ids"].type])
        self._logits = self._value((self.batch, 1, self.words), self._logits_type)
        self._single.bind_ortvalue_input("input_ids", self._ids)
        self._single.bind_ortvalue_output("logits", self._logits)
        self._prompt.bind_output("logits", *self._place)  # the first output: its shape differs
        bound = {"cache_lengths": self._lengths}
        if self.paged:
            self._table = np.full((self.batch, per_request), -1, np.int32)
            self._free = list(range(self.pages))
            self._pages = bound["block_table"] = self._value(self._table.shape, np.int32)
        self._caches: dict[str, Any] = {}
        for name, value in self._inputs.items():
            if name.startswith(_PAST):
                shape = [size if isinstance(size, int) else sizes[size] for size in value.shape]
                self._caches[name] = self._value(shape, _TYPES[value.type])
        for binding in (self._prompt, self._single):
            for name, value in (bound | self._caches).items():
                binding.bind_ortvalue_input(name, value)
            for name, value in self._caches.items():
                binding.bind_ortvalue_output(_PRESENT + name.removeprefix(_PAST), value)

    def _value(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, *self._place)

    def __call__(
        self,
        prompts: Sequence[Sequence[int] | NDArray[np.integer[Any]]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        stop: Iterable[int] = (),
        callback: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Continues each prompt.

        Args:
            prompts: token numbers of each request, one at least. They need not be equally many.
            max_new_tokens: how many to add, at most.
            temperature: 0 takes the greatest logit, of equal ones the first; otherwise the logits are divided by it and
                a token is drawn from their softmax.
            top_k: draws among that many greatest logits; 0: among all.
            seed: of the draws. Each prompt has its own, so that what is drawn does not depend on the others.
            stop: tokens that end a request.
            callback: is called with (number of the prompt, token) as soon as there is one.

        Raises:
            ValueError: a prompt is empty, has tokens that the model does not know, or does not fit with its new tokens
                into `capacity` or into all pages; a number is out of range.
            FloatingPointError: the model gave NaN or infinity where it was to choose.
        """
        if max_new_tokens < 1 or temperature < 0 or not 0 <= top_k <= self.words:
            raise ValueError(
                f"Generator: expected max_new_tokens >= 1, temperature >= 0 and 0 <= top_k <= {self.words}, got "
                f"{max_new_tokens}, {temperature} and {top_k}"
            )
        waiting = deque(self._request(i, prompt, max_new_tokens, seed) for i, prompt in enumerate(prompts))
        ends = frozenset(int(token) for token in stop)
        result = Generation([[] for _ in waiting], ["length"] * len(waiting))
        result.prompt_tokens = sum(len(request.pending) for request in waiting)
        places: list[_Request | None] = [None] * self.batch
        if self.paged:
            self._free = list(range(self.pages))
            self._table[:] = -1
        while waiting or any(places):
            self._admit(waiting, places)
            start = time.perf_counter()
            reading = any(request and not result.tokens[request.index] for request in places)
            logits, ready = self._step(places)
            made = [(b, request) for b, request in enumerate(places) if request and ready[b]]
            for (b, request), row in zip(made, logits, strict=True):
                token = choose(row, temperature, top_k, request.random)
                tokens = result.tokens[request.index]
                tokens.append(token)
                request.pending = np.array([token])
                if callback is not None:
                    callback(request.index, token)
                if token in ends:
                    result.finished[request.index] = "stop"
                if token in ends or len(tokens) == max_new_tokens:
                    self._release(places, b)
            seconds = time.perf_counter() - start
            if reading:
                result.prompt_seconds += seconds
            else:
                result.decode_seconds += seconds
                result.decode_tokens += len(made)
        return result

    def _request(self, index: int, prompt: Any, max_new_tokens: int, seed: int) -> _Request:
        expected = f"Generator: prompt {index} is expected to be a list of token numbers, at least one,"
        if isinstance(prompt, (str, bytes)):
            raise ValueError(f"{expected} as a tokenizer makes them of a text, got the text {prompt!r:.40}")
        if np.ndim(prompt) == 0:
            raise ValueError(f"{expected} and prompts a list of such lists, got {prompt!r:.40}")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{expected} got shape {tokens.shape} of {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self.words:
            raise ValueError(
                f"Generator: prompt {index} is expected to have tokens in [0, {self.words}), got "
                f"{tokens.min()} to {tokens.max()}"
            )
        keys = tokens.size + max_new_tokens - 1  # the last token is given to nobody
        room = min(self.capacity, self.pages * self.page_size) if self.paged else self.capacity
        if keys > room:
            raise ValueError(
                f"Generator: prompt {index} needs {keys} keys for {tokens.size} tokens and {max_new_tokens} new ones; "
                f"there are {room}" + (f", as the model has {room} positions" if room == self.positions else "")
            )
        return _Request(index, tokens.astype(np.int64), keys, np.random.default_rng([seed, index]))

    def _admit(self, waiting: deque[_Request], places: list[_Request | None]) -> None:
        """Requests go in their order to free places, with all pages that they may come to need."""
        changed = False
        for b in range(self.batch):
            if places[b] is not None or not waiting:
                continue
            if self.paged:
                need = -(-waiting[0].slots // self.page_size)
                if need > len(self._free):
                    break
                waiting[0].pages = [self._free.pop() for _ in range(need)]
                self._table[b, :need] = waiting[0].pages
            places[b] = waiting.popleft()
            changed = True
        if self.paged and changed:
            self._pages.update_inplace(self._table)

    def _release(self, places: list[_Request | None], b: int) -> None:
        request, places[b] = places[b], None
        if self.paged and request:
            self._free += request.pages
            self._table[b] = -1  # keys of a place that nobody has are dropped
            self._pages.update_inplace(self._table)

    def _step(self, places: list[_Request | None]) -> tuple[NDArray[Any], list[bool]]:
        """Runs the next tokens of each request.

        Tokens are padded on the right: what padding appends lies behind the request's length and is overwritten. It
        must not go beyond the capacity, where a model may have no positions.

        Returns:
            the last logits, of those places alone that have seen all their tokens, and which these are.
        """
        running = [request for request in places if request]
        width = min(self.chunk, *(self.capacity - request.length for request in running))
        width = min(width, max(len(request.pending) for request in running))
        ids = np.zeros((self.batch, width), _TYPES[self._inputs["input_ids"].type])
        lengths = np.zeros(self.batch, _TYPES[self._inputs["cache_lengths"].type])
        last, ready = np.zeros(self.batch, np.int64), [False] * self.batch
        for b, request in enumerate(places):
            if request is None:
                continue
            now = request.pending[:width]
            ids[b, : len(now)], lengths[b], last[b] = now, request.length, len(now) - 1
            request.pending = request.pending[width:]
            request.length += len(now)
            ready[b] = not len(request.pending)
        self._lengths.update_inplace(lengths)
        logits = self._run(ids)
        if not any(ready):  # in the middle of prompts
            return np.empty((0, self.words), self._logits_type), ready
        return logits.numpy()[ready, last[ready]], ready

    def _run(self, ids: NDArray[Any]) -> Any:
        """Logits (batch, sequence, words), an OrtValue, of ids (batch, sequence)."""
        options = self._ort.RunOptions()
        single = ids.shape[1] == 1
        if self._graph:
            options.add_run_config_entry("gpu_graph_id", _GRAPH if single else _EAGER)
        if single:
            self._ids.update_inplace(ids)
            self.session.run_with_iobinding(self._single, options)
            return self._logits
        tokens = self._ort.OrtValue.ortvalue_from_numpy(ids, *self._place)
        self._prompt.bind_ortvalue_input("input_ids", tokens)
        self._prompt.bind_output("logits", *self._place)
        self.session.run_with_iobinding(self._prompt, options)
        return self._prompt.get_outputs()[0]


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
