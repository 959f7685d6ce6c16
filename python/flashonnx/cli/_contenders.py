"""What `flashonnx bench` measures: a problem, and everything installed here that computes it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

Call = Callable[[], Any]
_ROWS, _HEADS = 16, 4  # queries of heads that are checked


@dataclass(frozen=True)
class Operator:
    """Self-attention of (batch, length, heads * size), length being what varies."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    dtype: str
    causal: bool

    def flops(self, length: int) -> float:
        """4 B H S S D, half of it if causal."""
        total = 4.0 * self.batch * self.heads * length * length * self.size
        return total / 2 if self.causal else total

    def arrays(self, length: int) -> dict[str, Any]:
        """Random q, k, v, the same at every call: they are not to be written to."""
        return _arrays(self, length)

    def made(self, length: int) -> dict[str, Any]:
        """What `arrays` keeps."""
        random = np.random.default_rng(length)
        widths = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        return {
            name: random.standard_normal((self.batch, length, heads * self.size), np.float32).astype(self.dtype)
            for name, heads in widths.items()
        }

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} / {self.kv_heads} heads"
        return f"batch {self.batch}, {heads} of {self.size}, {self.dtype}{', causal' if self.causal else ''}"


@dataclass
class Contender:
    """One way to compute it. `open` raises what keeps it from doing so, `close` frees what it holds."""

    name: str
    open: Callable[[int], Call]  # of a length; the call returns the outputs as NumPy arrays if asked to `read`
    ours: bool = False
    read: Callable[[], list[Any]] = field(default=list)
    close: Callable[[], None] = field(default=lambda: None)
    torch: bool = False


class Session(Contender):
    """A model in ONNX Runtime, inputs and outputs where the device is."""

    def __init__(
        self,
        name: str,
        model: Callable[[int], Any],
        feeds: Callable[[int], Mapping[str, Any]],
        device: str,
        threads: int,
        ours: bool = False,
    ) -> None:
        """`model` and `feeds` are given a length."""
        self._model, self._feeds, self._device, self._threads = model, feeds, device, threads
        self._held: tuple[Any, ...] = ()
        super().__init__(name, self._open, ours, self._read, self._close)

    def _open(self, length: int) -> Call:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        ort.set_default_logger_severity(4)  # what fails has a line in the table
        options.intra_op_num_threads = self._threads
        options.add_session_config_entry("session.force_spinning_stop", "1")  # so that nobody's threads are in the way
        providers: list[Any] = ["CPUExecutionProvider"]
        if self._device == "cuda":
            providers.insert(0, ("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"}))
        session = self._session(self._model(length), providers, options)
        if self._device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
            raise RuntimeError("ONNX Runtime could not use its CUDA provider: see flashonnx doctor")
        binding = session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(x, self._device, 0) for name, x in self._feeds(length).items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            binding.bind_output(output.name, self._device, 0)
        self._held = (session, binding, values)
        return lambda: session.run_with_iobinding(binding)

    def _session(self, model: Any, providers: list[Any], options: Any) -> Any:
        """With the library for what needs it; peers are measured without one too."""
        import onnxruntime as ort

        from flashonnx import session

        if self.ours:
            return session(model, providers, options)
        source = model if isinstance(model, str) else model.SerializeToString()
        return ort.InferenceSession(source, options, providers=providers)

    def _read(self) -> list[Any]:
        return self._held[1].copy_outputs_to_cpu()

    def _close(self) -> None:
        self._held = ()


