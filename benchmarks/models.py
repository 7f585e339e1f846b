"""The networks that the benchmarks quantize: a ResNet-50 of random weights, a toy of the same shape, real models.

The random ResNet is what an exporter leaves of a trained one: 53 convolutions with biases, into which
BatchNormalization is folded. It is folded here too: a first network measures the mean and deviation of every channel
on a few images, y = gamma (x - mean) / deviation + beta with random gamma and beta, and the second one carries the
result in its weights. So its activations are those of a trained network in size and spread, and its outputs differ
from image to image; without, all images come out nearly the same, and a signal-to-noise ratio rests on one draw.
The real models and their data are optional: a folder with `load_examples.py`, beside this repository as shared/data.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.peers.job import Feeds

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


class NetworkBuilder:
    """Nodes and initializers of a network under construction; each method appends a layer and names its output.

    Args:
        seed: of the random weights.
        statistics: mean and deviation [1, channels, 1, 1] by convolution and the mean features [width] of the head,
            to be folded into the weights; without them the network takes its own input's and has them as outputs.
    """

    def __init__(self, seed: int, statistics: dict[str, np.ndarray] | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.statistics = statistics
        self.measured: list[str] = []
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

    def conv(
        self, name: str, source: str, channels: tuple[int, int], kernel: int, stride: int = 1, gain: float = 1.0
    ) -> str:
        """A convolution with same padding and its normalization; `channels` is (in, out), `gain` scales gamma."""
        width_in, width_out = channels
        weight = self.random.standard_normal((width_out, width_in, kernel, kernel), dtype=np.float32)
        weight *= np.sqrt(2 / (width_in * kernel**2))
        gamma = gain * self.random.lognormal(0, 0.3, (width_out, 1, 1, 1))
        beta = 0.3 * gain * self.random.standard_normal(width_out)
        shape = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        if self.statistics is None:
            values = self.node("Conv", [source, self.constant(f"{name}.weight", weight)], **shape)
            return self.normalize(name, values, gamma.reshape(1, -1, 1, 1), beta.reshape(1, -1, 1, 1))
        factor = gamma / self.statistics[f"{name}.deviation"].reshape(-1, 1, 1, 1)
        bias = beta - (factor * self.statistics[f"{name}.mean"].reshape(-1, 1, 1, 1)).ravel()
        constants = [self.constant(f"{name}.weight", weight * factor), self.constant(f"{name}.bias", bias)]
        return self.node("Conv", [source, *constants], **shape)

    def normalize(self, name: str, values: str, gamma: np.ndarray, beta: np.ndarray) -> str:
        """gamma (x - mean) / deviation + beta over batch, rows and columns; mean and deviation become outputs."""
        mean = self.node("ReduceMean", [values], axes=[0, 2, 3], keepdims=1)
        centred = self.node("Sub", [values, mean])
        variance = self.node("ReduceMean", [self.node("Mul", [centred, centred])], axes=[0, 2, 3], keepdims=1)
        deviation = self.node("Sqrt", [variance])
        self.nodes.append(helper.make_node("Identity", [mean], [f"{name}.mean"]))
        self.nodes.append(helper.make_node("Identity", [deviation], [f"{name}.deviation"]))
        self.measured += [f"{name}.mean", f"{name}.deviation"]
        unit = self.node("Div", [centred, deviation])
        scaled = self.node("Mul", [unit, self.constant(f"{name}.gamma", gamma)])
        return self.node("Add", [scaled, self.constant(f"{name}.beta", beta)])

    def bottleneck(self, name: str, source: str, channels: tuple[int, int], stride: int) -> str:
        """1x1, 3x3, 1x1 with a shortcut; `channels` is (in, width), four times the width comes out."""
        width_in, width = channels
        branch = self.node("Relu", [self.conv(f"{name}.conv1", source, (width_in, width), 1)])
        branch = self.node("Relu", [self.conv(f"{name}.conv2", branch, (width, width), 3, stride)])
        branch = self.conv(f"{name}.conv3", branch, (width, 4 * width), 1, gain=0.2)
        if width_in != 4 * width or stride != 1:
            source = self.conv(f"{name}.shortcut", source, (width_in, 4 * width), 1, stride)
        return self.node("Relu", [self.node("Add", [branch, source])])

    def head(self, source: str, width: int, classes: int) -> str:
        """Mean over rows and columns, and a linear layer whose bias takes off the mean image's result."""
        flat = self.node("Flatten", [self.node("GlobalAveragePool", [source])])
        weight = self.random.standard_normal((classes, width)) / np.sqrt(width)
        bias = 0.1 * self.random.standard_normal(classes)
        if self.statistics is None:
            self.nodes.append(helper.make_node("ReduceMean", [flat], ["head.mean"], axes=[0], keepdims=0))
            self.measured.append("head.mean")
        else:
            bias -= weight @ self.statistics["head.mean"]
        parameters = [self.constant("head.weight", weight), self.constant("head.bias", bias)]
        return self.node("Gemm", [flat, *parameters], transB=1)

    def model(self, batch: int, image: int, outputs: list[str]) -> onnx.ModelProto:
        """The finished network from `images` [batch, 3, image, image] to `outputs`, opset 13."""
        images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, image, image])
        graph = helper.make_graph(self.nodes, "network", [images], [], self.initializers)
        graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        inferred = onnx.shape_inference.infer_shapes(model)
        onnx.checker.check_model(inferred)
        return inferred


