"""Two other ways to have a cache: PyTorch's own export, and GroupQueryAttention in the place of our nodes.

Each gives a step: of (batch, new) tokens after `length` keys the logits of the last ones, (batch, words).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

Step = Callable[[np.ndarray, int], np.ndarray]
_CPU = ["CPUExecutionProvider"]
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def greedy(step: Step, prompts: np.ndarray, new: int) -> tuple[list[list[int]], float]:
    """Tokens of each of the equally long prompts, and how many a second after them, without the time to choose them."""
    tokens, seconds = [step(prompts, 0).argmax(1)], 0.0
    while len(tokens) < new:
        start = time.perf_counter()
        logits = step(tokens[-1][:, None], prompts.shape[1] + len(tokens) - 1)
        seconds += time.perf_counter() - start
        tokens.append(logits.argmax(1))
    return np.stack(tokens, 1).tolist(), len(prompts) * (new - 1) / seconds


def concatenated(model: Path | bytes, device: str = "cpu") -> Step:
    """A step with PyTorch's export. What it gives back stays where it is made and is given to it again."""
    session = ort.InferenceSession(model, providers=_providers(device))
    pasts = [value for value in session.get_inputs() if value.name.startswith("past.")]
    names = [output.name for output in session.get_outputs()]
    state: dict[str, Any] = {}

    def step(tokens: np.ndarray, length: int) -> np.ndarray:
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", tokens)
        positions = np.broadcast_to(length + np.arange(tokens.shape[1]), tokens.shape)
        binding.bind_cpu_input("position_ids", positions.copy())
        if not length:
            for value in pasts:
                empty = np.zeros((len(tokens), value.shape[1], 0, value.shape[3]), _TYPES[value.type])
                state[value.name] = ort.OrtValue.ortvalue_from_numpy(empty, device, 0)
        for name, value in state.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, "cpu" if name == "logits" else device, 0)
        session.run_with_iobinding(binding)
        logits, *presents = binding.get_outputs()
        state.update(zip(state, presents, strict=True))
        return logits.numpy()[:, -1]

    return step


def with_group_query(file: Path, capacity: int) -> bytes:
    """Our export with GroupQueryAttention, rotary embedding included, in the place of our nodes."""
    model = onnx.load(file)
    graph = model.graph
    nodes = [node for node in graph.node if node.op_type == "FlashAttentionKVCache"]
    rotary = list(nodes[0].input[8:11])  # cosines, sines, and where each token finds its own
    caches = [value for value in graph.input if value.name.startswith("past_key_values.")]
    kv_heads, size = (caches[0].type.tensor_type.shape.dim[i].dim_value for i in (1, 3))
    kind = helper.tensor_dtype_to_np_dtype(caches[0].type.tensor_type.elem_type)
    for name, table in _rotary_tables(model, nodes[0], capacity).items():
        graph.initializer.append(numpy_helper.from_array(table.astype(kind), name))
    graph.input.append(helper.make_tensor_value_info("keys_less_one", TensorProto.INT32, ["batch"]))
    graph.input.append(helper.make_tensor_value_info("keys", TensorProto.INT32, [1]))
    for node in nodes:
        assert rotary == list(node.input[8:]), "layers with other rotary tables, a mask or sinks"
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        kept = {"q_num_heads", "kv_num_heads", "scale", "rotary_interleaved", "qkv_layout"}  # "gqa": theirs, too
        assert given.keys() <= kept, f"attributes that are not translated: {given.keys() - kept}"
        new = helper.make_node(
            "GroupQueryAttention", [*node.input[:5], "keys_less_one", "keys", "cosines", "sines"], node.output,
            domain="com.microsoft", num_heads=given["q_num_heads"], kv_num_heads=kv_heads, do_rotary=1,
            rotary_interleaved=given.get("rotary_interleaved", 0), scale=given.get("scale", size**-0.5),
        )  # fmt: skip
        node.CopyFrom(new)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model.SerializeToString()


