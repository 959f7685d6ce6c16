"""Runs Polygraphy's commands in one process of their own, as Polygraphy keeps one TensorRT for a whole process.

    python polygraphy_driver.py < jobs.json > results.json

A job is {"command": arguments of `polygraphy`} or {"script": path of a generated program}; with "library" in it,
FLASHONNX_LIBRARY is that, and with "missing" that module cannot be imported. The results are pairs: the exit code, and
all that was said.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

from polygraphy.tools._main import main


@contextlib.contextmanager
def without(module: str | None) -> Iterator[None]:
    """As if it were not installed; other modules that are imported meanwhile stay."""
    if module is None:
        yield
        return
    modules: dict[str, Any] = sys.modules
    before = modules.get(module)
    modules[module] = None
    try:
        yield
    finally:
        del modules[module]
        if before is not None:
            modules[module] = before


def do(job: dict[str, Any]) -> tuple[int, str]:
    said = io.StringIO()
    environment = {"FLASHONNX_LIBRARY": job["library"]} if "library" in job else {}
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        mock.patch.dict(os.environ, environment),
        without(job.get("missing")),
    ):
        try:
            if "script" in job:
                runpy.run_path(job["script"], run_name="__main__")
                status = 0
            else:
                status = main(job["command"])
        except BaseException:
            traceback.print_exc()
            status = 99
    return status, said.getvalue()


if __name__ == "__main__":
    print(json.dumps([do(job) for job in json.load(sys.stdin)]))
