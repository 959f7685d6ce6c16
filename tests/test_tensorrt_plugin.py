"""The TensorRT creator and plugin, driven by a host in C++ as a runtime drives them, without any TensorRT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import Case
from flashonnx._capi import CUDA, Device, Library
from nodes import asked_for
from seam import Problem, check_outputs
from trt_host import Host, Job, Shapes, find_program, job_of, larger, other

_CASES = [case for case in cases.ALL if not case.gpu]
# (architecture, multiprocessors, shared memory of a block)
_DEVICES = ((80, 108, 166912), (89, 142, 101376), (90, 132, 232448), (120, 188, 101376))


@pytest.fixture(scope="module")
def host(library_path: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Host]:
    tight = request.config.getoption("--tight")
    host = Host(find_program(library_path), library_path, tmp_path_factory.mktemp("host"), tight=tight)
    yield host
    host.close()


_GIVEN = {
    "is_causal": 1,
    "q_num_heads": 6,
    "kv_num_heads": 2,
    "scale": 0.1875,
    "softcap": 2.5,
    "left_window_size": 2**31 - 1,
    "right_window_size": 0,
    "softmax_precision": 10,
    "empty_row": "mean",
    "qkv_layout": "separate",
    "inputs": "Q,K,V,past_key,past_value",
    "outputs": "Y,present_key,lse",
}


def test_fields_survive_serialization(host: Host) -> None:
    result = host.do(Job(_GIVEN))[0]
    assert result.fields == _GIVEN | {"planned_workspace": -1}


def test_absent_fields_stay_absent(host: Host) -> None:
    result = host.do(Job({}))[0]
    assert result.fields
    assert {"scale", "q_num_heads", "kv_num_heads"}.isdisjoint(result.fields)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"is_causal": 2}, "attribute 'is_causal' is expected to be 0 or 1, got 2"),
        ({"is_causal": 1.0}, "attribute 'is_causal' is expected to be an integer"),
        ({"scale": 0.0}, "attribute 'scale' is expected to be positive and finite, got 0"),
        ({"scale": float("nan")}, "attribute 'scale' is expected to be positive and finite, got nan"),
        ({"scale": 1}, "attribute 'scale' is expected to be a float"),
        ({"q_num_heads": 0}, "attribute 'q_num_heads' is expected to be at least 1"),
        ({"q_num_heads": -1}, "attribute 'q_num_heads' is expected to be at least 1"),
        ({"left_window_size": -2}, "attribute 'left_window_size' is expected"),
        ({"softcap": -1.0}, "attribute 'softcap' is expected"),
        ({"softmax_precision": 11}, "got 11 (double)"),
        ({"empty_row": "nan"}, "attribute 'empty_row' is expected"),
        ({"qkv_layout": "hd3"}, "attribute 'qkv_layout' is expected"),
        ({"qkv_layout": "3hd", "inputs": "Q,K,V"}, 'without "K" and "V"'),
        ({"inputs": "Q,K"}, 'contain "K" and "V"'),
        ({"inputs": "K,Q,V"}, 'begin with "Q"'),
        ({"inputs": "Q,K,V,K"}, "distinct names"),
        ({"inputs": "Q,K,V,"}, "distinct names"),
        ({"inputs": "Q,K,V,weights"}, "distinct names"),
        ({"inputs": "Q,K,V,past_key"}, '"past_key" and "past_value" together'),
        ({"outputs": "lse"}, 'begin with "Y"'),
        ({"outputs": ""}, "distinct names"),
    ],
    ids=str,
)
def test_creator_refuses(host: Host, wrong: dict[str, Any], reason: str) -> None:
    failure = host.do(Job(wrong))[0].failure
    assert failure.startswith("refused by the creator: FlashAttention: ")
    assert reason in failure


def test_every_case_is_built(host: Host, library: Library) -> None:
    """Types, shapes, formats, and a plan that is enough for the case on every device; restored exactly."""
    for case in _CASES:
        jobs = [job_of(case, larger(case))]
        if case.mask and case.mask_dtype == "bool":
            jobs.append(job_of(case, mask_dtype="int8"))
        for job in jobs:
            result, _ = host.do(job)
            assert not result.failure, (case.id, result.failure)
            assert result.fields["planned_workspace"] == max(result.workspaces), case.id
            arrays = dict(zip(case.inputs(), job.shapes[0].arrays, strict=True))
            params = Problem(library, case, inputs=arrays).params
            for arch, sm_count, shared_memory in _DEVICES:
                params.device = Device(CUDA, 0, arch, sm_count, shared_memory)
                assert library.workspace(params) <= result.workspaces[0], (case.id, arch)


def test_opening_autoload_registers(library_path: str, tmp_path: Path) -> None:
    """Through the registry's virtual functions, which lie elsewhere in TensorRT 10 than in TensorRT-RTX."""
    autoload = str(Path(library_path).with_name("libflashonnx_trt_autoload.so"))
    host = Host(find_program(library_path), autoload, tmp_path)
    assert not host.do(job_of(Case("autoload", mask="b11k")))[0].failure
    # The logger was found.
    assert "attribute 'is_causal' is expected to be 0 or 1, got 2" in host.do(Job({"is_causal": 2}))[0].failure
    host.close()


