"""Whole models in ONNX Runtime: see README.md one folder up, and `python -m benchmarks.end_to_end --help`."""
