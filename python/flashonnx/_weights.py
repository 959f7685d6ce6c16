"""Chances of all tokens, up to a factor, made on the device where their logits lie: a session of its own, for draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashonnx._exchange import Exchange, pages, reader
from flashonnx._last_logits import GREATEST, LOGITS
from flashonnx._runtime import session

_TEMPERATURE, _WEIGHTS = "temperature", "weights"


class Weights:
    """exp((logits - the greatest of them) / temperature) in float32, of logits that do not move.

    Args:
        ort: the onnxruntime module.
        place: device and its number.
        providers: of the session.
        logits: (batch, 1, words), an OrtValue.
        dtype: of the logits.
        exchange: has GREATEST, (batch, 1, 1).
        run_options: of its runs.
    """

    def __init__(
        self, ort: Any, place: tuple[str, int], providers: list[Any], logits: Any, dtype: Any, exchange: Exchange,
        run_options: Any,
    ) -> None:  # fmt: skip
        self._session, self._options = session(_model(dtype), providers), run_options
        self._own = Exchange(ort, place, {_TEMPERATURE: ((1,), np.float32)})
        array = pages(logits.shape(), np.float32)
        weights = ort.OrtValue.ortvalue_from_numpy(array, *place)
        self._read = reader(array, weights, place[0])
        self._binding = self._session.io_binding()
        self._binding.bind_ortvalue_input(LOGITS, logits)
        exchange.bind_input(self._binding, GREATEST)
        self._own.bind_input(self._binding, _TEMPERATURE)
        self._binding.bind_ortvalue_output(_WEIGHTS, weights)

    def __call__(self, temperature: float) -> NDArray[np.float32]:
        """(batch, words), valid until the next call."""
        self._own.arrays[_TEMPERATURE][0] = temperature
        self._own.give()
        self._session.run_with_iobinding(self._binding, self._options)
        return self._read()[:, 0]


def _model(dtype: Any) -> Any:
    """Small inputs may lie in the host's memory: one node of their own reads each, not all that compute with it."""
    from onnx import TensorProto, helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Cast", [LOGITS], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Neg", [GREATEST], ["less"]),
        helper.make_node("Cast", ["less"], ["less wide"], to=TensorProto.FLOAT),
        helper.make_node("Abs", [_TEMPERATURE], ["divisor"]),
        helper.make_node("Add", ["wide", "less wide"], ["below"]),
        helper.make_node("Div", ["below", "divisor"], ["exponents"]),
        helper.make_node("Exp", ["exponents"], [_WEIGHTS]),
    ]
    inputs = [
        helper.make_tensor_value_info(LOGITS, kind, ["batch", 1, "words"]),
        helper.make_tensor_value_info(GREATEST, kind, ["batch", 1, 1]),
        helper.make_tensor_value_info(_TEMPERATURE, TensorProto.FLOAT, [1]),
    ]
    outputs = [helper.make_tensor_value_info(_WEIGHTS, TensorProto.FLOAT, ["batch", 1, "words"])]
    graph = helper.make_graph(nodes, "weights", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
