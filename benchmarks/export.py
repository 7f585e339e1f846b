"""Sizes and speed of exports: bytes per weight over theory, GB/s over a plain copy, packing, peak memory.

python benchmarks/export.py --parameters 100M            # sizes
python benchmarks/export.py --parameters 1.1B --speed    # speed and memory, in a temporary folder
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.numerics.packing import AWQ_ORDER, pack
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.layout import store
from quark.torch.fake_quantize import calibrate_with, make_quantizer
from quark.torch.quantization.config.config import (
    DataTypeSpec,
    FP8E4M3PerTensorSpec,
    Int3PerGroupSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    MX6Spec,
    MX9Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)

SHAPES = {"100M": (768, 2048, 12, 12), "1.1B": (2048, 5632, 32, 22)}  # hidden, intermediate, heads, layers
SCHEMES: dict[str, tuple[DataTypeSpec, float]] = {  # and the bits per weight that the format promises
    "int8 per channel": (Int8PerChannelSpec(0, symmetric=True), 8),
    "int4 groups of 128": (Int4PerGroupSpec(-1, 128), 4 + (32 + 4) / 128),
    "uint4 groups of 128, float16 scales": (Uint4PerGroupSpec(-1, 128, scale_type="float16"), 4 + (16 + 4) / 128),
    "int3 groups of 128": (Int3PerGroupSpec(-1, 128), 3 + (32 + 3) / 128),
    "FP8": (FP8E4M3PerTensorSpec(), 8),
    "MXFP4": (OCP_MXFP4Spec(-1, False), 4 + 8 / 32),
    "MXFP6": (OCP_MXFP6E2M3Spec(-1, False), 6 + 8 / 32),
    "MX6": (MX6Spec(-1), 6),
    "MX9": (MX9Spec(-1), 9),
}


class Decoder(nn.Module):
    """The linear layers of a Llama of a given shape, in order; it is exported, not run."""

    def __init__(self, hidden: int, intermediate: int, heads: int, layers: int) -> None:
        super().__init__()
        kv = hidden // heads * max(heads // 8, 1)
        sizes = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
        sizes += [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
        made = [nn.Linear(i, o, bias=False, dtype=torch.bfloat16) for _ in range(layers) for i, o in sizes]
        self.layers = nn.ModuleList(made)


def model_of(size: str) -> Decoder:
    """Random weights."""
    with torch.device("meta"):
        model = Decoder(*SHAPES[size])
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return model


def sizes(size: str) -> None:
    """Bytes of weights, scales and zero points over what the format promises."""
    print("| scheme | bits per weight | theory | ratio |\n|---|---|---|---|")
    for name, (spec, theory) in SCHEMES.items():
        model = model_of(size)
        count = sum(parameter.numel() for parameter in model.parameters())
        model = ModelQuantizer(QConfig(QLayerConfig(weight=spec.to_quantization_spec()))).quantize_model(model)
        with tempfile.TemporaryDirectory() as folder:
            export_safetensors(model, Path(folder) / "m")
            written = sum(path.stat().st_size for path in (Path(folder) / "m").glob("*.safetensors"))
        bits = 8 * written / count
        print(f"| {name} | {bits:.4f} | {theory:.4f} | {bits / theory:.4f} |", flush=True)


class Peak(threading.Thread):
    """The largest resident size while it runs, in bytes above the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_size, self.most, self.running = resident(), 0, True

    def run(self) -> None:
        """Look every 5 ms."""
        while self.running:
            self.most = max(self.most, resident() - self.start_size)
            time.sleep(0.005)


def resident() -> int:
    """Bytes in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def speed(size: str, shard_size: int) -> None:
    """Export and reload against a plain copy with safetensors, and the memory they take."""
    model: nn.Module | None = model_of(size)
    spec = Int4PerGroupSpec(-1, 128).to_quantization_spec()
    count = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        state = {name: value.detach() for name, value in model.state_dict().items()}
        plain = timed(lambda: save_file(state, folder / "plain.safetensors"))
        back = timed(lambda: load_file(folder / "plain.safetensors"))
        nbytes = 2 * count
        (folder / "plain.safetensors").unlink()
        model = ModelQuantizer(QConfig(QLayerConfig(weight=spec))).quantize_model(model)
        peak = Peak()
        peak.start()
        ours = timed(lambda: export_safetensors(model, folder / "m", max_shard_size=shard_size))
        peak.running = False
        peak.join()
        shard = max(path.stat().st_size for path in (folder / "m").glob("*.safetensors"))
        model = None
        with torch.device("meta"):
            skeleton = Decoder(*SHAPES[size])
        reading = Peak()
        reading.start()
        again = timed(lambda: import_model_from_safetensors(skeleton, folder / "m"))
        reading.running = False
        reading.join()
        written = sum(path.stat().st_size for path in (folder / "m").glob("*.safetensors"))
    print(f"parameters {count / 1e9:.2f} e9, bfloat16, int4 groups of 128; GB/s of the bfloat16 model")
    print(f"plain save {nbytes / plain / 1e9:.2f}   export {nbytes / ours / 1e9:.2f}   ratio {plain / ours:.2f}")
    print(f"plain load {nbytes / back / 1e9:.2f}   reload {nbytes / again / 1e9:.2f}   ratio {back / again:.2f}")
    print(f"largest shard {shard / 1e9:.3f} GB, peak above the model: export {peak.most / 1e9:.3f} GB")
    print(f"reload: {reading.most / 1e9:.3f} GB for a model of {written / 1e9:.3f} GB")


def timed(function) -> float:
    """Seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def packing() -> None:
    """GB of float32 input per second: codes to bytes; and all of it, with rounding, scales and zero points."""
    x = torch.randn(4096, 4096)
    nbytes = x.numel() * 4
    for bits, order in ((4, None), (4, AWQ_ORDER), (3, None), (5, None), (6, None)):
        codes = torch.randint(0, 1 << bits, x.shape, dtype=torch.uint8)
        best = best_of(lambda codes=codes, bits=bits, order=order: pack(codes, bits, order=order))
        print(f"pack {bits} bits{' in the order of AWQ' if order else ''}: {nbytes / best / 1e9:.2f} GB/s")
    for name in ("int8 per channel", "int4 groups of 128", "MXFP4", "FP8"):
        stages = QLayerConfig(weight=SCHEMES[name][0].to_quantization_spec()).stages("weight")
        quantizer = make_quantizer(stages, lambda stage: stage.spec.granularity, name)
        calibrate_with(quantizer, x)
        best = best_of(lambda quantizer=quantizer: store(x, quantizer))
        print(f"round and pack {name}: {nbytes / best / 1e9:.2f} GB/s")


def best_of(function) -> float:
    """Seconds of the fastest of five."""
    return min(timed(function) for _ in range(5))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", choices=SHAPES, default="100M")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--shard-size", type=int, default=300_000_000)
    arguments = parser.parse_args()
    packing()
    if arguments.speed:
        speed(arguments.parameters, arguments.shard_size)
    else:
        sizes(arguments.parameters)


if __name__ == "__main__":
    main()
