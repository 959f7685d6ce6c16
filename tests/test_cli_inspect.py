"""`flashonnx inspect`: sites, sizes, and the kernels that the library would take on devices that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashonnx
import onnx
import pytest
from cli_driver import Command, flashonnx_command, plain, written_out
from flashonnx._capi import CUDA, Library
from flashonnx.cli._attention import GPUS, attentions
from onnx import TensorProto, helper

__all__ = ["flashonnx_command", "plain"]


def node_model(
    inputs: dict[str, tuple[int, tuple[Any, ...]]], names: list[str], outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """One FlashAttention node."""
    values = [helper.make_tensor_value_info(name, *described) for name, described in inputs.items()]
    kind = next(iter(inputs.values()))[0]
    out = [f"y{i}" for i in range(outputs)]
    infos = [helper.make_tensor_value_info(name, kind, None) for name in out]
    node = helper.make_node("FlashAttention", names, out, "site", domain="flashonnx", **attributes)
    graph = helper.make_graph([node], "model", values, infos)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def with_cuda(library: Library) -> bool:
    """Whether the library has kernels for GPUs: it answers for a device that is described, wherever it is."""
    (attention,) = attentions(flashonnx.fuse(written_out())[0])
    from flashonnx.cli._attention import kernel

    return bool(kernel(library, attention, {"batch": 1, "sequence": 9}, 80)[0])


def test_sizes_and_bytes(plain: Path, flashonnx_command: Command) -> None:
    done = flashonnx_command.json("inspect", plain, "--dim", "batch=3", "--dim", "sequence=100", "--gpu", "cpu")
    (site,) = done["sites"]
    assert site["bytes"] == done["bytes"] == 3 * 4 * 100 * 100 * 4
    assert done["lengths"] == {"batch": 3, "sequence": 100}
    expected = {"batch": "batch", "q_heads": 4, "kv_heads": 4, "queries": "sequence", "keys": "sequence", "past": 0}
    assert site["sizes"] == expected | {"head_dim": 16, "value_dim": 16}
    assert (site["dtype"], site["kernels"], site["fused"]) == ("float32", {"cpu": "cpu"}, True)
    assert [path.name for path in Path().iterdir()] == ["plain.onnx"]
    said = flashonnx_command("inspect", plain, "--dim", "sequence=100", "--gpu", "cpu")
    assert "160 kB" in said and "probabilities" in said and "sequence × sequence" in said


@pytest.mark.parametrize("command", [("inspect",), ("fuse", "-o", "out.onnx")])
def test_names_that_the_model_does_not_have(command: tuple[str, ...], plain: Path, flashonnx_command: Command) -> None:
    said = flashonnx_command(command[0], plain, *command[1:], "--dim", "length=8", code=2)
    assert "has a dimension 'length'; there are batch, sequence" in said and not Path("out.onnx").exists()


def test_what_is_left(flashonnx_command: Command) -> None:
    onnx.save(written_out(exposed=True), "exposed.onnx")
    done = flashonnx_command.json("inspect", "exposed.onnx")
    (site,) = done["sites"]
    assert not site["fused"] and "output of the model" in site["reason"] and site["kernels"] == {}
    said = flashonnx_command("inspect", "exposed.onnx", "--gpu", "cpu")
    assert "left as it is: " in said and "output of the model" in said


def test_models_without_attention(flashonnx_command: Command) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, (2,))
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, (2,))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "none", [value], [out])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "none.onnx")
    assert flashonnx_command("inspect", "none.onnx") == "no attention found\n"
    assert flashonnx_command.json("inspect", "none.onnx")["sites"] == []


HALF, FLOAT, BOOL = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BOOL


@pytest.mark.parametrize(
    ("inputs", "names", "attributes", "sizes"),
    [
        (
            {"q": (HALF, ("b", "s", 256)), "k": (HALF, ("b", "t", 64)), "v": (HALF, ("b", "t", 128))},
            ["q", "k", "v"],
            {"q_num_heads": 8, "kv_num_heads": 2},
            ("b", 8, 2, "s", "t", 0, 32, 64),
        ),
        (
            {"q": (HALF, ("b", 8, "s", 32)), "k": (HALF, ("b", 2, "t", 32)), "v": (HALF, ("b", 2, "t", 32)),
             "pk": (HALF, ("b", 2, "p", 32)), "pv": (HALF, ("b", 2, "p", 32))},
            ["q", "k", "v", "", "pk", "pv"],
            {"is_causal": 1},
            ("b", 8, 2, "s", "p + t", "p", 32, 32),
        ),
        ({"q": (FLOAT, (2, "s", 3, 4, 16))}, ["q"], {"qkv_layout": "3hd"}, (2, 4, 4, "s", "s", 0, 16, 16)),
        ({"q": (FLOAT, (2, "s", 4, 3, 16))}, ["q"], {"qkv_layout": "h3d"}, (2, 4, 4, "s", "s", 0, 16, 16)),
        (
            {"q": (FLOAT, (2, "s", 128))}, ["q"], {"qkv_layout": "gqa", "q_num_heads": 4, "kv_num_heads": 2},
            (2, 4, 2, "s", "s", 0, 16, 16),
        ),
        (
            {"q": (FLOAT, ("s", "b", 192))}, ["q"], {"qkv_layout": "time_major", "q_num_heads": 4},
            ("b", 4, 4, "s", "s", 0, 16, 16),
        ),
    ],
    ids=["grouped", "past", "3hd", "h3d", "gqa", "time_major"],
)  # fmt: skip
def test_sizes_of_every_layout(
    inputs: dict[str, Any], names: list[str], attributes: dict[str, Any], sizes: tuple[Any, ...], library: Library
) -> None:
    from flashonnx.cli._attention import kernel

    (attention,) = attentions(node_model(inputs, names, **attributes))
    assert tuple(attention.sizes.values()) == sizes
    assert kernel(library, attention, {"b": 2, "s": 100, "t": 70, "p": 30}, 0) == ("cpu", "")


INT = TensorProto.INT32


@pytest.mark.parametrize(
    ("op", "inputs", "names", "attributes", "sizes", "features"),
    [
        (
            "FlashAttentionKVCache",
            {"q": (HALF, ("b", "s", 128)), "k": (HALF, ("b", "s", 64)), "v": (HALF, ("b", "s", 64)),
             "kc": (HALF, ("b", 4, "c", 16)), "vc": (HALF, ("b", 4, "c", 16)), "n": (INT, ("b",)),
             "cos": (HALF, (64, 4)), "sin": (HALF, (64, 4))},
            ["q", "k", "v", "kc", "vc", "n", "", "", "cos", "sin"],
            {"q_num_heads": 8, "kv_num_heads": 4},
            ("b", 8, 4, "s", "c", 0, 16, 16),
            ["a cache", "rotary", "causal"],
        ),
        (
            "FlashAttentionKVCache",
            {"q": (HALF, ("t", 128)), "k": (HALF, ("t", 64)), "v": (HALF, ("t", 64)),
             "kc": (HALF, (50, 32, 4, 16)), "vc": (HALF, (50, 32, 4, 16)), "n": (INT, ("b",)),
             "table": (INT, ("b", 7)), "ends": (INT, ("e",))},
            ["q", "k", "v", "kc", "vc", "n", "table", "ends"],
            {"q_num_heads": 8, "kv_num_heads": 4},
            ("e - 1", 8, 4, "t", 224, 0, 16, 16),
            ["a cache", "pages", "packed sequences", "causal"],
        ),
        (
            "FlashAttentionVarlen",
            {"q": (HALF, ("t", 8, 16)), "k": (HALF, ("u", 4, 16)), "v": (HALF, ("u", 4, 16)),
             "ends": (INT, (5,)), "key_ends": (INT, (5,))},
            ["q", "k", "v", "ends", "key_ends"],
            {"max_q_length": 40},
            (4, 8, 4, 40, "u", 0, 16, 16),
            ["packed sequences"],
        ),
    ],
    ids=["cache", "pages", "packed"],
)  # fmt: skip
def test_caches_and_packed_sequences(
    op: str, inputs: Any, names: Any, attributes: Any, sizes: Any, features: Any, library: Library
) -> None:
    from flashonnx.cli._attention import kernel

    model = node_model(inputs, names, **attributes)
    model.graph.node[0].op_type = op
    (attention,) = attentions(model)
    assert (attention.op, tuple(attention.sizes.values())[:8], attention.features) == (op, sizes, features)
    lengths = {"b": 2, "s": 3, "c": 64, "t": 30, "u": 70, "e": 3}
    assert kernel(library, attention, lengths, 0) == ("cpu", "")
    name, why = kernel(library, attention, lengths, 90)
    assert name or why
    p = attention.params(library, library.device(), lengths)
    assert (p.q_tokens, p.kv_tokens, p.num_pages, p.page_size, p.cache_capacity, p.rotary_dim) == {
        "cache": (0, 0, 0, 0, 64, 8), "pages": (30, 0, 50, 32, 224, 0), "packed sequences": (30, 70, 0, 0, 0, 0),
    }["packed sequences" if op.endswith("Varlen") else features[1] if features[1] == "pages" else "cache"]  # fmt: skip


def test_pages_need_no_sizes(flashonnx_command: Command) -> None:
    """An export with pages leaves their size and number open: 16 of 64 keys, and one sequence that is packed."""
    pool = (HALF, ("pages", "page_size", 4, 16))
    inputs = {
        "q": (HALF, ("t", 128)), "k": (HALF, ("t", 64)), "v": (HALF, ("t", 64)), "kc": pool, "vc": pool,
        "n": (INT, ("b",)), "table": (INT, ("b", "each")), "ends": (INT, ("e",)),
    }  # fmt: skip
    names = ["q", "k", "v", "kc", "vc", "n", "table", "ends"]
    model = node_model(inputs, names, q_num_heads=8, kv_num_heads=4)
    model.graph.node[0].op_type = "FlashAttentionKVCache"
    onnx.save(model, "pages.onnx")
    done = flashonnx_command.json("inspect", "pages.onnx", "--gpu", "cpu")
    (site,) = done["sites"]
    assert site["kernels"] == {"cpu": "cpu"} and done["bytes"] == 8 * 1024 * (16 * 64) * 2
    assert {n: done["lengths"][n] for n in ("t", "e", "each", "page_size")} == {
        "t": 1024,
        "e": 2,
        "each": 16,
        "page_size": 64,
    }
    assert (
        flashonnx_command.json("inspect", "pages.onnx", "--gpu", "cpu", "--dim", "each=3")["bytes"]
        == 8 * 1024 * 192 * 2
    )


def test_kernels_of_devices_that_are_not_here(library: Library, flashonnx_command: Command) -> None:
    """Float32 and large heads do without tensor cores; a head size of 513 is too large for all."""
    if not with_cuda(library):
        pytest.skip("a library without CUDA")
    expected = {
        ("half", 64): {"8.0": "sm80", "8.6": "sm80", "8.9": "sm80", "12.0": "sm80", "cpu": "cpu"},
        ("half", 512): dict.fromkeys(("8.0", "8.6", "8.9", "9.0", "12.0"), "simt") | {"cpu": "cpu"},
        ("float", 64): dict.fromkeys(("8.0", "8.6", "8.9", "9.0", "12.0"), "simt") | {"cpu": "cpu"},
        ("half", 513): dict.fromkeys(("8.0", "8.6", "8.9", "9.0", "12.0", "cpu"), None),
    }
    for (kind, size), kernels in expected.items():
        shape = ("b", 4, "s", size)
        inputs = dict.fromkeys("qkv", (HALF if kind == "half" else FLOAT, shape))
        inputs["mask"] = (BOOL, ("b", 1, 1, "s"))
        onnx.save(node_model(inputs, ["q", "k", "v", "mask"], is_causal=1), "model.onnx")
        done = flashonnx_command.json("inspect", "model.onnx")
        (site,) = done["sites"]
        assert {name: site["kernels"][name] for name in kernels} == kernels, (kind, size)
        assert site["features"] == ["causal", "mask b×1×1×s bool"]
    assert "does head dimensions up to 512, got 513" in site["refusals"]["8.9"]
    flashonnx_command("inspect", "model.onnx")
    said = flashonnx_command("inspect", "model.onnx", "--gpu", "8.9", code=1)
    assert "no kernel" in said and "got 513" in said


def test_a_library_without_cuda_says_so(
    plain: Path, flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own answer, or, where the library has CUDA, what it would be."""
    said = "FlashAttention: this build of the library has no kernels for the device"
    whole = Library.supported

    def supported(self: Library, params: Any) -> str:
        if params.device.kind == CUDA and whole_has_cuda:
            raise NotImplementedError(said)
        return whole(self, params)

    whole_has_cuda = with_cuda(Library(flashonnx.library_path()))
    monkeypatch.setattr(Library, "supported", supported)
    for arguments, code in (((), 0), (("--gpu", "8.9"), 1)):
        text = flashonnx_command("inspect", plain, *arguments, code=code)
        assert f"{said}; it was built without CUDA" in text
        assert ("kernel cpu on the CPU" in text) == (not arguments)


