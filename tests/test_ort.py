"""The custom op in ONNX Runtime: the same cases, shape inference, threads, sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import cases
import cases_bias
import numpy as np
import pytest
from cases import Case
from nodes import DOMAIN, asked_for, one_node, open_session, run
from onnx import TensorProto, helper
from seam import check_outputs
from test_kernels import on_devices

ort = pytest.importorskip("onnxruntime")
flashonnx = pytest.importorskip("flashonnx")
_BY_ID = {case.id: case for case in cases.ALL}


@pytest.fixture(autouse=True)
def _needs_provider(request: pytest.FixtureRequest, library_path: str) -> None:
    if request.node.get_closest_marker("gpu") and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")


@on_devices(*cases.ALL, *cases_bias.SMALL)
def test_case(device: str, case: Case) -> None:
    inputs = case.inputs()
    session = open_session(one_node(case, inputs), device)
    check_outputs(case, inputs, run(session, case, inputs))


@on_devices(
    *(_BY_ID[i] for i in ("everything", "layout-3hd-float16", "mask-b11k-bool", "sinks-bfloat16", "lengths-float32"))
)
def test_dynamic_shapes(device: str, case: Case) -> None:
    """One session, sizes it has never heard of, then others."""
    session = open_session(one_node(case, case.inputs(), dynamic=True), device)
    square = case.layout == "3hd"
    for batch, length, more in ((2, 9, 0), (3, 1, 4), (1, 70, 0), (3, 33, 20)):
        lengths = tuple(range(1, batch + 1)) if case.lengths else None
        kv_length = length if square else length + more
        now = replace(
            case, id=f"{case.id} {batch} {length}", batch=batch, q_length=length, kv_length=kv_length, lengths=lengths
        )
        inputs = now.inputs()
        check_outputs(now, inputs, run(session, now, inputs))


@on_devices(*(replace(_BY_ID[i], id=i) for i in ("past-bhsd-64", "past-bshd-3", "no-lse", "present-without-past")))
def test_each_subset_of_outputs(device: str, case: Case) -> None:
    for present in (False, True):
        for lse in (False, True):
            now = replace(case, present=present, lse=lse)
            inputs = now.inputs()
            check_outputs(now, inputs, run(open_session(one_node(now, inputs), device), now, inputs))


def test_shapes_are_inferred() -> None:
    """From symbolic sizes: every output has its type, its rank and what can be known of it."""
    node = helper.make_node("FlashAttention", ["Q", "K", "V", "", "past_key", "past_value"],
                            ["Y", "present_key", "present_value", "lse"],
                            domain=DOMAIN, q_num_heads=4, kv_num_heads=2)  # fmt: skip
    inputs = {
        "Q": ("B", "S", 64),
        "K": ("B", "L", 32),
        "V": ("B", "L", 48),
        "past_key": ("B", 2, "P", 16),
        "past_value": ("B", 2, "P", 24),
    }
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in inputs.items()]
    # Outputs are declared without shapes, so that what the session reports is inferred.
    kinds = {
        "Y": TensorProto.FLOAT16,
        "present_key": TensorProto.FLOAT16,
        "present_value": TensorProto.FLOAT16,
        "lse": TensorProto.FLOAT,
    }
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    model = helper.make_model(
        helper.make_graph([node], "shapes", infos, outputs),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )
    found = {output.name: output for output in open_session(model).get_outputs()}
    assert found["Y"].shape == ["B", "S", 96]
    assert found["lse"].shape == ["B", 4, "S"]
    assert found["present_key"].shape[:2] + found["present_key"].shape[3:] == ["B", 2, 16]
    assert found["present_value"].shape[:2] + found["present_value"].shape[3:] == ["B", 2, 24]
    assert found["present_key"].shape[2] == found["present_value"].shape[2] not in ("L", "P", None)
    assert {name: output.type for name, output in found.items()} == {
        name: f"tensor({'float' if name == 'lse' else 'float16'})" for name in kinds
    }


@pytest.mark.parametrize("past", [None, 6])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_shapes_are_inferred_of_every_layout(layout: str, past: int | None) -> None:
    """From known sizes: what comes to nodes that read our outputs, of which nothing is declared."""
    heads = (6, 2) if layout in ("bhsd", "bshd", "gqa") else (3, 3)
    value_dim = 12 if layout in ("bhsd", "bshd") else None
    case = cases.square("shapes", 9, dtype="float16", layout=layout, past=past, heads=heads, head_dim=20,
                        value_dim=value_dim, present=True)  # fmt: skip
    model = one_node(case, case.inputs())
    attention = model.graph.node[-1]
    for i, output in enumerate(model.graph.output):
        output.type.tensor_type.ClearField("shape")
        attention.output[i] = f"inner_{output.name}"
        model.graph.node.append(helper.make_node("Identity", [attention.output[i]], [output.name]))
    found = {output.name: (output.type, tuple(output.shape)) for output in open_session(model).get_outputs()}
    kinds = {"lse": "tensor(float)"}
    assert found == {n: (kinds.get(n, "tensor(float16)"), shape) for n, shape in case.output_shapes().items()}


def test_attention_between_other_nodes(device: str) -> None:
    """Our node reads what a node before it wrote, and the next reads ours, many times (onnxruntime#6952, #17412)."""
    case = _BY_ID["d64-s128-float32"]
    inputs = case.inputs()
    model = one_node(case, inputs)
    node = model.graph.node[0]
    node.input[0], node.output[0] = "Q_twice", "Y_half"
    model.graph.node.insert(0, helper.make_node("Add", ["Q", "Q"], ["Q_twice"]))
    model.graph.node.append(helper.make_node("Add", ["Y_half", "Y_half"], ["Y"]))
    session = open_session(model, device)
    for i in range(200 if device == "cpu" else 1000):
        given = {name: np.roll(x, i, axis=1) for name, x in inputs.items()}
        outputs = session.run(["Y"], {**given, "Q": given["Q"] / 2})
        if i % 40 == 0:
            check_outputs(case, given, {"Y": outputs[0] / 2})


@on_devices(_BY_ID["everything"])
def test_eight_threads_on_one_session(device: str, case: Case) -> None:
    session = open_session(one_node(case, case.inputs(), dynamic=True), device)

    def work(index: int) -> None:
        for repeat in range(10):
            batch, length = 1 + (index + repeat) % 3, 1 + 7 * ((3 * index + repeat) % 8)
            now = replace(case, id=f"thread {batch} {length}", batch=batch, q_length=length, kv_length=length)
            inputs = now.inputs()
            check_outputs(now, inputs, run(session, now, inputs))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_session_threads(threads: int) -> None:
    case = _BY_ID["s577-float32"]
    inputs = case.inputs()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = flashonnx.session(one_node(case, inputs), ["CPUExecutionProvider"], options)
    check_outputs(case, inputs, run(session, case, inputs))


def test_session_after_session(device: str) -> None:
    """ONNX Runtime closes the library with its last session, and opens it again."""
    case = _BY_ID["d64-s128-float32"]
    inputs = case.inputs()
    model = one_node(case, inputs)
    for _ in range(10):
        session = open_session(model, device)
        check_outputs(case, inputs, run(session, case, inputs))
        del session


def test_two_sessions_share_options() -> None:
    options = ort.SessionOptions()
    case = _BY_ID["mask-b11k-bool"]
    inputs = case.inputs()
    for _ in range(2):
        session = flashonnx.session(one_node(case, inputs), ["CPUExecutionProvider"], options)
        check_outputs(case, inputs, run(session, case, inputs))


@on_devices(*(_BY_ID[i] for i in ("everything", "causal-d64-float16", "llama-decode-bfloat16", "s577-float32")))
def test_runs_are_bit_equal(device: str, case: Case) -> None:
    inputs = case.inputs()
    session = open_session(one_node(case, inputs), device)
    first = run(session, case, inputs)
    check_outputs(case, inputs, first)
    for i in range(1000 if device == "cuda" else 100):
        for name, out in run(session, case, inputs).items():
            assert out.tobytes() == first[name].tobytes(), f"{name} of run {i}"


def test_two_sessions_on_two_threads(device: str) -> None:
    """Each of its own model, at the same time, again and again with other inputs."""
    chosen = [_BY_ID[i] for i in ("everything", "causal-d64-float16")]
    sessions = [open_session(one_node(case, case.inputs()), device) for case in chosen]
    together = Barrier(2)

    def work(index: int) -> None:
        for i in range(30):
            case = replace(chosen[index], id=f"{chosen[index].id} {i}")
            inputs = case.inputs()
            together.wait(60)
            check_outputs(case, inputs, run(sessions[index], case, inputs))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def _graph_session(case: Case) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """A session that captures its runs, the binding, and its inputs and outputs on the device."""
    inputs = case.inputs()
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
    session = flashonnx.session(one_node(case, inputs), providers)
    binding = session.io_binding()
    bound = {name: ort.OrtValue.ortvalue_from_numpy(x, "cuda", 0) for name, x in inputs.items()}
    for name, value in bound.items():
        binding.bind_ortvalue_input(name, value)
    kinds = {"lse": np.float32}
    results = {}
    for name in filter(None, asked_for(case)):
        shape = list(case.output_shapes()[name])
        kind = kinds.get(name, cases.numpy_dtype(case.dtype))
        results[name] = ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, "cuda", 0)
        binding.bind_ortvalue_output(name, results[name])
    return session, binding, bound, results


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        replace(_BY_ID["everything"], id="graph"),
        replace(_BY_ID["everything"], id="graph-float16", dtype="float16"),
        Case("graph-lengths", kv_length=300, lengths=(300, 300), is_causal=1),
        Case("graph-lengths-float16", dtype="float16", kv_length=300, lengths=(300, 300), is_causal=1),
        Case("graph-split", heads=(8, 2), q_length=1, kv_length=5000, lengths=(300, 300), is_causal=1),
    ],
    ids=lambda case: case.id,
)
def test_cuda_graph(case: Case) -> None:
    """ONNX Runtime captures a run and replays it over new inputs, and over lengths that change on the device."""
    session, binding, bound, results = _graph_session(case)
    for i in range(6):
        lengths = None if case.lengths is None else (case.keys - 55 * i, 3 * i)
        given = replace(case, id=f"{case.id} {i}", lengths=lengths).inputs()
        for name, value in bound.items():
            value.update_inplace(given[name])
        session.run_with_iobinding(binding)
        check_outputs(case, given, {name: value.numpy() for name, value in results.items()})


@pytest.mark.gpu
def test_cuda_graph_is_replayed(library_path: str) -> None:
    """After the first run the library is not called any more: what runs is the graph."""
    program = """
import sys
import cases, test_ort
session, binding, *_ = test_ort._graph_session(cases.Case("graph", lse=False))
session.run_with_iobinding(binding)
print("replays", file=sys.stderr, flush=True)
for _ in range(5):
    session.run_with_iobinding(binding)
"""
    environment = os.environ | {"FLASHONNX_LIBRARY": library_path, "FLASHONNX_LOG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
    captured, replayed = done.stderr.split("replays")
    assert "flashonnx: " in captured
    assert "flashonnx: " not in replayed


@pytest.mark.gpu
def test_second_device() -> None:
    """A session on device 1, with nodes run in parallel (onnxruntime#14710, PR#24192)."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    case = _BY_ID["everything"]
    inputs = case.inputs()
    options = ort.SessionOptions()
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    session = flashonnx.session(one_node(case, inputs), [("CUDAExecutionProvider", {"device_id": 1})], options)
    check_outputs(case, inputs, run(session, case, inputs))
