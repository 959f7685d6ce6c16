"""Whisper: an encoder of speech, and a decoder that attends to itself and to the encoder; greedy transcription.

    python samples/whisper/run.py

Two files, so that the encoder runs once a recording: encoder.onnx and decoder.onnx. The decoder has no cache: each step
takes all tokens so far. The model is tiny and has random weights, so that nothing is downloaded; its "text" means
nothing. Needs `pip install flashonnx[torch,ort] transformers`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import flashonnx
import numpy as np
import torch
import transformers
from torch import Tensor, nn

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on GPUs: float32 in full, as it is compared with the CPU's

BINS, FRAMES, LAYERS, STEPS = 8, 40, 2, 8
START = 3  # the first token of every text


class Decoder(nn.Module):
    """Logits of every position, from the tokens and what the encoder heard."""

    def __init__(self, model: transformers.WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.decoder, self.head = model.model.decoder, model.proj_out
        self.config = model.config

    def forward(self, ids: Tensor, heard: Tensor) -> Tensor:
        out = self.decoder(input_ids=ids, encoder_hidden_states=heard, use_cache=False)
        return self.head(out.last_hidden_state)


def tiny_whisper() -> transformers.WhisperForConditionalGeneration:
    config = transformers.WhisperConfig(
        vocab_size=99,
        d_model=32,
        num_mel_bins=BINS,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=START,
        eos_token_id=1,
        decoder_start_token_id=START,
        init_std=0.3,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config).eval()


def main() -> None:
    torch.manual_seed(0)
    model = tiny_whisper()
    features = torch.randn(2, BINS, FRAMES)  # of two recordings, as WhisperFeatureExtractor makes them
    with torch.inference_mode():
        heard = model.model.encoder(features).last_hidden_state
    ids = torch.full((2, 5), START)
    with tempfile.TemporaryDirectory() as folder:
        encoder, decoder = Path(folder) / "encoder.onnx", Path(folder) / "decoder.onnx"
        encoder_report = flashonnx.export_onnx(
            model.model.encoder, (features,), encoder, dynamic_shapes={"input_features": {0: "batch"}}
        )
        decoder_report = flashonnx.export_onnx(
            Decoder(model).eval(),
            (ids, heard),
            decoder,
            dynamic_shapes={"ids": {0: "batch", 1: "tokens"}, "heard": {0: "batch"}},
            output_names=["logits"],
        )
        print(encoder_report, decoder_report, sep="\n")
        assert encoder_report.fused == encoder_report.total == LAYERS
        assert decoder_report.fused == decoder_report.total == 2 * LAYERS, "to itself and to the encoder"
        encode, decode = flashonnx.session(encoder), flashonnx.session(decoder)

    tokens = np.full((2, 1), START)
    states = encode.run(None, {"input_features": features.numpy()})[0]
    for _ in range(STEPS):
        logits = decode.run(["logits"], {"ids": tokens, "heard": states})[0]
        with torch.inference_mode():
            expected = model(input_features=features, decoder_input_ids=torch.from_numpy(tokens)).logits.numpy()
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        tokens = np.concatenate([tokens, logits[:, -1:].argmax(axis=-1)], axis=1)
    print(f"{STEPS} tokens for each of {len(tokens)} recordings, the logits of every step as PyTorch's:\n{tokens}")


if __name__ == "__main__":
    main()
