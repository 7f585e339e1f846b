"""What each algorithm leaves of a language model: perplexity, and mean KL divergence to the float model's logits.

    python -m benchmarks.llm_accuracy [--windows 24] [--samples 32] [--schemes int4 int2] [--algorithms gptq awq]
    python -m benchmarks.llm_accuracy --model stories      # stories260K, on stories that it wrote
    python -m benchmarks.llm_accuracy --outliers     # the same function with 1 % of channels fifty times as large
    python -m benchmarks.llm_accuracy --peer-python PATH   # the peer's rounding, GPTQ and AWQ on the same data

llama is the 5M-parameter Llama of the shared folder: calibrated on windows of 256 tokens of the first 92 % of its text,
measured on the last 8 %. stories260K is calibrated on the first stories of its set (128 tokens each), measured on the
last; layers whose 172 inputs groups of 32 do not divide have groups of 43. Small models lose little perplexity at 4
bits, so the divergence decides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, record
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    AdaQuantConfig,
    AdaRoundConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    HQQConfig,
    Int2PerGroupSpec,
    Int3PerGroupSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
JOB = Path(__file__).parent / "peers" / "llm_accuracy_job.py"
LENGTH, PART, STORY, GROUP, ODD = 256, 0.92, 128, 32, 43
INT4 = Int4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
TOKENS8 = Int8PerChannelSpec(symmetric=True, ch_axis=1, is_dynamic=True).to_quantization_spec()
GROUPS4 = Int4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=True).to_quantization_spec()
SCHEMES = {
    "int4": QLayerConfig(weight=INT4),
    "int3": QLayerConfig(weight=Int3PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()),
    "int2": QLayerConfig(weight=Int2PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()),
    "mxfp4": QLayerConfig(weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()),
    "w8a8": QLayerConfig(
        weight=Int8PerChannelSpec(symmetric=True, ch_axis=0).to_quantization_spec(), input_tensors=TOKENS8
    ),
    "w4a8": QLayerConfig(weight=INT4, input_tensors=TOKENS8),
    "w4a4": QLayerConfig(weight=INT4, input_tensors=GROUPS4),
}
ALGORITHMS: dict[str, list[Any] | None] = {
    "rtn": None,
    "hqq": [HQQConfig()],
    "smoothquant": [SmoothQuantConfig(alpha=0.5)],
    "autosmoothquant": [AutoSmoothQuantConfig()],
    "awq": [AWQConfig()],
    "quarot": [RotationConfig(r2=True, r4=True)],
    "gptq": [GPTQConfig()],
    "gptaq": [GPTAQConfig()],
    "qronos": [QronosConfig()],
    "adaround": [AdaRoundConfig()],
    "adaquant": [AdaQuantConfig()],
    "autoround": [AutoRoundConfig(iters=100, lr=0.01, minmax_lr=0.01)],
    "svdquant": [SVDQuantConfig(svd_rank=8, min_layer_size=32)],
    "quarot+qronos": [RotationConfig(r2=True, r4=True), QronosConfig()],
    "smoothquant+qronos": [SmoothQuantConfig(alpha=0.5), QronosConfig()],
    "awq+qronos": [AWQConfig(), QronosConfig()],
}


def examples() -> Any:
    """The loaders beside the models."""
    sys.path.insert(0, str(DATA))
    import load_examples

    return load_examples


def load_llama() -> torch.nn.Module:
    """The 5M-parameter Llama."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DATA / "models" / "shakespeare_llama_5m", dtype=torch.float32).eval()


