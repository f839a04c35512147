"""The rim: the only modules that read ONNX protobuf. Weights are never read."""
