"""export_onnx with caches as inputs and outputs: one model that generates what transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.export import unfuse  # noqa: E402
from flashonnx.export.pytorch.kv_cache import CacheExportError  # noqa: E402
from models import has_library  # noqa: E402
from transformers_models import _GROUPED  # noqa: E402

CAPACITY, NEW = 32, 12
PROMPTS = ([5, 17, 33, 60, 2, 41, 7], [11, 8, 23])
_CACHED = {name: value for name, value in _GROUPED.items() if name != "use_cache"}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "bos_token_id": 0}
_OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 99, "max_position_embeddings": 64, "init_std": 0.3}  # fmt: skip
_MORE = {"sliding_window": 4, "head_dim": 8}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _CACHED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_CACHED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _CACHED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_CACHED, "head_dim": 16}),
    "phi": ("PhiForCausalLM", "PhiConfig", _CACHED),  # part of the head is rotated
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {n: x for n, x in _CACHED.items() if n[:7] != "num_key"}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_CACHED, **_MORE}),  # a softcap
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig",
               {**_CACHED, **_MORE, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig",
                {**_CACHED, **_MORE, "num_local_experts": 4, "num_experts_per_tok": 2,
                 "experts_implementation": "batched_mm",
                 "layer_types": ["sliding_attention", "full_attention"]}),
    "cohere": ("CohereForCausalLM", "CohereConfig",  # neighbours are turned
               {**_CACHED, "tie_word_embeddings": False, "logit_scale": 1.0}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_CACHED, "head_dim": 8, "pad_token_id": 0}),  # half of them
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**_CACHED, "initializer_range": 0.1}),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig",  # Q, K and V by one product, heads side by side
                  {n: x for n, x in _CACHED.items() if n[:7] != "num_key"}),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config",
              {**_CACHED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config",  # without rotation where a layer sees all
                {**_CACHED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
                 "tie_word_embeddings": False, "logit_scale": 1.0}),
    "ernie": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_CACHED, "head_dim": 8, "tie_word_embeddings": False}),
}  # fmt: skip
EVERYDAY = ("llama", "gpt2", "opt")
EACH = [pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.slow) for name in MODELS]


def made(name: str) -> Any:
    """A model with enough in its weights that tokens differ."""
    model, config, given = MODELS[name]
    torch.manual_seed(1)
    result = getattr(transformers, model)(getattr(transformers, config)(**given)).eval()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    result.generation_config.eos_token_id = None
    result.generation_config.pad_token_id = 0
    return result


def expected(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers generates by itself."""
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


