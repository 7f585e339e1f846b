"""The page of the Python interface: every public name, its parameters from its docstring, an example that runs.

A parameter is described in the docstring of its class or function or, for what classes share, of a class above it.
Names of one family (specs, data types, presets, algorithms) have one form of example; every other name has its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import quark.onnx
import quark.torch
import quark.torch.quantization

ENTRY = re.compile(r"^ {4}(?P<names>[*\w, ]+): (?P<words>.*(?:\n {5,}.*)*)", re.M)
SETUP = """<!-- setup
import shutil
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from quark.demo.data import model_path, split

shutil.copy(model_path(), "model.onnx")
samples = [{"image": one[None]} for one in split()[0][0][:8]]
np.savez("samples.npz", image=split()[0][0][:8])
torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape))
ids = torch.randint(0, 32, (1, 8))
-->
"""
EXAMPLES = {
    "AlgoConfig": "assert isinstance(AdaRoundConfig(), AlgoConfig)",
    "BaseDataType": "assert issubclass(Int8, BaseDataType)",
    "DataType": "assert issubclass(Int8, DataType)",
    "CachedDataReader": "reader = CachedDataReader(samples)",
    "CalibrationDataReader": """class Reader(CalibrationDataReader):
    def __init__(self):
        self.rest = iter(samples)

    def get_next(self):
        return next(self.rest, None)


reader = Reader()""",
    "CalibMethod": "spec = QTensorConfig(calibration_method=CalibMethod.Percentile)",
    "CalibrationMethod": "method = CalibrationMethod.Entropy",
    "ExtendedCalibrationMethod": "method = ExtendedCalibrationMethod.MinMSE",
    "ExtendedQuantType": "kind = ExtendedQuantType.QBFloat16",
    "QuantType": "kind = QuantType.QUInt8",
    "QuantGranularity": "spec = QTensorConfig(quant_granularity=QuantGranularity.Channel)",
    "ScaleType": "spec = QTensorConfig(scale_type=ScaleType.PowerOf2)",
    "Config": 'config = Config(global_quant_config=get_default_config("XINT8"))',
    "get_default_config": 'config = get_default_config("A8W8_CPU")',
    "QuantizationConfig": 'assert isinstance(get_default_config("A8W8"), QuantizationConfig)',
    "DatasetReader": 'reader = DatasetReader("model.onnx", [one["image"][0] for one in samples])',
    "PathDataReader": 'reader = PathDataReader("model.onnx", "samples.npz")',
    "Preprocessing": "steps = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))",
    "RandomDataReader": 'reader = RandomDataReader("model.onnx")',
    "QConfig": 'config = QConfig(QLayerConfig(Int8Spec(), Int8Spec()), exclude=["^/head/.*"])',
    "QLayerConfig": "layer = QLayerConfig(input_tensors=UInt8Spec(), weight=Int8Spec())",
    "QTensorConfig": "spec = QTensorConfig(symmetric=False, data_type=UInt8)",
    "onnx.ModelQuantizer": 'ModelQuantizer(A8W8_QCONFIG).quantize_model("model.onnx", "quantized.onnx", samples)',
    "LLMTemplate": 'config = LLMTemplate.for_model(model).get_config("int4_wo_32")',
    "torch.ModelQuantizer": "model = ModelQuantizer(config).quantize_model(model)",
    "QuantFlow": "flow = next(iter(QuantFlow))",
    "export_compressed_tensors": 'export_compressed_tensors(model, "compressed_tensors")',
    "export_gguf": """from pathlib import Path

folder = Path("model_dir")  # with the tokenizer.json of the model
try:
    export_gguf(model, "gguf", "llama", tokenizer_path=folder)
except ValueError as error:  # this one has no tokenizer
    print(error)""",
    "export_onnx": 'export_onnx(model, "onnx_model", ids)',
    "export_safetensors": 'export_safetensors(model, "checkpoint")',
    "import_model_from_safetensors": 'again = import_model_from_safetensors(None, "checkpoint")',
    "fold_batch_norm": """from torch import nn

net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
folded = fold_batch_norm(net, torch.zeros(1, 3, 4, 4))""",
    "learned_scales": "groups = [parameter for name, parameter in learned_scales(model)]",
    "auto": """found = quark.auto("model.onnx", samples * 2, "small.onnx", "size", minutes=0)
print(found.winner.name)""",
    "register_algorithm": """def nearest(weight, hessian, grid):
    return grid.round(weight)


quark.register_algorithm("nearest", nearest)""",
    "unregister_algorithm": 'quark.unregister_algorithm("nearest")',
    "register_calibration": """def widest(statistic, grid):
    return statistic.lo, statistic.hi


quark.register_calibration("widest", widest)""",
    "unregister_calibration": 'quark.unregister_calibration("widest")',
    "register_format": """from quark.numerics.formats import Int

quark.register_format(Int("int6", 6, signed=True))""",
    "unregister_format": 'quark.unregister_format("int6")',
    "quantization.Config": "config = Config(QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec()))",
    "quantization.QConfig": 'config = QConfig(QLayerConfig(), exclude=["lm_head"])',
    "quantization.QLayerConfig": "layer = QLayerConfig(weight=Int4PerGroupSpec(-1, 32).to_quantization_spec())",
    "quantization.QTensorConfig": """from quark.torch.quantization.config.type import Dtype, QSchemeType

spec = QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0)""",
    "QuantizationSpec": "assert QuantizationSpec is QTensorConfig",
    "QATSpec": "assert issubclass(TQTSpec, QATSpec)",
    "TQTSpec": """from quark.torch.quantization.config.type import TQTThresholdInitMeth

