"""Measurements that are no tests: speed, memory, fidelity and latency, beside two peers on the same machine.

    python -m benchmarks.onnx_ptq      time and peak memory of one quantization; `--latency` for the quantized models
    python -m benchmarks.fidelity      signal-to-noise ratio and task metrics of the quantized models

Every benchmark takes ``--json FILE`` (``benchmarks.record``); ``benchmarks.page`` prints RESULTS.md from such files.
"""
