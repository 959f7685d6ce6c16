"""The TensorRT creator and plugin, driven as a runtime drives them, without any TensorRT."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import cases
import numpy as np
import pytest
import trt_abi
from cases import Case
from flashonnx._capi import CUDA, Device, Library
from flashonnx.tensorrt import prepare_for_tensorrt
from nodes import DOMAIN, asked_for, one_node
from seam import Buffer, Problem, check_outputs
from trt_models import attributes_of


@pytest.fixture(scope="session")
def creator(library_path: str) -> int:
    return trt_abi.only_creator(library_path)


def test_creator_says_who_it_is(creator: int) -> None:
    names = [
        trt_abi.call(creator, slot, ctypes.c_char_p) for slot in (trt_abi.NAME, trt_abi.VERSION, trt_abi.NAMESPACE)
    ]
    assert names == [b"FlashAttention", b"1", b"flashonnx"]


def test_fields_survive_serialization(creator: int) -> None:
    given = {
        "is_causal": 1,
        "q_num_heads": 6,
        "kv_num_heads": 2,
        "scale": 0.1875,
        "softcap": 2.5,
        "left_window_size": 2**31 - 1,
        "right_window_size": 0,
        "softmax_precision": 10,
        "empty_row": "mean",
        "qkv_layout": "separate",
        "inputs": "Q,K,V,past_key,past_value",
        "outputs": "Y,present_key,lse",
    }
    plugin = trt_abi.create_plugin(creator, given)
    assert plugin is not None
    fields = trt_abi.serialized_fields(plugin)
    assert fields == given | {"planned_workspace": -1}
    fields["planned_workspace"] = 2**40 + 1  # as an engine planned on a large profile has it
    restored = trt_abi.create_plugin(creator, fields, trt_abi.RUNTIME_PHASE)
    assert restored is not None
    assert trt_abi.serialized_fields(restored) == fields


def test_absent_fields_stay_absent(creator: int) -> None:
    plugin = trt_abi.create_plugin(creator, {})
    assert plugin is not None
    assert {"scale", "q_num_heads", "kv_num_heads"}.isdisjoint(trt_abi.serialized_fields(plugin))


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_causal": 2},
        {"is_causal": 1.0},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"scale": 1},
        {"q_num_heads": 0},
        {"q_num_heads": -1},
        {"left_window_size": -2},
        {"softcap": -1.0},
        {"softmax_precision": 11},
        {"empty_row": "nan"},
        {"qkv_layout": "hd3"},
        {"qkv_layout": "3hd", "inputs": "Q,K,V"},
        {"inputs": "Q,K"},
        {"inputs": "K,Q,V"},
        {"inputs": "Q,K,V,K"},
        {"inputs": "Q,K,V,"},
        {"inputs": "Q,K,V,bias"},
        {"inputs": "Q,K,V,past_key"},
        {"outputs": "lse"},
        {"outputs": ""},
    ],
    ids=str,
)
def test_creator_refuses(creator: int, wrong: dict[str, Any]) -> None:
    assert trt_abi.create_plugin(creator, wrong) is None


class Driven:
    """A case's node as a runtime sees it: the plugin, and its tensors' types and shapes."""

    def __init__(self, creator: int, case: Case) -> None:
        (node,) = (n for n in prepare_for_tensorrt(one_node(case, case.inputs())).graph.node if n.domain == DOMAIN)
        plugin = trt_abi.create_plugin(creator, attributes_of(node))
        assert plugin is not None
        self.plugin = plugin
        # As prepare_for_tensorrt casts it.
        self.arrays = {n: x.astype(np.int32) if x.dtype == bool else x for n, x in case.inputs().items()}
        self.inputs = [(x.dtype.name, x.shape) for x in self.arrays.values()]
        self.output_names = list(filter(None, asked_for(case)))
        shapes = case.output_shapes()
        self.outputs = [("float32" if n == "lse" else case.dtype, shapes[n]) for n in self.output_names]

    def planned(self, creator: int) -> tuple[int, int]:
        """Builds, serialises and restores: the plugin of an engine, and its workspace."""
        built = trt_abi.clone(self.plugin)
        assert trt_abi.configure(built, self.inputs, self.outputs) == 0
        size = trt_abi.workspace_size(built, self.inputs, self.outputs)
        fields = trt_abi.serialized_fields(built)
        assert fields["planned_workspace"] == size
        trt_abi.delete(built)
        trt_abi.delete(self.plugin)
        restored = trt_abi.create_plugin(creator, fields, trt_abi.RUNTIME_PHASE)
        assert restored is not None
        return restored, size


@pytest.mark.parametrize("case", [case for case in cases.ALL if not case.gpu], ids=lambda case: case.id)
def test_build_answers(creator: int, library: Library, case: Case) -> None:
    """Only these types, only linear, and a workspace that is enough for the case on every device."""
    driven = Driven(creator, case)
    inputs, outputs = driven.inputs, driven.outputs
    for position, (dtype, _) in enumerate(inputs + outputs):
        assert trt_abi.supports(driven.plugin, position, inputs, outputs)
        assert not trt_abi.supports(driven.plugin, position, inputs, outputs, trt_abi.CHANNELS_BY_2)
        changed = [*inputs, *outputs]
        changed[position] = ("bool", changed[position][1])
        wrong = (changed[: len(inputs)], changed[len(inputs) :])
        assert not trt_abi.supports(driven.plugin, position, *wrong), dtype
    plugin, planned = driven.planned(creator)
    trt_abi.delete(plugin)
    params = Problem(library, case, inputs=driven.arrays).params
    for arch, sm_count, shared_memory in ((80, 108, 166912), (89, 142, 101376), (90, 132, 232448), (120, 188, 101376)):
        params.device = Device(CUDA, 0, arch, sm_count, shared_memory)
        assert library.workspace(params) <= planned


def test_maxima_need_not_agree(creator: int) -> None:
    """Bounds of derived shapes may be loose: B is at most 4 here, 5 there, and the mask's keys more than K's."""
    plugin = trt_abi.create_plugin(creator, {"q_num_heads": 2, "kv_num_heads": 2, "inputs": "Q,K,V,attn_mask"})
    assert plugin is not None
    shapes = ((4, 9, 64), (5, 16, 64), (4, 12, 64), (5, 1, 9, 40))
    inputs = [("float16", shape) for shape in shapes]
    outputs = [("float16", (4, 9, 64))]
    assert trt_abi.configure(plugin, inputs, outputs) == 0


def test_profiles_add_up(creator: int) -> None:
    """The plan remembers the workspace of its largest profile, whatever comes last."""
    small, large = (Driven(creator, Case(f"past-{n}", past=n, kv_length=1, q_length=1)) for n in (3, 300))
    sizes = [trt_abi.workspace_size(d.plugin, d.inputs, d.outputs) for d in (small, large)]
    assert sizes[0] < sizes[1]
    for driven in (small, large, small):
        assert trt_abi.configure(small.plugin, driven.inputs, driven.outputs) == 0
    assert trt_abi.serialized_fields(small.plugin)["planned_workspace"] == sizes[1]


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.id)
def test_enqueue(creator: int, library: Library, case: Case) -> None:
    """The whole way of a plugin, to a context on a stream of its own; guarded memory, compared with the reference."""
    import torch

    device = "cuda"

    driven = Driven(creator, case)
    plugin, planned = driven.planned(creator)
    context = trt_abi.attach(plugin)
    assert context is not None
    memory = Problem(library, case, device, inputs=driven.arrays)
    workspace = Buffer((planned,), np.int8, device)
    assert trt_abi.shape_change(context, driven.inputs, driven.outputs) == 0
    addresses = (
        [memory.inputs[name].view.data_ptr() for name in driven.arrays],
        [memory.outputs[name].view.data_ptr() for name in driven.output_names],
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    described = (driven.inputs, driven.outputs)
    assert trt_abi.enqueue(context, described, addresses, workspace.view.data_ptr(), stream.cuda_stream) == 0
    stream.synchronize()
    workspace.numpy()
    check_outputs(case, case.inputs(), {name: memory.outputs[name].numpy() for name in driven.output_names})
    trt_abi.delete(context)
    trt_abi.delete(plugin)


def test_no_tensorrt_in_the_process(library_path: str, creator: int) -> None:
    code = (
        "import ctypes, sys\n"
        "class Status(ctypes.Structure): _fields_ = (('code', ctypes.c_int32), ('message', ctypes.c_char * 508))\n"
        "register = ctypes.CDLL(sys.argv[1]).flashonnx_tensorrt_register\n"
        "register.restype = Status\n"
        "print(register().message.decode())"
    )
    done = subprocess.run([sys.executable, "-c", code, library_path], capture_output=True, text=True)
    assert "no TensorRT 10, 11 or RTX is loaded in this process" in done.stdout, done.stderr
