"""What ONNX Runtime adds: attention nodes in a row in a session, against as many bare launches.

    python -m benchmarks.session_overhead                # CUDA: both as one CUDA graph, and both launched one by one
    python -m benchmarks.session_overhead --device cpu --nodes 4 --keys 256

Each node appends one token to its cache and attends to it; its output is the next one's Q. The session's inputs,
outputs and caches are the very memory that the bare launches use, and what both write must agree to the bit.
Wall-clock times are those of a call that waits for its work; device times are those of CUDA events around it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.timing import EventClock, HostClock, interleave, paired_ratio, spread

COLUMNS = ("device", "batch", "keys", "nodes", "mode", "clock", "session_us", "bare_us", "ratio")
_DTYPE = "float16"


@dataclass(frozen=True)
class Shape:
    """A decoding step."""

    batch: int
    keys: int  # in the cache, with the new one
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128


class Tensors:
    """Everything that both sides read and write."""

    def __init__(self, shape: Shape, device: str) -> None:
        import torch

        torch.manual_seed(0)
        more = {"dtype": getattr(torch, _DTYPE), "device": device}
        token = (shape.batch, 1, shape.kv_heads * shape.size)
        cache = (shape.batch, shape.kv_heads, shape.keys, shape.size)
        self.q = torch.randn(shape.batch, 1, shape.heads * shape.size, **more)
        self.k, self.v = torch.randn(token, **more), torch.randn(token, **more)
        self.lengths = torch.full((shape.batch,), shape.keys - 1, dtype=torch.int64, device=device)
        self.caches = [(torch.randn(cache, **more), torch.randn(cache, **more)) for _ in range(shape.nodes)]
        self.y = torch.empty_like(self.q)

    def written(self) -> list[Any]:
        """Copies of what a step writes."""
        return [self.y.clone(), *(cache[:, :, -1].clone() for pair in self.caches for cache in pair)]

    def clear(self) -> None:
        """Makes sure that the next step writes it again."""
        for tensor in (self.y, *(cache[:, :, -1] for pair in self.caches for cache in pair)):
            tensor.fill_(float("nan"))


def bare(shape: Shape, tensors: Tensors) -> Callable[[], None]:
    """All launches through the C seam, on PyTorch's current stream."""
    import torch
    from flashonnx._capi import CPU, CUDA, Library
    from flashonnx._capi_cache import kv_cache_params
    from flashonnx._library import library_path

    library, on_gpu = Library(library_path()), tensors.q.is_cuda
    device = library.device(CUDA if on_gpu else CPU)

    def heads(x: Any) -> Any:
        return x.view(shape.batch, 1, -1, shape.size).transpose(1, 2)

    steps, q = [], tensors.q
    keep = []  # outputs between nodes
    for i, (key, value) in enumerate(tensors.caches):
        y = tensors.y if i == shape.nodes - 1 else torch.empty_like(tensors.q)
        given = [heads(x) for x in (q, tensors.k, tensors.v, y)]
        steps.append(kv_cache_params(library, device, *given, key, value, tensors.lengths))
        keep.append(y)
        q = y
    size = max(library.workspace(params) for params in steps)
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=tensors.q.device)

    def run(keep: list[Any] = keep) -> None:
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
        for params in steps:
            library.run(params, workspace.data_ptr(), stream)

    return run


