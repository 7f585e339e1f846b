"""Sizes and speed of exports: bytes per weight over theory, GB/s over a plain copy, packing, peak memory.

    python -m benchmarks.export --parameters 100M            # sizes
    python -m benchmarks.export --parameters 1.1B --speed    # speed and memory, in a temporary folder

What is compared, each line in turns with its plain counterpart, in one process:

    export, rounding included   from float weights in memory to files of codes, over ``save_file`` of the float weights;
                                both rates count the bytes of the float weights
    reload                      files of codes to a model whose tensors are in memory of its own, over ``load_file`` and
                                a copy of every tensor of the same files (files are mapped: the copy is the reading)
    export of codes             a reloaded model to files, over ``save_file`` of the same tensors

The peak is the resident memory above that at the start of the step, looked at every 5 ms.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks import record
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

SHAPES = {  # hidden, intermediate, heads, layers
    "100M": (768, 2048, 12, 12),
    "0.3B": (2048, 5632, 32, 4),
    "1.1B": (2048, 5632, 32, 22),
}
VOCABULARY = 32000
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


class LanguageModel(nn.Module):
    """A decoder with its embedding and its head, which stay float."""

    def __init__(self, hidden: int, intermediate: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden, dtype=torch.bfloat16)
        self.decoder = Decoder(hidden, intermediate, heads, layers)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False, dtype=torch.bfloat16)


def model_of(size: str) -> nn.Module:
    """The linear layers, with random weights."""
    with torch.device("meta"):
        model = Decoder(*SHAPES[size])
    return filled(model)


def language_model(size: str) -> nn.Module:
    """The whole, with random weights."""
    with torch.device("meta"):
        model = LanguageModel(*SHAPES[size])
    return filled(model)


def filled(model: nn.Module) -> nn.Module:
    """``model`` with random weights."""
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


def speed(size: str, shard_size: int, repeats: int) -> None:
    """Export and reload against safetensors' own functions, in turns, and the memory they take."""
    model: nn.Module | None = language_model(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    state = {name: value.detach() for name, value in model.state_dict().items()}
    config = QConfig(QLayerConfig(weight=Int4PerGroupSpec(-1, 128).to_quantization_spec()), exclude=["lm_head"])
    model = ModelQuantizer(config).quantize_model(model)
    print(f"{count / 1e9:.2f} billion parameters in bfloat16, int4 groups of 128, lm_head and embedding float")
    print("| step | GB | GB/s | plain GB/s | ratio | peak, GB |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        files = folder / "model"

        def exported(source: nn.Module) -> Callable[[], object]:
            return lambda: export_safetensors(source, files, max_shard_size=shard_size)

        line("export, rounding included", 2 * count, repeats, exported(model), lambda: save_file(state, files), files)
        model = state = None
        kept = sorted(path for path in files.glob("*.safetensors"))
        written = sum(path.stat().st_size for path in kept)
        line("reload", written, repeats, lambda: resident_copy(reloaded(size, files)), lambda: plain_load(kept))
        model = resident_copy(reloaded(size, files))
        state = plain_load(kept)
        shard = max(path.stat().st_size for path in kept)
        shutil.rmtree(files)
        line("export of codes", written, repeats, exported(model), lambda: save_file(state, files), files)
    print(f"largest shard {shard / 1e9:.3f} GB, of {len(kept)}")


def line(
    name: str,
    nbytes: int,
    repeats: int,
    ours: Callable[[], object],
    plain: Callable[[], object],
    target: Path | None = None,
) -> None:
    """Measure both in turns and print a row; what they write to ``target`` is deleted, but for the last of ours."""
    times, most = [], 0.0
    for _ in range(repeats):
        remove(target)
        base = timed(plain)
        remove(target)
        peak = Peak()
        peak.start()
        times.append((timed(ours), base))
        peak.running = False
        peak.join()
        most = max(most, peak.most)
    mine, base = (median(pair[k] for pair in times) for k in (0, 1))
    ratio = median(b / a for a, b in times)
    rates = f"{nbytes / mine / 1e9:.2f} | {nbytes / base / 1e9:.2f} | {ratio:.2f}"
    print(f"| {name} | {nbytes / 1e9:.2f} | {rates} | {most / 1e9:.3f} |", flush=True)


def remove(target: Path | None) -> None:
    """Delete a file or a folder, and let the disk finish what it was given."""
    if target is not None and target.is_dir():
        shutil.rmtree(target)
    elif target is not None:
        target.unlink(missing_ok=True)
    os.sync()


def reloaded(size: str, files: Path) -> nn.Module:
    """The model of a folder."""
    with torch.device("meta"):
        skeleton = LanguageModel(*SHAPES[size])
    return import_model_from_safetensors(skeleton, files)


def resident_copy(model: nn.Module) -> nn.Module:
    """The model with its tensors in memory of its own: files are mapped, so that reading is copying."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def plain_load(files: list[Path]) -> dict[str, torch.Tensor]:
    """All tensors of the files, in memory of their own."""
    return {name: value.clone() for path in files for name, value in load_file(path).items()}


def timed(function) -> float:
    """Seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def packing() -> None:
    """GB of float32 input per second: codes to bytes; and all of it, with rounding, scales and zero points."""
    x = torch.randn(4096, 4096)
    print("| GB of float32 | per second | per CPU second |\n|---|---|---|")
    for bits, order in ((4, None), (4, AWQ_ORDER), (3, None), (5, None), (6, None)):
        codes = torch.randint(0, 1 << bits, x.shape, dtype=torch.uint8)
        name = f"pack {bits} bits{' in the order of AWQ' if order else ''}"
        rate(name, 4 * x.numel(), lambda codes=codes, bits=bits, order=order: pack(codes, bits, order=order))
    for name in ("int8 per channel", "int4 groups of 128", "MXFP4", "FP8"):
        stages = QLayerConfig(weight=SCHEMES[name][0].to_quantization_spec()).stages("weight")
        quantizer = make_quantizer(stages, name)
        calibrate_with(quantizer, x)
        rate(f"round and pack {name}", 4 * x.numel(), lambda quantizer=quantizer: store(x, quantizer))


def rate(name: str, nbytes: int, function: Callable[[], object]) -> None:
    """Print GB a second, the best of five turns."""
    wall, cpu = inf, inf
    for _ in range(5):
        start, begin = time.perf_counter(), time.process_time()
        function()
        wall, cpu = min(wall, time.perf_counter() - start), min(cpu, time.process_time() - begin)
    print(f"| {name} | {nbytes / wall / 1e9:.2f} | {nbytes / cpu / 1e9:.2f} |", flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", choices=SHAPES, default="100M")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--shard-size", type=int, default=300_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help=record.HELP)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    packing()
    if arguments.speed:
        speed(arguments.parameters, arguments.shard_size, arguments.repeats)
    else:
        sizes(arguments.parameters)


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
