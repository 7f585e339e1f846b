"""Graph mode: convolutional models quantized on the graph that ``torch.export`` makes of them.

trace → in-place operators made functional → layers become modules → batch norms folded → placed → calibrated
"""
