"""flashonnx in TensorRT: register the plugin, prepare a model for the parser.

    import tensorrt as trt                                      # or tensorrt_rtx
    flashonnx.tensorrt.register()
    parser.parse(flashonnx.tensorrt.prepare_for_tensorrt("model.onnx").SerializeToString())

TensorRT 10.3 and later, TensorRT-RTX; neither is imported before it is needed.
"""

from flashonnx.tensorrt._prepare import prepare_for_tensorrt as prepare_for_tensorrt
from flashonnx.tensorrt._register import register as register

__all__ = ["prepare_for_tensorrt", "register"]
