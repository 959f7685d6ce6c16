"""Parses and builds ONNX models with TensorRT-RTX and our plugin, in a process of its own that may abort.

    python trt_driver.py < jobs.json > results.jsonl

A job is {"model": path}, which is parsed as it is, or {"model": path, "engine": arguments of build_engine, "remember":
[text]}. A result line says what came of it, which of the texts stand in the plan (it needs a GPU to be loaded), and
what TensorRT logged.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import flashonnx.tensorrt
import tensorrt_rtx as trt


class Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING):
            self.lines.append(f"{severity.name}: {message}")


def parse(model: str, builder: trt.Builder, log: Log) -> dict[str, Any]:
    log.lines.clear()
    network = builder.create_network()
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(model)
    layers = [network.get_layer(i) for i in range(network.num_layers)] if parsed else []
    tensors = [layer.get_output(i) for layer in layers for i in range(layer.num_outputs)]
    return {
        "parsed": parsed,
        "layers": [layer.type.name for layer in layers],
        "tensors": {t.name: [t.dtype.name, list(t.shape)] for t in tensors},
        "log": log.lines.copy(),
    }


def build(model: str, arguments: dict[str, Any], remember: list[str], log: Log) -> dict[str, Any]:
    log.lines.clear()
    handler = logging.Handler()
    handler.emit = lambda record: log.lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("Polygraphy")  # where build_engine says TensorRT's log goes
    logger.addHandler(handler)
    try:
        plan = flashonnx.tensorrt.build_engine(model, **arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "log": log.lines.copy()}
    finally:
        logger.removeHandler(handler)
    # Strings stand in the plan with their final zero.
    return {"plan_bytes": len(plan), "remembered": [text for text in remember if text.encode() + b"\0" in plan]}


def main() -> None:
    flashonnx.tensorrt.register(trt)
    log = Log()
    builder = trt.Builder(log)
    for job in json.load(sys.stdin):
        if "engine" in job:
            result = build(job["model"], job["engine"], job.get("remember", []), log)
        else:
            result = parse(job["model"], builder, log)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
