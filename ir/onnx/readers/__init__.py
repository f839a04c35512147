"""Parts of an ONNX file as plain values."""
