"""Engines from ONNX models, through Polygraphy's loaders."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashonnx._large import is_large
from flashonnx._library import LibraryError, library_path
from flashonnx.tensorrt._prepare import prepare_for_tensorrt
from flashonnx.tensorrt._register import last_plugin_error, modules, register

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

Profile = Mapping[str, Sequence[Sequence[int]]]


class EngineError(RuntimeError):
    """TensorRT could not parse the model or build the engine; the message says why."""


def build_engine(
    model: onnx.ModelProto | ir.Model | str | os.PathLike[str],
    profiles: Profile | Sequence[Profile] = (),
    *,
    tensorrt: ModuleType | None = None,
    compute_capabilities: Sequence[str] = (),
    embed_plugin: bool = False,
    progress: bool | None = None,
    **config: Any,
) -> bytes:
    """A TensorRT engine of a fused model, serialised.

    The model is prepared (`prepare_for_tensorrt`) and the plugin registered first. What TensorRT says along the way
    goes to the logger "Polygraphy" of Python's logging.

    Args:
        model: a fused model, or the path of one.
        profiles: for inputs of dynamic shape: one optimisation profile, or several, each of the form
            {"x": (minimum, optimum, maximum)}, where each is a shape.
        tensorrt: the module `tensorrt` or `tensorrt_rtx`. Default: the one that is imported, else the first that can
            be.
        compute_capabilities: GPUs to build for, e.g. ["8.0", "12.0"]. TensorRT-RTX alone has this choice, and needs it
            where there is no GPU. Default: the GPU that is there.
        embed_plugin: put libflashonnx.so into the engine, which then needs no other installation of it. Whoever loads
            such an engine has to allow its code (`runner(engine, allow_code=True)`, or
            `Runtime.engine_host_code_allowed`), in a process where the plugin is not registered already.
        progress: whether to show a progress bar. Default: if standard error is a terminal.
        **config: more for Polygraphy's `CreateConfig`, e.g. `builder_optimization_level=3`,
            `memory_pool_limits={trt.MemoryPoolType.WORKSPACE: 1 << 30}`.

    Raises:
        EngineError: TensorRT or the plugin refuses; the message has the reason from TensorRT's log.
        ValueError: an input of dynamic shape without a profile, or a profile for what is no input; what
            `prepare_for_tensorrt` refuses.
        ModuleNotFoundError: TensorRT or Polygraphy is not installed.
        LibraryError: the flashonnx library is missing or unsuitable.
    """
    trt = tensorrt or modules()[0]
    backend = polygraphy_backend(trt)
    prepared = prepare_for_tensorrt(model)
    given = [profiles] if isinstance(profiles, Mapping) else list(profiles)
    _check_profiles(prepared, given)
    register(trt)
    with _said_by_tensorrt() as lines, _monitor(trt, progress) as monitor, tempfile.TemporaryDirectory() as folder:
        create = backend.CreateConfig
        if compute_capabilities:
            from polygraphy.backend import tensorrt_rtx

            create = tensorrt_rtx.CreateConfigRTX
            config["compute_capabilities"] = [_numbers(text) for text in compute_capabilities]
        if given:
            config["profiles"] = [_profile(backend, profile) for profile in given]
        last_plugin_error()  # of something else
        try:
            made = create(progress_monitor=monitor, **config)
            if embed_plugin:
                made = backend.PostprocessConfig(made, _embed)
            network = parsed_network(backend, trt, prepared, folder)
            return bytes(backend.engine_bytes_from_network(network, made))
        except _polygraphy_error() as error:
            raise EngineError(_reason(lines, str(error), trt)) from error


def polygraphy_backend(trt: ModuleType) -> ModuleType:
    """Polygraphy's loaders, for this TensorRT module: a process has them for one alone."""
    try:
        import polygraphy.config
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "engines are built with Polygraphy, which is not installed: pip install polygraphy", name=error.name
        ) from error
    rtx = trt.__name__ == "tensorrt_rtx"
    loaded = "polygraphy.backend.trt" in sys.modules
    if loaded and bool(polygraphy.config.USE_TENSORRT_RTX) != rtx:
        raise LibraryError(
            f"Polygraphy was imported for another TensorRT than {trt.__name__}: set POLYGRAPHY_USE_TENSORRT_RTX="
            f"{int(rtx)} before Python starts, or import flashonnx.tensorrt's choice first"
        )
    polygraphy.config.USE_TENSORRT_RTX = rtx
    import polygraphy.backend.trt

    return polygraphy.backend.trt


