"""Round-to-nearest of a large checkpoint from disk to disk, against what reading and writing its bytes costs.

    python -m benchmarks.torch_files                       # the shape of TinyLlama: 1.1 billion parameters, 2.2 GB
    python -m benchmarks.torch_files --layers 4            # a part of it
    python -m benchmarks.torch_files --torchao             # and torchao, int8 per channel, in memory

The weights are random, and made and written a tensor at a time. The base is one run over the same files: every tensor
is read, multiplied by 1 in place, and written. Base and quantization take turns. Processor seconds are those of the
process, without the imports of torch and transformers, which take place before; peak memory is that of a process of its
own, without what its imports take.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open

from benchmarks import measure, record
from quark.torch import LLMTemplate
from quark.torch.export.shards import Item, write_file, write_shards
from quark.torch.files import quantize_checkpoint

HIDDEN, INNER, VOCABULARY, KV = 2048, 5632, 32000, 256
LIMIT = 1.5
GIGA = 1 << 30


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for k in range(layers):
        block = f"model.layers.{k}"
        for name, rows in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            found[f"{block}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        found |= {f"{block}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{block}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{block}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make(folder: Path, layers: int, shard_size: int) -> int:
    """Write a random checkpoint; parameters."""
    generator = torch.Generator().manual_seed(0)

    def item(name: str, shape: tuple[int, ...]) -> Item:
        dtype = torch.bfloat16
        return Item({name: (shape, dtype)}, lambda: {name: torch.randn(shape, generator=generator).to(dtype) / 45})

    items = [item(*entry) for entry in shapes(layers).items()]
    write_shards(folder, items, shard_size=shard_size)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**names, **sizes, **heads, "tie_word_embeddings": False}))
    return sum(item.size for item in items) // 2


def base(source: Path, target: Path) -> None:
    """Read, multiply by one, write."""
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            write_file(target / path.name, [one(file, name) for name in file.keys()])  # noqa: SIM118


def one(file: Any, name: str) -> Item:
    """A tensor times one."""
    view = file.get_slice(name)
    return Item({name: (tuple(view.get_shape()), torch.bfloat16)}, lambda: {name: file.get_tensor(name).mul_(1)})


def ours(source: Path, target: Path, scheme: str) -> None:
    """Quantize."""
    quantize_checkpoint(source, target, LLMTemplate.get("llama").get_config(scheme))


def timed(function: Any, target: Path) -> dict[str, float]:
    """Wall and processor seconds; what was written is deleted."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    found = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    shutil.rmtree(target)
    return found


PEAK = """
import sys
from pathlib import Path
from benchmarks import torch_files
import transformers.models.llama.modeling_llama, quark.torch.export.api
before = torch_files.highest()
torch_files.ours(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(torch_files.highest() - before)
"""


def highest() -> int:
    """Most bytes that this program has had in memory; ``ru_maxrss`` of a child begins with that of its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text()).group(1))  # type: ignore[union-attr]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak(source: Path, target: Path, scheme: str) -> float:
    """Bytes that a process takes more than its imports."""
    command = [sys.executable, "-c", PEAK, str(source), str(target), scheme]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(target)
    return float(run.stdout.split()[-1])


def torchao_seconds(layers: int) -> dict[str, float]:
    """torchao's int8 weight-only on the same shapes, in memory, one layer at a time, without files."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    total, start = 0.0, time.process_time()
    for name, shape in shapes(layers).items():
        if "_proj" in name:
            layer = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
            before = time.perf_counter()
            quantize_(torch.nn.Sequential(layer), Int8WeightOnlyConfig())
            total += time.perf_counter() - before
    return {"seconds": total, "cpu": time.process_time() - start}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--schemes", nargs="*", default=["int4_wo_128", "int8_wo_per_channel"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shard", type=float, default=0.5, help="GB a file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written")
    parser.add_argument("--torchao", action="store_true", help="torchao's int8 weight-only beside, in memory")
    parser.add_argument("--json", type=Path, help=record.HELP)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    import_module("transformers.models.llama.modeling_llama")
    report: dict[str, Any] = {"machine": measure.machine(), "lines": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        source.mkdir()
        report["parameters"] = make(source, options.layers, int(options.shard * 1e9))
        billions = report["parameters"] / 1e9
        print(f"{billions:.2f} billion parameters in {len(list(source.glob('*.safetensors')))} files")
        print("| scheme | s per billion | CPU s per billion | times the base, wall | CPU | peak, files |")
        print("|---|---|---|---|---|---|")
        for scheme in options.schemes:
            runs = [
                (timed(lambda: base(source, target), target), timed(lambda: ours(source, target, scheme), target))  # noqa: B023
                for _ in range(options.repeats)
            ]
            line = {"scheme": scheme, "peak": peak(source, target, scheme)}
            for kind in ("seconds", "cpu"):
                line[kind] = median(b[kind] for _, b in runs) / billions
                line[f"{kind}_ratio"] = median(b[kind] / a[kind] for a, b in runs)
            report["lines"].append(line)
            sizes = (line["peak"] / GIGA, line["peak"] / max(p.stat().st_size for p in source.glob("*.safetensors")))
            ratios = f"{line['seconds_ratio']:.2f} | {line['cpu_ratio']:.2f} | {sizes[0]:.2f} GiB, {sizes[1]:.2f}"
            print(f"| {scheme} | {line['seconds']:.1f} | {line['cpu']:.1f} | {ratios} |", flush=True)
        if options.torchao:
            report["torchao"] = torchao_seconds(options.layers)
            print(f"torchao int8 weight-only, no files: {report['torchao']['seconds'] / billions:.1f} s per billion")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return int(any(line["seconds_ratio"] > LIMIT for line in report["lines"]))


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
