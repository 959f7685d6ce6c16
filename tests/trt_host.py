"""tests/cpp/: its jobs written, its results read."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
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
    id: str
    fields: dict[str, Any]
    shapes: list[Shapes] = field(default_factory=list)


@dataclass
class Result:
    """What the host said of a job."""

    fields: dict[str, Any]  # that an engine remembers
    workspaces: list[int]  # bytes, for each set of shapes
    failure: str


def find_host(library_path: str) -> str:
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
    return Job(case.id, fields, sets)


def larger(case: Case) -> Case:
    """The same node on other shapes: one batch entry more."""
    lengths = None if case.lengths is None else (*case.lengths, case.kv_length)
    return replace(case, id=f"{case.id}+1", batch=case.batch + 1, lengths=lengths)


def drive(
    host: str, library: str, jobs: Sequence[Job], folder: Path, *, gpu: bool = False, tight: bool = False
) -> tuple[list[Result], memoryview]:
    """Runs the host on the jobs, behind the command of FLASHONNX_TEST_WRAPPER (compute-sanitizer, say) if there is one.

    Args:
        host: the program.
        library: libflashonnx.so, or libflashonnx_trt_autoload.so.
        jobs: what to do.
        folder: for files.
        gpu: whether to run on the sets of shapes that have arrays.
        tight: device memory without guards, for sanitizers.

    Returns:
        A result for each job, and the outputs, one after the other.
    """
    files = [folder / name for name in ("jobs", "inputs", "outputs")]
    files[0].write_text("".join(map(_lines, jobs)))
    arguments = [*shlex.split(os.environ.get("FLASHONNX_TEST_WRAPPER", "")), host, library, str(files[0])]
    if gpu:
        with files[1].open("wb") as out:
            for shapes in (shapes for job in jobs for shapes in job.shapes if shapes.run):
                out.writelines(np.ascontiguousarray(array).tobytes() for array in shapes.arrays)
        arguments += [str(files[1]), str(files[2]), *(["tight"] if tight else [])]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    results = [_result(text) for text in done.stdout.split("job ")[1:]]
    assert len(results) == len(jobs)
    return results, memoryview(files[2].read_bytes() if gpu else b"")


def _lines(job: Job) -> str:
    lines = [f"job {job.id}"]
    for name, value in job.fields.items():
        kind = {int: "int", float: "float", str: "string"}[type(value)]
        text = value.hex() if isinstance(value, float) else value
        lines.append(f"field {name} {kind} {'=' if kind == 'string' else ''}{text}")
    for shapes in job.shapes:
        lines.append("shapes " + ("run" if shapes.run else "profile"))
        for kind, tensors in (("input", shapes.inputs), ("output", shapes.outputs)):
            lines += [" ".join((kind, dtype, *map(str, shape))) for dtype, shape in tensors]
    return "\n".join(lines) + "\n"


def _result(text: str) -> Result:
    result = Result({}, [], "")
    for line in text.splitlines()[1:]:
        kind, _, rest = line.partition(" ")
        if kind == "field":
            name, dtype, value = rest.split(" ", 2)
            result.fields[name] = {"int": int, "float": float.fromhex, "string": lambda x: x[1:]}[dtype](value)
        elif kind == "workspace":
            result.workspaces.append(int(rest))
        else:
            result.failure = (result.failure + " " + line.removeprefix("failed ")).strip()
    return result