class Generation:
    """A session with its caches, which hold NaN where nothing was written."""

    def __init__(self, path: Path, batch: int, *, library: bool = True, pages: Any = None) -> None:
        model = onnx.load(path)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        providers = ["CPUExecutionProvider"]
        self.session = (
            flashonnx.session(model, providers, options)
            if library
            else ort.InferenceSession(model.SerializeToString(), options, providers=providers)
        )
        sizes = {"batch": batch, "capacity": CAPACITY, "pages": 20, "page_size": 4}
        self.caches = {}
        for value in model.graph.input:
            if value.name.startswith("past_key_values."):
                shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
                self.caches[value.name] = np.full(shape, np.nan, np.float32)
        self.lengths = np.zeros(batch, np.int64)
        self.pages = {} if pages is None else {"block_table": pages}

    def step(self, ids: np.ndarray, new: np.ndarray | None = None) -> np.ndarray:
        """Logits of `ids`, of which sentence b has the first `new[b]` alone, or all."""
        given = {"input_ids": ids, "cache_lengths": self.lengths, **self.pages, **self.caches}
        logits, *presents = self.session.run(None, given)
        self.caches = dict(zip(self.caches, presents, strict=True))
        self.lengths = self.lengths + (ids.shape[1] if new is None else new)
        return logits

    def generate(self, prompts: tuple[list[int], ...], chunk: int = 0, new: int = NEW) -> list[list[int]]:
        """Greedily: prompts padded on the right, or of one length and in chunks, then token by token."""
        counts = np.array([len(prompt) for prompt in prompts])
        ids = np.array([prompt + [0] * (counts.max() - len(prompt)) for prompt in prompts])
        if chunk:
            for start in range(0, ids.shape[1], chunk):
                logits = self.step(ids[:, start : start + chunk])
            last = logits[:, -1]
        else:
            last = self.step(ids, counts)[np.arange(len(prompts)), counts - 1]
        found = [last.argmax(-1)]
        while len(found) < new:
            found.append(self.step(found[-1][:, None])[:, -1].argmax(-1))
        return np.stack(found, 1).tolist()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exports each model once."""
    folder, done = tmp_path_factory.mktemp("caches"), {}

    def of(name: str) -> tuple[Any, Path]:
        if name not in done:
            model, path = made(name), folder / f"{name}.onnx"
            report = flashonnx.export_onnx(model, (), path, kv_cache="static")
            assert report.fused == report.total == 2, str(report)
            onnx.checker.check_model(onnx.load(path), full_check=True)
            done[name] = model, path
        return done[name]

    return of


@pytest.mark.parametrize(
    "library", [False, pytest.param(True, marks=pytest.mark.skipif(not has_library(), reason="lib"))]
)
@pytest.mark.parametrize("name", EACH)
def test_generates_what_transformers_does(name: str, library: bool, exported: Any) -> None:
    """Two prompts of different lengths at once, beyond every window; by the library and by the bodies."""
    model, path = exported(name)
    want = [expected(model, prompt) for prompt in PROMPTS]
    assert len({token for tokens in want for token in tokens}) > 4, "too monotonous to tell"
    assert Generation(path, 2, library=library).generate(PROMPTS) == want


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prompts_in_chunks(chunk: int, exported: Any) -> None:
    model, path = exported("llama")
    generation = Generation(path, 1, library=has_library())
    assert generation.generate(PROMPTS[:1], chunk) == [expected(model, PROMPTS[0])]
    assert generation.lengths.tolist() == [len(PROMPTS[0]) + NEW - 1]


def test_inputs_and_outputs(exported: Any) -> None:
    _, path = exported("llama")
    graph = onnx.load(path).graph
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.output]
    }
    cache = ["batch", 2, "capacity", 8]
    numbered = [f"{i}.{name}" for i in (0, 1) for name in ("key", "value")]
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "cache_lengths": ["batch"],
        **{f"past_key_values.{name}": cache for name in numbered},
        "logits": ["batch", "sequence", 99],
        **{f"present.{name}": cache for name in numbered},
    }
    assert not {"Softmax", "Where", "Trilu"} & {node.op_type for node in graph.node}  # no masks


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gpt2", "opt", "cohere2")])
def test_rotation_is_in_the_operator(name: str, exported: Any) -> None:
    """As halves or as neighbours, of whole heads or of their first part: nothing of it is left in the graph."""
    graph = onnx.load(exported(name)[1]).graph
    nodes = [node for node in graph.node if node.domain == "flashonnx"]
    assert len(nodes) == 2 and all(node.input[8] and node.input[9] and node.input[10] for node in nodes)
    assert "Neg" not in {node.op_type for node in graph.node}


def test_what_multiplies_queries_is_in_the_scale(exported: Any) -> None:
    """OPT multiplies Q and leaves a scale of 1: one product makes all three projections all the same."""
    graph = onnx.load(exported("opt")[1]).graph
    nodes = [node for node in graph.node if node.domain == "flashonnx"]
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    assert [(each["qkv_layout"], round(each["scale"], 5)) for each in found] == [(b"gqa", 0.35355)] * 2
    assert not {"Transpose", "Mul"} & {node.op_type for node in graph.node}


def test_windows_are_attributes(exported: Any) -> None:
    _, path = exported("mistral")
    nodes = [node for node in onnx.load(path).graph.node if node.domain == "flashonnx"]
    assert [[a.i for a in node.attribute if a.name == "left_window_size"] for node in nodes] == [[3], [3]]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_with_the_longest_sequence(kind: str, tmp_path: Path) -> None:
    """In one run for all sentences the angles would be those of the longest."""
    model = made("llama")
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(CacheExportError, match=f"type '{kind}' change with the longest"):
        flashonnx.export_onnx(model, (), tmp_path / "x.onnx", kv_cache="static")


def test_training_mode_is_refused(tmp_path: Path) -> None:
    """Its Dropout would go into the file and draw at every step."""
    model, path = made("llama").train(), tmp_path / "x.onnx"
    with pytest.raises(CacheExportError, match=r"LlamaForCausalLM is in training mode.*call model\.eval\(\) first"):
        flashonnx.export_onnx(model, (), path, kv_cache="static")
    assert model.training and not path.exists()


def test_last_logits_alone(tmp_path: Path) -> None:
    """What the model takes besides goes into every call."""
    model, path = made("llama"), tmp_path / "last.onnx"
    report = flashonnx.export_onnx(model, (), path, kv_cache="static", kwargs={"logits_to_keep": 1})
    assert "for prompts of equal length only: Slice" in report.notes[0]
    generation = Generation(path, 1, library=has_library())
    assert generation.step(np.array(PROMPTS[:1])).shape == (1, 1, 99)


def test_what_looks_across_tokens_is_refused(tmp_path: Path) -> None:
    """A mean over the new tokens would take in the padding of a shorter prompt."""

    class Centred(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits - out.logits.mean(1, keepdim=True)
            return out

    model = Centred(made("llama").config).eval()
    with pytest.raises(CacheExportError, match=r"ReduceMean .* looks across the new tokens"):
        flashonnx.export_onnx(model, (), tmp_path / "x.onnx", kv_cache="static")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not has_library(), reason="pages need the library")
def test_pages(tmp_path: Path) -> None:
    """Two sentences in pages that lie anywhere; the report says that no runtime but ours has them."""
    model, path = made("llama"), tmp_path / "paged.onnx"
    report = flashonnx.export_onnx(model, (), path, kv_cache="paged")
    assert "block_table" in report.notes[0]
    pages = np.random.default_rng(0).permutation(20)[:12].reshape(2, 6).astype(np.int32)
    got = Generation(path, 2, pages=pages).generate(PROMPTS)
    assert got == [expected(model, prompt) for prompt in PROMPTS]


def test_back_to_standard_operators(exported: Any, tmp_path: Path) -> None:
    model, path = exported("llama")
    _, report = unfuse(path, tmp_path / "plain.onnx")
    assert report.fused == 0
    got = Generation(tmp_path / "plain.onnx", 1, library=False).generate(PROMPTS[:1], new=4)
    assert got == [expected(model, PROMPTS[0], 4)]


_PLAIN = {name: value for name, value in _CACHED.items() if name != "num_key_value_heads"}


class PositionsOfItsOwn(transformers.OPTForCausalLM):
    """Counts from the tokens in its cache, whatever positions it is given."""

    def __init__(self) -> None:
        super().__init__(transformers.OPTConfig(**_OPT))

    def forward(self, input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        places = start + torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().forward(input_ids, position_ids=places[None], past_key_values=past_key_values, **kwargs)


REFUSED: dict[str, tuple[Any, str]] = {
    "no cache": (lambda: transformers.BertModel(transformers.BertConfig(**_PLAIN)), "keeps no keys"),
    "ALiBi": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=99, n_layer=2, n_head=4, hidden_size=32)
        ),
        "grows with the keys",
    ),
    "an attention of its own": (
        lambda: transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=99, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
            )
        ),
        "fuse(path, kv_cache=...)",
    ),
    "a mask of the cache's size": (
        lambda: transformers.BioGptForCausalLM(transformers.BioGptConfig(**_PLAIN)),
        "depending on the number of tokens in its cache",
    ),
    "experts": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**_CACHED, num_local_experts=4, experts_implementation="grouped_mm")
        ),
        "set_experts_implementation('batched_mm')",
    ),
    "latents": (
        lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **_PLAIN,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_rope_head_dim=4,
                qk_nope_head_dim=4,
                v_head_dim=8,
                first_k_dense_replace=2,
                n_routed_experts=4,
                moe_intermediate_size=16,
                num_key_value_heads=4,
            )
        ),
        "made of latents",
    ),
    "positions from the cache's size": (PositionsOfItsOwn, "computes with the number of tokens in its cache"),
    "not of transformers": (lambda: torch.nn.Linear(2, 2), "models of transformers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match="kv_cache") as raised:
        flashonnx.export_onnx(make().eval(), (), tmp_path / "model.onnx", kv_cache="static")
    assert words in str(raised.value), str(raised.value)
    assert str(raised.value).count("ForCausalLM") <= 1, "its class once is enough"
    assert not list(tmp_path.iterdir())


def test_experts_within_another_model(tmp_path: Path) -> None:
    """What has the choice is named as the caller can reach it."""
    config = transformers.MixtralConfig(**_CACHED, num_local_experts=4, experts_implementation="grouped_mm")

    class Within(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = transformers.MixtralForCausalLM(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.decoder(ids, use_cache=False).logits

    with pytest.raises(torch.onnx.OnnxExporterError) as raised:
        flashonnx.export_onnx(Within().eval(), (torch.ones(1, 3, dtype=torch.int64),), tmp_path / "model.onnx")
    said = " ".join(raised.value.__notes__)
    assert "call model.decoder.set_experts_implementation('batched_mm')" in said


def test_arguments(tmp_path: Path) -> None:
    model = made("llama")
    for given, words in (
        ({"kv_cache": "ragged"}, "'static', 'paged' or None, got 'ragged'"),
        ({"kv_cache": "static", "dynamic_shapes": {}}, "dynamic_shapes"),
        ({"kv_cache": "static", "output_names": ["y"]}, "output_names"),
        ({"kv_cache": "static", "kwargs": {"attention_mask": torch.ones(1, 2)}}, "cache_lengths"),
    ):
        with pytest.raises(ValueError, match=words):
            flashonnx.export_onnx(model, (), tmp_path / "model.onnx", **given)
    assert model.config._attn_implementation != "onnx_fused"
