"""The way from PyTorch: scaled_dot_product_attention, transformers, and what torch's exporter gets wrong."""
