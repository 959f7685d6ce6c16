"""`flashonnx export`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flashonnx.cli._files import check_writable, report_files
from flashonnx.cli._output import Json, lengths, working
from flashonnx.cli.fuse import KINDS, Joined, Portable, ReportOption, Strict, tell

HF = "hf:"


class DType(StrEnum):
    """Of the exported weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class KVCache(StrEnum):
    """Where a decoder's keys and values are."""

    STATIC = "static"
    PAGED = "paged"


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="hf:FOLDER, a model of transformers; or module:function (file.py:function), which returns a model and "
            "its example inputs.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="ONNX file to write.", show_default=False)
    ],
    opset: Annotated[int | None, typer.Option(help="Of the standard operators, 18 to 25. Default: 20.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Convert the model's weights first. Default: as they are.")
    ] = None,
    class_: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="Class of transformers, if not the configuration's.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of hf:'s example inputs: batch, sequence. Repeatable."),
    ] = None,
    kv_cache: Annotated[
        KVCache | None, typer.Option(help="A decoder's caches as inputs and outputs, for prompts and single tokens.")
    ] = None,
    report: ReportOption = None,
    portable: Portable = True,
    join_projections: Joined = True,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Export a PyTorch model with its attention fused.

    A function returns a tuple (model, args), or a dictionary of the arguments of flashonnx.export_onnx: model, args,
    and perhaps kwargs, dynamic_shapes, opset, input_names, output_names.
    """
    import flashonnx

    if importlib.util.find_spec("torch") is None:
        raise ImportError("export needs PyTorch: pip install 'flashonnx[torch]'")
    check_writable(output)
    files = report_files(report, KINDS, output.with_suffix(".report"))
    with working(f"exporting {source}"):
        if source.startswith(HF):
            from flashonnx.cli._hf import example

            kind = None if dtype is None else dtype.value
            arguments = example(source.removeprefix(HF), class_, lengths(size), kind)
        else:
            if class_ or size:
                raise ValueError("export: --class and --size are for hf:FOLDER; a function makes its own inputs")
            arguments = _called(source)
            if dtype is not None:
                arguments = _converted(arguments, dtype.value)
        if opset is not None:
            arguments["opset"] = opset
        if kv_cache is not None:  # it has inputs of its own
            arguments = {name: arguments[name] for name in ("model", "opset") if name in arguments}
            arguments["kv_cache"] = kv_cache.value
        model, args = arguments.pop("model"), arguments.pop("args", ())
        arguments |= {"portable": portable, "join_projections": join_projections}
        done = flashonnx.export_onnx(model, tuple(args), output, **arguments)
    tell(done, files, output, json, {})
    if strict and done.fused < done.total:
        raise typer.Exit(1)


def _called(source: str) -> dict[str, Any]:
    """What the function of `module:function` returns, as arguments of export_onnx.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    import torch

    name, separator, function = source.rpartition(":")
    if not separator or not name or not function:
        folder = f": for a model of transformers in that folder write hf:{source}" if Path(source).is_dir() else ""
        raise ValueError(f"export: the source is expected as hf:FOLDER or module:function, got '{source}'{folder}")
    module = _imported(name)
    made: Any = module
    for part in function.split("."):
        if not hasattr(made, part):
            raise ValueError(f"export: {name} has no '{function}'")
        made = getattr(made, part)
    if not callable(made):
        raise ValueError(f"export: '{function}' of {name} is no function")
    result = made()
    if isinstance(result, Mapping) and "model" in result:
        arguments = dict(result)
    elif isinstance(result, tuple) and len(result) == 2:
        args = result[1]
        named = isinstance(args, Mapping)
        arguments = {"model": result[0]} | ({"kwargs": dict(args)} if named else {"args": _as_tuple(args)})
    else:
        what = type(result).__name__
        raise ValueError(
            f"export: {source} is expected to return (model, args) or a dictionary with 'model', got {what}"
        )
    if not isinstance(arguments["model"], (torch.nn.Module, torch.export.ExportedProgram)):
        what = type(arguments["model"]).__name__
        raise ValueError(f"export: the model of {source} is expected to be a torch.nn.Module, got {what}")
    if isinstance(arguments["model"], torch.nn.Module):
        arguments["model"].eval()
    return arguments


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)


def _imported(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"export: there is no file '{name}'")
        sys.path.insert(0, str(path.absolute().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ValueError(f"export: there is no module '{name}' here (or write path/to/file.py:function)") from error


def _converted(arguments: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The model and its floating-point example inputs in another type."""
    import torch

    kind = getattr(torch, dtype)

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(kind) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {name: convert(inner) for name, inner in value.items()}
        return type(value)(map(convert, value)) if type(value) in (tuple, list) else value

    converted = {name: convert(arguments[name]) for name in ("args", "kwargs") if name in arguments}
    return arguments | converted | {"model": arguments["model"].to(kind)}
