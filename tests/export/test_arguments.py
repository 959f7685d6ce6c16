"""Options of fuse and export_onnx: another type or word is an error before anything is read, made or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashonnx
import numpy as np
import pytest

FLAGS = {"join_projections": "no", "portable": 0}
FUSE = FLAGS | {"shared_cache": None}
EXPORT = FLAGS | {"external_data": "beside"}


def called(function: str, folder: Path, **options: Any) -> None:
    """With a model that is none, of which nobody may speak before the options."""
    if function == "fuse":
        flashonnx.fuse(folder / "no such model.onnx", folder / "no such folder" / "y.onnx", **options)
    else:
        pytest.importorskip("torch")
        flashonnx.export_onnx("no model", None, folder / "no such folder" / "y.onnx", **options)  # type: ignore[arg-type]


CASES = [("fuse", *item) for item in FUSE.items()] + [("export_onnx", *item) for item in EXPORT.items()]


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_flags(function: str, name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError) as error:
        called(function, tmp_path, **{name: value})
    assert str(error.value) == f"{function}: {name} is expected to be True or False, got {value!r}"


@pytest.mark.parametrize("function", ["fuse", "export_onnx"])
@pytest.mark.parametrize(("value", "hint"), [("statik", "static"), ("PAGED", "paged"), ("circular", ""), ("", "")])
def test_another_cache(function: str, value: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache is expected to be") as error:
        called(function, tmp_path, kv_cache=value)
    more = f"; did you mean '{hint}'?" if hint else ""
    assert str(error.value) == f"{function}: kv_cache is expected to be 'static', 'paged' or None, got '{value}'{more}"


@pytest.mark.parametrize("function", ["fuse", "export_onnx"])
@pytest.mark.parametrize("value", [True, 1, ("static",)])
def test_no_word_for_a_cache(function: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"{function}: kv_cache is expected to be 'static', 'paged' or None, got "):
        called(function, tmp_path, kv_cache=value)


@pytest.mark.parametrize(("value", "kind"), [("20", TypeError), (20.0, TypeError), (17, ValueError), (26, ValueError)])
def test_opset(value: Any, kind: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(kind) as error:
        called("export_onnx", tmp_path, opset=value)
    assert str(error.value) == f"export_onnx: opset is expected to be 18 to 25, got {value!r}"


def test_what_is_right_goes_on(tmp_path: Path) -> None:
    """To the next that is wrong."""
    with pytest.raises(FileNotFoundError):
        called("fuse", tmp_path, kv_cache="static", join_projections=False)
    with pytest.raises(TypeError, match="the model is expected to be a"):
        called("export_onnx", tmp_path, opset=np.int64(20), external_data=None, portable=False)
