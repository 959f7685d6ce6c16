"""Sessions of a subject's graphs, side by side: they take turns, so that what drifts, drifts for all."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import timing
from benchmarks.end_to_end import profile, weights
from benchmarks.end_to_end.models import Subject
from benchmarks.end_to_end.prepare import BASE, distance

if TYPE_CHECKING:
    import torch

ADD = "+add"  # behind a variant's name: biases stay additions, where ONNX Runtime would make a Gemm of fixed sizes
_DISABLE = ("optimization.disable_specified_optimizers", "MatMulAddFusion")
_WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: "cuda" or "cpu".
        budget: seconds of measured time for each session.
        cuda_graph: whether ONNX Runtime captures each session in a CUDA graph.
        only: names of variants, with the ending of those without MatMulAddFusion; empty for all.
    """

    device: str
    budget: float = 1.0
    cuda_graph: bool = False
    only: tuple[str, ...] = ()


@dataclasses.dataclass
class Result:
    """One variant of one subject; None where it was not measured.

    Attributes:
        variant: its name.
        note: how its graph was made, or why there are no numbers.
        rounds: how many calls were timed.
        median_ms: of a call with inputs and outputs on the device, until the device is done.
        low_ms: first quartile.
        high_ms: third quartile.
        device_mib: what the session and its first calls took from the device, weights included.
        error: root mean square of the difference to "plain" over that of "plain", on this device.
        cpu_error: the same of the small model in float32.
        times: seconds of each round.
    """

    variant: str
    note: str
    rounds: int | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    device_mib: float | None = None
    error: float | None = None
    cpu_error: float | None = None
    times: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Running:
    run: Callable[[], None]
    output: torch.Tensor
    keep: tuple[Any, ...]


def load(description: Path) -> tuple[Subject, list[dict[str, Any]]]:
    """A subject and its variants, as `prepare` described them."""
    content = json.loads(description.read_text())
    return Subject(**content["subject"]), content["variants"]


def measure(
    description: Path, settings: Settings, say: Callable[[str], None] = print, kernels: Path | None = None
) -> list[Result]:
    """Every variant that there is, on a GPU once more without ONNX Runtime's MatMulAddFusion, which is slow there.

    Weights that are missing are made. ONNX Runtime's operators choose their kernels themselves (cuDNN's on an H200).

    Args:
        description: the subject's file of those that `prepare` wrote.
        settings: how.
        say: is told what happens.
        kernels: a file to which each session's kernels and their times are added.
    """
    import torch

    subject, variants = load(description)
    folder = description.parent
    paths = {v["name"]: folder / f"{subject.name}.{v['name']}.onnx" for v in variants if v["made"]}
    chosen = [(v, suffix) for v in variants for suffix in _suffixes(v["name"], paths.get(v["name"]), settings)]
    needed = {paths[v["name"]] for v, _ in chosen if v["made"]}
    for made in weights.fill(sorted(needed), settings.device):
        say(f"{made.name}: random weights, {made.stat().st_size >> 20} MiB")
    results, running, outputs = [], {}, {}
    _wake(settings.device)
    for variant, suffix in chosen:
        name = variant["name"]
        result = Result(name + suffix, variant["note"], cpu_error=variant["error"])
        results.append(result)
        if not variant["made"]:
            continue
        free = _free(settings.device)
        try:
            session = _start(paths[name], subject, settings, add=bool(suffix))
        except Exception as error:  # of many classes; the others can still be measured
            result.note = f"ONNX Runtime: {str(error).splitlines()[0][:200]}"
            say(f"{subject.name}: {result.variant}: {result.note}")
            continue
        if settings.device == "cuda":
            result.device_mib = (free - _free(settings.device)) / 2**20
        running[result.variant] = session
        if variant["same"]:
            outputs[result.variant] = session.output.cpu().numpy()
    for result in results:
        if result.variant in outputs and BASE in outputs:
            result.error = distance(outputs[result.variant], outputs[BASE])
    calls = {name: session.run for name, session in running.items()}
    times = _time(calls, settings)
    for result in results:
        if result.variant in times:
            _enter(result, times[result.variant])
    if kernels is not None:
        with kernels.open("a", encoding="utf-8") as file:
            for name, run in calls.items():
                file.write(f"\n{subject.name} {name}\n{profile.table(run)}")
    running.clear()
    calls.clear()
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return results


