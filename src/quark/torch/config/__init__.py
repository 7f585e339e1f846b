"""The torch dialect: what users write, and what it compiles to. ``quark.torch.quantization`` holds the public paths."""
