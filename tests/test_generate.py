"""flashonnx.generate: the tokens that transformers generates, for requests of every length at once.

A token is right if it is transformers' own. Where float rounding could decide, the model itself is asked, in float32
and on the very tokens before: only if its greatest logit is within TIE of the token's is a difference excused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ort = pytest.importorskip("onnxruntime")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.generate import Generator  # noqa: E402

TIE = 1e-3
NEW = 20
PROMPTS = [np.random.default_rng(n).integers(1, 99, n).tolist() for n in (7, 3, 20, 1, 9)]
_LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA |= {"intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 40, "bos_token_id": 0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
}
FORMS = [
    ("llama", "static"),
    ("gpt2", "static"),
    ("llama", "paged"),
    pytest.param(("gpt2", "paged"), marks=pytest.mark.slow),
]
# So few places that some wait, chunks that end within prompts, pages of one key, fewer pages than places would fill,
# and no more positions than the longest request needs.
SIZES = [
    {"batch": 2, "chunk": 4, "capacity": 40, "page_size": 4},
    {"batch": 3, "chunk": 64, "capacity": 40, "page_size": 16, "pages": 4},
    {"batch": 7, "chunk": 5, "capacity": 40, "page_size": 8},
    {"batch": 1, "chunk": 1, "capacity": 39, "page_size": 1},
]


def made(name: str) -> Any:
    """A model with enough in its weights that tokens differ."""
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def expected(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers generates by itself."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def check_greedy(model: Any, prompt: list[int], tokens: list[int], want: list[int]) -> None:
    """`tokens` are `want`, up to where the model finds two equally good; then each is as good as the best."""
    assert len(tokens) == len(want)
    if tokens == want:
        return
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    first = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b)
    assert gaps[first] <= TIE, f"token {first} is {tokens[first]}, not {want[first]}, whose logit is {gaps[first]} more"
    assert gaps.max() <= TIE, f"after a tie at {first}: token {int(gaps.argmax())} is {gaps.max()} off the best"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, library_path: str) -> Any:
    """Exports each model once."""
    folder, done = tmp_path_factory.mktemp("generate"), {}

    def of(name: str, kind: str) -> tuple[Any, Path]:
        if (name, kind) not in done:
            model, path = made(name), folder / f"{name}_{kind}.onnx"
            flashonnx.export_onnx(model, (), path, kv_cache=kind)
            done[name, kind] = model, path
        return done[name, kind]

    return of


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[list[int]]]:
    return {name: [expected(made(name), prompt) for prompt in PROMPTS] for name in MODELS}


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_what_transformers_generates(form: tuple[str, str], exported: Any, wanted: Any) -> None:
    """Twice with each generator: what an earlier call left in the caches is not seen."""
    model, path = exported(*form)
    want = wanted[form[0]]
    assert len({token for tokens in want for token in tokens}) > 8, "too monotonous to tell"
    for sizes in SIZES:
        generator = Generator(path, device="cpu", **sizes)
        for prompts, right in ((PROMPTS, want), (PROMPTS[::-1], want[::-1])):
            result = generator(prompts, NEW)
            for prompt, tokens, tokens_wanted in zip(prompts, result.tokens, right, strict=True):
                check_greedy(model, prompt, tokens, tokens_wanted)
            assert result.finished == ["length"] * len(prompts)
            assert result.prompt_tokens == sum(map(len, prompts))


def test_chosen_in_the_graph(exported: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: the nodes that find the greatest logits, and lengths that are brought; here the CPU runs them."""
    from flashonnx import _decoder, _last_logits

    model, path = exported("llama", "paged")

    def as_on_cuda(graph: Any) -> None:
        _last_logits.bring(next(value for value in graph.inputs if value.name == "cache_lengths"))
        _last_logits.find_greatest(graph)

    monkeypatch.setattr(_decoder.Decoder, "_chooses", lambda self: True)
    monkeypatch.setattr(_decoder, "find_greatest", as_on_cuda)
    monkeypatch.setattr(_decoder, "greatest", lambda logits: pytest.fail("the host searched"))
    for sizes in SIZES:
        generator = Generator(path, device="cpu", **sizes)
        for prompt, tokens, want in zip(PROMPTS, generator(PROMPTS, NEW).tokens, wanted["llama"], strict=True):
            check_greedy(model, prompt, tokens, want)
    ways = [{"temperature": 0.8, "seed": 3, **more} for more in ({}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9})]
    drawn = [generator(PROMPTS, NEW, **how).tokens for how in ways]
    assert generator._decoder._weights is not None
    monkeypatch.undo()
    plain = Generator(path, device="cpu", **SIZES[0])
    assert drawn == [plain(PROMPTS, NEW, **how).tokens for how in ways]


