"""Graph mode on real tasks: what quantization after training leaves, and what training with quantizers wins back.

    python -m benchmarks.torch_graph                          # digits and flowers
    python -m benchmarks.torch_graph --sections digits

digits    a small residual network on the 8x8 digits of scikit-learn, half of them to train and half to test
flowers   SqueezeNet 1.1 on test images; 250 images to calibrate and to train, with the answers of the float model

Each scheme is measured as it comes out of calibration, and after a few epochs in which weights and scales learn (LSQ,
or TQT for powers of two). ``onnx`` is the share of test images on which ONNX Runtime's answers are those of torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import measure, record
from quark.torch import ModelQuantizer, export_onnx, learned_scales
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer import LSQObserver, TQTObserver

SHARED = measure.ROOT.parent / "shared" / "data"
Row = dict[str, Any]


def tensor(dtype: str, observer: type | None, channels: bool = False, scale: str | None = None) -> QTensorConfig:
    """One scale a tensor, or one a channel; learned where the observer says so."""
    scheme, axis = ("per_channel", 0) if channels else ("per_tensor", None)
    return QTensorConfig(Dtype[dtype], observer_cls=observer, qscheme=scheme, ch_axis=axis, scale_type=scale)  # type: ignore[arg-type]


def layer(weights: str, inputs: str, observer: type | None = LSQObserver) -> QLayerConfig:
    """Weights per channel (but for TQT), activations per tensor."""
    channels = observer is not TQTObserver
    return QLayerConfig(input_tensors=tensor(inputs, observer), weight=tensor(weights, observer, channels))


SCHEMES = {
    "int8, min/max": layer("int8", "uint8", None),
    "int8, LSQ": layer("int8", "uint8"),
    "int8, powers of two, TQT": layer("int8", "int8", TQTObserver),
    "int4 weights, uint4 activations, LSQ": layer("int4", "uint4"),
    "int2 weights, uint2 activations, LSQ": layer("int2", "uint2"),
    "int4, powers of two, TQT": layer("int4", "int4", TQTObserver),
}


def graph_of(model: nn.Module, found: QLayerConfig, samples: Any, edges: tuple[str, ...]) -> nn.Module:
    """The quantized graph; the first and the last layer have 8 bits."""
    observer = found.weight.observer_cls  # type: ignore[union-attr]
    wide = layer("int8", "int8" if observer is TQTObserver else "uint8", observer)
    config = QConfig(found, layer_quant_config=dict.fromkeys(edges, wide), quant_mode="fx_graph_mode")  # type: ignore[arg-type]
    return ModelQuantizer(config).quantize_model(model, samples)


def learn(
    graph: nn.Module,
    batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]],
    epochs: int,
    rates: tuple[float, float],
    logarithms: bool,
) -> None:
    """Train weights and scales on (inputs, wanted logits): the divergence of the answers falls.

    The rate of a scale is relative: LSQ learns the scale itself, whose steps are in its own size; TQT its logarithm.
    """
    scales = [scale for _, scale in learned_scales(graph)]
    weights = [value for value in graph.parameters() if all(value is not scale for scale in scales)]
    sizes = [1.0 if logarithms else float(scale.detach().abs().mean()) for scale in scales]
    groups = [{"params": [scale], "lr": rates[1] * size} for scale, size in zip(scales, sizes, strict=True)]
    optimizer = torch.optim.Adam([{"params": weights, "lr": rates[0]}, *groups])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    graph.train()
    for _ in range(epochs):
        for x, wanted in batches():
            loss = nn.functional.kl_div(
                graph(x).log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="batchmean"
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    graph.eval()


class Residual(nn.Module):
    """Two convolutions with batch norms, and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [N, C, H, W]."""
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


def digits_model() -> nn.Module:
    """About 8,000 parameters."""
    stem = (nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*stem, Residual(16), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def digits_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 1, 8, 8] in 0..1 and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)


def trained_digits(x: torch.Tensor, y: torch.Tensor, epochs: int = 20) -> nn.Module:
    """The float network."""
    torch.manual_seed(0)
    model = digits_model()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def shuffled(
    x: torch.Tensor, wanted: torch.Tensor, size: int, mirror: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches in random order, the images of every second one mirrored."""
    for number, part in enumerate(torch.randperm(len(x)).split(size)):
        yield (x[part].flip(-1) if mirror and number % 2 else x[part]), wanted[part]


