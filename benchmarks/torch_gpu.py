"""The torch flow on a CUDA device: what quantizing costs, what evaluating a quantized model costs over the float one.

    python -m benchmarks.torch_gpu                        # 8 layers of the shape of TinyLlama, bfloat16, random weights
    python -m benchmarks.torch_gpu --layers 22 --samples 64

Seconds are wall time with the device waited for, after one warm-up; memory is the device's peak over the float model's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from quark.errors import QuarkError
from quark.torch import LLMTemplate, ModelQuantizer

SCHEMES = ("int8_wo_per_channel", "int4_wo_128", "fp8", "ptpc_fp8", "fp8_block", "mxfp4", "mxfp8", "nvfp4", "mx6")
ALGORITHMS = ("gptq", "gptaq", "qronos", "awq", "smoothquant", "rotation", "autoround")


def model(layers: int) -> Any:
    """Random weights in the shape of TinyLlama, bfloat16, on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=32000, num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of a call, the device waited for, and its result."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


@torch.no_grad()
def forward(net: Any, ids: torch.Tensor) -> float:
    """Least seconds of five forward passes."""
    net(ids)
    return min(seconds(lambda: net(ids))[0] for _ in range(5))


def row(name: str, layers: int, data: list[torch.Tensor], bare: float, **how: Any) -> dict[str, Any]:
    """One scheme or algorithm: seconds to quantize, forward over float before and after freezing, peak memory."""
    gc.collect()
    torch.cuda.empty_cache()
    net = model(layers)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    config = LLMTemplate.get("llama").get_config(**how)
    try:
        took, net = seconds(partial(ModelQuantizer(config).quantize_model, net, data))
    except QuarkError as error:
        return {"name": name, "refused": str(error)}
    peak = torch.cuda.max_memory_allocated() - base
    ratio = forward(net, data[0]) / bare
    frozen = forward(ModelQuantizer.freeze(net), data[0]) / bare
    return {"name": name, "seconds": took, "forward": ratio, "frozen": frozen, "peak_gb": peak / 1e9}


def main() -> None:
    """Print the table as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--json", type=Path, help=record.HELP)
    told = parser.parse_args()
    data = list(torch.randint(0, 32000, (told.samples, 1, 512), device="cuda"))
    bare = forward(model(told.layers), data[0])
    rows = [{"device": torch.cuda.get_device_name(), "torch": torch.__version__, "float forward": bare}]
    print(json.dumps(rows[0]))
    jobs = [{"scheme": name} for name in SCHEMES]
    jobs += [{"scheme": "int4_wo_128", "algorithm": name} for name in ALGORITHMS]
    for job in jobs:
        rows.append(row(job.get("algorithm", job["scheme"]), told.layers, data, bare, **job))
        print(json.dumps(rows[-1]), flush=True)
    if told.json:
        told.json.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
