"""The operator in ONNX: its schema, and the standard operators that its body consists of."""
