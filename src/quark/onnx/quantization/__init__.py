"""The public paths of the ONNX dialect."""