def test_what_no_attention_has_is_said_once(flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kinds of attention, and one reason for all."""
    kinds = [node_model(dict.fromkeys("qkv", (FLOAT, ("b", 4, "s", size))), list("qkv")) for size in (16, 32, 64)]
    whole = kinds[0]
    for i, other in enumerate(kinds[1:]):
        part = onnx.compose.add_prefix(other, f"{i}_")
        for field in ("node", "input", "output"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
    onnx.save(whole, "three.onnx")
    said = "FlashAttention: this build of the library has no kernels for the device"

    def supported(self: Library, params: Any) -> str:
        if params.device.kind == CUDA:
            raise NotImplementedError(said)
        return "cpu"

    monkeypatch.setattr(Library, "supported", supported)
    text = flashonnx_command("inspect", "three.onnx")
    assert text.count("heads of") == 3 and text.count(said) == 1
    assert text.count("no kernel for any on 8.0, ") == 1 and text.count("kernel cpu on the CPU") == 3


def test_answers_are_those_of_the_seam(library: Library) -> None:
    """The problem that is described is the one the library is asked about: sizes, strides, features."""
    inputs = dict.fromkeys("qkv", (HALF, ("b", "s", 256))) | {"mask": (HALF, (1, 8, "s", "s"))}
    attributes = {"q_num_heads": 8, "kv_num_heads": 8, "softcap": 30.0, "left_window_size": 5, "is_causal": 1}
    (attention,) = attentions(node_model(inputs, ["q", "k", "v", "mask"], **attributes))
    from flashonnx.cli._attention import device_of

    p = attention.params(library, device_of(89), {"b": 3, "s": 20})
    assert (p.batch, p.q_heads, p.kv_heads, p.q_length, p.kv_length, p.head_dim, p.value_dim) == (
        3,
        8,
        8,
        20,
        20,
        32,
        32,
    )
    assert list(p.q.stride) == [20 * 256, 32, 256, 1] and list(p.mask.stride) == [0, 400, 20, 1] and p.mask_keys == 20
    assert (p.softcap, p.window_left, p.window_right, p.is_causal) == (30.0, 5, -1, 1)
    assert (p.device.kind, p.device.arch, p.device.sm_count) == (CUDA, 89, GPUS[89][1])


def test_sites_that_are_alike_share_a_line(flashonnx_command: Command) -> None:
    import test_verify_bisect

    onnx.save(test_verify_bisect.layers(), "layers.onnx")
    said = flashonnx_command("inspect", "layers.onnx", "--gpu", "cpu")
    assert "softmax0 and 2 more alike" in said and "softmax1" not in said
    said = flashonnx_command("inspect", "layers.onnx", "--gpu", "cpu", "--all")
    assert all(f"softmax{i}" in said for i in range(3)) and "more alike" not in said


def test_without_a_library(plain: Path, flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHONNX_LIBRARY", "missing.so")
    done = flashonnx_command.json("inspect", plain)
    assert "missing.so" in done["error"] and done["bytes"] == 4 * 1024 * 1024 * 4
