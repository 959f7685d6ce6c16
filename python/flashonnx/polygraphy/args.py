"""The options that flashonnx adds to `polygraphy run`, and the code they put into its script.

The docstrings of these classes are read by Polygraphy: "Title: what the options are related to".
"""

from __future__ import annotations

import os
from typing import Any

from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import ModelArgs, OnnxLoadArgs, OnnxrtSessionArgs, TrtLoadEngineArgs, TrtRunnerArgs
from polygraphy.tools.args import util as args_util
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import inline, inline_identifier, make_invocable, safe

_LOADERS = "flashonnx.polygraphy.loaders"


class FlashonnxModelArgs(BaseArgs):
    """flashonnx Model: the model that the runners of flashonnx take.

    Depends on:

        - ModelArgs
        - OnnxLoadArgs
    """

    def add_parser_args_impl(self) -> None:
        """Adds the options."""
        self.group.add_argument(
            "--flashonnx-model",
            help="The fused model for --flashonnx-onnxrt and --flashonnx-trt, where the other runners take another "
            "one, say the original. Default: the model that all take",
            default=None,
        )
        self.group.add_argument(
            "--flashonnx-fuse",
            help="Fuse the model for --flashonnx-onnxrt and --flashonnx-trt, as `flashonnx fuse` does; where nothing "
            "can be fused, they run it as it is and say so",
            action="store_true",
            default=None,
        )

    def parse_impl(self, args: Any) -> None:
        """Sets `path` (str or None) and `fuse` (bool)."""
        self.path = args_util.get(args, "flashonnx_model")
        self.fuse = bool(args_util.get(args, "flashonnx_fuse"))
        if self.path is not None:
            if not os.path.isfile(self.path):
                G_LOGGER.critical(f"--flashonnx-model: there is no file {self.path}")
            self.path = os.path.abspath(self.path)

    def add_to_script_impl(self, script: Any) -> Any:
        """The name of a loader of the model."""
        script.add_import(imports=["FusedModel"], frm=_LOADERS)
        fuse = self.fuse or None  # None is left out of the script
        return script.add_loader(make_invocable("FusedModel", self._source(script), fuse=fuse), "fused_model")

    def _source(self, script: Any) -> Any:
        if self.path is not None:
            return self.path
        model, onnx_args = self.arg_groups[ModelArgs], self.arg_groups[OnnxLoadArgs]
        if model.model_type is None or not model.model_type.is_onnx():
            G_LOGGER.critical(f"flashonnx's runners take ONNX models, {model.path} is of type {model.model_type}")
        return onnx_args.add_to_script(script) if onnx_args.must_use_onnx_loader() else model.path


class FlashonnxOnnxrtRunnerArgs(BaseRunnerArgs):
    """flashonnx in ONNX-Runtime: running inference with ONNX-Runtime and flashonnx's operators.

    Depends on:

        - FlashonnxModelArgs
        - OnnxrtSessionArgs
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        """The runner's name and option."""
        return "flashonnx in ONNX-Runtime", "flashonnx-onnxrt"

    def add_parser_args_impl(self) -> None:
        """Adds the options."""
        self.group.add_argument(
            "--flashonnx-providers",
            help="Execution providers of --flashonnx-onnxrt, in the order of priority, e.g. `cuda cpu`. Default: those "
            "of --providers",
            nargs="+",
            default=None,
        )

    def parse_impl(self, args: Any) -> None:
        """Sets `providers` (list of str, or None)."""
        self.providers = args_util.get(args, "flashonnx_providers")

    def add_to_script_impl(self, script: Any) -> None:
        """Adds the runner."""
        theirs = self.arg_groups[OnnxrtSessionArgs]
        level = theirs.graph_optimization_level
        if level is not None:
            script.add_import(imports=["onnxruntime"], imp_as="onnxrt")
            level = inline(safe("onnxrt.GraphOptimizationLevel.{:}", inline_identifier(level)))
        script.add_import(imports=["OnnxrtRunner"], frm="polygraphy.backend.onnxrt")
        script.add_import(imports=["FlashonnxSession"], frm=_LOADERS)
        model = self.arg_groups[FlashonnxModelArgs].add_to_script(script)
        session = make_invocable(
            "FlashonnxSession", model, providers=self.providers or theirs.providers, graph_optimization_level=level
        )
        loader = script.add_loader(session, "flashonnx_session")
        script.add_runner(make_invocable("OnnxrtRunner", loader, name="flashonnx-onnxrt"))


class FlashonnxTrtRunnerArgs(BaseRunnerArgs):
    """flashonnx in TensorRT: running inference with TensorRT and flashonnx's plugin.

    Depends on:

        - FlashonnxModelArgs
        - TrtLoadEngineArgs
        - TrtRunnerArgs
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        """The runner's name and option."""
        return "flashonnx in TensorRT", "flashonnx-trt"

    def get_extra_help_text_impl(self) -> str:
        """What is not obvious about it."""
        return (
            "The model is prepared for TensorRT's parser and the plugin registered before. Options of the engine, its "
            "configuration and the runner apply as to --trt; those of the network (--trt-outputs ...) do not."
        )

    def add_to_script_impl(self, script: Any) -> None:
        """Adds the runner."""
        script.add_import(imports=["TrtRunner"], frm="polygraphy.backend.trt")
        script.add_import(imports=["WithPlugin"], frm=_LOADERS)
        network = None
        if self.arg_groups[ModelArgs].model_type != "engine":
            script.add_import(imports=["PluginNetwork"], frm=_LOADERS)
            model = self.arg_groups[FlashonnxModelArgs].add_to_script(script)
            network = script.add_loader(make_invocable("PluginNetwork", model), "plugin_network")
        engine = self.arg_groups[TrtLoadEngineArgs].add_to_script(script, network)
        # Outermost, as Polygraphy's loaders run from the outside in: before the parser, and before an engine is loaded.
        loader = script.add_loader(make_invocable("WithPlugin", engine), "with_plugin")
        theirs = self.arg_groups[TrtRunnerArgs]
        runner = make_invocable(
            "TrtRunner",
            loader,
            name="flashonnx-trt",
            optimization_profile=theirs.optimization_profile,
            allocation_strategy=theirs.allocation_strategy,
            weight_streaming_budget=theirs.weight_streaming_budget,
            weight_streaming_percent=theirs.weight_streaming_percent,
        )
        script.add_runner(runner)
