"""Quantize/dequantize: placement, parameters, carriers and emission."""
