"""How fast flashonnx is beside its peers: see README.md in this folder, and `python -m benchmarks --help`."""