def _rotary_tables(model: onnx.ModelProto, node: onnx.NodeProto, capacity: int) -> dict[str, np.ndarray]:
    """Cosines and sines of all positions: our node gets those of the new tokens, GroupQueryAttention looks them up."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    end = list(model.graph.node).index(node)
    del part.graph.node[end:], part.graph.output[:]
    for value in [value for value in part.graph.input if value.name.startswith("past_key_values.")]:
        part.graph.input.remove(value)
    for name in node.input[8:11]:
        part.graph.output.append(onnx.ValueInfoProto(name=name))
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns of each weight that this part does not need
    session = ort.InferenceSession(part.SerializeToString(), options, providers=_CPU)
    ids, length = np.zeros((1, capacity), np.int64), np.zeros(1, np.int64)
    cosines, sines, places = session.run(None, {"input_ids": ids, "cache_lengths": length})
    return {"cosines": cosines[places[0]], "sines": sines[places[0]]}


class GroupQuery:
    """A step with GroupQueryAttention, its caches bound once; on CUDA, steps of one token are a CUDA graph."""

    def __init__(self, model: Path | bytes, batch: int, capacity: int, device: str = "cpu", graph: bool = True) -> None:
        self._session = ort.InferenceSession(model, providers=_providers(device, graph))
        self._device = device
        self._options = ort.RunOptions(), ort.RunOptions()  # of prompts, and of single tokens
        for options, graph_id in zip(self._options, ("-1", "1"), strict=True):
            options.add_run_config_entry("gpu_graph_id", graph_id)
        values = {value.name: value for value in self._session.get_inputs()}
        words = self._session.get_outputs()[0].shape[2]
        kinds = {value.name: value.type for value in self._session.get_outputs()}
        self._single, self._prompt = self._session.io_binding(), self._session.io_binding()
        self._given = {name: self._value((batch, *more), kind) for name, more, kind in (
            ("input_ids", (1,), np.int64), ("cache_lengths", (), np.int64), ("keys_less_one", (), np.int32)
        )}  # fmt: skip
        self._logits = self._value((batch, 1, words), _TYPES[kinds["logits"]])
        for name, value in self._given.items():
            self._single.bind_ortvalue_input(name, value)
        # The host's bound of the keys: a graph would keep the first step's.
        self._single.bind_cpu_input("keys", np.array([capacity], np.int32))
        self._single.bind_ortvalue_output("logits", self._logits)
        for name, value in values.items():
            if name.startswith("past_key_values."):
                cache = self._value((batch, value.shape[1], capacity, value.shape[3]), _TYPES[value.type])
                for binding in (self._single, self._prompt):
                    binding.bind_ortvalue_input(name, cache)
                    binding.bind_ortvalue_output(name.replace("past_key_values", "present"), cache)

    def _value(self, shape: tuple[int, ...], kind: Any) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, kind), self._device, 0)

    def repeat(self) -> None:
        """The last step of one token once more."""
        self._session.run_with_iobinding(self._single, self._options[1])

    def __call__(self, tokens: np.ndarray, length: int) -> np.ndarray:
        batch, new = tokens.shape
        lengths = np.full(batch, length, np.int64)
        given = {"input_ids": tokens, "cache_lengths": lengths, "keys_less_one": (lengths + new - 1).astype(np.int32)}
        if new == 1:
            for name, array in given.items():
                self._given[name].update_inplace(array)
            self.repeat()
            return self._logits.numpy()[:, -1]
        for name, array in given.items():
            self._prompt.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, self._device, 0))
        self._prompt.bind_cpu_input("keys", np.array([length + new], np.int32))
        self._prompt.bind_output("logits", "cpu")
        self._session.run_with_iobinding(self._prompt, self._options[0])
        return self._prompt.get_outputs()[-1].numpy()[:, -1]  # the last that was bound


def _providers(device: str, graph: bool = False) -> list[Any]:
    cuda = [("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph))})] if device == "cuda" else []
    return [*cuda, *_CPU]
