"""Train the demo's network and write ``digits.onnx`` and ``digits.npz`` into the package.

A small residual network (conv-BN-ReLU blocks, one depthwise convolution, two residual additions, 0.4 M parameters) on
scikit-learn's digits enlarged to 32×32. The BatchNorms stay in the file as nodes, as in many real exports. Needs the
``torch`` and ``onnx`` extras and scikit-learn; a few minutes on two cores:

    python examples/train_digits.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from quark.demo.data import HELD_OUT, INPUT, preprocess

PACKAGE = Path(__file__).parents[1] / "src" / "quark" / "demo"


def block(inputs: int, outputs: int, stride: int = 1, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    """Convolution, batch normalization, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """``relu(x + f(x))`` with two 3×3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = block(channels, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result: ``[N, channels, H, W]``."""
        return F.relu(x + self.norm(self.second(self.first(x))))


class Digits(nn.Module):
    """image ``[N, 1, 32, 32]`` to logits ``[N, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            block(1, 32),
            block(32, 64, stride=2),
            Residual(64),
            block(64, 64, stride=2, groups=64),
            block(64, 128, kernel=1),
            Residual(128),
        )
        self.head = nn.Linear(128, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        return self.head(self.body(image).mean((2, 3)))


def shifted(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The batch moved by up to two pixels in each direction."""
    down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return torch.roll(batch, (down, right), (2, 3))


def train(inputs: torch.Tensor, labels: torch.Tensor, epochs: int, seed: int) -> Digits:
    """Adam with a one-cycle learning rate."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network, batch = Digits(), 64
    steps = -(-len(inputs) // batch) * epochs
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for epoch in range(epochs):
        for index in torch.randperm(len(inputs), generator=generator).split(batch):
            loss = F.cross_entropy(network(shifted(inputs[index], generator)), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}/{epochs}  loss {loss.item():.4f}", flush=True)
    return network.eval()


def export(network: Digits, path: Path) -> None:
    """Write ``network`` as ONNX with its BatchNorms kept as nodes and a free batch size."""
    torch.onnx.export(
        network,
        (torch.zeros(1, 1, 32, 32),),
        str(path),
        input_names=[INPUT],
        output_names=["logits"],
        dynamic_axes={INPUT: {0: "N"}, "logits": {0: "N"}},
        opset_version=17,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE,
        dynamo=False,
    )


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=PACKAGE)
    options = parser.parse_args()
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    inputs, targets = torch.from_numpy(preprocess(images)), torch.from_numpy(labels.astype(np.int64))
    network = train(inputs[:-HELD_OUT], targets[:-HELD_OUT], options.epochs, options.seed)
    with torch.no_grad():
        right = (network(inputs[-HELD_OUT:]).argmax(1) == targets[-HELD_OUT:]).double().mean().item()
    print(f"top-1 on {HELD_OUT} held-out digits: {right:.4f}")
    np.savez_compressed(options.output / "digits.npz", images=images, labels=labels)
    export(network, options.output / "digits.onnx")


if __name__ == "__main__":
    main()
