"""A model that verify runs: its graph, its sessions, and onnx's evaluator where ONNX Runtime cannot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flashonnx._float64 import without_bfloat16_doors
from flashonnx._inputs import Feeds, input_specs
from flashonnx._large import is_large
from flashonnx._library import LibraryError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    Model: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto | onnxruntime.InferenceSession


class Candidate:
    """A model that can be run: its graph, and a session of it."""

    def __init__(self, model: Model, providers: list[Any] | None) -> None:
        source: Any = model
        if hasattr(source, "get_providers"):  # a session
            providers = providers or source.get_providers()
            source = getattr(source, "_model_path", None) or getattr(source, "_model_bytes", None)
            if source is None:
                raise ValueError("verify: the graph of this session is not known: pass the model itself")
        proto = load(source)
        self.specs = input_specs(proto)
        self.inputs = [spec.name for spec in self.specs]
        self.outputs = [output.name for output in proto.graph.output]
        self.proto = without_bfloat16_doors(proto)
        self._source = os.fspath(source) if self.proto is proto and isinstance(source, (str, os.PathLike)) else None
        self._providers = providers

    def open(self, optimised: bool = True) -> Any:
        """An ONNX Runtime session."""
        import onnxruntime

        from flashonnx._runtime import default_providers, session

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it cannot run is reported here
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        large = self._source is None and is_large(self.proto)  # which `session` knows how to load
        if large or is_fused(self.proto):
            return session(self._source or self.proto, self._providers, options)
        source = self._source or self.proto.SerializeToString()
        return onnxruntime.InferenceSession(source, options, providers=self._providers or default_providers())

    def exposing(self, values: Mapping[str, int]) -> Candidate:
        """The same model with these values of its graph as its only outputs.

        Args:
            values: name to ONNX element type, 0 where it is not known.
        """
        import onnx

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        del proto.graph.output[:]
        for name, kind in values.items():
            output = proto.graph.output.add(name=name)
            if kind:
                output.type.tensor_type.elem_type = kind
        return Candidate(proto, self._providers)

    def run(self, session: Any, feeds: Feeds) -> list[Any]:
        narrow = {name: x.astype(np.float32) if x.dtype.name == "bfloat16" else x for name, x in feeds.items()}
        return session.run(self.outputs, narrow)

    def runner(self, notes: list[str]) -> Any:
        """Runs the original; onnx's evaluator does it where ONNX Runtime cannot (bfloat16 on the CPU, some masks)."""
        from flashonnx import _float64

        try:
            session = self.open()
        except LibraryError:
            raise
        except Exception as error:
            notes.append(f"ONNX Runtime cannot open the original ({first_line(error)}); onnx's evaluator runs it")
            session = _float64.evaluate(self.proto)

        def run(feeds: Feeds) -> list[Any]:
            nonlocal session
            try:
                return self.run(session, feeds)
            except Exception as error:
                evaluator = _float64.evaluate(self.proto)
                try:
                    result = self.run(evaluator, feeds)
                except Exception:
                    raise error from None  # it is the inputs
                notes.append(f"ONNX Runtime cannot run the original ({first_line(error)}); onnx's evaluator runs it")
                session = evaluator
                return result

        return run


def load(model: Any) -> onnx.ModelProto:
    import onnx

    if isinstance(model, onnx.ModelProto):
        return model
    is_file = isinstance(model, (str, os.PathLike))
    if is_file or isinstance(model, (bytes, bytearray)):
        try:
            if is_file:
                proto = onnx.load(os.fspath(model), load_external_data=False)
            else:
                proto = onnx.load_model_from_string(bytes(model))
        except OSError:
            raise
        except Exception as error:  # protobuf's own exceptions differ between its versions
            raise ValueError(f"verify: {_name(model)} is not an ONNX model: {first_line(error)}") from error
        if not proto.HasField("graph"):
            raise ValueError(f"verify: {_name(model)} is not an ONNX model: it has no graph")
        if is_file:
            try:
                onnx.load_external_data_for_model(proto, os.path.dirname(os.path.abspath(model)))
            except Exception as error:  # a file that is missing is an error of the checker's own kind
                raise ValueError(
                    f"verify: the weights of {_name(model)} cannot be read: {first_line(error)}"
                ) from error
        return proto
    raise TypeError(f"verify: expected a path, bytes, an onnx.ModelProto or a session, got {type(model).__name__}")


def _name(model: Any) -> str:
    return "the model" if isinstance(model, (bytes, bytearray)) else f"'{os.fspath(model)}'"


def is_fused(model: onnx.ModelProto) -> bool:
    """Whether a model has nodes of flashonnx."""
    bodies = [function.node for function in model.functions if function.domain != "flashonnx"]
    return any(_attends(nodes) for nodes in (model.graph.node, *bodies))


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]


def _attends(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether a node, also one in a subgraph, is flashonnx's."""
    return any(
        node.domain == "flashonnx" or any(_attends(g.node) for a in node.attribute for g in (a.g, *a.graphs))
        for node in nodes
    )
