"""Every public fault of attention operators that is known to us, and the tests of its whole kind.

The table names cases of `cases.py`, by patterns: each of these runs through the seam (`test_kernels.py::test_case`) and
through ONNX Runtime (`test_ort.py::test_case`), on the CPU and on CUDA, and through TensorRT's plugin
(`test_tensorrt*.py`, which take all of them). Where a case cannot say it, tests are named.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import cases
import pytest

SEAM, ORT = "test_kernels.py", "test_ort.py"
CACHES = ("test_cache_kernels.py", "test_ort_kv_cache.py")  # the same of caches
# By fault: patterns of case ids (which may name no "::"), or tests.
FAULTS: dict[str, tuple[str, ...]] = {
    # The operator.
    "padded-kv-nan": (
        "poison-lengths-nan-*", "poison-lengths-inf-*", "poison-lengths-causal-*",
        *(f"{file}::test_case[cpu-{case}]" for file in CACHES for case in ("poison-inf", "length0")),
    ),
    "masked-value-poison": ("poison-mask-*-bool-*-cap0.5", "poison-mask-*-T-*-cap0.5", "poison-mask-*-cap0.0"),
    "all-false-row": ("empty-row-[0124]-zero*", "empty-row-zero-gqa-*", "empty-row-[01]-mean*", "poison-dead-row-*"),
    "finite-sentinel-is-a-bias": ("sentinel-finfo.min-*", "sentinel--1e4-*"),
    "causal-one-query-no-past": ("causal-one-query-no-past-*",),
    "causal-external-cache": (
        "causal-lengths-*", "empty-row-5-*", *(f"{file}::test_case[cpu-read-beyond-queries]" for file in CACHES),
    ),
    "rank3-mask-is-heads": ("mask-hqk-*", "mask-1qk-*", "mask-h1k-*"),
    "key-mask-broadcast-over-queries": (
        "mask-b11k-*", "mask-111k-*", "mask-bh1k-*", "bert-*",
        "test_seam.py::test_memory_does_not_grow_with_the_square",
    ),
    "gqa-repeat-not-tile": ("group-6-2*", "sinks-causal-gqa-*", "layout-gqa-6-2-mask*"),
    "odd-group": tuple(f"group-{group}*" for group in ("3-1", "5-1", "12-2", "7-1", "16-1", "71-1")),
    "head-512-fp16": ("d512-scale-1-s6", "d512-scale-1-s64", "d512-*"),
    "fp16-score-overflow": ("score-overflow", "score-overflow-causal"),
    "value-head-differs": ("d256-dv512-*", "d192-dv128-*", "d72-dv40-*", "d*-dv*-bhsd-causal*", "past-dv*"),
    "odd-head-dims": tuple(f"d{dim}-*" for dim in (1, 7, 20, 33, 72, 96, 100, 129, 160, 200)),
    "transposed-views": (
        "layout-bshd-*", "layout-3hd-*", "layout-h3d-*", "layout-gqa-*", "layout-time_major-*",
        "test_hypothesis.py::test_kernel", "test_kernels.py::test_torch_tensors",
    ),
    "unaligned-base": (
        "test_kernels.py::test_unaligned_memory", "test_ort_memory.py::test_unaligned_memory",
        "test_cache_kernels.py::test_unaligned_memory",
    ),
    "many-heads": ("many-heads", "many-heads-small*", "many-batches"),
    "beyond-2^31": (
        "test_kernels.py::test_strides_beyond_32_bits", "test_ort_memory.py::test_strides_beyond_32_bits",
        "test_cache_kernels.py::test_strides_beyond_32_bits",
    ),
    "empty-things": (
        "no-batch-*", "no-queries-*", "no-keys-*", "no-tokens-3hd*",
        *(f"test_varlen.py::test_{way}[{device}-{case}]" for way in ("seam", "onnx_runtime")
          for device in ("cpu", "cuda")
          for case in ("empty-middle", "empty-ends", "no-keys", "no-tokens", "no-key-tokens", "no-sequences")),
        *(f"{file}::test_case[cpu-{case}]" for file in CACHES
          for case in ("no-batch", "no-tokens", "no-tokens-ragged", "no-capacity", "length0-ragged")),
    ),
    "total-kv-multiple-of-8": tuple(f"mask-k{keys}-*" for keys in (7, 8, 9, 15, 16, 17, 32)),
    "window-counts-self": ("window-*-causal*", "window-past-1*", "window-past-5*", "window-[0-9]*-uneven*"),
    "window-ragged": (
        "window-lengths*", *(f"{file}::test_case[{device}-window-ragged-{dtype}]" for file in CACHES
                             for device in ("cpu", "cuda") for dtype in cases.DTYPES),
    ),
    "shared-memory-attribute": (
        "test_kernels.py::test_one_after_another", "test_ort_memory.py::test_one_after_another",
    ),
    # A node cannot ask for a fixed split: between nodes only equal shapes give equal bits, as the header says.
    "batch-mates": (
        "test_kernels.py::test_fixed_split_ignores_batch_mates",
        "test_cache_kernels.py::test_fixed_split_ignores_batch_mates",
    ),
    "run-to-run": ("test_repeats.py::test_runs_are_bit_equal", "test_ort.py::test_runs_are_bit_equal"),
    # Loading and sessions.
    "default-stream": ("test_ort.py::test_attention_between_other_nodes",),
    "concurrent-runs": (
        "test_repeats.py::test_eight_threads", "test_ort.py::test_eight_threads_on_one_session",
        "test_ort.py::test_two_sessions_on_two_threads",
    ),
    "register-twice": ("test_library.py::test_register_twice", "test_library.py::test_register_then_again_by_hand"),
    "old-runtime": ("test_library.py::test_old_runtime", "test_tensorrt_register.py::test_old_tensorrt"),
    "optional-hole": (
        "lengths-*", "sinks-*", "test_ort.py::test_each_subset_of_outputs", "test_ort.py::test_dynamic_shapes",
        "test_tensorrt_prepare.py::test_holes_are_closed", "test_tensorrt.py::test_every_case_is_parsed",
    ),
    "wrong-library": (
        "test_library.py::test_missing", "test_library.py::test_not_a_library", "test_library.py::test_wrong_header",
        "test_library.py::test_unloadable", "test_library.py::test_other_library",
        "test_tensorrt_register.py::test_missing_library",
        "test_tensorrt_register.py::test_library_without_the_adapter",
    ),
    "trt-already-registered": (
        "test_tensorrt.py::test_registration_happens_once", "test_tensorrt.py::test_polygraphy_opens_autoload",
        "test_tensorrt_register.py::test_lean_runtime",
    ),
    "trt-attribute-int64": (
        "test_tensorrt_prepare.py::test_wide_windows_become_the_widest",
        "test_tensorrt_prepare.py::test_attributes_that_tensorrt_would_mangle_are_refused",
    ),
    "second-device": ("test_kernels.py::test_second_device", "test_ort.py::test_second_device"),
}  # fmt: skip
# Faults that only some ways or devices can meet.
ONLY_SEAM = {"batch-mates"}
ONLY_ORT = {"default-stream", "register-twice", "old-runtime", "wrong-library"}
ONLY_TENSORRT = {"trt-already-registered", "trt-attribute-int64"}
ALSO_TENSORRT = {"old-runtime", "optional-hole", "wrong-library"}  # in tests of its own
ONLY_CPU = {"register-twice", "old-runtime", "wrong-library", *ONLY_TENSORRT}
ONLY_CUDA = {"second-device"}


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """The ids of all tests that the table may name."""
    here = Path(__file__).parent
    files = sorted({name.split("::")[0] for names in FAULTS.values() for name in names if "::" in name} | {SEAM, ORT})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "slow or not slow",
        *(f"{here.name}/{x}" for x in files),
    ]
    done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return {line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_has_its_tests(fault: str, collected: set[str]) -> None:
    """What the table names exists, and is run on both devices through the seam and ONNX Runtime."""
    found: set[str] = set()
    for name in FAULTS[fault]:
        if "::" in name:
            ids = {i for i in collected if i == name or i.startswith(f"{name}[")}
        else:
            matching = [case.id for case in cases.ALL if fnmatchcase(case.id, name)]
            assert matching, f"no case is called {name}"
            ways = (f"{file}::test_case[{device}-{i}]" for file in (SEAM, ORT) for device in ("cpu", "cuda")
                    for i in matching)  # fmt: skip
            ids = collected.intersection(ways)
        assert ids, f"there is no test {name}"
        found |= ids
    tensorrt = {i for i in found if i.startswith("test_tensorrt")}
    assert bool(tensorrt) == (fault in ONLY_TENSORRT | ALSO_TENSORRT)
    through = {"ort" if re.match(r"test_(ort|library)", i) else "seam" for i in found - tensorrt}
    devices = {"cuda" if re.search(r"\bcuda\b|hopper|second_device", i) else "cpu" for i in found}
    ways = {"seam"} if fault in ONLY_SEAM else {"ort"} if fault in ONLY_ORT else {"seam", "ort"}
    assert through == (set() if fault in ONLY_TENSORRT else ways)
    assert devices == ({"cpu"} if fault in ONLY_CPU else {"cuda"} if fault in ONLY_CUDA else {"cpu", "cuda"})
