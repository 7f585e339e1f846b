"""How fast networks run whose weights nobody trained: float, `A8W8_CPU` and ONNX Runtime's own quantizer, taking turns.

    python -m benchmarks.networks                          # every network below, on one thread
    python -m benchmarks.networks --networks bert mish --threads 1 2

Architectures of transformers and small networks by hand, one for each kind of kernel: what is measured is which kernels
run, not what they answer. Weights are random, the normalizations' statistics too; exported by torch at opset 17, those
of text by its newer exporter. Timed as in `benchmarks.latency`, with its table; then the SQNR of the first output, on a
sample that was calibrated on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import latency, record
from quark.numerics.metrics import sqnr

SAMPLES, OPSET = 3, 17
SMALL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
#: Class of transformers, its configuration, and the shape of the input; none: 64 token ids.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], tuple[int, ...] | None]] = {
    "resnet": ("ResNet", {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}, (1, 3, 128, 128)),
    "mobilenet_v2": ("MobileNetV2", {"depth_multiplier": 0.75}, (1, 3, 128, 128)),
    "convnext": ("ConvNext", {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2]}, (1, 3, 128, 128)),
    "poolformer": ("PoolFormer", {"hidden_sizes": [32, 64, 160, 256], "depths": [2, 2, 4, 2]}, (1, 3, 128, 128)),
    "levit": ("Levit", {"image_size": 128, "hidden_sizes": [64, 128, 192]}, (1, 3, 128, 128)),
    "vit": ("ViT", {"image_size": 128, **SMALL}, (1, 3, 128, 128)),
    "swin": ("Swin", {"image_size": 128, "embed_dim": 48, "depths": [2, 2, 2, 2], "window_size": 4}, (1, 3, 128, 128)),
    "segformer": ("Segformer", {"hidden_sizes": [16, 32, 80, 128]}, (1, 3, 128, 128)),
    "bert": ("Bert", {"vocab_size": 1000, "attn_implementation": "eager", **SMALL}, None),
    "gpt_neox": ("GPTNeoX", {"vocab_size": 1000, "use_cache": False, "attn_implementation": "eager", **SMALL}, None),
    "llama": ("Llama", {"vocab_size": 1000, "use_cache": False, "attn_implementation": "eager", **SMALL}, None),
    "wav2vec2": ("Wav2Vec2", {"conv_dim": [128] * 7, "num_conv_pos_embedding_groups": 8, **SMALL}, (1, 16000)),
}


def stack(widths: list[int], act: Callable[[int], nn.Module], kernel: int = 3, one: bool = False) -> nn.Sequential:
    """Convolutions, normalizations and activation functions; the size halves where the width grows."""
    layers: list[nn.Module] = []
    for read, made in pairwise(widths):
        if one:
            layers += [nn.Conv1d(read, made, kernel, padding=kernel // 2), act(made)]
        else:
            layers += [nn.Conv2d(read, made, kernel, 1 + (read < made), kernel // 2), nn.BatchNorm2d(made), act(made)]
    return nn.Sequential(*layers)


class Shuffled(nn.Module):
    """ShuffleNet's block: one half goes through three convolutions, then the channels change places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        depthwise = nn.Conv2d(half, half, 3, padding=1, groups=half)
        self.branch = nn.Sequential(stack([half, half], relu, 1), depthwise, stack([half, half], relu, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, channels, height, width] in, the same out."""
        kept, read = x.chunk(2, 1)
        both = torch.cat([kept, self.branch(read)], 1)
        count, channels, height, width = both.shape
        return both.view(count, 2, channels // 2, height, width).transpose(1, 2).reshape(both.shape)


def relu(_: int) -> nn.Module:
    """A Relu, whatever the width."""
    return nn.ReLU()


WIDTHS = [3, 32, 32, 64, 64, 128, 128]
#: Networks by hand: what makes one, and the shape of its input.
BY_HAND: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: stack(WIDTHS, relu), (1, 3, 128, 128)),
    "silu": (lambda: stack(WIDTHS, lambda _: nn.SiLU()), (1, 3, 128, 128)),
    "mish": (lambda: stack(WIDTHS, lambda _: nn.Mish()), (1, 3, 128, 128)),
    "prelu": (lambda: stack(WIDTHS, nn.PReLU), (1, 3, 128, 128)),
    "elu": (lambda: stack(WIDTHS, lambda _: nn.ELU()), (1, 3, 128, 128)),
    "elu of sounds": (lambda: stack([1, 32, 32, 64, 64], lambda _: nn.ELU(), 7, True), (1, 1, 8000)),
    "shuffled": (lambda: nn.Sequential(stack([3, 116], relu), *(Shuffled(116) for _ in range(6))), (1, 3, 64, 64)),
}


class First(nn.Module):
    """The first tensor that a model makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the model in, its first output out."""
        found = self.model(x)
        return found if isinstance(found, torch.Tensor) else found[0]


def built(name: str) -> tuple[nn.Module, tuple[int, ...] | None]:
    """A network with random weights, and the shape of its input."""
    torch.manual_seed(0)
    if name in BY_HAND:
        make, shape = BY_HAND[name]
        model: nn.Module = make()
    else:
        kind, settings, of_input = ARCHITECTURES[name]
        config = getattr(transformers, f"{kind}Config")(**settings)
        model, shape = getattr(transformers, f"{kind}Model")(config), of_input  # type: ignore[assignment]
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.running_mean, 0, 0.3)  # type: ignore[arg-type]
            nn.init.uniform_(one.running_var, 0.5, 2)  # type: ignore[arg-type]
        if isinstance(one, nn.PReLU):
            nn.init.uniform_(one.weight, -0.05, 0.5)
    return First(model).eval(), shape


def rows_of(told: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row a network and number of threads, as in `benchmarks.latency`."""
    rows = []
    for name in told.networks:
        model, shape = built(name)
        samples = [torch.randint(1000, (1, 64)) if shape is None else torch.randn(shape) for _ in range(SAMPLES)]
        path, feeds = folder / f"{name.replace(' ', '_')}.onnx", [{"x": one.numpy()} for one in samples]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            how = {"dynamo": False, "opset_version": OPSET} if shape else {"dynamo": True, "verbose": False}
            torch.onnx.export(model, (samples[0],), str(path), input_names=["x"], **how)
        paths = latency.variants(name.replace(" ", "_"), path, feeds, folder, None)
        answers = {who: latency.session(one, 1).run(None, feeds[0])[0] for who, one in paths.items()}
        decibels = {who: float(sqnr(answers["float"], one)) for who, one in answers.items() if who != "float"}
        for threads in told.threads:
            found = latency.times(paths, feeds[0], threads, told.rounds)
            rows.append({"model": name, "threads": threads, "milliseconds": found, "metrics": decibels})
            print(f"{name}, {threads} threads: {found}, SQNR {decibels}", file=sys.stderr)
    return rows


def main() -> int:
    """Print the tables, and what the first outputs keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ARCHITECTURES, *BY_HAND]
    parser.add_argument("--networks", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help=record.HELP)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = rows_of(told, Path(name))
    for threads in told.threads:
        print(latency.table(rows, threads) + "\n")
    print(latency.metric_table(rows))
    if told.json:
        told.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
