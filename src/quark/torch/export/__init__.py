"""Export of quantized models and their reload: one file per format."""