def model(shape: Shape) -> bytes:
    """The nodes in a row, caches as inputs and outputs."""
    import onnx
    from onnx import TensorProto, helper

    half, token = TensorProto.FLOAT16, shape.kv_heads * shape.size
    cache = [shape.batch, shape.kv_heads, shape.keys, shape.size]
    info = helper.make_tensor_value_info
    inputs = [info("q", half, [shape.batch, 1, shape.heads * shape.size])]
    inputs += [info(name, half, [shape.batch, 1, token]) for name in "kv"]
    inputs += [info("lengths", TensorProto.INT64, [shape.batch])]
    outputs, nodes, q = [], [], "q"
    for i in range(shape.nodes):
        y = "y" if i == shape.nodes - 1 else f"y{i}"
        past, present = [f"key{i}", f"value{i}"], [f"present_key{i}", f"present_value{i}"]
        nodes.append(
            helper.make_node(
                "FlashAttentionKVCache", [q, "k", "v", *past, "lengths"], [y, *present], domain="flashonnx",
                q_num_heads=shape.heads, kv_num_heads=shape.kv_heads,
            )
        )  # fmt: skip
        inputs += [info(name, half, cache) for name in past]
        outputs += [info(name, half, cache) for name in present]
        q = y
    outputs.insert(0, info("y", half, [shape.batch, 1, shape.heads * shape.size]))
    graph = helper.make_graph(nodes, "nodes", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("flashonnx", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def session(shape: Shape, tensors: Tensors, graph: bool) -> Callable[[], None]:
    """A run of the session, on PyTorch's current stream, that does not wait; with `graph` from a CUDA graph."""
    import flashonnx
    import numpy as np
    import onnxruntime
    import torch

    providers: list[Any] = ["CPUExecutionProvider"]
    if tensors.q.is_cuda:
        stream = str(torch.cuda.current_stream().cuda_stream)
        providers.insert(
            0, ("CUDAExecutionProvider", {"user_compute_stream": stream, "enable_cuda_graph": str(int(graph))})
        )
    made = flashonnx.session(model(shape), providers)
    binding = made.io_binding()
    given = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "lengths": tensors.lengths}
    results = {"y": tensors.y}
    for i, pair in enumerate(tensors.caches):
        for name, x in zip(("key", "value"), pair, strict=True):
            given[f"{name}{i}"] = results[f"present_{name}{i}"] = x
    for bind, some in ((binding.bind_input, given), (binding.bind_output, results)):
        for name, x in some.items():
            kind = np.int64 if x.dtype == torch.int64 else np.float16
            bind(name, x.device.type, 0, kind, list(x.shape), x.data_ptr())
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry("gpu_graph_id", "0")  # the default; without it each run throws and catches inside
    return lambda: made.run_with_iobinding(binding, options)


def measure(shape: Shape, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each mode and clock."""
    import torch

    tensors = Tensors(shape, device)
    launch = bare(shape, tensors)
    launch()
    rows = []
    for mode in ("graph", "eager") if device == "cuda" else ("eager",):
        calls = {"session": session(shape, tensors, mode == "graph"), "bare": launch}
        if mode == "graph":
            captured = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
                launch()
            calls["bare"] = captured.replay
        _agree(calls, tensors, device)
        clocks: dict[str, Any] = {"wall": HostClock()}
        if device == "cuda":
            clocks["device"] = EventClock(flush=False)
        for clock, timer in clocks.items():
            waits = clock == "wall" and device == "cuda"
            timed = {name: _waiting(call) if waits else call for name, call in calls.items()}
            interleave(timed, timer, 10)
            times = interleave(timed, timer, rounds)
            middle = {name: spread(each).median * 1e6 for name, each in times.items()}
            ratio = paired_ratio(times["session"], times["bare"])
            values = (device, shape.batch, shape.keys, shape.nodes, mode, clock, middle["session"], middle["bare"])
            rows.append(dict(zip(COLUMNS, (*values, ratio), strict=True)))
        _agree(calls, tensors, device)
    return rows


def _waiting(call: Callable[[], None]) -> Callable[[], None]:
    import torch

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def _agree(calls: dict[str, Callable[[], None]], tensors: Tensors, device: str) -> None:
    """Raises an AssertionError unless all write the same."""
    import torch

    found = {}
    for name, call in calls.items():
        for _ in range(3):  # the first run of a session loads, the second captures
            tensors.clear()
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        found[name] = tensors.written()
    for a, b in zip(found["session"], found["bare"], strict=True):
        assert torch.equal(a, b), "the session and the bare launches write different numbers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.session_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--batch", default="1,8", help="separated by commas")
    add("--keys", type=int, default=4096)
    add("--nodes", type=int, default=32)
    add("--rounds", type=int, default=100)
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        import torch

        torch.cuda.set_stream(torch.cuda.Stream())
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for batch in map(int, options.batch.split(",")):
        for row in measure(Shape(batch, options.keys, options.nodes), options.device, options.rounds):
            writer.writerow({name: f"{x:.3f}" if isinstance(x, float) else x for name, x in row.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
