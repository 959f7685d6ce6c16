"""tests/cpp/: its jobs written, its results read."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, numpy_dtype
from flashonnx.reference import Array
from flashonnx.tensorrt import prepare_for_tensorrt
from nodes import DOMAIN, asked_for, one_node
from trt_models import attributes_of

Described = list[tuple[str, tuple[int, ...]]]  # a dtype and a shape, for each tensor
_ROOT = Path(__file__).parent.parent


@dataclass
class Shapes:
    """A set of shapes to plan for and, if there are arrays, to run on."""

    inputs: Described
    outputs: Described
    arrays: list[Array] = field(default_factory=list)
    run: bool = True

    def read(self, data: memoryview) -> tuple[list[Array], memoryview]:
        """The outputs from the beginning of `data`, and the rest of it."""
        arrays = []
        for dtype, shape in self.outputs:
            kind = numpy_dtype(dtype)
            size = int(np.prod(shape)) * kind.itemsize
            arrays.append(np.frombuffer(data[:size], kind).reshape(shape))
            data = data[size:]
        return arrays, data


@dataclass
class Job:
    """A node as plugin fields, and sets of shapes; without those only the creator is asked."""

    fields: dict[str, Any]
    shapes: list[Shapes] = field(default_factory=list)
    operator: str = "FlashAttention"


@dataclass
class Result:
    """What the host said of a job."""

    fields: dict[str, Any]  # that an engine remembers
    workspaces: list[int]  # bytes, for each set of shapes
    failure: str


def find_program(library_path: str) -> str:
    """The program beside the library, or in the build that installed it; skips the test if there is none."""
    for folder in (Path(library_path).parent, _ROOT / "build" / "wheel"):
        if (folder / "trt_host").is_file():
            return str(folder / "trt_host")
    pytest.skip("tier tensorrt: no conformance host (configure with -DFLASHONNX_TESTS=ON and TensorRT's headers)")


def job_of(case: Case, *variants: Case, mask_dtype: str = "int32") -> Job:
    """The case's node, on the shapes of the case and of its variants; boolean masks are cast as `prepare` would."""
    fields: dict[str, Any] = {}
    sets = []
    for variant in (case, *variants):
        inputs = variant.inputs()
        (node,) = (n for n in prepare_for_tensorrt(one_node(variant, inputs)).graph.node if n.domain == DOMAIN)
        fields = fields or attributes_of(node)
        assert attributes_of(node) == fields
        arrays = [x.astype(mask_dtype) if x.dtype == bool else x for x in inputs.values()]
        shapes = variant.output_shapes()
        names = filter(None, asked_for(variant))
        outputs = [("float32" if name == "lse" else variant.dtype, shapes[name]) for name in names]
        sets.append(Shapes([(x.dtype.name, x.shape) for x in arrays], outputs, arrays))
    return Job(fields, sets)


def larger(case: Case) -> Case:
    """The same node on other shapes: one batch entry more."""
    lengths = None if case.lengths is None else (*case.lengths, case.kv_length)
    return replace(case, id=f"{case.id}+1", batch=case.batch + 1, lengths=lengths)


def other(case: Case) -> Case:
    """The same node on other shapes: `larger`, or one batch entry alone where many take long to check."""
    if case.batch <= 64:
        return larger(case)
    return replace(case, id=f"{case.id}-1", batch=1, lengths=None if case.lengths is None else case.lengths[-1:])


class Host:
    """The program, running; it is started again once it has died or a device may be in doubt.

    The command of FLASHONNX_TEST_WRAPPER (compute-sanitizer, say) goes before it, if there is one.
    """

    def __init__(self, program: str, library: str, folder: Path, *, tight: bool = False) -> None:
        wrapper = shlex.split(os.environ.get("FLASHONNX_TEST_WRAPPER", ""))
        self._command = [*wrapper, program, library, *(["tight"] if tight else [])]
        self._files = [folder / name for name in ("inputs", "outputs", "errors")]
        self._process: subprocess.Popen[str] | None = None

    def do(self, job: Job, *, gpu: bool = False) -> tuple[Result, memoryview]:
        """Does a job; with `gpu` on the sets of shapes that have arrays too, whose outputs come one after the other."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        inputs, outputs, _ = self._files
        if gpu:
            with inputs.open("wb") as file:
                for array in (array for shapes in job.shapes if shapes.run for array in shapes.arrays):
                    file.write(np.ascontiguousarray(array).tobytes())
        lines: list[str] = []
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(_lines(job) + (f"go {inputs} {outputs}\n" if gpu else "go\n"))
            process.stdin.flush()
            for line in process.stdout:
                if line == "done\n":
                    result = _result(lines)
                    if gpu and result.failure:
                        self.close()  # an error of CUDA's may stick to the process
                    return result, memoryview(outputs.read_bytes() if gpu else b"")
                lines.append(line)
        self.close()
        raise AssertionError("the host ended before its job")

    def _start(self) -> subprocess.Popen[str]:
        with self._files[2].open("w") as errors:
            return subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def close(self) -> None:
        """Ends the program; a sanitizer has then told what it found."""
        if self._process is not None:
            self._process.communicate()
            code, self._process = self._process.returncode, None
            assert code == 0, self._files[2].read_text()[-8000:]


def _lines(job: Job) -> str:
    lines = [f"operator {job.operator}"]
    for name, value in job.fields.items():
        kind = {int: "int", float: "float", str: "string"}[type(value)]
        text = value.hex() if isinstance(value, float) else value
        lines.append(f"field {name} {kind} {'=' if kind == 'string' else ''}{text}")
    for shapes in job.shapes:
        lines.append("shapes " + ("run" if shapes.run else "profile"))
        for kind, tensors in (("input", shapes.inputs), ("output", shapes.outputs)):
            lines += [" ".join((kind, dtype, *map(str, shape))) for dtype, shape in tensors]
    return "".join(f"{line}\n" for line in lines)


def _result(lines: list[str]) -> Result:
    result = Result({}, [], "")
    for line in map(str.strip, lines):
        kind, _, rest = line.partition(" ")
        if kind == "field":
            name, dtype, value = rest.split(" ", 2)
            result.fields[name] = {"int": int, "float": float.fromhex, "string": lambda x: x[1:]}[dtype](value)
        elif kind == "workspace":
            result.workspaces.append(int(rest))
        else:
            result.failure = (result.failure + " " + line.removeprefix("failed ")).strip()
    return result
