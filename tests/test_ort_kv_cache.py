"""FlashAttentionKVCache in ONNX Runtime: the same cases, in place and not, in sessions that go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import CacheCase
from cache_nodes import CACHES, asked_for, one_node, run
from cache_seam import check_cache_outputs
from cases import numpy_dtype
from flashonnx.reference import Array
from nodes import DOMAIN, open_session
from onnx import TensorProto, helper
from seam import Buffer, address
from test_cache_kernels import on_devices

ort = pytest.importorskip("onnxruntime")
flashonnx = pytest.importorskip("flashonnx")
_BY_ID = {case.id: case for case in cache_cases.ALL}


@pytest.fixture(autouse=True)
def _needs_provider(request: pytest.FixtureRequest, library_path: str) -> None:
    if request.node.get_closest_marker("gpu") and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")


@on_devices(*cache_cases.ALL)
def test_case(device: str, case: CacheCase) -> None:
    inputs = case.inputs()
    session = open_session(one_node(case, inputs), device)
    check_cache_outputs(case, inputs, run(session, case, inputs))


class Decoder:
    """A session whose caches are bound once, as input and output; `feed` runs a step."""

    def __init__(self, case: CacheCase, device: str, inputs: dict[str, Array], **provider: str) -> None:
        self.case, self.device = case, device
        model = one_node(case, inputs, dynamic=not provider)
        if provider:
            self.session = flashonnx.session(model, [("CUDAExecutionProvider", provider)])
        else:
            self.session = open_session(model, device)
        self.binding = self.session.io_binding()
        self.bound = {name: Buffer(x.shape, x.dtype, device, array=x) for name, x in inputs.items()}
        for name in CACHES:
            self._bind(f"present_{name}", self.bound[name], self.binding.bind_output)
        self.outputs: dict[str, Buffer] = {}

    def _bind(self, name: str, buffer: Buffer, bind: Any) -> None:
        kind = helper.np_dtype_to_tensor_dtype(buffer.dtype)
        where = address(buffer.view) or address(buffer.bytes)  # torch has no address of nothing
        bind(name, self.device, 0, kind, buffer.shape, where)

    def run(self, case: CacheCase, inputs: dict[str, Array]) -> dict[str, Array]:
        """One run with other inputs, except for the caches, which stay where and as they are."""
        for name, x in inputs.items():
            if name in CACHES:
                continue
            known = self.bound.get(name)
            if known is None or known.shape != x.shape:
                self.bound[name] = Buffer(x.shape, x.dtype, self.device, array=x)
            elif self.device == "cpu":
                known.view[...] = x
            else:
                import torch

                known.view.copy_(torch.from_numpy(np.ascontiguousarray(x)))
        for name in inputs:
            self._bind(name, self.bound[name], self.binding.bind_input)
        kinds = {"Y": numpy_dtype(case.dtype), "lse": np.dtype(np.float32)}
        for name, shape in case.output_shapes().items():
            if name in kinds and name in asked_for(case):
                known = self.outputs.get(name)
                if known is None or known.shape != shape:
                    self.outputs[name] = Buffer(shape, kinds[name], self.device)
                self._bind(name, self.outputs[name], self.binding.bind_output)
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()  # what fills the memory is on PyTorch's stream
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()
        outputs = {name: buffer.numpy().copy() for name, buffer in self.outputs.items()}
        return outputs | {f"present_{name}": self.bound[name].numpy().copy() for name in CACHES}


@on_devices(*(_BY_ID[i] for i in (
    "append-half-8of2-float32", "append-page4-interleaved-ragged-8of2-float16", "page16-float32", "sinks-float16",
    "everything", "full-99-paged", "no-tokens", "prefill-and-decode", "mask-b1qk-bool-0",
)))  # fmt: skip
def test_in_place(device: str, case: CacheCase) -> None:
    """The caches are bound as inputs and outputs: they change where they are, and nothing around them."""
    inputs = case.inputs()
    check_cache_outputs(case, inputs, Decoder(case, device, inputs).run(case, inputs))


@on_devices(_BY_ID["append-half-8of2-float32"], _BY_ID["page16-float32"])
def test_caches_that_are_bound_crosswise(device: str, case: CacheCase) -> None:
    """Keys where the values are would be read as such: refused, and nothing is written."""
    inputs = case.inputs()
    inputs["value_cache"] = inputs["key_cache"].copy()
    decoder = Decoder(case, device, inputs)
    for name, other in zip(CACHES, reversed(CACHES), strict=True):
        decoder._bind(f"present_{name}", decoder.bound[other], decoder.binding.bind_output)
    with pytest.raises(Exception, match=r"'present_key_cache' is written .* other memory than 'value_cache', got the"):
        decoder.run(case, inputs)
    for name in CACHES:
        assert decoder.bound[name].numpy().tobytes() == inputs[name].tobytes()


@on_devices(*(
    replace(CacheCase("generate", lengths=(0, 0, 0), heads=(4, 2), capacity=64, head_dim=64, dtype=dtype, rotary="half",
                      page_size=page), id=f"generate-{page}-{dtype}")
    for page in (0, 16) for dtype in ("float32", "float16")
))  # fmt: skip
def test_generation(device: str, case: CacheCase) -> None:
    """A prompt in chunks, then token by token, in one session over caches that are bound once."""
    inputs = case.inputs()
    if case.page_size:  # every page that will ever be asked for
        pages = len(inputs["key_cache"])
        inputs["block_table"] = np.arange(pages - 3, dtype=np.int32)[::-1].reshape(inputs["block_table"].shape).copy()
    decoder = Decoder(case, device, inputs)
    past = {name: inputs[name] for name in CACHES}
    lengths = (0, 0, 0)
    for step, tokens in enumerate((9, 5, 9, 1, 1, 1, 9, 1)):
        now = replace(case, id=f"{case.id} {step}", q_length=tokens, lengths=lengths)
        given = now.inputs() | past
        if case.page_size:
            given["block_table"] = inputs["block_table"]
        outputs = decoder.run(now, given)
        check_cache_outputs(now, given, outputs)
        past = {name: outputs[f"present_{name}"] for name in CACHES}
        lengths = tuple(length + tokens for length in lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("ragged", [None, (1, 3, 2)], ids=["regular", "ragged"])
def test_cuda_graph(page: int, ragged: tuple[int, ...] | None) -> None:
    """Captured once, replayed over lengths, tables, tokens and sequences that change on the device."""
    case = CacheCase("graph", dtype="float16", lengths=(5, 0, 20), q_length=2, ragged=ragged, capacity=256, head_dim=64,
                     page_size=page, rotary="half")  # fmt: skip
    inputs = case.inputs()
    decoder = Decoder(case, "cuda", inputs, enable_cuda_graph="1")
    past = {name: inputs[name] for name in CACHES}
    for step, lengths in enumerate(((5, 0, 20), (7, 2, 22), (200, 0, 254), (0, 0, 0), (256, 300, -1))):
        sequences = ragged and tuple(np.roll(ragged, step))
        now = replace(case, id=f"graph {step}", lengths=lengths, ragged=sequences)
        given = now.inputs() | past
        outputs = decoder.run(now, given)
        check_cache_outputs(now, given, outputs)
        past = {name: outputs[f"present_{name}"] for name in CACHES}


def test_a_node_between_others_may_write_in_place() -> None:
    """A cache that another node makes and none else reads may be reused; one that is a session's input is not."""
    case = _BY_ID["append-half-8of2-float32"]
    inputs = case.inputs()
    model = one_node(case, inputs)
    node = model.graph.node[0]
    for i, name in ((3, "key_cache"), (4, "value_cache")):
        node.input[i] = f"{name}_made"
        model.graph.node.insert(0, helper.make_node("Neg", [name], [f"{name}_negated"]))
        model.graph.node.insert(1, helper.make_node("Neg", [f"{name}_negated"], [f"{name}_made"]))
    check_cache_outputs(case, inputs, run(open_session(model), case, inputs))


