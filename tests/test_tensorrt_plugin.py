"""The TensorRT creator and plugin, driven by a host in C++ as a runtime drives them, without any TensorRT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import Case
from flashonnx._capi import CUDA, Device, Library
from nodes import asked_for
from seam import Problem, check_outputs
from trt_host import Job, Shapes, drive, find_host, job_of, larger

_CASES = [case for case in cases.ALL if not case.gpu]
# (architecture, multiprocessors, shared memory of a block)
_DEVICES = ((80, 108, 166912), (89, 142, 101376), (90, 132, 232448), (120, 188, 101376))


@pytest.fixture(scope="session")
def host(library_path: str) -> str:
    return find_host(library_path)


def one(host: str, library: str, job: Job, folder: Path) -> Any:
    """The result of one job on no device."""
    (result,), _ = drive(host, library, [job], folder)
    return result


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


def test_fields_survive_serialization(host: str, library_path: str, tmp_path: Path) -> None:
    result = one(host, library_path, Job("fields", _GIVEN), tmp_path)
    assert result.fields == _GIVEN | {"planned_workspace": -1}


def test_absent_fields_stay_absent(host: str, library_path: str, tmp_path: Path) -> None:
    result = one(host, library_path, Job("nothing", {}), tmp_path)
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
        ({"inputs": "Q,K,V,bias"}, "distinct names"),
        ({"inputs": "Q,K,V,past_key"}, '"past_key" and "past_value" together'),
        ({"outputs": "lse"}, 'begin with "Y"'),
        ({"outputs": ""}, "distinct names"),
    ],
    ids=str,
)
def test_creator_refuses(host: str, library_path: str, tmp_path: Path, wrong: dict[str, Any], reason: str) -> None:
    failure = one(host, library_path, Job("wrong", wrong), tmp_path).failure
    assert failure.startswith("refused by the creator: FlashAttention: ")
    assert reason in failure


def test_every_case_is_built(host: str, library: Library, library_path: str, tmp_path: Path) -> None:
    """Types, shapes, formats, and a plan that is enough for the case on every device; restored exactly."""
    jobs = [job_of(case, larger(case)) for case in _CASES]
    jobs += [job_of(case, mask_dtype="int8") for case in _CASES if case.mask and case.mask_dtype == "bool"]
    results, _ = drive(host, library_path, jobs, tmp_path)
    by_id = {case.id: case for case in _CASES}
    for job, result in zip(jobs, results, strict=True):
        assert not result.failure, (job.id, result.failure)
        assert result.fields["planned_workspace"] == max(result.workspaces), job.id
        arrays = dict(zip(by_id[job.id].inputs(), job.shapes[0].arrays, strict=True))
        params = Problem(library, by_id[job.id], inputs=arrays).params
        for arch, sm_count, shared_memory in _DEVICES:
            params.device = Device(CUDA, 0, arch, sm_count, shared_memory)
            assert library.workspace(params) <= result.workspaces[0], (job.id, arch)


def test_opening_autoload_registers(host: str, library_path: str, tmp_path: Path) -> None:
    """Through the registry's virtual functions, which lie elsewhere in TensorRT 10 than in TensorRT-RTX."""
    case = Case("autoload", mask="b11k")
    autoload = str(Path(library_path).with_name("libflashonnx_trt_autoload.so"))
    good, bad = job_of(case), Job("wrong", {"is_causal": 2})
    (built, refused), _ = drive(host, autoload, [good, bad], tmp_path)
    assert not built.failure
    assert "attribute 'is_causal' is expected to be 0 or 1, got 2" in refused.failure  # the logger was found


def test_maxima_need_not_agree(host: str, library_path: str, tmp_path: Path) -> None:
    """Bounds of derived shapes may be loose: B is at most 4 here, 5 there, and the mask's keys more than K's."""
    shapes = ((4, 9, 64), (5, 16, 64), (4, 12, 64), (5, 1, 9, 40))
    loose = Shapes([("float16", shape) for shape in shapes], [("float16", (4, 9, 64))], run=False)
    fields = {"q_num_heads": 2, "kv_num_heads": 2, "inputs": "Q,K,V,attn_mask"}
    assert not one(host, library_path, Job("loose", fields, [loose]), tmp_path).failure


def test_profiles_add_up(host: str, library_path: str, tmp_path: Path) -> None:
    """The plan remembers the workspace of its largest profile, whatever comes last."""
    small, large = (Case(f"past-{n}", past=n, kv_length=1, q_length=1) for n in (3, 300))
    result = one(host, library_path, job_of(small, large, small), tmp_path)
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
def test_refused_while_building(
    host: str, library_path: str, tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    given = {"Q": ("float16", (2, 5, 64)), "K": ("float16", (2, 7, 64)), "V": ("float16", (2, 7, 64)),
             "attn_mask": ("int32", (2, 1, 1, 7))} | wrong  # fmt: skip
    shapes = Shapes(list(given.values()), [("float16", given["Q"][1])], run=False)
    fields = {"q_num_heads": 2, "kv_num_heads": 2, "inputs": ",".join(given)}
    failure = one(host, library_path, Job("wrong", fields, [shapes]), tmp_path).failure
    assert "FlashAttention: " in failure
    assert reason in failure


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.id)
def test_enqueue(host: str, library_path: str, tmp_path: Path, case: Case, request: pytest.FixtureRequest) -> None:
    """The whole way of a plugin: see tests/cpp/run.cpp. Two sets of shapes, compared with the reference."""
    variants = (case, larger(case))
    dtypes = ("int32", "int8") if case.mask and case.mask_dtype == "bool" else ("int32",)
    jobs = [job_of(*variants, mask_dtype=dtype) for dtype in dtypes]
    tight = request.config.getoption("--tight")
    results, data = drive(host, library_path, jobs, tmp_path, gpu=True, tight=tight)
    for job, result in zip(jobs, results, strict=True):
        assert not result.failure
        for variant, shapes in zip(variants, job.shapes, strict=True):
            outputs, data = shapes.read(data)
            names = filter(None, asked_for(variant))
            check_outputs(variant, variant.inputs(), dict(zip(names, outputs, strict=True)))
    assert not data


def test_no_tensorrt_in_the_process(library_path: str, host: str) -> None:
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