@dataclass(frozen=True)
class Shape:
    """Dimensions of a residual network of bottlenecks; the defaults are ResNet-50's.

    Attributes:
        stages: (blocks, width, first stride) of each stage.
        stem: channels after the first convolution.
        image: height and width of the input.
        classes: outputs of the last layer.
    """

    stages: tuple[tuple[int, int, int], ...] = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
    stem: int = 64
    image: int = 224
    classes: int = 1000


TOY = Shape(stages=((2, 8, 1),), stem=8, image=32, classes=10)
STATISTICS_BATCH = 4


def resnet(shape: Shape = Shape(), seed: int = 0) -> onnx.ModelProto:
    """A residual network of random weights with its normalization folded in; ResNet-50 where nothing is said."""
    measuring = NetworkBuilder(seed)
    output = lay_out(measuring, shape)
    model = measuring.model(STATISTICS_BATCH, shape.image, [*measuring.measured, output])
    batch = np.concatenate([feed["images"] for feed in random_images(shape.image, STATISTICS_BATCH, seed=0)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = session.run(measuring.measured, {"images": batch})
    folded = NetworkBuilder(seed, dict(zip(measuring.measured, values, strict=True)))
    return folded.model(1, shape.image, [lay_out(folded, shape)])


def lay_out(net: NetworkBuilder, shape: Shape) -> str:
    """Append all layers and return the output's name."""
    values = net.node("Relu", [net.conv("stem", "images", (3, shape.stem), 7, 2)])
    values, width_in = net.node("MaxPool", [values], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), shape.stem
    for stage, (blocks, width, stride) in enumerate(shape.stages):
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            values = net.bottleneck(name, values, (width_in, width), stride if block == 0 else 1)
            width_in = 4 * width
    return net.head(values, width_in, shape.classes)


def random_images(image: int, samples: int, seed: int) -> list[Feeds]:
    """Images [1, 3, image, image] of unit variance: coarse patches that differ from image to image, and noise."""
    random = np.random.default_rng(seed)
    side = image // 8
    coarse = random.standard_normal((samples, 1, 3, 8, 8), dtype=np.float32)
    fine = random.standard_normal((samples, 1, 3, image, image), dtype=np.float32)
    values = np.sqrt(np.float32(0.7)) * coarse.repeat(side, -1).repeat(side, -2) + np.sqrt(np.float32(0.3)) * fine
    return [{"images": each} for each in values]


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


def resnet_example(folder: Path, shape: Shape = Shape(), name: str = "resnet50") -> Example:
    """A random ResNet, written to `folder`; calibration and held-out images differ in their seed."""
    path = folder / f"{name}.onnx"
    onnx.save(resnet(shape), path)
    calibration, held_out = partial(random_images, shape.image, 16, 1), partial(random_images, shape.image, 48, 2)
    return Example(name, path, calibration, held_out)


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
        return ({"data": data.caffe_input(image)} for image, _ in islice(data.flower_images("test"), 0, 800, 4))

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
            feeds for feeds, _ in islice(walk(data.open_session(models / name), data.speech()[1]), 250, 1000)
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
