"""Quantize/dequantize: placement, parameters, kinds of nodes and emission."""
