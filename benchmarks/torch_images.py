"""What algorithms of the torch flow leave of a network of convolutions, beside rounding to nearest.

    python -m benchmarks.torch_images [--algorithms CLE CE ...] [--images 200] [--json FILE]

SqueezeNet 1.1 on flowers, calibrated on 16 training images spread over all classes; on test images: relative squared
error of the logits, mean KL divergence to the float answers, and the share of images with the float model's class.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.torch_quality import examples
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    BiasCorrectionConfig,
    ChannelEqualizationConfig,
    CLEConfig,
    Int4PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
)

INT8 = Int8PerTensorSpec().to_quantization_spec()
INT4 = Int4PerChannelSpec(ch_axis=0).to_quantization_spec()
SCHEMES = {
    "int4 weights, per channel": QLayerConfig(weight=INT4),
    "int8 weights, per tensor": QLayerConfig(weight=INT8),
    "int8 weights and activations, per tensor": QLayerConfig(INT8, weight=INT8),
    "int4 weights per channel, int8 activations": QLayerConfig(INT8, weight=INT4),
}
ALGORITHMS: dict[str, list[AlgoConfig]] = {
    "nearest": [],
    "CLE": [CLEConfig()],
    "CE": [ChannelEqualizationConfig()],
    "BC": [BiasCorrectionConfig()],
    "BC gain": [BiasCorrectionConfig(gain=True)],
    "AdaRound": [AdaRoundConfig(num_iterations=200, batch_size=4)],
    "AdaQuant": [AdaQuantConfig(num_iterations=200, batch_size=4)],
    "CE, BC": [ChannelEqualizationConfig(), BiasCorrectionConfig()],
}
CALIBRATION = 16


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--images", type=int, default=200, help="test images")
    parser.add_argument("--json", type=Path, help=record.HELP)
    run = parser.parse_args(argv)
    load = examples()
    model, feeds = load.torch_flowers5().eval(), list(load.calib_flowers5())
    samples = [torch.from_numpy(feed["data"]) for feed in feeds[:: len(feeds) // CALIBRATION][:CALIBRATION]]
    pairs = list(load.flower_images("test"))
    chosen = pairs[:: max(1, len(pairs) // run.images)]
    images = torch.cat([torch.from_numpy(load.caffe_input(image)) for image, _ in chosen])
    wanted = answers(model, images)
    print("| scheme | algorithm | squared error | KL | same class |\n" + 5 * "|---" + "|", flush=True)
    for title, layer in SCHEMES.items():
        for name in dict.fromkeys(("nearest", *run.algorithms)):
            config = QConfig(layer, algo_config=copy.deepcopy(ALGORITHMS[name]) or None)
            found = answers(ModelQuantizer(config).quantize_model(copy.deepcopy(model), samples), images)
            error = float((found - wanted).square().sum() / wanted.square().sum())
            p, q = wanted.log_softmax(1), found.log_softmax(1)
            kl = float((p.exp() * (p - q)).sum(1).mean())
            same = float((found.argmax(1) == wanted.argmax(1)).double().mean())
            print(f"| {title} | {name} | {error:.4f} | {kl:.4f} | {same:.3f} |", flush=True)
    return 0


def answers(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Logits, in double precision."""
    return torch.cat([model(images[k : k + 20]) for k in range(0, len(images), 20)]).double()


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