learning = TQTSpec(threshold_init_meth=TQTThresholdInitMeth._KL_J)""",
    "quantization.AlgoConfig": 'assert isinstance(AlgoConfig.from_dict({"name": "gptq"}), GPTQConfig)',
    "OnlineRotationConfig": "online = OnlineRotationConfig()",
    "load_pre_optimization_config_from_file": """import json
from pathlib import Path

Path("gptq.json").write_text(json.dumps({"name": "gptq", "damp_percent": 0.01}))
algorithm = load_pre_optimization_config_from_file("gptq.json")""",
    "load_quant_algo_config_from_file": 'algorithm = load_quant_algo_config_from_file("gptq.json")',
    "DataTypeSpec": "assert isinstance(Int8PerTensorSpec(), DataTypeSpec)",
    "TwoStageSpec": "assert isinstance(nvfp4, TwoStageSpec)",
    "ProgressiveSpec": "int4_on_fp8 = ProgressiveSpec(FP8E4M3PerTensorSpec(), Int4PerChannelSpec(ch_axis=0))",
    "ScaleQuantSpec": "nvfp4 = ScaleQuantSpec(FP4PerGroupSpec(ch_axis=-1, group_size=16), FP8E4M3PerTensorSpec())",
}
#: What a name is that is no class and no function.
PRESET, VALUES = "A preset as a `QConfig`.", {"TwoStageSpec": "`ProgressiveSpec` or `ScaleQuantSpec`."}
#: Arguments that examples of the spec helpers of torch need.
NEEDED = {"ch_axis": "-1", "group_size": "32"}


def described(one: Any) -> dict[str, str]:
    """Parameter -> what the docstrings of a class, of those above it and of its constructor, or of a function say."""
    places = [*reversed(inspect.getmro(one)), one.__init__] if inspect.isclass(one) else [one]
    found: dict[str, str] = {}
    for place in places:
        for entry in ENTRY.finditer(inspect.getdoc(place) or ""):
            for name in entry["names"].replace("*", "").split(","):
                found[name.strip()] = " ".join(entry["words"].split())
    return found


def parameters(one: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a user gives; those of enumerations are not parameters of ours."""
    if type(one).__name__ == "EnumType" or type(one).__name__ == "EnumMeta":
        return {}
    return {name: given for name, given in inspect.signature(one).parameters.items() if given.kind != given.VAR_KEYWORD}


def example(module: ModuleType, name: str) -> str:
    """Code that uses a name; of a family, or its own."""
    one, flow = getattr(module, name), module.__name__.rpartition(".")[2]
    if f"{flow}.{name}" in EXAMPLES or name in EXAMPLES:
        return EXAMPLES.get(f"{flow}.{name}") or EXAMPLES[name]
    if name.endswith("_QCONFIG"):
        return f"quantizer = ModelQuantizer({name})"
    if flow == "quantization" and name.endswith("Spec"):
        needs = [f"{key}={NEEDED[key]}" for key, given in parameters(one).items() if given.default is given.empty]
        return f"layer = QLayerConfig(weight={name}({', '.join(needs)}).to_quantization_spec())"
    if flow == "quantization" and issubclass(one, quark.torch.quantization.AlgoConfig):
        return f"config = QConfig(QLayerConfig(), algo_config=[{name}()])"
    if name.endswith("Spec"):
        return f"layer = QLayerConfig(input_tensors={name}(), weight={name}())"
    if issubclass(one, quark.onnx.AlgoConfig):
        return f"config = QConfig(algo_config=[{name}()])"
    if issubclass(one, quark.onnx.BaseDataType):
        return f"spec = QTensorConfig(data_type={name})"
    raise KeyError(f"{name} has no example in docs/api.py")


def sections() -> Iterator[str]:
    """One section a name."""
    for module, names in public().items():
        imported = f"from {module.__name__} import *" if module is not quark else "import quark"
        yield f"## {module.__name__}\n\n```python\n{imported}\n```\n"
        for name in names:
            yield section(module, name)


def public() -> dict[ModuleType, list[str]]:
    """The names of every public module, each where it is met first, in the order of the page."""
    found, seen = dict[ModuleType, list[str]](), set[int]()
    for module in (quark.onnx, quark.torch, quark.torch.quantization, quark):
        names = dict.fromkeys(module.__all__)
        found[module] = [name for name in sorted(names, key=order) if id(getattr(module, name)) not in seen]
        seen |= {id(getattr(module, name)) for name in names}
    return found


def order(name: str) -> tuple[bool, bool, str]:
    """Classes before functions; what an example needs before it."""
    return name[0].islower(), name.startswith("unregister"), name.lower()


def section(module: ModuleType, name: str) -> str:
    """What a name is, its parameters, an example."""
    one = getattr(module, name)
    says = (inspect.getdoc(one) or "").partition("\n\n")[0] if callable(one) else VALUES.get(name, PRESET)
    text = " ".join(says.split())
    words = described(one) if callable(one) else {}
    rows = [
        f"| `{key}` | {'' if given.default is given.empty else f'`{default(given.default)}`'} | {cell(words[key])} |"
        for key, given in (parameters(one) if callable(one) else {}).items()
    ]
    table = ["| parameter | default | |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### {name}", "", text, "", *table, "```python", example(module, name), "```", ""])


def default(value: Any) -> str:
    """A default in few letters, the same on every machine."""
    return "empty" if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" else cell(str(value))


def cell(words: str) -> str:
    """Words that fit a cell of a table."""
    return words.replace("|", "\\|")


def page() -> str:
    """The whole page."""
    head = (
        "# Python interface\n\nGenerated by `docs/generate.py` from the docstrings: every public name "
        "with its parameters and\nan example that runs.\n\n"
    )
    return head + SETUP + "\n" + "\n".join(sections()).rstrip() + "\n"