def _polygraphy_error() -> type[Exception]:
    from polygraphy.exception import PolygraphyException

    error: type[Exception] = PolygraphyException
    return error


def parsed_network(backend: ModuleType, trt: ModuleType, model: onnx.ModelProto, folder: str) -> Any:
    """Polygraphy's (builder, network, parser) of a prepared model; `folder` is for one beyond protobuf's 2 GB."""
    import onnx

    # The plugin takes exactly the types that the model says; TensorRT 11 and RTX know nothing else.
    typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    if not is_large(model):
        return backend.network_from_onnx_bytes(model.SerializeToString(), strongly_typed=typed)
    path = str(Path(folder, "model.onnx"))
    onnx.save_model(model, path, save_as_external_data=True, location="model.data")
    return backend.network_from_onnx_path(path, strongly_typed=typed)


def _check_profiles(model: onnx.ModelProto, profiles: Sequence[Profile]) -> None:
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input if value.name not in weights}
    dynamic = {name: dims for name, dims in inputs.items() if any(not dim.HasField("dim_value") for dim in dims)}
    for profile in profiles or [{}]:
        for name, shapes in profile.items():
            if name not in inputs:
                raise ValueError(f"profile: the model has no input {name!r}, its inputs are {', '.join(inputs)}")
            if len(shapes) != 3 or {len(shape) for shape in shapes} != {len(inputs[name])}:
                raise ValueError(
                    f"profile: input {name!r} is expected to have three shapes (minimum, optimum, maximum) of "
                    f"{len(inputs[name])} dimensions, got {tuple(map(tuple, shapes))}"
                )
        for name in (name for name in dynamic if name not in profile):
            shape = ", ".join(str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?"
                              for dim in dynamic[name])  # fmt: skip
            raise ValueError(
                f"input {name!r} has the dynamic shape ({shape}): give its minimum, optimum and maximum, "
                f"profiles={{{name!r}: (minimum, optimum, maximum)}}"
            )


def _profile(backend: ModuleType, shapes: Profile) -> Any:
    profile = backend.Profile()
    for name, (minimum, optimum, maximum) in shapes.items():
        profile.add(name, tuple(minimum), tuple(optimum), tuple(maximum))
    return profile


def _embed(builder: Any, network: Any, config: Any) -> None:
    config.plugins_to_serialize = [library_path()]


def _numbers(capability: str) -> tuple[int, int]:
    major, separator, minor = str(capability).partition(".")
    if not (separator and major.isdigit() and minor.isdigit()):
        raise ValueError(f'compute_capabilities: expected texts such as "8.0", got {capability!r}')
    return int(major), int(minor)


@contextlib.contextmanager
def _said_by_tensorrt() -> Iterator[list[str]]:
    """The errors that Polygraphy passes on from TensorRT, as they come."""
    from polygraphy.logger import G_LOGGER

    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = G_LOGGER.use_python_logging_system, G_LOGGER.colors
    G_LOGGER.use_python_logging_system, G_LOGGER.colors = True, False
    G_LOGGER.python_logger.addHandler(handler)
    try:
        yield lines
    finally:
        G_LOGGER.python_logger.removeHandler(handler)
        G_LOGGER.use_python_logging_system, G_LOGGER.colors = before


def _reason(lines: list[str], error: str, trt: ModuleType) -> str:
    """The plugin's own words if it was the plugin, else every error."""
    theirs = [line.removeprefix("[E] ") for line in lines if line.startswith("[E] ")] or [error]
    return f"{trt.__name__} {trt.__version__}: " + (last_plugin_error() or "; ".join(dict.fromkeys(theirs)))


@contextlib.contextmanager
def _monitor(trt: ModuleType, progress: bool | None) -> Iterator[Any]:
    """An IProgressMonitor that shows TensorRT's phases as bars, or None."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield None
        return
    import rich.console
    import rich.progress

    bars = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.tasks: dict[str, rich.progress.TaskID] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.tasks[phase_name] = bars.add_task(phase_name, total=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            bars.update(self.tasks[phase_name], completed=step + 1)
            return True  # go on

        def phase_finish(self, phase_name: str) -> None:
            bars.remove_task(self.tasks.pop(phase_name))

    with bars:
        yield Monitor()
