"""flashonnx in `polygraphy run`: the runners --flashonnx-onnxrt and --flashonnx-trt.

Polygraphy finds `argument_groups` by the entry point group "polygraphy.run.plugins". The scripts that it generates use
`flashonnx.polygraphy.loaders`. Nothing of Polygraphy is imported before Polygraphy itself asks.
"""

from __future__ import annotations

from typing import Any


def argument_groups() -> list[Any]:
    """What `polygraphy run` gets from flashonnx: argument groups of Polygraphy."""
    from flashonnx.polygraphy import args

    return [args.FlashonnxModelArgs(), args.FlashonnxOnnxrtRunnerArgs(), args.FlashonnxTrtRunnerArgs()]
