"""Graphs of ``onnx_ir``, for both flows: verbs on them, and what runtimes must be kept from doing to them."""
