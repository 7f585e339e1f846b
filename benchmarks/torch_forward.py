"""What fake quantization costs a PyTorch model at run time, and how much of the model it leaves.

    python -m benchmarks.torch_forward                     # forward over float forward, per scheme; one thread
    python -m benchmarks.torch_forward --windows 40        # and perplexity on 40 windows of 256 tokens

The model is the 5M-parameter Llama of the shared folder (real weights and text); ``--toy`` takes a random one instead.
Float and quantized forwards take turns, and the medians are compared, so that a busy machine slows both. Weights are
quantized at the first forward, which is timed for itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import measure, record
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    AmdFP4Spec,
    BFP16Spec,
    FP4PerGroupSpec,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    MX9Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP8E4M3Spec,
    OCP_MXINT8Spec,
    QConfig,
    QLayerConfig,
    ScaleQuantSpec,
    Uint4PerGroupSpec,
)

SHARED = measure.ROOT.parent / "shared" / "data"
WINDOW = 256
LIMIT = 3.0
NVFP4 = ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec())
SCHEMES: dict[str, tuple[Any, Any]] = {  # weight, input
    "int8 static": (Int8PerTensorSpec(), Int8PerTensorSpec()),
    "int8 dynamic": (Int8PerTensorSpec(), Int8PerTensorSpec(is_dynamic=True)),
    "int8 per channel, per token": (Int8PerChannelSpec(0, True), Int8PerChannelSpec(1, True, is_dynamic=True)),
    "fp8 static": (FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec()),
    "fp8 dynamic": (FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec(is_dynamic=True)),
    "fp8 per channel, per token": (FP8E4M3PerChannelSpec(0), FP8E4M3PerChannelSpec(1, is_dynamic=True)),
    "int4 groups of 32, weights only": (Int4PerGroupSpec(-1, 32), None),
    "int4 groups of 64, weights only": (Int4PerGroupSpec(-1, 64), None),
    "int4 groups of 128 (down_proj: 64), weights only": (Int4PerGroupSpec(-1, 128), None),
    "uint4 groups of 32, weights only": (Uint4PerGroupSpec(-1, 32), None),
    "int4 groups of 64": (Int4PerGroupSpec(-1, 64), Int4PerGroupSpec(-1, 64, is_dynamic=True)),
    "mxfp8 e4m3": (OCP_MXFP8E4M3Spec(-1), OCP_MXFP8E4M3Spec(-1)),
    "mxfp6 e2m3": (OCP_MXFP6E2M3Spec(-1), OCP_MXFP6E2M3Spec(-1)),
    "mxfp4": (OCP_MXFP4Spec(-1), OCP_MXFP4Spec(-1)),
    "mxint8": (OCP_MXINT8Spec(-1), OCP_MXINT8Spec(-1)),
    "mx6": (MX6Spec(-1), MX6Spec(-1)),
    "mx9": (MX9Spec(-1), MX9Spec(-1)),
    "bfp16": (BFP16Spec(-1), BFP16Spec(-1)),
    "nvfp4": (NVFP4, NVFP4),
    "amd fp4": (AmdFP4Spec(-1, 16), AmdFP4Spec(-1, 16)),
}


def real_model() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """The Llama with token ids to calibrate on and to measure with."""
    sys.path.insert(0, str(SHARED))
    import load_examples

    model, tokenizer = load_examples.torch_shakespeare()
    parts = (torch.tensor(load_examples.shakespeare_ids(tokenizer, part)) for part in ("train", "test"))
    return model, *parts


def toy_model() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A random Llama of two small layers and random ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
    return model, torch.randint(256, (4 * WINDOW,)), torch.randint(256, (4 * WINDOW,))


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def quantized(model: torch.nn.Module, scheme: str, ids: torch.Tensor) -> torch.nn.Module:
    """A quantized copy of ``model``; the output layer stays float, as is usual."""
    weight, activation = (spec and spec.to_quantization_spec() for spec in SCHEMES[scheme])
    smaller = {"*down_proj": QLayerConfig(weight=Int4PerGroupSpec(-1, 64).to_quantization_spec())}  # 704 inputs
    layer = QLayerConfig(input_tensors=activation, weight=weight)
    config = QConfig(layer, exclude=["lm_head"], layer_quant_config=smaller if "128" in scheme else {})
    samples = [ids[None, k * WINDOW : (k + 1) * WINDOW] for k in range(4)]
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model), samples)


def perplexity(model: torch.nn.Module, ids: torch.Tensor, windows: int) -> float:
    """exp of the mean loss over the first ``windows`` windows."""
    losses = []
    for k in range(min(windows, (len(ids) - 1) // WINDOW)):
        part = ids[k * WINDOW : (k + 1) * WINDOW + 1]
        losses.append(torch.nn.functional.cross_entropy(model(part[None, :-1]).logits[0].float(), part[1:]))
    return float(torch.stack(losses).mean().exp())


def measured(
    model: torch.nn.Module, scheme: str, data: tuple[torch.Tensor, torch.Tensor], options: Any
) -> dict[str, Any]:
    """One line: times, ratio and quality of a scheme."""
    calibration, test = data
    x = test[None, :WINDOW]
    start = time.perf_counter()
    twin = quantized(model, scheme, calibration)
    line: dict[str, Any] = {"scheme": scheme, "quantize_s": time.perf_counter() - start}
    line["first_forward_s"] = seconds(lambda: twin(x))
    pairs = [(seconds(lambda: model(x)), seconds(lambda: twin(x))) for _ in range(options.repeats)]
    line["float_ms"], line["quantized_ms"] = (1e3 * median(times) for times in zip(*pairs, strict=True))
    line["ratio"] = median(b / a for a, b in pairs)
    reference = model(x).logits
    line["relative_error"] = float((twin(x).logits - reference).norm() / reference.norm())
    if options.windows:
        line["perplexity"] = perplexity(twin, test, options.windows)
    return line


IMPORT = """
import time, torch
start = time.perf_counter(), time.process_time()
import quark.torch
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""


