"""How jobs grow: processor seconds and peak memory of whole processes, as one size becomes four times as large, twice.

    python -m benchmarks.growth [--axes samples places bytes lengths blocks widths] [--json FILE]

Each job is a process with one thread on one core. Of three sizes in equal steps the exponent is that of the part which
grows, ``log((c3 - c2) / (c2 - c1)) / log(step)``: what every job costs anyway (imports, a session) falls out of it.
1 is linear. Where the differences are within a tenth of a second there is nothing to tell, and no exponent is given.

    samples   a chain of 20 convolutions and activations, calibrated
    places    the same, by the places of its tensors
    bytes     eight matrix products, by the bytes of the model
    lengths   a free axis, by how many lengths the samples have
    blocks    a checkpoint of Llama's shape, file to file, by its decoder blocks
    widths    four blocks of it, by the squares of their width
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.measure import table
from benchmarks.whole_process import Cost, cost_of

#: Seconds between sizes below which a difference is the machine's.
NOTHING = 0.1
CHAIN = """
import sys
import numpy, onnx
from onnx import TensorProto, helper, numpy_helper
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
method, samples, side, lengths = sys.argv[1], *map(int, sys.argv[2:5])
rng, wide, nodes, weights = numpy.random.default_rng(0), 16, [], []
for k in range(10):
    weights.append(numpy_helper.from_array(rng.normal(0, 0.3, (wide, wide, 1, 1)).astype("f"), f"w{k}"))
    nodes.append(helper.make_node("Conv", [f"r{k}", f"w{k}"], [f"c{k}"], name=f"conv{k}"))
    nodes.append(helper.make_node("Relu", [f"c{k}"], [f"r{k + 1}"], name=f"relu{k}"))
shape = [1, wide, side, side if lengths == 1 else "free"]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("r0", "r10")]
graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
spec = UInt8Spec(calibration_method=CalibMethod[method])
config = QConfig(global_config=QLayerConfig(input_tensors=spec, weight=Int8Spec()), target="cpu")
feeds = ({"r0": rng.normal(0, 1, (1, wide, side, side + k % lengths)).astype("f")} for k in range(samples))
ModelQuantizer(config).quantize_model(model, None, feeds)
"""
PRODUCTS = """
import sys
import numpy, onnx
kind, wide, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rng, files = numpy.random.default_rng(0), [folder + "/m.onnx", folder + "/q.onnx"]
if kind == "write":  # weight by weight: a process of the model's size is none to compare with
    from onnx import TensorProto, helper
    nodes, weights, place = [], [], open(folder + "/m.data", "wb")
    for k in range(8):
        tensor = TensorProto(name=f"w{k}", dims=[wide, wide], data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "m.data"), ("offset", place.tell()), ("length", 4 * wide * wide)):
            tensor.external_data.add(key=key, value=str(value))
        place.write(rng.standard_normal((wide, wide), dtype="f") / numpy.float32(wide**0.5))
        weights.append(tensor)
        nodes.append(helper.make_node("MatMul", [f"t{k}", f"w{k}"], [f"t{k + 1}"], name=f"n{k}"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, wide]) for name in ("t0", "t8")]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), files[0])
    if 32 * wide * wide < 1e9:  # in one file, where one can hold it
        onnx.save(onnx.load(files[0]), files[0])
    sys.exit()
feeds = [{"t0": rng.standard_normal((4, wide), dtype="f")} for _ in range(2)]
if kind == "inference":
    import onnxruntime
    session = onnxruntime.InferenceSession(files[0])
    for feed in feeds:
        session.run(None, feed)
else:
    from quark.onnx import ModelQuantizer, get_default_config, Config
    config = get_default_config(kind)
    config.extra_options.update(PrintSummary=False)
    config.use_external_data_format = 32 * wide * wide > 1e9
    ModelQuantizer(Config(config)).quantize_model(*files, feeds)
