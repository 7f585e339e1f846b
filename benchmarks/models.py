"""The networks that the benchmarks quantize: a ResNet-50 of random weights, a toy of the same shape, real models.

The random ResNet is what an exporter leaves of a trained one: BatchNormalization folded into 53 convolutions with
biases, channel gains that differ (log-normal, as batch normalization's do), He initialization, and a smaller gain at
the end of each residual branch, so that activations stay within a few units of each other over all 16 blocks.
The real models and their data are optional: a folder with `load_examples.py`, beside this repository as shared/data.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.peers.job import Feeds

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))


class NetworkBuilder:
    """Nodes and initializers of a network under construction; each method appends a layer and names its output."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def node(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        """Append one node with one output and return that output's name."""
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def constant(self, name: str, values: np.ndarray) -> str:
        """Append a float32 initializer and return its name."""
        self.initializers.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def weight(self, shape: tuple[int, ...], gain: float) -> np.ndarray:
        """He-normal values times `gain`, each output channel scaled by its own log-normal factor."""
        values = self.random.standard_normal(shape, dtype=np.float32) * gain * np.sqrt(2 / np.prod(shape[1:]))
        factors = self.random.lognormal(0, 0.35, shape[0])
        return values * factors.reshape(-1, *[1] * (len(shape) - 1))

    def conv(self, source: str, channels: tuple[int, int], kernel: int, stride: int = 1, gain: float = 1.0) -> str:
        """A convolution [out, in, kernel, kernel] with a bias and same padding; `channels` is (in, out)."""
        name, (width_in, width_out) = f"conv{len(self.nodes)}", channels
        weight = self.constant(f"{name}.weight", self.weight((width_out, width_in, kernel, kernel), gain))
        bias = self.constant(f"{name}.bias", 0.1 * self.random.standard_normal(width_out))
        pads, shape = [kernel // 2] * 4, [kernel, kernel]
        return self.node("Conv", [source, weight, bias], kernel_shape=shape, strides=[stride] * 2, pads=pads)

    def bottleneck(self, source: str, channels: tuple[int, int], stride: int) -> str:
        """1x1, 3x3, 1x1 with a shortcut; `channels` is (in, width), four times the width comes out."""
        width_in, width = channels
        branch = self.node("Relu", [self.conv(source, (width_in, width), 1)])
        branch = self.node("Relu", [self.conv(branch, (width, width), 3, stride)])
        branch = self.conv(branch, (width, 4 * width), 1, gain=0.4)
        changes = width_in != 4 * width or stride != 1
        shortcut = self.conv(source, (width_in, 4 * width), 1, stride, gain=0.7) if changes else source
        return self.node("Relu", [self.node("Add", [branch, shortcut])])

    def model(self, image: int, classes: int, output: str) -> onnx.ModelProto:
        """The finished network from `images` [1, 3, image, image] to `output` [1, classes], opset 13."""
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, image, image])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, [1, classes])],
            self.initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(model)
        return model


def resnet(
    stages: tuple[tuple[int, int, int], ...] = STAGES,
    stem: int = 64,
    image: int = 224,
    classes: int = 1000,
    seed: int = 0,
) -> onnx.ModelProto:
    """A residual network of bottlenecks; the defaults are ResNet-50 (25.6 M parameters, 122 nodes).

    Args:
        stages: (blocks, width, first stride) of each stage.
        stem: channels after the first convolution.
        image: height and width of the input.
        classes: outputs of the last layer.
        seed: of the random weights.
    """
    net = NetworkBuilder(seed)
    values = net.node("Relu", [net.conv("images", (3, stem), 7, 2)])
    values, width_in = net.node("MaxPool", [values], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), stem
    for blocks, width, stride in stages:
        for block in range(blocks):
            values = net.bottleneck(values, (width_in, width), stride if block == 0 else 1)
            width_in = 4 * width
    flat = net.node("Flatten", [net.node("GlobalAveragePool", [values])])
    weight = net.constant("head.weight", net.random.standard_normal((classes, width_in)) / np.sqrt(width_in))
    bias = net.constant("head.bias", 0.1 * net.random.standard_normal(classes))
    return net.model(image, classes, net.node("Gemm", [flat, weight, bias], transB=1))


def toy() -> onnx.ModelProto:
    """The same network small enough for a test: two blocks, 32x32."""
    return resnet(stages=((2, 8, 1),), stem=8, image=32, classes=10)


def random_images(model: onnx.ModelProto, samples: int, seed: int) -> list[Feeds]:
    """Standard-normal images for a network of `resnet`."""
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    random = np.random.default_rng(seed)
    return [{"images": random.standard_normal(shape, dtype=np.float32)} for _ in range(samples)]


