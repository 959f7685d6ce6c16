"""Serves a fused model with Ray Serve: replicas, and requests that are batched with padding.

    python samples/ray_serve/run.py

Starts Ray on this machine, sends requests over HTTP and checks every answer; on a cluster give `ray.init` its address.
Needs `pip install flashonnx[torch,ort] "ray[serve]"`; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flashonnx
import numpy as np
import ray
import torch
from ray import serve

REPLICAS = 2
LARGEST_BATCH = 8
REQUESTS = 48
PORT = int(os.environ.get("RAY_SERVE_PORT", "8000"))


class Embedder(torch.nn.Module):
    """Token numbers and padding to one vector for each row."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        attends = attention_mask.bool()
        y = self.encoder(self.table(tokens), src_key_padding_mask=~attends)
        weights = attends.to(y.dtype).unsqueeze(-1)
        return (y * weights).sum(1) / weights.sum(1)


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=4 * LARGEST_BATCH)
class Server:
    """A replica: one session, to which all requests of a moment go as one batch."""

    def __init__(self, model: bytes, threads: int = 1) -> None:
        import onnxruntime  # of the replica's own process

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads  # replicas share the machine's cores
        self.session = flashonnx.session(model, session_options=options)

    @serve.batch(max_batch_size=LARGEST_BATCH, batch_wait_timeout_s=0.05)
    async def embed(self, rows: list[list[int]]) -> list[dict[str, Any]]:
        tokens, mask = padded(rows)
        vectors = self.session.run(None, {"tokens": tokens, "attention_mask": mask})[0]
        return [{"vector": v.tolist(), "batch": len(rows), "replica": os.getpid()} for v in vectors]

    async def __call__(self, request: Any) -> dict[str, Any]:
        return await self.embed((await request.json())["tokens"])


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths as one array, and where they have tokens."""
    longest = max(map(len, rows))
    tokens = np.array([row + [0] * (longest - len(row)) for row in rows], np.int64)
    mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows], np.int64)
    return tokens, mask


def export() -> bytes:
    """The fused model; a portable file, so that a replica without the library would answer too."""
    torch.manual_seed(0)
    example = (torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64))
    axes = {0: "batch", 1: "sequence"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "embedder.onnx"
        report = flashonnx.export_onnx(
            Embedder().eval(), example, file, dynamic_shapes=(axes, axes), input_names=["tokens", "attention_mask"]
        )
        print(report)
        assert report.fused == report.total == 2
        return file.read_bytes()


def ask(row: list[int]) -> dict[str, Any]:
    """One request over HTTP."""
    body = json.dumps({"tokens": row}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/embed", body, timeout=60) as answer:
        return json.loads(answer.read())


def main() -> None:
    model = export()
    random = np.random.default_rng(0)
    rows = [random.integers(1, 1000, random.integers(1, 40)).tolist() for _ in range(REQUESTS)]
    alone = flashonnx.session(model)
    expected = []
    for row in rows:
        tokens, mask = padded([row])
        expected.append(alone.run(None, {"tokens": tokens, "attention_mask": mask})[0][0])

    ray.init(num_cpus=REPLICAS + 1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    try:
        serve.run(Server.bind(model), name="embed", route_prefix="/embed")
        with ThreadPoolExecutor(REQUESTS) as clients:
            answers = list(clients.map(ask, rows))
    finally:
        serve.shutdown()
        ray.shutdown()

    difference = max(np.abs(np.array(a["vector"]) - e).max() for a, e in zip(answers, expected, strict=True))
    batches, replicas = [a["batch"] for a in answers], {a["replica"] for a in answers}
    print(f"{REQUESTS} requests, {len(replicas)} replicas, batches of up to {max(batches)}")
    print(f"{difference:.1e} from the same row alone, without padding")
    assert difference < 1e-5
    assert max(batches) > 1 and len(replicas) == REPLICAS


if __name__ == "__main__":
    main()
