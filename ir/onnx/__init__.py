"""Import of ONNX files: the only modules that read ONNX protobuf. The numbers of weights are never read."""
