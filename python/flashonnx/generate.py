"""Text from decoders whose keys and values stay in caches: prompts in chunks, then token by token, several at once.

    flashonnx.export_onnx(model, (), "decoder.onnx", kv_cache="static")  # or "paged"
    generator = flashonnx.generate.Generator("decoder.onnx", batch=4, capacity=2048)
    result = generator([[5, 17, 33], [11, 8]], max_new_tokens=100)

The caches are made once and bound as inputs and as outputs, so that nothing is copied. Each run of the model takes the
next tokens of every request: a chunk of its prompt, or its last token. On CUDA, runs of single tokens are one graph
that is captured once and replayed.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashonnx._arguments import real, stops, whole
from flashonnx._decoder import Decoder
from flashonnx._sampling import Draw, choose

if TYPE_CHECKING:
    import onnx
    import onnxruntime

_CAPACITY = 1024


@dataclass
class Generation:
    """What was generated, and how fast.

    Attributes:
        tokens: of each prompt, in order, the new tokens; a stop token is the last of them.
        finished: of each prompt what ended it: "stop", "length" or "callback".
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
    pending: list[int]
    slots: int  # keys that it may come to have
    random: np.random.Generator
    length: int = 0
    pages: list[int] = field(default_factory=list)


class Generator:
    """A session with its caches, for `batch` requests at once.

    Args:
        model: a decoder as `export_onnx(model, (), path, kv_cache="static")` or `"paged"` writes it, all logits among
            its outputs: path, bytes or `onnx.ModelProto`. Logits and caches are float32, float16 or, on CUDA, bfloat16.
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
        TypeError: a size is no whole number.
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
        batch, chunk, page_size = whole("batch", batch), whole("chunk", chunk), whole("page_size", page_size)
        capacity = capacity if capacity is None else whole("capacity", capacity)
        pages = pages if pages is None else whole("pages", pages)
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"Generator: device is expected to be 'cpu' or 'cuda', got {device!r}")
        self._decoder = Decoder(model, device, device_id, cuda_graph, provider_options, session_options)
        self.session, self.positions = self._decoder.session, self._decoder.positions
        if capacity is None:
            capacity = min(_CAPACITY, self.positions or _CAPACITY)
        if self.positions is not None and capacity > self.positions:
            raise ValueError(
                f"Generator: capacity is expected to be at most the model's {self.positions} positions, got {capacity}"
            )
        per_request = -(-capacity // page_size)
        self.batch, self.capacity, self.chunk, self.page_size = batch, capacity, chunk, page_size
        self.pages = batch * per_request if pages is None else pages
        self._decoder.bind(batch, capacity, self.pages, page_size, per_request)
        self._running = threading.Lock()

    def __call__(
        self,
        prompts: Sequence[Sequence[int] | NDArray[np.integer[Any]]],
        max_new_tokens: int,
        *,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: int | Iterable[int] = (),
        callback: Callable[[int, int], object] | None = None,
    ) -> Generation:
        """Continues each prompt.

        Args:
            prompts: token numbers of each request, one at least. They need not be equally many.
            max_new_tokens: how many to add, at most.
            temperature: 0 takes the greatest logit, of equal ones the first, whatever top_k and top_p are; otherwise
                the logits are divided by it and a token is drawn from their softmax. Default: 1 where top_k or top_p
                is given, else 0.
            top_k: draws among that many greatest logits; 0: among all.
            top_p: of these, draws among the fewest, most likely first, whose chances come to at least top_p.
            seed: of the draws. Each prompt has its own, so that what is drawn does not depend on the others.
            stop: a token that ends a request, or several. Nothing else does: a model's own end of text is given here.
            callback: is called with (number of the prompt, token) as soon as there is one. If it returns True, that
                request ends there and its place goes to the next. What it raises ends the call; the generator can be
                called again.

        Raises:
            RuntimeError: it is running already, in another thread or in a callback: its caches are in use.
            TypeError: an argument is not of its kind: a number of tokens that is no whole number, say.
            ValueError: a prompt is empty, has tokens that the model does not know, or does not fit with its new tokens
                into `capacity` or into all pages; a number is out of range.
            FloatingPointError: the model gave NaN or infinity where it was to choose.
        """
        max_new_tokens, seed = whole("max_new_tokens", max_new_tokens), whole("seed", seed, 0)
        how, ends = self._draw(temperature, top_k, top_p), stops(stop, self._decoder.words)
        if isinstance(prompts, Mapping):
            raise TypeError(
                f"Generator: prompts are expected to be lists of token numbers, got a {type(prompts).__name__} of "
                f"{', '.join(map(str, prompts))}: give its 'input_ids', made without padding"
            )
        prompts = [prompts] if isinstance(prompts, (str, bytes)) else prompts  # whose error then shows it
        waiting = deque(self._request(i, prompt, max_new_tokens, seed) for i, prompt in enumerate(prompts))
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "Generator: it is running already, and its caches hold one call at a time: give it all prompts in one "
                "call, which run together, or make a Generator for each thread"
            )
        try:
            return self._run(waiting, max_new_tokens, how, ends, callback)
        finally:
            self._running.release()

    def _run(
        self,
        waiting: deque[_Request],
        max_new_tokens: int,
        how: Draw,
        ends: Container[int],
        callback: Callable[[int, int], object] | None,
    ) -> Generation:
        """The call, after its checks."""
        result = Generation([[] for _ in waiting], ["length"] * len(waiting))
        result.prompt_tokens = sum(len(request.pending) for request in waiting)
        places: list[_Request | None] = [None] * self.batch
        if self._decoder.paged:
            self._free = list(range(self.pages))
            self._decoder.table[:] = -1
        while waiting or any(places):
            self._admit(waiting, places)
            start = time.perf_counter()
            reading = any(request and not result.tokens[request.index] for request in places)
            made = self._step(places)
            chosen = self._choose(made, how) if made else []
            for (b, request), token in zip(made, chosen, strict=True):
                tokens = result.tokens[request.index]
                tokens.append(token)
                request.pending = [token]
                said = None if callback is None else callback(request.index, token)
                is_enough = isinstance(said, (bool, np.bool_)) and bool(said)  # NumPy's of a comparison with an array's
                if token in ends or is_enough:
                    result.finished[request.index] = "stop" if token in ends else "callback"
                if token in ends or is_enough or len(tokens) == max_new_tokens:
                    self._release(places, b)
            seconds = time.perf_counter() - start
            if reading:
                result.prompt_seconds += seconds
            else:
                result.decode_seconds += seconds
                result.decode_tokens += len(made)
        return result

    def _draw(self, temperature: float | None, top_k: int, top_p: float) -> Draw:
        top_k, top_p = whole("top_k", top_k, 0, self._decoder.words), real("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"Generator: top_p is expected to be in (0, 1], got {top_p}")
        if temperature is None:
            temperature = float(top_k > 0 or top_p < 1)
        temperature = real("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"Generator: temperature is expected to be at least 0, got {temperature}")
        if temperature > float(np.finfo(np.float32).max):  # -inf of a token that is ruled out, over inf, would be NaN
            raise ValueError(f"Generator: temperature is expected to be a finite float32, got {temperature}")
        return Draw(temperature, top_k, top_p)

    def _request(self, index: int, prompt: Any, max_new_tokens: int, seed: int) -> _Request:
        expected = f"Generator: prompt {index} is expected to be a list of token numbers, at least one,"
        if isinstance(prompt, (str, bytes)):
            raise ValueError(f"{expected} as a tokenizer makes them of a text, got the text {prompt!r:.40}")
        if np.ndim(prompt) == 0:
            raise ValueError(f"{expected} and prompts a list of such lists, got {prompt!r:.40}")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{expected} got shape {tokens.shape} of {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self._decoder.words:
            raise ValueError(
                f"Generator: prompt {index} is expected to have tokens in [0, {self._decoder.words}), got "
                f"{tokens.min()} to {tokens.max()}"
            )
        keys = tokens.size + max_new_tokens - 1  # the last token is given to nobody
        room = min(self.capacity, self.pages * self.page_size) if self._decoder.paged else self.capacity
        if keys > room:
            raise ValueError(
                f"Generator: prompt {index} needs {keys} keys for {tokens.size} tokens and {max_new_tokens} new ones; "
                f"there are {room}" + (f", as the model has {room} positions" if room == self.positions else "")
            )
        return _Request(index, tokens.tolist(), keys, np.random.default_rng([seed, index]))

    def _admit(self, waiting: deque[_Request], places: list[_Request | None]) -> None:
        """Requests go in their order to free places, with all pages that they may come to need."""
        changed = False
        for b in range(self.batch):
            if places[b] is not None or not waiting:
                continue
            if self._decoder.paged:
                need = -(-waiting[0].slots // self.page_size)
                if need > len(self._free):
                    break
                waiting[0].pages = [self._free.pop() for _ in range(need)]
                self._decoder.table[b, :need] = waiting[0].pages
            places[b] = waiting.popleft()
            changed = True
        if self._decoder.paged and changed:
            self._decoder.write_table()

    def _release(self, places: list[_Request | None], b: int) -> None:
        request, places[b] = places[b], None
        if self._decoder.paged and request:
            self._free += request.pages
            self._decoder.table[b] = -1  # keys of a place that nobody has are dropped
            self._decoder.write_table()

    def _step(self, places: list[_Request | None]) -> list[tuple[int, _Request]]:
        """Runs the next tokens of each request.

        Tokens are padded on the right: what padding appends lies behind the request's length and is overwritten. It
        must not go beyond the capacity, where a model may have no positions.

        Returns:
            place and request of those that have now seen all their tokens.
        """
        running = [(b, request) for b, request in enumerate(places) if request]
        longest = max(len(request.pending) for _, request in running)
        width = min(self.chunk, longest, *(self.capacity - request.length for _, request in running))
        ids, lengths, last = self._decoder.given(width)
        for b, request in running:
            lengths[b] = request.length
            if width == 1:
                ids[b, 0], count = request.pending.pop(0), 1
            else:
                count = min(width, len(request.pending))
                ids[b, :count], last[b] = request.pending[:count], b * width + count - 1
                del request.pending[:count]
            request.length += count
        self._decoder.run(ids)
        return [(b, request) for b, request in running if not request.pending]

    def _choose(self, made: list[tuple[int, _Request]], how: Draw) -> list[int]:
        places, randoms = [b for b, _ in made], [request.random for _, request in made]
        rows = functools.partial(self._decoder.rows, places, how.top_k > 0)
        return choose(self._decoder.greatest(places), rows, how, randoms)