def test_maxima_need_not_agree(host: Host) -> None:
    """Bounds of derived shapes may be loose: B is at most 4 here, 5 there, and the mask's keys more than K's."""
    shapes = ((4, 9, 64), (5, 16, 64), (4, 12, 64), (5, 1, 9, 40))
    loose = Shapes([("float16", shape) for shape in shapes], [("float16", (4, 9, 64))], run=False)
    fields = {"q_num_heads": 2, "kv_num_heads": 2, "inputs": "Q,K,V,attn_mask"}
    assert not host.do(Job(fields, [loose]))[0].failure


def test_profiles_add_up(host: Host) -> None:
    """The plan remembers the workspace of its largest profile, whatever comes last."""
    small, large = (Case(f"past-{n}", past=n, kv_length=1, q_length=1) for n in (3, 300))
    result = host.do(job_of(small, large, small))[0]
    assert result.workspaces[0] == result.workspaces[2] < result.workspaces[1]
    assert result.fields["planned_workspace"] == result.workspaces[1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"K": ("float32", (2, 7, 64))}, "input 'K' is expected to have type Q's type"),
        ({"Q": ("int8", (2, 5, 64))}, "input 'Q' is expected to have type float32, float16 or bfloat16"),
        ({"attn_mask": ("bool", (2, 1, 1, 7))}, "prepare_for_tensorrt casts booleans"),
        ({"V": ("float16", (2, 2, 7, 32))}, "input 'V' is expected to have 3 dimensions, got 4"),
        ({"Q": ("float16", (2, 5, 8192)), "K": ("float16", (2, 7, 8192)), "V": ("float16", (2, 7, 8192))}, "4096"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_while_building(host: Host, wrong: dict[str, Any], reason: str) -> None:
    given = {"Q": ("float16", (2, 5, 64)), "K": ("float16", (2, 7, 64)), "V": ("float16", (2, 7, 64)),
             "attn_mask": ("int32", (2, 1, 1, 7))} | wrong  # fmt: skip
    shapes = Shapes(list(given.values()), [("float16", given["Q"][1])], run=False)
    fields = {"q_num_heads": 2, "kv_num_heads": 2, "inputs": ",".join(given)}
    failure = host.do(Job(fields, [shapes]))[0].failure
    assert "FlashAttention: " in failure
    assert reason in failure


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.id)
def test_enqueue(host: Host, case: Case) -> None:
    """The whole way of a plugin: see tests/cpp/run.cpp. Two sets of shapes, compared with the reference."""
    variants = (case, other(case))
    for mask_dtype in ("int32", "int8") if case.mask and case.mask_dtype == "bool" else ("int32",):
        job = job_of(*variants, mask_dtype=mask_dtype)
        result, data = host.do(job, gpu=True)
        assert not result.failure
        for variant, shapes in zip(variants, job.shapes, strict=True):
            outputs, data = shapes.read(data)
            names = filter(None, asked_for(variant))
            check_outputs(variant, variant.inputs(), dict(zip(names, outputs, strict=True)))
        assert not data


def test_no_tensorrt_in_the_process(library_path: str, host: Host) -> None:
    code = (
        "import ctypes, sys\n"
        "class Status(ctypes.Structure): _fields_ = (('code', ctypes.c_int32), ('message', ctypes.c_char * 508))\n"
        "register = ctypes.CDLL(sys.argv[1]).flashonnx_tensorrt_register\n"
        "register.restype = Status\n"
        "print(register().message.decode())"
    )
    done = subprocess.run([sys.executable, "-c", code, library_path], capture_output=True, text=True)
    assert "no TensorRT 10, 11 or RTX is loaded in this process" in done.stdout, done.stderr
    autoload = str(Path(library_path).with_name("libflashonnx_trt_autoload.so"))
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, autoload], capture_output=True, text=True)
    assert done.returncode == 0
    assert "libflashonnx_trt_autoload.so: FlashAttention: no TensorRT 10" in done.stderr
