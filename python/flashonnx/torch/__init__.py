"""The kernels of flashonnx as PyTorch operators: `import flashonnx.torch` registers `torch.ops.flashonnx.attention`.

    import flashonnx.torch

    y = torch.ops.flashonnx.attention(q, k, v, is_causal=True)                  # q (B, Hq, S, D), k, v (B, Hkv, S, D)
    y = torch.ops.flashonnx.attention(q, k, v, q_num_heads=16, kv_num_heads=4)  # q (B, S, Hq * D), ...
    y, present_key, present_value, lse = torch.ops.flashonnx.attention_outputs(q, k, v, present=True, lse=True)

They take what `flashonnx::FlashAttention` takes, mean the same (`flashonnx.reference` defines it) and become one such
node in `flashonnx.export_onnx`. They run on the CPU and on CUDA devices, on the current stream, on views as they are,
inside torch.compile and CUDA graphs; they have no gradient. See `attention` for the arguments.
"""

from flashonnx.torch._ops import attention, attention_outputs

__all__ = ["attention", "attention_outputs"]