def import_seconds(repeats: int) -> tuple[float, float]:
    """What ``import quark.torch`` adds to ``import torch``, wall and processor time: medians over fresh processes."""
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
    wall, cpu = zip(*(map(float, run.split()) for run in runs), strict=True)
    return median(wall), median(cpu)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and exit with 1 where a scheme is slower than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="*", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--windows", type=int, default=0, help="windows of text for the perplexity; 0: none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="a small random model")
    parser.add_argument("--json", type=Path, help=record.HELP)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model, *data = toy_model() if options.toy else real_model()
    wall, cpu = import_seconds(3)
    report: dict[str, Any] = {"machine": measure.machine(), "import_s": wall, "import_cpu_s": cpu, "lines": []}
    print(f"import quark.torch adds {wall:.2f} s ({cpu:.2f} s of the processor) to import torch")
    with torch.no_grad():
        if options.windows:
            report["perplexity"] = perplexity(model, data[1], options.windows)
            print(f"perplexity of the float model: {report['perplexity']:.3f}")
        print(
            "| scheme | quantize s | first forward s | float ms | quantized ms | ratio | relative error | perplexity |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for scheme in options.schemes:
            line = measured(model, scheme, tuple(data), options)
            report["lines"].append(line)
            print(row(line), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    slow = [line["scheme"] for line in report["lines"] if line["ratio"] > LIMIT]
    print(f"over {LIMIT} times float: {', '.join(slow)}" if slow else f"every scheme within {LIMIT} times float")
    return int(bool(slow) and not options.toy)


def row(line: dict[str, Any]) -> str:
    """A line of the table."""
    quality = f"{line['perplexity']:.3f}" if "perplexity" in line else "–"
    return (
        f"| {line['scheme']} | {line['quantize_s']:.2f} | {line['first_forward_s']:.2f} | {line['float_ms']:.0f} "
        f"| {line['quantized_ms']:.0f} | {line['ratio']:.2f} | {line['relative_error']:.4f} | {quality} |"
    )


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