@pytest.mark.gpu
def test_draws_on_cuda(exported: Any) -> None:
    """Of the chances that the device makes the same tokens are drawn as of the CPU's, one after another and at once."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    _, path = exported("llama", "static")
    for how in ({"temperature": 0.8}, {"top_k": 20}, {"top_p": 0.9}, {"temperature": 2.0, "top_k": 30, "top_p": 0.8}):
        want = Generator(path, device="cpu", **SIZES[0])(PROMPTS, NEW, seed=3, **how).tokens
        for sizes in SIZES[::2]:
            generator = Generator(path, device="cuda", provider_options={"use_tf32": "0"}, **sizes)
            assert generator(PROMPTS, NEW, seed=3, **how).tokens == want
            assert generator(PROMPTS, NEW, seed=4, **how).tokens != want


def test_models_from_elsewhere(exported: Any, wanted: Any, tmp_path: Path) -> None:
    """Weights beside the file, bytes, and a model in memory, which stays as it is."""
    onnx = pytest.importorskip("onnx")
    _, path = exported("llama", "static")
    model = onnx.load(path)
    before = model.SerializeToString()
    apart = tmp_path / "decoder.onnx"
    onnx.save_model(onnx.load(path), apart, save_as_external_data=True, location="weights", size_threshold=0)
    assert (tmp_path / "weights").stat().st_size > apart.stat().st_size / 4
    options = ort.SessionOptions()
    for given in (apart, str(apart), model, before):
        generator = Generator(given, device="cpu", capacity=40, session_options=options)
        assert generator(PROMPTS[:1], 5).tokens == [wanted["llama"][0][:5]]
    assert model.SerializeToString() == before
    assert not options.get_session_config_entry("session.model_external_initializers_file_folder_path")  # nor to others
    with pytest.raises(ValueError, match="the bytes are not an ONNX model"):
        Generator(b"no model", device="cpu")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Generator(tmp_path / "nowhere.onnx", device="cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equal_logits_and_no_numbers(device: str, tmp_path: Path, library_path: str) -> None:
    """Of equal logits the first, as transformers takes it; NaN and infinity are no choice."""
    if device == "cuda" and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    model, path = made("llama"), tmp_path / "twice.onnx"
    weights = model.lm_head.weight.data
    weights[50:] = weights[: len(weights) - 50]
    flashonnx.export_onnx(model, (), path, kv_cache="static")
    generator = Generator(path, device=device, batch=2, capacity=40)
    for tokens in generator(PROMPTS, NEW).tokens:
        assert max(tokens) < 50
    for index, value in ((0, float("nan")), (3, float("inf"))):
        model.model.norm.weight.data[index] = value
        flashonnx.export_onnx(model, (), path, kv_cache="static")
        with pytest.raises(FloatingPointError, match="expected to be finite"):
            Generator(path, device=device, capacity=40)(PROMPTS, NEW)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("form", [("llama", "static"), ("gpt2", "static"), ("llama", "paged")], ids="-".join)
def test_on_cuda(form: tuple[str, str], graph: bool, exported: Any, wanted: Any) -> None:
    """In float32: the graph is captured in the first call and replayed in the second, with other lengths and pages."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    model, path = exported(*form)
    options = {"use_tf32": "0"}
    for sizes in SIZES[:3]:
        generator = Generator(path, device="cuda", cuda_graph=graph, provider_options=options, **sizes)
        for prompts, right in ((PROMPTS, wanted[form[0]]), (PROMPTS[::-1], wanted[form[0]][::-1])):
            for prompt, tokens, want in zip(prompts, generator(prompts, NEW).tokens, right, strict=True):
                check_greedy(model, prompt, tokens, want)


@pytest.mark.parametrize("form", [("llama", "static"), ("llama", "paged")], ids="-".join)
def test_stops_and_calls_back(form: tuple[str, str], exported: Any, wanted: Any) -> None:
    """A request ends with a stop token, its place goes to the next; tokens are told as they come."""
    _, path = exported(*form)
    want = wanted["llama"]
    stop = {want[0][4], want[2][9]}
    cut = [next((i + 1 for i, token in enumerate(tokens) if token in stop), NEW) for tokens in want]
    assert len(set(cut)) > 2
    told: list[list[int]] = [[] for _ in PROMPTS]
    order: list[int] = []

    def tell(index: int, token: int) -> None:
        told[index].append(token)
        order.append(index)

    generator = Generator(path, batch=2, capacity=40, page_size=8, device="cpu")
    result = generator(PROMPTS, NEW, stop=stop, callback=tell)
    assert result.tokens == told == [tokens[:n] for tokens, n in zip(want, cut, strict=True)]
    assert result.finished == ["stop" if want[i][n - 1] in stop else "length" for i, n in enumerate(cut)]
    assert order[:2] == [0, 1], "two go side by side"
    assert result.decode_tokens > 0 and result.tokens_per_second > 0
    (one,) = generator(PROMPTS[:1], NEW, stop=want[0][4]).tokens
    assert one == want[0][: want[0].index(want[0][4]) + 1]


