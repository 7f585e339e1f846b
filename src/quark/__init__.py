"""quark: one toolkit that quantizes PyTorch and ONNX models. Importing it costs nothing; import a flow to work."""

__version__ = "0.13.0"