class Torch(Contender):
    """PyTorch's scaled_dot_product_attention by one of its backends, or flashonnx's operator there."""

    def __init__(self, name: str, backend: str, problem: Operator, device: str, threads: int) -> None:
        """`backend` is a name of torch.nn.attention.SDPBackend, "" for PyTorch's own choice, or "flashonnx"."""
        self._backend, self._problem, self._device, self._threads = backend, problem, device, threads
        self._output: Any = None
        super().__init__(name, self._open, backend == "flashonnx", self._read, self._close, torch=True)

    def _open(self, length: int) -> Call:
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        problem = self._problem
        tensors = [torch.from_numpy(x).to(self._device) for x in problem.arrays(length).values()]
        q, k, v = (x.unflatten(2, (-1, problem.size)).transpose(1, 2) for x in tensors)
        attend = self._function()

        def call() -> None:
            with torch.inference_mode():
                self._output = attend(q, k, v)
            if self._device == "cuda":
                torch.cuda.synchronize()

        return call

    def _function(self) -> Callable[..., Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        causal, grouped = self._problem.causal, self._problem.heads != self._problem.kv_heads
        if self._backend == "flashonnx":
            import flashonnx.torch  # noqa: F401 - registers it

            return lambda q, k, v: torch.ops.flashonnx.attention(q, k, v, is_causal=causal)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        if not self._backend:
            return lambda q, k, v: sdpa(q, k, v, is_causal=causal, enable_gqa=grouped)
        backend = getattr(SDPBackend, self._backend)

        def attend(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, is_causal=causal, enable_gqa=grouped)

        return lambda q, k, v: told_why_not(lambda: attend(q, k, v)) if self._output is None else attend(q, k, v)

    def _read(self) -> list[Any]:
        return [self._output.transpose(1, 2).flatten(2).cpu().numpy()]

    def _close(self) -> None:
        self._output = None


def told_why_not(call: Callable[[], Any]) -> Any:
    """The result of a first call of PyTorch's attention by one backend.

    Raises:
        RuntimeError: the backend refuses, for the reason that PyTorch only warns of.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return call()
        except RuntimeError as error:
            texts = [str(warning.message).partition(" (Triggered internally")[0] for warning in caught]
            # Lines before the reason name the backend; those of backends that were not asked for say so.
            reasons = [t for t in texts if "not used because" not in t and "runtime disabled" not in t]
            raise RuntimeError(reasons[0].partition(". ")[0] if reasons else str(error)) from error


def operator_contenders(problem: Operator, device: str, threads: int) -> Iterator[Contender]:
    """All that this machine may have, ours first; whether one can do it shows when it is opened."""
    import importlib.util

    def session(name: str, form: str, ours: bool = False) -> Session:
        return Session(name, lambda n: graph(problem, n, form), problem.arrays, device, threads, ours)

    yield session("flashonnx", "FlashAttention", True)
    yield session("ORT Attention", "Attention")
    yield session("ORT MultiHeadAttention", "MultiHeadAttention")
    yield session("unfused", "unfused")
    if importlib.util.find_spec("torch") is not None:
        backends = {"flashonnx in PyTorch": "flashonnx", "PyTorch": ""}
        if device == "cuda":
            backends = {
                "flashonnx in PyTorch": "flashonnx",
                "PyTorch FlashAttention-2": "FLASH_ATTENTION",
                "PyTorch cuDNN": "CUDNN_ATTENTION",
                "PyTorch mem.-efficient": "EFFICIENT_ATTENTION",
            }
        for name, backend in backends.items():
            yield Torch(name, backend, problem, device, threads)


def model_contenders(
    original: Path, fused: Any, feeds: Callable[[int], Mapping[str, Any]], device: str, threads: int, name: str
) -> list[Contender]:
    """The model as it is fused (a path or a model), and as it was, without the library, under that name."""
    return [
        Session("fused", lambda length: fused, feeds, device, threads, True),
        Session(name, lambda length: str(original), feeds, device, threads),
    ]


def graph(problem: Operator, length: int, form: str) -> onnx.ModelProto:
    """The problem as an ONNX model from q, k, v (B, S, H D) to y.

    Raises:
        ValueError: this form has no such problem.
    """
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT if problem.dtype == "float32" else TensorProto.FLOAT16
    widths = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads, "y": problem.heads}
    values = [
        helper.make_tensor_value_info(name, kind, (problem.batch, length, heads * problem.size))
        for name, heads in widths.items()
    ]
    heads: dict[str, Any] = {
        "q_num_heads": problem.heads,
        "kv_num_heads": problem.kv_heads,
        "is_causal": int(problem.causal),
    }
    constants: list[Any] = []
    if form == "unfused":
        nodes = _unfused(problem, length, kind, constants)
    elif form == "MultiHeadAttention":
        if problem.heads != problem.kv_heads:
            raise ValueError("has as many key heads as query heads")
        attributes: dict[str, Any] = {"num_heads": problem.heads, "unidirectional": int(problem.causal)}
        nodes = [helper.make_node(form, list("qkv"), ["y"], domain="com.microsoft", **attributes)]
    else:
        domain = "flashonnx" if form == "FlashAttention" else ""
        nodes = [helper.make_node(form, list("qkv"), ["y"], domain=domain, **heads)]
    made = helper.make_graph(nodes, form, values[:3], values[3:], constants)
    opsets = [helper.make_opsetid(*pair) for pair in (("", 23), ("com.microsoft", 1), ("flashonnx", 1))]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def _unfused(problem: Operator, length: int, kind: int, constants: list[Any]) -> list[Any]:
    """MatMul, Softmax, MatMul as exporters write them; a causal mask is added."""
    from onnx import helper, numpy_helper

    def constant(name: str, value: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    nodes = []
    groups = problem.heads // problem.kv_heads
    for name, heads, order in (
        ("q", problem.heads, (0, 2, 1, 3)),
        ("k", problem.kv_heads, (0, 2, 3, 1)),
        ("v", problem.kv_heads, (0, 2, 1, 3)),
    ):
        split = constant(f"{name}_split", np.array([0, 0, heads, problem.size]))
        nodes.append(helper.make_node("Reshape", [name, split], [f"{name}_4d"]))
        last = f"{name}_heads"
        nodes.append(helper.make_node("Transpose", [f"{name}_4d"], [last], perm=order))
        if heads != problem.heads:
            index = constant(f"{name}_index", np.repeat(np.arange(heads), groups))
            nodes.append(helper.make_node("Gather", [last, index], [f"{name}_all"], axis=1))
    q, k, v = ("q_heads", *(f"{n}_all" if groups > 1 else f"{n}_heads" for n in "kv"))
    scale = constant("scale", np.array(1 / math.sqrt(problem.size), problem.dtype))
    nodes += [
        helper.make_node("MatMul", [q, k], ["products"]),
        helper.make_node("Mul", ["products", scale], ["scaled"]),
    ]
    scores = "scaled"
    if problem.causal:
        triangle = np.triu(np.full((length, length), -np.inf, problem.dtype), 1)
        nodes.append(helper.make_node("Add", ["scaled", constant("triangle", triangle)], ["scores"]))
        scores = "scores"
    flat = constant("flat", np.array([0, 0, problem.heads * problem.size]))
    nodes += [
        helper.make_node("Softmax", [scores], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", v], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["joined"], perm=(0, 2, 1, 3)),
        helper.make_node("Reshape", ["joined", flat], ["y"]),
    ]
    return nodes


def wrong(problem: Operator, length: int, output: Any) -> str:
    """Why an output is wrong, by some rows of some heads in float64; "" if it is right.

    It may be off by twice what rounding scores and probabilities to the type gives, and a few last places.
    """
    rows, picked, truth, allowed = _expected(problem, length)
    found = _heads(problem, np.asarray(output))[:, picked][:, :, rows]
    error = np.abs(found.astype(np.float64) - truth).max()
    return "" if error <= allowed else f"wrong: off by {error:.3g}, {allowed:.3g} is allowed"


@functools.lru_cache(maxsize=1)
def _arrays(problem: Operator, length: int) -> dict[str, Any]:
    return problem.made(length)


@functools.lru_cache(maxsize=1)
def _expected(problem: Operator, length: int) -> tuple[Any, Any, Any, float]:
    """Rows and heads, what stands there in float64, and what an answer may be off."""
    arrays = problem.arrays(length)
    rows = np.unique(np.linspace(0, length - 1, _ROWS).astype(int))
    picked = np.unique(np.linspace(0, problem.heads - 1, _HEADS).astype(int))
    q = _heads(problem, arrays["q"])[:, picked][:, :, rows]
    k, v = (_heads(problem, arrays[n])[:, picked // (problem.heads // problem.kv_heads)] for n in "kv")
    hidden = np.arange(length)[None] > rows[:, None] if problem.causal else np.zeros((len(rows), length), bool)

    def attention(kind: Any) -> Any:
        wide = np.promote_types(kind, np.float32)  # sums are; NumPy is slow in float16 besides
        scores = (q.astype(wide) @ k.astype(wide).swapaxes(2, 3) / math.sqrt(problem.size)).astype(kind).astype(wide)
        scores[..., hidden] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True)).astype(kind).astype(wide)
        return (p @ v.astype(wide)).astype(kind).astype(np.float64)

    truth = attention(np.float64)
    rounding = np.abs(attention(problem.dtype) - truth).max()
    return rows, picked, truth, float(2 * rounding + 8 * np.finfo(problem.dtype).eps * np.abs(truth).max())


def _heads(problem: Operator, x: Any) -> Any:
    return x.reshape(problem.batch, x.shape[1], -1, problem.size).swapaxes(1, 2)