@torch.no_grad()
def answers(net: nn.Module, images: torch.Tensor, size: int = 50) -> torch.Tensor:
    """Classes."""
    return torch.cat([net(part).argmax(1) for part in images.split(size)])


def onnx_agrees(graph: nn.Module, images: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of images on which the exported file answers as torch does."""
    import onnxruntime

    frozen = ModelQuantizer.freeze(graph)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_onnx(frozen, folder, (images[:2],), dynamic_shapes=({0: "batch"},))
        session = onnxruntime.InferenceSession(str(Path(folder) / "quark_model.onnx"))
    name = session.get_inputs()[0].name
    found = torch.cat([torch.from_numpy(session.run(None, {name: part.numpy()})[0]) for part in images.split(50)])
    return float((found.argmax(1) == expected).double().mean())


def compare(model: nn.Module, train: torch.Tensor, test: tuple[torch.Tensor, torch.Tensor], job: Row) -> Iterator[Row]:
    """A row per scheme."""
    images, labels = test
    with torch.no_grad():
        wanted = torch.cat([model(part) for part in train.split(50)])
    right = (answers(model, images) == labels).double().mean().item()
    yield {"scheme": "float", "before": right, "after": right, "onnx": 1.0}
    for name in job["schemes"]:
        graph = graph_of(model, SCHEMES[name], train[:128].split(32), job["edges"])
        before = (answers(graph, images) == labels).double().mean().item()
        learns = any(True for _ in learned_scales(graph))
        if learns:
            torch.manual_seed(0)
            logarithms = SCHEMES[name].weight.observer_cls is TQTObserver  # type: ignore[union-attr]
            batches = partial(shuffled, train, wanted, job["size"], job["mirror"])
            learn(graph, batches, job["epochs"], job["rates"], logarithms)
        found = answers(graph, images)
        after = (found == labels).double().mean().item() if learns else None
        yield {"scheme": name, "before": before, "after": after, "onnx": onnx_agrees(graph, images, found)}


def digits(options: argparse.Namespace) -> Iterator[Row]:
    """The small network."""
    x, y = digits_data()
    half = len(x) // 2
    job = {
        "schemes": options.schemes,
        "edges": ("0", "7"),
        "size": 64,
        "epochs": 20,
        "rates": (1e-3, 1e-3),
        "mirror": False,
    }
    yield from compare(trained_digits(x[:half], y[:half]), x[:half], (x[half:], y[half:]), job)


def flowers(options: argparse.Namespace) -> Iterator[Row]:
    """SqueezeNet."""
    sys.path.insert(0, str(SHARED))
    import load_examples as load

    pairs = list(load.flower_images("test"))[:: max(1, 800 // options.images)]
    images = torch.cat([torch.from_numpy(load.caffe_input(image)) for image, _ in pairs])
    labels = torch.tensor([label for _, label in pairs])
    train = torch.cat([torch.from_numpy(feed["data"]) for feed in load.calib_flowers5()])
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))]
    model = load.torch_flowers5()
    edges = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear))
    edges = (edges[0], edges[-1])
    job = {
        "schemes": options.schemes,
        "edges": edges,
        "size": 25,
        "epochs": options.epochs,
        "rates": (3e-5, 1e-3),
        "mirror": True,
    }
    yield from compare(model, train, (images, labels), job)


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {"digits": digits, "flowers": flowers}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--schemes", nargs="*", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--images", type=int, default=400, help="test images of flowers")
    parser.add_argument("--epochs", type=int, default=4, help="of training on flowers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help=record.HELP)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report: Row = {"machine": measure.machine()}
    for name in options.sections:
        print(f"| {name} | after calibration | after training | ONNX agrees |\n|---|---|---|---|", flush=True)
        report[name] = []
        for row in SECTIONS[name](options):
            report[name].append(row)
            after = "" if row["after"] is None else f"{row['after']:.4f}"
            print(f"| {row['scheme']} | {row['before']:.4f} | {after} | {row['onnx']:.4f} |", flush=True)
        print()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
