"""flashonnx in TensorRT: the plugin, models for the parser, engines, and running them.

    engine = flashonnx.tensorrt.build_engine("fused.onnx", {"x": (minimum, optimum, maximum)})
    with flashonnx.tensorrt.runner(engine) as run:
        outputs = run({"x": x})

or, in a program that builds its engines itself:

    flashonnx.tensorrt.register()
    parser.parse(flashonnx.tensorrt.prepare_for_tensorrt("fused.onnx").SerializeToString())

TensorRT 10.3 and later, TensorRT-RTX; neither is imported before it is needed.
"""

from flashonnx.tensorrt._build import EngineError as EngineError
from flashonnx.tensorrt._build import build_engine as build_engine
from flashonnx.tensorrt._prepare import prepare_for_tensorrt as prepare_for_tensorrt
from flashonnx.tensorrt._register import autoload_path as autoload_path
from flashonnx.tensorrt._register import register as register
from flashonnx.tensorrt._runner import polygraphy_runner as polygraphy_runner
from flashonnx.tensorrt._runner import runner as runner

__all__ = [
    "EngineError",
    "autoload_path",
    "build_engine",
    "polygraphy_runner",
    "prepare_for_tensorrt",
    "register",
    "runner",
]
