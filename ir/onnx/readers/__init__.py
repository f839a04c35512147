"""Reads the parts of an ONNX file into plain values, and checks them."""
