"""Files that commands read and write."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Input = Annotated[Path, typer.Argument(help="ONNX file.", show_default=False)]
_NPY = b"\x93NUMPY"  # how a file of numpy.save begins


def report_files(wanted: Sequence[str] | None, kinds: Sequence[str], stem: Path) -> dict[str, Path]:
    """Where reports go, by kind: "html" is `stem`.html, "folder/page.html" is that file.

    Raises:
        ValueError: another kind than those.
        OSError: a file that cannot be written.
    """
    files: dict[str, Path] = {}
    for text in wanted or []:
        kind = text if text in kinds else Path(text).suffix.removeprefix(".").lower()
        if kind not in kinds:
            raise ValueError(f"--report is expected to be {' or '.join(kinds)}, or a file that ends so, got '{text}'")
        path = stem.with_name(f"{stem.name}.{kind}") if text in kinds else Path(text)
        check_writable(path)
        files[kind] = path
    return files


def check_writable(path: Path) -> None:
    """Raises what would keep a file from being written there, before any work is done.

    Raises:
        ValueError: it is "-", which stands for stdout elsewhere.
        OSError: whatever keeps `flashonnx.fuse` from writing there.
    """
    if str(path) == "-":  # weights may go into a second file, and stdout says what was done
        raise ValueError("cannot write to '-': models and reports go to files, not to stdout, which has the report")
    from flashonnx.export.model.files import check_output

    check_output(path)


def write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, Path(os.path.realpath(path)))


def write_model(path: Path, model: Any) -> None:
    """Whole or not at all; beyond protobuf's 2 GB with weights in `path`.data."""
    import onnx

    from flashonnx._large import is_large

    if not is_large(model):
        write(path, model.SerializeToString())
        return
    file, data = Path(os.path.realpath(path)), f"{path.name}.data"
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder)
        onnx.save_model(model, temporary / file.name, save_as_external_data=True, location=data)
        os.replace(temporary / data, file.parent / data)
        os.replace(temporary / file.name, file)


def check_dims(names: Iterable[str], model: Path) -> None:
    """Raises what keeps `names` from being dimensions of a model.

    Raises:
        ValueError: nothing in the model has one of them, or it is not an ONNX model.
    """
    names = list(names)
    if not names:
        return
    from flashonnx._inputs import names_in
    from flashonnx.export.model import files

    graph = files.load(model).model.graph
    values = [*graph.inputs, *graph.outputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    texts = dict.fromkeys(str(dim) for value in values for dim in value.shape or () if not isinstance(dim, int))
    known = dict.fromkeys(name for text in texts if text != "None" for name in (text, *names_in(text)))
    for name in names:
        if name not in known:
            raise ValueError(f"--dim: nothing in {model} has a dimension '{name}'; there are {_listed(known)}")


def _listed(names: Iterable[str]) -> str:
    plain = [name for name in names if name.isidentifier()]
    more = f" and {len(plain) - 12} more" if len(plain) > 12 else ""
    return ", ".join(plain[:12]) + more if plain else "none with a name"


def given_inputs(paths: Sequence[Path] | None) -> list[Mapping[str, Any]] | None:
    """The cases in .npz files, one a file; None without files.

    Raises:
        OSError: a file is missing.
        ValueError: one is something else.
    """
    return [_arrays(path) for path in paths] if paths else None


def _arrays(path: Path) -> dict[str, Any]:
    import numpy as np

    expected = f"--inputs is expected to be an .npz file, as numpy.savez(path, **inputs) writes it; '{path}'"
    with path.open("rb") as file:
        start = file.read(len(_NPY))
    if start == _NPY:
        raise ValueError(f"{expected} holds one array without a name")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{expected} is none")
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{expected} cannot be read: {error}") from error
