"""BERT for classification with padded batches: a padded row gets the answer that it gets alone.

    python samples/bert_padding/run.py

The model is tiny and has random weights, so that nothing is downloaded; with real ones, write
`BertForSequenceClassification.from_pretrained(...)`. Needs `pip install flashonnx[torch,ort] transformers`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import flashonnx
import numpy as np
import torch
import transformers

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on GPUs: float32 in full, as it is compared with the CPU's

LENGTHS = (23, 4, 1, 11)  # tokens in each row


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.BertConfig(
        **sizes, vocab_size=1000, max_position_embeddings=64, num_labels=3, initializer_range=0.3
    )
    model = transformers.BertForSequenceClassification(config).eval()

    padding = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.random.default_rng(0).integers(1, config.vocab_size, padding.shape) * padding
    batch = {"input_ids": ids, "attention_mask": padding.astype(np.int64)}
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    axes = {name: {0: "batch", 1: "sequence"} for name in batch}

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bert.onnx"
        report = flashonnx.export_onnx(model, (), file, kwargs=tensors, dynamic_shapes=axes, output_names=["logits"])
        print(report)
        assert report.fused == report.total == config.num_hidden_layers
        session = flashonnx.session(file)

    logits = session.run(["logits"], batch)[0]
    with torch.inference_mode():
        expected = model(**tensors).logits.numpy()
    print(f"from PyTorch: {np.abs(logits - expected).max():.1e} of {np.abs(expected).max():.2f} at most")
    np.testing.assert_allclose(logits, expected, atol=1e-4)

    for row, length in enumerate(LENGTHS):
        alone = {name: array[row : row + 1, :length] for name, array in batch.items()}
        difference = np.abs(session.run(["logits"], alone)[0] - logits[row]).max()
        print(f"row {row}, {length:2} tokens of {max(LENGTHS)}: {difference:.1e} from the same row without padding")
        assert difference < 1e-4

    # What stands in the padding is never looked at.
    other = batch | {"input_ids": np.where(padding, ids, 7)}
    assert np.array_equal(session.run(["logits"], other)[0], logits)


if __name__ == "__main__":
    main()
