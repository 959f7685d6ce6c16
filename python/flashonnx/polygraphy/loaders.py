"""Loaders for Polygraphy: fused models, sessions with flashonnx's operators, networks with its plugin.

They do nothing before they are called, as all of Polygraphy's, and end with its PolygraphyException, which its command
line shows as one message.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from polygraphy import config, util
from polygraphy.backend.base import BaseLoader
from polygraphy.logger import G_LOGGER

if TYPE_CHECKING:
    import onnx
    import onnxruntime


class FusedModel(BaseLoader):
    """A model with FlashAttention nodes."""

    def __init__(self, model: Any, fuse: bool = False) -> None:
        """Remembers what to load.

        Args:
            model: a path, an `onnx.ModelProto`, or a loader of one of them.
            fuse: fuse it first. If nothing can be fused, the model stays as it is and a warning gives the reasons.
        """
        self._model = model
        self._fuse = fuse

    def call_impl(self) -> str | onnx.ModelProto:
        """The path or model, as it was given; a model in memory if it is fused here.

        Raises:
            PolygraphyException: it is no model, or has no FlashAttention node and is not to be fused.
        """
        model, _ = util.invoke_if_callable(self._model)
        with _said_plainly():
            if self._fuse:
                return _fused(model)
            if not _has_attention(model):
                G_LOGGER.critical(
                    f"{_name(model)} has no flashonnx::FlashAttention node, so there is nothing to test: fuse it "
                    "(`flashonnx fuse`), name the fused model by --flashonnx-model, or say --flashonnx-fuse"
                )
        return model


class FlashonnxSession(BaseLoader):
    """An `onnxruntime.InferenceSession` with flashonnx's operators."""

    def __init__(
        self, model: Any, providers: Sequence[str] | None = None, graph_optimization_level: Any = None
    ) -> None:
        """Remembers what to load.

        Args:
            model: what `flashonnx.session` takes, or a loader of it.
            providers: names of execution providers or parts of them, whatever their case. Default: the CPU, as for
                Polygraphy's own sessions.
            graph_optimization_level: an `onnxruntime.GraphOptimizationLevel`. Default: ONNX Runtime's.
        """
        self._model = model
        self._providers = providers or ["cpu"]
        self._level = graph_optimization_level

    def call_impl(self) -> onnxruntime.InferenceSession:
        """The session.

        Raises:
            PolygraphyException: no library, no suitable ONNX Runtime, no such provider, or no model.
        """
        import flashonnx

        with _said_plainly():
            model, _ = util.invoke_if_callable(self._model)
            options = _options()
            if self._level is not None:
                options.graph_optimization_level = self._level
            return flashonnx.session(model, _full_names(self._providers), options)


class PluginNetwork(BaseLoader):
    """A TensorRT network in which FlashAttention nodes are plugin layers.

    The plugin has to be registered when it is called: `WithPlugin` around it, or around what calls it.
    """

    def __init__(self, model: Any) -> None:
        """Remembers the model: what `prepare_for_tensorrt` takes, or a loader of it."""
        self._model = model

    def call_impl(self) -> Any:
        """Polygraphy's (builder, network, parser).

        Raises:
            PolygraphyException: no TensorRT, or a model that it or `prepare_for_tensorrt` refuses.
        """
        from flashonnx.tensorrt import prepare_for_tensorrt
        from flashonnx.tensorrt._build import parsed_network, polygraphy_backend

        with _said_plainly(), tempfile.TemporaryDirectory() as folder:
            trt = _tensorrt()
            model, _ = util.invoke_if_callable(self._model)
            return parsed_network(polygraphy_backend(trt), trt, prepare_for_tensorrt(model), folder)


class WithPlugin(BaseLoader):
    """Registers flashonnx's TensorRT plugin, and then gives what another loader gives."""

    def __init__(self, loader: Any) -> None:
        """Remembers the other loader, e.g. of an engine; something that is no loader is given as it is."""
        self._loader = loader

    def call_impl(self) -> Any:
        """What the other loader gives.

        Raises:
            PolygraphyException: no TensorRT, or no library with the plugin.
        """
        from flashonnx.tensorrt import register

        with _said_plainly():
            register(_tensorrt())
        result, _ = util.invoke_if_callable(self._loader)
        return result


@contextlib.contextmanager
def _said_plainly() -> Iterator[None]:
    """Errors that say what to do, without a traceback."""
    from flashonnx import LibraryError

    try:
        yield
    except (LibraryError, ModuleNotFoundError, OSError, ValueError) as error:
        G_LOGGER.critical(f"flashonnx: {error}")


def _fused(model: Any) -> onnx.ModelProto:
    import onnx

    import flashonnx

    fused, report = flashonnx.fuse(model)
    assert isinstance(fused, onnx.ModelProto)
    if isinstance(model, (str, os.PathLike)):  # weights in other files stay there
        onnx.load_external_data_for_model(fused, str(Path(model).parent))
    say = G_LOGGER.info if report.fused else G_LOGGER.warning
    say(f"flashonnx: {_name(model)}: {report}")
    return fused


def _has_attention(model: Any) -> bool:
    import onnx_ir as ir

    from flashonnx.export.model import files
    from flashonnx.export.operator.schema import DOMAIN, OP_TYPE

    loaded = files.load(model).model
    graphs: list[ir.Graph | ir.Function] = [loaded.graph, *loaded.functions.values()]
    return any(
        (node.domain, node.op_type) == (DOMAIN, OP_TYPE)
        for graph in graphs
        for node in ir.traversal.RecursiveGraphIterator(graph)
    )


def _name(model: Any) -> str:
    return os.fspath(model) if isinstance(model, (str, os.PathLike)) else "the model"


def _options() -> onnxruntime.SessionOptions:
    from flashonnx._runtime import checked_onnxruntime

    return checked_onnxruntime().SessionOptions()


def _full_names(providers: Sequence[str]) -> list[str]:
    """ONNX Runtime's names of the providers, found as Polygraphy finds them."""
    from flashonnx._runtime import checked_onnxruntime

    available = checked_onnxruntime().get_available_providers()
    names = [util.find_str_in_iterable(provider, available) for provider in providers]
    for provider, name in zip(providers, names, strict=True):
        if name is None:
            raise ValueError(f"there is no execution provider {provider!r} here, but {', '.join(available)}")
    return names


def _tensorrt() -> ModuleType:
    """The TensorRT that Polygraphy uses in this process."""
    name, other = ("tensorrt_rtx", "tensorrt") if config.USE_TENSORRT_RTX else ("tensorrt", "tensorrt_rtx")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ModuleNotFoundError(_missing(name, other), name=name) from None
        said = f"{name} is installed, but cannot be imported: {error}; install {name.replace('_', '-')} again"
        raise ModuleNotFoundError(said, name=error.name) from error


def _missing(name: str, other: str) -> str:
    """What to do without this TensorRT, which Polygraphy took as its variable says."""
    switch = {
        "tensorrt_rtx": "set POLYGRAPHY_USE_TENSORRT_RTX=1 before the command, for TensorRT-RTX",
        "tensorrt": "unset POLYGRAPHY_USE_TENSORRT_RTX, for TensorRT",
    }[other]
    if importlib.util.find_spec(other) is not None:
        return f"{name} is not installed, but {other} is: {switch}; or pip install {name.replace('_', '-')}"
    alternative = f"pip install {other.replace('_', '-')} and {switch}"
    return f"neither {name} nor {other} is installed: pip install {name.replace('_', '-')}; or {alternative}"