def _suffixes(name: str, path: Path | None, settings: Settings) -> list[str]:
    """The ways to run a variant: with all of ONNX Runtime's optimisations, and without one where that may matter."""
    asked = [suffix for suffix in ("", ADD) if not settings.only or name + suffix in settings.only]
    without = ADD in asked and settings.device == "cuda" and _has_biases(path)
    return [suffix for suffix in asked if not suffix or without]


def _time(calls: dict[str, Callable[[], None]], settings: Settings) -> dict[str, list[float]]:
    clock = timing.HostClock()
    for _ in range(_WARM_UP):
        estimates = timing.interleave(calls, clock, 1)
    return timing.interleave(calls, clock, timing.rounds_for([x[0] for x in estimates.values()], settings.budget))


def _enter(result: Result, times: list[float]) -> None:
    middle = timing.spread(times)
    result.rounds, result.times = len(times), times
    result.median_ms, result.low_ms, result.high_ms = middle.median * 1e3, middle.low * 1e3, middle.high * 1e3


def speedup(results: list[Result], of: str, over: str) -> float | None:
    """How many times as fast `of` is as `over`: the median over rounds of pairs that were measured side by side."""
    times = {result.variant: result.times for result in results}
    if not times.get(of) or not times.get(over):
        return None
    return statistics.median(b / a for a, b in zip(times[of], times[over], strict=True))


def _start(path: Path, subject: Subject, settings: Settings, *, add: bool) -> _Running:
    """A session that has run, with everything bound on the device."""
    import flashonnx
    import torch

    providers: list[Any] = ["CPUExecutionProvider"]
    if settings.device == "cuda":
        options = {"arena_extend_strategy": "kSameAsRequested"}  # memory is what was asked for, no power of two
        options |= {"enable_cuda_graph": "1"} if settings.cuda_graph else {}
        providers.insert(0, ("CUDAExecutionProvider", options))
    session_options = _options()
    if add:
        session_options.add_session_config_entry(*_DISABLE)
    session = flashonnx.session(path, providers, session_options)
    if settings.device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("its CUDA provider cannot be loaded")
    binding, given, keep = session.io_binding(), subject.inputs(), []
    for node in session.get_inputs():
        kind = torch.int32 if node.type == "tensor(int32)" else given[node.name].dtype
        x = given[node.name].to(settings.device, kind).contiguous()
        _bind(binding.bind_input, node.name, x)
        keep.append(x)
    output = torch.full(_shape(subject), float("nan"), dtype=getattr(torch, subject.dtype), device=settings.device)
    _bind(binding.bind_output, session.get_outputs()[0].name, output)
    if settings.device == "cuda":
        torch.cuda.synchronize()  # ONNX Runtime's stream does not wait for PyTorch's

    def run() -> None:
        session.run_with_iobinding(binding)
        if settings.device == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):  # a CUDA graph is captured in the first
        run()
    return _Running(run, output, (session, binding, *keep))


def _wake(device: str) -> None:
    """Loads CUDA's libraries, so that their memory does not count as the first session's."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    if device == "cpu":
        return
    square = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [64, 64]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "wake", square[:1], square[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options(), providers=["CUDAExecutionProvider"])
    session.run(None, {"x": np.ones((64, 64), np.float16)})


def _options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


def _shape(subject: Subject) -> tuple[int, int, int]:
    if subject.family == "llama":
        return subject.batch, 1, subject.config["vocab_size"]
    return subject.batch, subject.tokens, subject.config["hidden_size"]


def _bind(bind: Callable[..., None], name: str, x: torch.Tensor) -> None:
    import numpy as np

    kind = np.dtype(str(x.dtype).removeprefix("torch."))
    bind(name, x.device.type, 0, kind, list(x.shape), x.data_ptr())


def _has_biases(path: Path | None) -> bool:
    """Whether a vector is added to what a MatMul makes, so that MatMulAddFusion may have something to do."""
    import onnx

    if path is None:
        return False
    graph = onnx.load(path, load_external_data=False).graph
    products = {node.output[0] for node in graph.node if node.op_type == "MatMul"}
    vectors = {proto.name for proto in graph.initializer if len(proto.dims) == 1}
    return any(
        node.op_type == "Add" and products & set(node.input) and vectors & set(node.input) for node in graph.node
    )


def _free(device: str) -> int:
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])
