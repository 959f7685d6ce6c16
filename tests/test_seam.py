"""The C seam itself: layout of the struct, validation, refusals, workspace. No device is needed."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashonnx import _capi
from flashonnx._capi import CPU, CUDA, DTYPES, Device, Library, Params, Status, attention_params
from flashonnx.reference import Array

HEADERS = Path(__file__).parent.parent / "plugin" / "include"
HOPPER = Device(CUDA, 0, 90, 132, 232448)  # an H100 or H200, here or not


def test_structs_agree_with_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    structs = {"status": Status, "device": Device, "tensor": _capi.Tensor, "attention_params": Params}
    lines, ours = [], []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(flashonnx_{name}));')
        ours.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(flashonnx_{name}, {field}));')
            ours.append(f"{name}.{field} {getattr(struct, field).offset}")
    source = '#include <cstdio>\n#include "flashonnx/attention.h"\nint main() {\n' + "\n".join(lines) + "\n}\n"
    (tmp_path / "offsets.cpp").write_text(source)
    program = tmp_path / "offsets"
    subprocess.run([compiler, f"-I{HEADERS}", str(tmp_path / "offsets.cpp"), "-o", str(program)], check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines() == ours


def test_enums_agree_with_the_header() -> None:
    header = (HEADERS / "flashonnx" / "attention.h").read_text()
    enums = {name: int(value) for name, value in re.findall(r"FLASHONNX_(\w+)\s*=\s*(\d+)", header)}
    for name, value in DTYPES.items():
        assert enums[name.upper().removesuffix("FN")] == value
    assert (enums["CPU"], enums["CUDA"]) == (CPU, CUDA)
    assert {name: enums[f"EMPTY_ROW_{name.upper()}"] for name in _capi.EMPTY_ROW} == _capi.EMPTY_ROW


def test_header_is_c(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "user.c"
    source.write_text(
        '#include "flashonnx/attention.h"\nint main(void) { return (int)sizeof(flashonnx_attention_params) == 0; }\n'
    )
    subprocess.run(
        [compiler, "-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", "-fsyntax-only", str(source)], check=True
    )


def test_init_sets_every_default(library: Library) -> None:
    params = library.params()
    assert params.struct_size == ctypes.sizeof(Params)
    defaults = {"struct_size": params.struct_size, "mask_keys": -1, "window_left": -1, "window_right": -1}
    expected = Params(**defaults)
    assert bytes(params) == bytes(expected)


def test_version(library: Library) -> None:
    project = re.search(r"VERSION (\S+)", (HEADERS.parents[1] / "CMakeLists.txt").read_text().split("project(")[1])
    assert project is not None
    assert library.version() == project[1]


def _arrays(dtype: str = "float32", dim: int = 64) -> dict[str, Array]:
    return {name: np.zeros((2, 4, length, dim), dtype) for name, length in (("q", 5), ("k", 7), ("v", 7), ("o", 5))}


@pytest.fixture
def params(library: Library) -> Params:
    """A valid problem."""
    arrays = _arrays()
    params = attention_params(library, library.device(CPU), **arrays)
    params.keeps_alive = arrays
    return params


def _tensor(dtype: str, data: int = 1 << 12, stride: tuple[int, ...] = (1, 1, 1, 1)) -> _capi.Tensor:
    return _capi.Tensor(data, (ctypes.c_int64 * 4)(*stride), DTYPES[dtype])


_BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "struct_size": ({"struct_size": 8}, r"struct_size.*expected to be \d+.*got 8"),
    "device": ({"device": Device(7)}, r"device\.kind.*got 7"),
    "batch": ({"batch": -1}, r"batch.*got -1"),
    "huge": ({"q_length": 2**60}, r"q_length.*got 1152921504606846976"),
    "huge tensor": ({"batch": 2**30, "kv_length": 2**30}, r"'K'.*at most 2\^56.*got 1073741824 x 4 x 1073741824 x 64"),
    "q_heads": ({"q_heads": 0}, r"q_heads.*got 0"),
    "kv_heads": ({"kv_heads": 0}, r"kv_heads.*got 0"),
    "group": ({"kv_heads": 3}, r"q_heads.*multiple of.*kv_heads.*3.*got 4"),
    "q_length": ({"q_length": -1}, r"q_length.*got -1"),
    "kv_length": ({"kv_length": -1}, r"kv_length.*got -1"),
    "past_length": ({"past_length": -1}, r"past_length.*got -1"),
    "past_length without past": ({"past_length": 3}, r"past_length.*past_key.*got 3"),
    "head_dim": ({"head_dim": 0}, r"head_dim.*got 0"),
    "value_dim": ({"value_dim": 0}, r"value_dim.*got 0"),
    "no q": ({"q": _capi.Tensor()}, r"'Q' is required"),
    "no k": ({"k": _capi.Tensor()}, r"'K' is required"),
    "no v": ({"v": _capi.Tensor()}, r"'V' is required"),
    "no o": ({"o": _capi.Tensor()}, r"'Y' is required"),
    "q dtype": ({"q": _tensor("int32")}, r"'Q'.*dtype.*got int32"),
    "k dtype": ({"k": _tensor("float16")}, r"'K'.*float32.*got float16"),
    "v dtype": ({"v": _tensor("bfloat16")}, r"'V'.*float32.*got bfloat16"),
    "o dtype": ({"o": _tensor("bool")}, r"'Y'.*got bool"),
    "unknown dtype": ({"q": _capi.Tensor(1, (ctypes.c_int64 * 4)(1, 1, 1, 1), 77)}, r"'Q'.*got unknown"),
    "q stride": ({"q": _tensor("float32", stride=(1, 1, 1, 2))}, r"'Q'.*innermost stride 1, got 2"),
    "mask dtype": ({"mask": _tensor("int64")}, r"'attn_mask'.*got int64"),
    "mask keys": ({"mask": _tensor("bool"), "mask_keys": 8}, r"'attn_mask'.*at most.*7.*got 8"),
    "lse dtype": ({"lse": _tensor("float16")}, r"'lse'.*float32.*got float16"),
    "sinks dtype": ({"sinks": _tensor("float16")}, r"'sinks'.*float32.*got float16"),
    "lengths dtype": ({"key_lengths": _tensor("float32")}, r"'nonpad_kv_seqlen'.*int32 or int64.*got float32"),
    "past_k alone": ({"past_k": _tensor("float32")}, r"'past_key'.*'past_value'"),
    "present_v alone": ({"present_v": _tensor("float32")}, r"'present_key'.*'present_value'.*got only 'present_value'"),
    "past and lengths": (
        {"past_k": _tensor("float32"), "past_v": _tensor("float32"), "key_lengths": _tensor("int64")},
        r"'nonpad_kv_seqlen' cannot be combined with 'past_key'",
    ),
    "offset without lengths": ({"offset_from_lengths": 1}, r"offset_from_lengths.*'nonpad_kv_seqlen'"),
    "scale": ({"scale": float("nan")}, r"'scale'.*finite.*got (-?)nan"),
    "negative scale": ({"scale": -0.5}, r"'scale' is expected to be positive.*got -0\.5"),
    "reserved": ({"reserved": 1}, r"'reserved' of 'params' is expected to be 0, got 1"),
    "reserved of the cache": ({"reserved_cache": 2}, r"'reserved' of 'params' cache' is expected to be 0, got 2"),
    "reserved of a tensor": ({"lse": _capi.Tensor(reserved=3)}, r"'reserved' of 'lse' is expected to be 0, got 3"),
    "softcap": ({"softcap": -1.0}, r"'softcap'.*got -1"),
    "empty_row": ({"empty_row": 2}, r"'empty_row'.*got 2"),
    "mean and sinks": ({"empty_row": 1, "sinks": _tensor("float32")}, r"empty_row.*'sinks'"),
    "window_left": ({"window_left": -2}, r"'left_window_size'.*got -2"),
    "window_right": ({"window_right": -2}, r"'right_window_size'.*got -2"),
    "offset": ({"causal_offset": 2**60}, r"'causal_offset'.*got 1152921504606846976"),
    "dropout": ({"dropout": 1.5}, r"'dropout'.*got 1\.5"),
}


@pytest.mark.parametrize("name", _BROKEN)
def test_invalid(library: Library, params: Params, name: str) -> None:
    """Each function names the field, what was expected and what came; nothing is touched."""
    fields, message = _BROKEN[name]
    for field, value in fields.items():
        setattr(params, field, value)
    for function in (library.supported, library.workspace, library.workspace_bound, library.run):
        with pytest.raises(ValueError, match=message):
            function(params)


@pytest.mark.parametrize(("field", "name"), [("q", "Q"), ("k", "K"), ("v", "V"), ("o", "Y")])
def test_null_data(library: Library, params: Params, field: str, name: str) -> None:
    getattr(params, field).data = None
    assert library.supported(params)  # which never looks at data
    with pytest.raises(ValueError, match=f"'{name}'.*null pointer"):
        library.run(params)


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "dropout"),
    "descale": ({"q_descale": _tensor("float32")}, "descale"),
    "head_dim": ({"head_dim": 520}, r"head dimensions up to 512, got 520"),
    "value_dim": ({"value_dim": 513}, r"head dimensions up to 512, got 513"),
    "float8": ({name: _tensor("float8_e4m3fn") for name in "qkv"}, "dtype float8_e4m3"),
}


@pytest.mark.parametrize("device", [Device(CPU), HOPPER], ids=["cpu", "hopper"])
@pytest.mark.parametrize("name", _REFUSED)
def test_refused(library: Library, params: Params, name: str, device: Device) -> None:
    """What the seam can say and no kernel does yet is refused with the reason, by every function."""
    params.device = device
    if device.kind == CUDA and not _has_kernels(library, params):
        pytest.skip("built without CUDA kernels")
    fields, message = _REFUSED[name]
    for field, value in fields.items():
        setattr(params, field, value)
    for function in (library.supported, library.workspace, library.run):
        with pytest.raises(NotImplementedError, match=message):
            function(params)


def test_old_device_is_refused(library: Library, params: Params) -> None:
    params.device = Device(CUDA, 0, 35, 15, 49152)
    with pytest.raises(NotImplementedError, match=r"3\.5|no kernels for the device"):
        library.supported(params)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "sizes", [{"q_length": 2**31}, {"q_length": 2**30, "kv_length": 2**30}, {"batch": 2**31}], ids=str
)
def test_more_than_cuda_kernels_count(library: Library, params: Params, dtype: str, sizes: dict[str, int]) -> None:
    """`supported` says so; the launch would be too late."""
    params.device = HOPPER
    if not _has_kernels(library, params):
        pytest.skip("built without CUDA kernels")
    for name in "qkvo":
        setattr(params, name, _tensor(dtype))
    for size, value in sizes.items():
        setattr(params, size, value)
    for function in (library.supported, library.workspace, library.run):
        with pytest.raises(NotImplementedError, match=r"simt .*up to 2\^31"):
            function(params)


def test_unknown_device(library: Library) -> None:
    with pytest.raises(ValueError, match=r"kind is expected to be 0 .*got 9"):
        library.device(9)
    device = library.device(CPU)
    assert (device.kind, device.arch) == (CPU, 0)
    assert device.sm_count > 0


def test_null_arguments(library: Library) -> None:
    functions = library._functions
    assert functions.flashonnx_attention_supported(None).code == 1
    assert functions.flashonnx_attention_run(None, None, None).code == 1
    assert functions.flashonnx_device_query(CPU, 0, None).code == 1


def test_what_is_written_has_its_own_memory(library: Library) -> None:
    """Present keys over past values would be read as such."""
    new, past, present = (np.zeros((1, 2, n, 16), np.float32) for n in (3, 5, 8))
    values = np.zeros_like(past), np.zeros_like(present)
    params = attention_params(library, library.device(CPU), new, new, new, new.copy(), past_k=past, past_v=values[0],
                              present_k=present, present_v=values[1])  # fmt: skip
    workspace = np.empty(library.workspace(params) + 1, np.uint8)
    library.run(params, workspace.ctypes.data)
    own = type(params.present_k).from_buffer_copy(params.present_k)  # what ctypes gives is a view
    params.present_k = params.past_v
    with pytest.raises(ValueError, match=r"'present_key' is written .* other memory than 'past_value', got the same"):
        library.run(params, workspace.ctypes.data)
    params.present_k, params.present_v = own, params.past_k
    with pytest.raises(ValueError, match=r"'present_value' is written .* other memory than 'past_key', got the same"):
        library.run(params, workspace.ctypes.data)


_SIZES = ("batch", "q_length", "kv_length", "head_dim", "value_dim")


@pytest.mark.parametrize("device", [Device(CPU, sm_count=4), HOPPER], ids=["cpu", "hopper"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_workspace_bound(library: Library, device: Device, dtype: str, random: np.random.Generator) -> None:
    """The bound at the maxima holds for every problem of sizes up to these, past with and without present included."""
    for _ in range(200):
        maxima = attention_params(library, device, **_arrays(dtype))
        if device.kind == CUDA and not _has_kernels(library, maxima):
            pytest.skip("built without CUDA kernels")
        for name in _SIZES:
            setattr(maxima, name, int(random.integers(1, 512 if "dim" in name else 300)))
        if random.random() < 0.5:
            maxima.past_k = maxima.past_v = maxima.k
            maxima.past_length = int(random.integers(0, 300))
        bound = library.workspace_bound(maxima)
        assert library.workspace(maxima) <= bound
        smaller = type(maxima).from_buffer_copy(maxima)
        for name in (*_SIZES, "past_length"):
            low = 1 if "dim" in name else 0
            setattr(smaller, name, int(random.integers(low, getattr(maxima, name) + 1)))
        assert 0 <= library.workspace(smaller) <= bound


@pytest.mark.parametrize("size", ["batch", "q_length", "kv_length"])
@pytest.mark.parametrize("mask", [None, "rows", "keys"])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_empty_problems_have_a_kernel(library: Library, size: str, mask: str | None, is_causal: int) -> None:
    """Kernels are chosen by quotients of sizes; a division by none would end the process."""
    params = attention_params(library, HOPPER, **_arrays("float16"), is_causal=bool(is_causal))
    if not _has_kernels(library, params):
        pytest.skip("built without CUDA kernels")
    for name in ("q", "k", "v", "o"):
        getattr(params, name).dtype = DTYPES["bfloat16"]
    for length in ("q_length", "kv_length", "mask_keys"):
        setattr(params, length, 2048)
    if mask:
        params.mask = _tensor("bfloat16", stride=(0, 0, 2048 if mask == "rows" else 0, 1))
    setattr(params, size, 0)
    if size == "kv_length":
        params.mask_keys = 0
    assert library.supported(params)
    assert 0 <= library.workspace(params) <= library.workspace_bound(params)


def test_workspace_bound_of_masks(library: Library) -> None:
    """A mask with a row for each head may become one that heads share, which Hopper's kernels pack."""
    maxima = attention_params(library, HOPPER, **_arrays("float16"))
    if not _has_kernels(library, maxima):
        pytest.skip("built without CUDA kernels")
    for name in ("q_heads", "kv_heads"):
        setattr(maxima, name, 4)
    for name in ("q_length", "kv_length", "mask_keys"):
        setattr(maxima, name, 1024)
    smaller = type(maxima).from_buffer_copy(maxima)
    maxima.mask = _capi.broadcast(np.ones((2, 4, 1024, 1024), bool))
    smaller.mask = _capi.broadcast(np.ones((2, 1, 1024, 1024), bool))
    if library.supported(smaller) != "sm90":
        pytest.skip("built without sm90")
    needed = library.workspace(smaller)
    assert needed >= 2 * 1024 * 1024 / 8, "the mask is packed to bits"
    assert needed <= library.workspace_bound(maxima)


@pytest.mark.parametrize("device", [Device(CPU, sm_count=4), HOPPER], ids=["cpu", "hopper"])
def test_memory_does_not_grow_with_the_square(library: Library, device: Device) -> None:
    """64 times the length needs at most 64 times the workspace; a (B, 1, 1, Sk) mask stays as small as it is."""
    sizes = []
    for length in (1 << 12, 1 << 18):
        params = attention_params(library, device, **_arrays())
        if device.kind == CUDA and not _has_kernels(library, params):
            pytest.skip("built without CUDA kernels")
        params.q_length = params.kv_length = params.mask_keys = length
        params.mask = _capi.broadcast(np.ones((2, 1, 1, 7), bool))
        sizes.append(library.workspace(params))
    assert sizes[1] <= max(64 * sizes[0], 1 << 20)


def _has_kernels(library: Library, params: Params) -> bool:
    try:
        library.supported(params)
    except NotImplementedError as error:
        assert "no kernels for the device" in str(error)
        return False
    return True
