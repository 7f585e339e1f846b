"""Small command-line tools: ``python -m quark.onnx.tools.<name>``."""
