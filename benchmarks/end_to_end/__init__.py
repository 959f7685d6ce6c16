"""Whole models in ONNX Runtime: see the section of README.md one folder up, and `python -m benchmarks.end_to_end --help`."""
