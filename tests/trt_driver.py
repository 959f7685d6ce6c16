"""Parses, and if asked builds, ONNX models with TensorRT-RTX and our plugin, in a process of its own that may abort.

    python trt_driver.py < jobs.json > results.jsonl

A job is {"model": path, "build": bool, "shapes": {input: [min, opt, max]}, "remember": [text]}; a result line says what
came of it, and which of the texts stand in the plan (it cannot be loaded without a GPU).
"""

from __future__ import annotations

import json
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


def run(job: dict[str, Any], builder: trt.Builder, log: Log) -> dict[str, Any]:
    log.lines.clear()
    network = builder.create_network()
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(job["model"])
    layers = [network.get_layer(i) for i in range(network.num_layers)] if parsed else []
    tensors = [layer.get_output(i) for layer in layers for i in range(layer.num_outputs)]
    result: dict[str, Any] = {
        "parsed": parsed,
        "layers": [layer.type.name for layer in layers],
        "tensors": {t.name: [t.dtype.name, list(t.shape)] for t in tensors},
    }
    if parsed and job.get("build"):
        plan = build(job, builder, network)
        result["plan_bytes"] = None if plan is None else len(plan)
        result["remembered"] = [text for text in job.get("remember", []) if plan and text.encode() + b"\0" in plan]
    return result | {"log": log.lines.copy()}


def build(job: dict[str, Any], builder: trt.Builder, network: trt.INetworkDefinition) -> bytes | None:
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    profile = builder.create_optimization_profile()
    for name, shapes in job.get("shapes", {}).items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return None if plan is None else bytes(plan)


def main() -> None:
    flashonnx.tensorrt.register(trt)
    log = Log()
    builder = trt.Builder(log)
    for job in json.load(sys.stdin):
        print(json.dumps(run(job, builder, log)), flush=True)


if __name__ == "__main__":
    main()