def test_caches_are_written_in_place(exported: Any) -> None:
    """The buffers that were bound have keys after a run, which only happens if they are the outputs too."""
    _, path = exported("llama", "static")
    generator = Generator(path, capacity=32, device="cpu")
    caches = list(generator._decoder.caches.values())
    for cache in caches:
        cache.update_inplace(np.full(cache.shape(), np.nan, np.float32))
    (tokens,) = generator(PROMPTS[:1], 5).tokens
    for cache in caches:
        filled = np.isfinite(cache.numpy()).all((0, 1, 3))
        assert filled.tolist() == [i < len(PROMPTS[0]) + len(tokens) - 1 for i in range(32)]


def test_sampling(exported: Any) -> None:
    """By its seed alone: not by the other requests, their number or the chunks."""
    _, path = exported("llama", "static")
    how = {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
    one = Generator(path, batch=1, chunk=3, capacity=40, device="cpu")
    many = Generator(path, batch=5, capacity=40, device="cpu")
    first = one(PROMPTS, NEW, seed=3, **how).tokens
    assert first == many(PROMPTS, NEW, seed=3, **how).tokens
    assert first != many(PROMPTS, NEW, seed=4, **how).tokens
    for only in ({"top_k": 1}, {"top_p": 1e-9}):
        assert many(PROMPTS, NEW, temperature=5.0, **only).tokens == many(PROMPTS, NEW).tokens


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([[]], {}, "prompt 0 is expected to be a list"),
    "no numbers": ([[1], [0.5]], {}, "prompt 1 is expected to be a list"),
    "text": (["hello"], {}, "prompt 0 is expected to be a list of token numbers.* a tokenizer .* got the text 'hello'"),
    "text alone": ("hello", {}, "prompt 0 is expected to be a list of token numbers.* got the text 'hello'"),
    "one list": ([1, 2], {}, "prompt 0 is expected .* prompts a list of such lists, got 1"),
    "unknown token": ([[99]], {}, r"tokens in \[0, 99\), got 99 to 99"),
    "too long": ([[1] * 30], {}, "needs 34 keys for 30 tokens and 5 new ones; there are 32"),
    "no tokens": ([[1]], {"max_new_tokens": 0}, "max_new_tokens is expected .* of at least 1, got 0"),
    "top_k": ([[1]], {"top_k": 100}, r"top_k is expected .* in \[0, 99\], got 100"),
    "temperature": ([[1]], {"temperature": -1.0}, "temperature is expected to be at least 0, got -1.0"),
    "temperature inf": ([[1]], {"temperature": 1e39}, "temperature is expected to be a finite float32, got 1e"),
    "temperature NaN": ([[1]], {"temperature": float("nan")}, "temperature is expected to be a number, got NaN"),
    "top_p": ([[1]], {"top_p": 0.0}, r"top_p is expected to be in \(0, 1\], got 0.0"),
    "top_p beyond": ([[1]], {"top_p": 1.5}, r"top_p is expected to be in \(0, 1\], got 1.5"),
    "unknown stop": ([[1]], {"stop": [3, 99]}, r"stop is expected to have tokens in \[0, 99\), got 99"),
    "seed": ([[1]], {"seed": -1}, "seed is expected .* of at least 0, got -1"),
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "part of a token": ({"max_new_tokens": 2.5}, "max_new_tokens is expected to be a whole number, got 2.5"),
    "no number": ({"max_new_tokens": None}, "max_new_tokens is expected to be a whole number, got None"),
    "yes": ({"max_new_tokens": True}, "max_new_tokens is expected to be a whole number, got True"),
    "top_k": ({"top_k": 2.5}, "top_k is expected to be a whole number, got 2.5"),
    "top_p": ({"top_p": "0.9"}, "top_p is expected to be a number, got '0.9'"),
    "temperature": ({"temperature": "hot"}, "temperature is expected to be a number, got 'hot'"),
    "stop": ({"stop": None}, "stop is expected to be a token number or several, got None"),
    "stops": ({"stop": [1, 2.5]}, r"stop is expected to be a token number or several, got \[1, 2.5\]"),
    "stop or not": ({"stop": True}, "stop is expected to be a token number or several, got True"),
    "bytes": ({"stop": b"a"}, "stop is expected to be a token number or several, got b'a'"),
    "words": ({"stop": "end"}, "stop is expected to be a token number or several, got 'end'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests(case: str, exported: Any) -> None:
    prompts, more, message = WRONG[case]
    generator = Generator(exported("llama", "static")[1], capacity=32, device="cpu")
    with pytest.raises(ValueError, match=message):
        generator(prompts, **{"max_new_tokens": 5, **more})


@pytest.mark.parametrize("case", KINDS)
def test_arguments_of_other_kinds(case: str, exported: Any) -> None:
    more, message = KINDS[case]
    generator = Generator(exported("llama", "static")[1], capacity=32, device="cpu")
    with pytest.raises(TypeError, match=message):
        generator([[1]], **{"max_new_tokens": 5, **more})


def test_top_k_or_top_p_alone_draw(exported: Any) -> None:
    """At temperature 1, as transformers with do_sample=True; at temperature 0 nothing is drawn."""
    generator = Generator(exported("llama", "static")[1], batch=5, capacity=40, device="cpu")
    greedy = generator(PROMPTS, NEW).tokens
    for how in ({"top_k": 20}, {"top_p": 0.9}):
        drawn = generator(PROMPTS, NEW, **how).tokens
        assert drawn == generator(PROMPTS, NEW, temperature=1, **how).tokens != greedy
        assert generator(PROMPTS, NEW, temperature=0, **how).tokens == greedy


def test_wrong_models_and_sizes(exported: Any) -> None:
    from onnx import TensorProto, helper

    _, path = exported("llama", "static")
    with pytest.raises(ValueError, match="batch is expected to be a whole number of at least 1, got 0"):
        Generator(path, batch=0)
    for name in ("batch", "capacity", "chunk", "page_size", "pages"):
        with pytest.raises(TypeError, match=f"{name} is expected to be a whole number, got 2.5"):
            Generator(path, **{name: 2.5})
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'tpu'"):
        Generator(path, device="tpu")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "other", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ValueError, match="got x -> y"):
        Generator(model, device="cpu")


@pytest.mark.parametrize(("name", "count"), [("llama", 64), ("gpt2", 40)])
def test_positions_bound_capacity(name: str, count: int, exported: Any) -> None:
    """The export notes how many the model has. All can be used, none beyond them."""
    model, path = exported(name, "static")
    with pytest.raises(ValueError, match=f"at most the model's {count} positions, got {count + 1}"):
        Generator(path, capacity=count + 1, device="cpu")
    generator = Generator(path, device="cpu")  # the default of 1024 would be too much
    assert (generator.capacity, generator.positions) == (count, count)
    prompt, new = PROMPTS[0], count + 1 - len(PROMPTS[0])  # the last token is given to nobody
    with pytest.raises(ValueError, match=f"there are {count}, as the model has {count} positions"):
        generator([prompt], new + 1)
    (tokens,) = generator([prompt], new).tokens
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits[torch.arange(new), torch.tensor(tokens)]
    assert gaps.max() <= TIE


def test_positions_that_nobody_noted(exported: Any) -> None:
    """A file from elsewhere: the default is 1024 keys."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(exported("llama", "static")[1])
    assert {prop.key: prop.value for prop in model.metadata_props} == {"flashonnx:max_positions": "64"}
    del model.metadata_props[:]
    generator = Generator(model, device="cpu")
    assert (generator.capacity, generator.positions) == (1024, None)


def test_positions_of_configurations() -> None:
    """Some name the positions before a scaling of rotary embeddings, some have no bound."""
    from flashonnx.export.pytorch.kv_cache import positions

    scaled = {"rope_theta": 10000.0, "factor": 4.0}
    kinds = {"linear": None, "dynamic": None, "yarn": 64, "default": 64}
    for kind, count in kinds.items():
        config = transformers.LlamaConfig(**_LLAMA, rope_parameters=scaled | {"rope_type": kind})
        assert positions(transformers.LlamaForCausalLM(config)) == count, kind
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
    assert positions(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))) is None


def test_cuda_that_is_not_there(exported: Any) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(flashonnx.LibraryError, match=r"device='cuda' is not to be had .* pip install onnxruntime-gpu"):
        Generator(exported("llama", "static")[1], device="cuda")


def test_pages_bound_requests(exported: Any) -> None:
    with pytest.raises(ValueError, match="there are 12"):
        Generator(exported("llama", "paged")[1], batch=2, capacity=64, page_size=4, pages=3, device="cpu")([[1] * 9], 5)