def load_outliers() -> torch.nn.Module:
    """Its twin with outliers in what the norms write; the same function."""
    model, generator = load_llama(), torch.Generator().manual_seed(1)
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        readers = {
            block.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            block.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        with torch.no_grad():
            for norm, layers in readers.items():
                channels = torch.randperm(len(norm.weight), generator=generator)[: max(1, len(norm.weight) // 100)]
                norm.weight[channels] *= 50
                for layer in layers:
                    layer.weight[:, channels] /= 50
    return model


def shakespeare(samples: int, windows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Calibration samples and windows to measure on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DATA / "models" / "shakespeare_llama_5m")
    ids = torch.tensor(tokenizer((DATA / "data" / "tinyshakespeare.txt").read_text())["input_ids"])
    cut = int(len(ids) * PART)
    starts = torch.randint(0, cut - LENGTH, (samples,), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = [ids[cut + k * LENGTH : cut + (k + 1) * LENGTH][None] for k in range(windows)]
    return [ids[start : start + LENGTH][None] for start in starts], held_out


def load_stories() -> torch.nn.Module:
    """stories260K; rotations ask a model for the width of a head."""
    model = examples().torch_stories()
    model.head_dim = 8
    return model


def stories(samples: int, windows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Calibration samples and windows to measure on."""
    ids = torch.from_numpy(examples().token_ids())[:, :STORY]
    return list(ids[:samples, None]), list(ids[-windows:, None])


MODELS = {
    "llama": (load_llama, shakespeare, "lm_head"),
    "outliers": (load_outliers, shakespeare, "lm_head"),
    "stories": (load_stories, stories, "output"),
}


@torch.no_grad()
def logits(model: torch.nn.Module, windows: list[torch.Tensor]) -> torch.Tensor:
    """Log-probabilities, [windows, length, vocabulary]."""
    answers = [model(window) for window in windows]
    return torch.cat([getattr(answer, "logits", answer) for answer in answers]).log_softmax(-1)


def other_groups(model: torch.nn.Module, layer: QLayerConfig) -> dict[str, QLayerConfig]:
    """The same with groups of 43, for layers whose inputs groups of 32 do not divide."""

    def fitted(tensor: Any) -> Any:
        return replace(tensor, group_size=ODD) if tensor is not None and tensor.group_size == GROUP else tensor

    odd = replace(layer, weight=fitted(layer.weight), input_tensors=fitted(layer.input_tensors))
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    block = layer.weight.dtype is OCP_MXFP4Spec(ch_axis=-1).to_quantization_spec().dtype  # pads its last block
    return {} if block else {name: odd for name, part in linear if part.in_features % GROUP}


def of_peer(options: argparse.Namespace) -> list[list[str]]:
    """The peer's rows, on the same samples and windows."""
    jobs = [f"{scheme}:{name}" for scheme in ("int4", "int3") for name in ("rtn", "gptq", "awq")]
    command = [options.peer_python, str(JOB), str(DATA), str(options.samples), str(options.windows), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, env=measure.job_environment(options.peer_python))
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [[scheme, name, f"{ppl:.3f}", f"{1e3 * kl:.2f}", f"{s:.1f}"] for scheme, name, ppl, kl, s in found]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--model", choices=[name for name in MODELS if name != "outliers"], default="llama")
    parser.add_argument("--outliers", action="store_true")
    parser.add_argument("--peer-python", help="the interpreter of the peer's environment")
    parser.add_argument("--json", type=Path, help=record.HELP)
    chosen = parser.parse_args()
    if chosen.peer_python:
        print(measure.table(["scheme", "algorithm", "perplexity", "KL x 1000", "CPU s"], of_peer(chosen)))
        return
    torch.set_num_threads(1)
    make, data, head = MODELS["outliers" if chosen.outliers else chosen.model]
    samples, windows = data(chosen.samples, chosen.windows)
    reference = logits(make(), windows)
    following = torch.cat([window[:, 1:] for window in windows])
    rows = []
    for scheme in chosen.schemes:
        for name in chosen.algorithms:
            model = make()
            layer, odd = SCHEMES[scheme], other_groups(model, SCHEMES[scheme])
            config = QConfig(layer, layer_quant_config=odd, exclude=[head], algo_config=ALGORITHMS[name])
            start = time.process_time()
            model = ModelQuantizer(config).quantize_model(model, samples)
            seconds = time.process_time() - start
            found = logits(model, windows)
            divergence = float((reference.exp() * (reference - found)).sum(-1).mean())
            perplexity = float(torch.exp(-found[:, :-1].gather(2, following[..., None]).mean()))
            rows.append([scheme, name, f"{perplexity:.3f}", f"{1e3 * divergence:.2f}", f"{seconds:.1f}"])
            print(" ".join(rows[-1]), flush=True)
    print(measure.table(["scheme", "algorithm", "perplexity", "KL x 1000", "CPU s"], rows))


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