@dataclass(frozen=True)
class Example:
    """A model with its data.

    Attributes:
        name: short name.
        path: the float model.
        calibration: yields calibration feeds.
        held_out: yields feeds that calibration never saw.
        metrics: maps a model's path to its task metrics; None where there is no task.
        larger_is_better: the sense of the first metric.
    """

    name: str
    path: Path
    calibration: Callable[[], Iterable[Feeds]]
    held_out: Callable[[], Iterable[Feeds]]
    metrics: Callable[[Path], dict[str, float]] | None = None
    larger_is_better: bool = True


def resnet_example(folder: Path, samples: int = 16, model: onnx.ModelProto | None = None) -> Example:
    """The random ResNet, written to `folder`; calibration and held-out images differ in their seed."""
    network = resnet() if model is None else model
    path = folder / "resnet.onnx"
    onnx.save(network, path)
    return Example(
        "resnet50", path, lambda: random_images(network, samples, 1), lambda: random_images(network, samples, 2)
    )


def load_examples(folder: Path) -> ModuleType:
    """The module that reads the real models and their data; it finds its neighbours by its own folder."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("load_examples")
    finally:
        sys.path.remove(str(folder))


def real_examples(folder: Path = DATA) -> list[Example]:
    """The real models with calibration data, held-out data and metrics; none where the folder is absent."""
    if not (folder / "load_examples.py").exists():
        return []
    data = load_examples(folder)
    models = folder / "models"
    return [*vision_examples(data, models), *sequence_examples(data, models)]


def vision_examples(data: ModuleType, models: Path) -> list[Example]:
    """A classifier and two detectors; held out are images or views that calibration does not use."""

    def flowers() -> Iterable[Feeds]:
        return ({"data": data.caffe_input(image)} for image, _ in islice(data.flower_images("test"), 0, 800, 25))

    def scenes(name: str, prepare: Callable[[Any], np.ndarray]) -> Callable[[], Iterable[Feeds]]:
        return lambda: ({name: prepare(image)} for image, _, _ in data.coco_images())

    return [
        Example(
            "squeezenet11_flowers5",
            models / "squeezenet11_flowers5.onnx",
            lambda: islice((feed for k, feed in enumerate(data.calib_flowers5()) if k % 8 == 0), 32),
            flowers,
            lambda path: {"top1": data.eval_flowers5(path)["top1"]},
        ),
        Example(
            "yolox_nano",
            models / "yolox_nano.onnx",
            lambda: data.calib_yolox_nano(21),
            scenes("images", data.yolox_input),
            lambda path: {"mAP50": data.eval_yolox_nano(path)["mAP50"]},
        ),
        Example(
            "ultraface_rfb320",
            models / "ultraface_rfb320.onnx",
            lambda: data.calib_ultraface(63),
            scenes("input", data.ultraface_input),
            lambda path: {"AP50": data.eval_ultraface(path)["AP50"]},
        ),
    ]


def sequence_examples(data: ModuleType, models: Path) -> list[Example]:
    """Two streaming speech models and a small language model.

    The speech models' held-out steps come after the calibrated ones, and carry the float model's own state, so that
    one step's error is measured; the task metric lets the error run on from step to step.
    """

    def steps(name: str, walk: Callable[..., Iterable[tuple[Feeds, Any]]]) -> Callable[[], Iterable[Feeds]]:
        return lambda: (
            feeds for feeds, _ in islice(walk(data.open_session(models / name), data.speech()[1]), 250, 500)
        )

    def stories(path: Path) -> dict[str, float]:
        names = {"perplexity": "stories_selfgen", "perplexity_oz": "oz_tokens"}
        return {metric: data.eval_stories(path, data=name)["perplexity"] for metric, name in names.items()}

    return [
        Example(
            "silero_vad",
            models / "silero_vad_16k_op15.onnx",
            data.calib_silero,
            steps("silero_vad_16k_op15.onnx", data.silero_steps),
            lambda path: {key: data.eval_silero(path)[key] for key in ("auc", "accuracy")},
        ),
        Example(
            "gtcrn",
            models / "gtcrn_simple.onnx",
            data.calib_gtcrn,
            steps("gtcrn_simple.onnx", data.gtcrn_steps),
            lambda path: {"si_sdr": data.eval_gtcrn(path)["si_sdr_out"]},
        ),
        Example(
            "stories260K",
            models / "stories260K.onnx",
            data.calib_stories,
            lambda: ({"input_ids": ids[None, :128]} for ids in data.token_ids()[64:96]),
            stories,
            larger_is_better=False,
        ),
    ]