"""
BLOCKS = """
import sys, shutil
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from quark.torch import LLMTemplate
from quark.torch.files import quantize_checkpoint
from quark.torch.quantization.config.config import AutoRoundConfig, AWQConfig, GPTQConfig, SmoothQuantConfig
algorithm, blocks, width, folder = sys.argv[1], *map(int, sys.argv[2:4]), Path(sys.argv[4])
torch.manual_seed(0)
sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "vocab_size": 512}
LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, **sizes)).save_pretrained(folder / "source")
samples = [{"input_ids": torch.randint(0, 512, (1, 64))} for _ in range(4)]
config = LLMTemplate.get("llama").get_config("int4_wo_128")
rows = {"GPTQ": GPTQConfig, "AWQ": AWQConfig, "SmoothQuant": SmoothQuantConfig}
rows["AutoRound"] = lambda: AutoRoundConfig(iters=20)
config.algo_config = [rows[algorithm]()]
shutil.rmtree(folder / "q", ignore_errors=True)
quantize_checkpoint(folder / "source", folder / "q", config, samples=samples)
"""


@dataclass(frozen=True)
class Axis:
    """What grows.

    Attributes:
        sizes: three, in equal steps.
        kinds: of jobs.
        code: of the process.
        words: the arguments of a job, for a kind and a size.
        first: the arguments of a process that writes what the job reads, where there is one.
    """

    sizes: tuple[int, int, int]
    kinds: tuple[str, ...]
    code: str
    words: Callable[[str, int], list[str]]
    first: Callable[[int], list[str]] | None = None

    @property
    def step(self) -> float:
        """How many times as large the next size is."""
        return self.sizes[1] / self.sizes[0]


def width(megabytes: int) -> str:
    """Rows of eight square float matrices of so many bytes together."""
    return str(round(math.sqrt(megabytes * 1e6 / 32)))


AXES = {
    "samples": Axis(
        (125, 500, 2000),
        ("MinMax", "Percentile", "MinMSE", "Entropy"),
        CHAIN,
        lambda kind, size: [kind, str(size), "16", "1"],
    ),
    "places": Axis(
        (64**2, 128**2, 256**2),
        ("MinMax", "Percentile", "MinMSE", "Entropy"),
        CHAIN,
        lambda kind, size: [kind, "16", str(math.isqrt(size)), "1"],
    ),
    "bytes": Axis(
        (120, 600, 3000),
        ("inference", "A8W8_CPU", "XINT8", "MATMUL_NBITS"),
        PRODUCTS,
        lambda kind, size: [kind, width(size)],
        lambda size: ["write", width(size)],
    ),
    "lengths": Axis((4, 16, 64), ("MinMax", "Entropy"), CHAIN, lambda kind, size: [kind, "256", "32", str(size)]),
    "blocks": Axis((4, 8, 16), ("GPTQ", "AWQ", "AutoRound"), BLOCKS, lambda kind, size: [kind, str(size), "128"]),
    "widths": Axis(
        (128**2, 256**2, 512**2),
        ("GPTQ", "AWQ", "SmoothQuant"),
        BLOCKS,
        lambda kind, size: [kind, "4", str(math.isqrt(size))],
    ),
}


def exponent(costs: Sequence[float], step: float) -> float | None:
    """Of the part that grows, from three sizes; None where nothing grows."""
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    return math.log(second / first) / math.log(step) if min(first, second) > NOTHING else None


def measured(axis: Axis, kind: str, repeats: int) -> list[Cost]:
    """The cheapest of several runs at every size, the sizes in turns."""
    found: list[list[Cost]] = [[] for _ in axis.sizes]
    for _ in range(repeats):
        for costs, size in zip(found, axis.sizes, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                if axis.first is not None:
                    cost_of([sys.executable, "-c", axis.code, *axis.first(size), folder], folder)
                costs.append(cost_of([sys.executable, "-c", axis.code, *axis.words(kind, size), folder], folder))
    return [min(costs, key=lambda cost: cost.cpu) for costs in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help=record.HELP)
    chosen = parser.parse_args(argv)
    rows, figures = [], []
    for name in chosen.axes:
        axis = AXES[name]
        for kind in axis.kinds:
            costs = measured(axis, kind, chosen.repeats)
            power = exponent([cost.cpu for cost in costs], axis.step)
            said = [", ".join(f"{value(cost)}" for cost in costs) for value in (seconds, megabytes)]
            rows.append(
                [
                    name,
                    ", ".join(map(str, axis.sizes)),
                    kind,
                    *said,
                    "nothing grows" if power is None else f"{power:.2f}",
                ]
            )
            figures.append({"axis": name, "kind": kind, "exponent": power, "costs": [asdict(cost) for cost in costs]})
    print(table(["what grows", "sizes", "job", "CPU s", "peak MB", "exponent"], rows))
    if chosen.json:
        chosen.json.write_text(json.dumps({"growth": figures}, indent=1), encoding="utf-8")
    return 0


def seconds(cost: Cost) -> str:
    """CPU seconds of a process."""
    return f"{cost.cpu:.2f}"


def megabytes(cost: Cost) -> str:
    """Most memory of a process."""
    return f"{cost.peak / 1e6:.0f}"


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
