"""The one arithmetic of the project: formats, rounding, scales, granularity, quantize and dequantize, metrics.

Every function takes NumPy arrays or torch tensors (CPU or GPU) and gives the same bits on all of them; torch is never
imported here.
"""