def test_shapes_are_inferred() -> None:
    """From symbolic sizes, in every form."""
    forms = {
        ("B", "S", 64): ["B", "S", 4 * 24], ("B", 4, "S", 16): ["B", 4, "S", 24],
        ("T", 64): ["T", 4 * 24], ("T", 4, 16): ["T", 4, 24],
    }  # fmt: skip
    for q, y in forms.items():
        ragged = q[0] == "T"
        shapes = {"Q": (TensorProto.FLOAT16, q), "K": (TensorProto.FLOAT16, (*q[:-1], 32))}
        if len(q) == 3 + (not ragged):
            shapes["K"] = (TensorProto.FLOAT16, tuple(2 if d == 4 else d for d in q))
        shapes["V"] = (TensorProto.FLOAT16, tuple(24 if d == 16 else 48 if d == 32 else d for d in shapes["K"][1]))
        shapes["key_cache"] = (TensorProto.FLOAT16, ("B", 2, "M", 16))
        shapes["value_cache"] = (TensorProto.FLOAT16, ("B", 2, "M", 24))
        shapes["cache_lengths"] = (TensorProto.INT32, ("B",))
        given = [*shapes, "", "cu_seqlens_q"] if ragged else list(shapes)
        if ragged:
            shapes["cu_seqlens_q"] = (TensorProto.INT32, ("B1",))
        outputs = ["Y", "present_key_cache", "present_value_cache", "lse"]
        node = helper.make_node("FlashAttentionKVCache", given, outputs, domain=DOMAIN, q_num_heads=4, kv_num_heads=2)
        kinds = [TensorProto.FLOAT16] * 3 + [TensorProto.FLOAT]
        model = helper.make_model(
            helper.make_graph(
                [node], "shapes", [helper.make_tensor_value_info(n, *of) for n, of in shapes.items()],
                [helper.make_tensor_value_info(n, kind, None) for n, kind in zip(outputs, kinds, strict=True)],
            ),
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)], ir_version=10,
        )  # fmt: skip
        found = {output.name: output.shape for output in open_session(model).get_outputs()}
        assert found["Y"] == y
        assert found["lse"] == ([4, "T"] if ragged else ["B", 4, "S"])
        assert found["present_key_cache"] == ["B", 2, "M", 16]
        assert found["present_value_cache"] == ["B", 2, "M", 24]
