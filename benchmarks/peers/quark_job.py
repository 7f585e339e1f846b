"""Quantize one model with whatever package named `quark` this interpreter holds: ours or the peer's.

Both have the same interface, so one program drives both and neither is favoured.

    {"model", "output", "feeds", "inputs": {"spec": "Int8Spec", "calibration_method": "MinMax"}, "weight": {...},
     "options": {}, "target": "cpu", "algorithms": [{"class": "AdaRoundConfig", "num_iterations": 20}]}
    {"model", "output", "feeds", "preset": "A8W8_CPU"}
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from benchmarks.peers.job import FileReader, main, measured, timed, version

ENUMS = {"calibration_method": "CalibMethod", "scale_type": "ScaleType", "quant_granularity": "QuantGranularity"}


def make_spec(package: Any, row: dict[str, Any]) -> Any:
    """`{"spec": class, field: value}` as that class's object; values of ENUMS are given by name."""
    fields = {key: value for key, value in row.items() if key != "spec"}
    values = {
        key: getattr(getattr(package, ENUMS[key]), value) if key in ENUMS else value for key, value in fields.items()
    }
    return getattr(package, row["spec"])(**values)


def make_config(package: Any, job: dict[str, Any]) -> Any:
    """The configuration that a job spells out, or the preset that it names; `target` is ours alone."""
    if "preset" in job:
        return package.QConfig.get_default_config(job["preset"])
    layer = package.QLayerConfig(
        input_tensors=make_spec(package, job["inputs"]), weight=make_spec(package, job["weight"])
    )
    target = {"target": job["target"]} if "target" in job else {}
    algorithms = [make_algorithm(package, row) for row in job.get("algorithms", [])]
    return package.QConfig(global_config=layer, algo_config=algorithms, extra_options=job.get("options", {}), **target)


def make_algorithm(package: Any, row: dict[str, Any]) -> Any:
    """`{"class": name, field: value}` as an entry of `algo_config`."""
    return getattr(package, row["class"])(**{key: value for key, value in row.items() if key != "class"})


def quantize(job: dict[str, Any]) -> dict[str, Any]:
    """Import, then quantize; both are timed. Ours imports its engine with the first model, so that counts as import."""
    import_seconds, package = timed(lambda: importlib.import_module("quark.onnx"))
    if importlib.util.find_spec("quark.onnx.flow") is not None:
        import_seconds += timed(lambda: importlib.import_module("quark.onnx.flow"))[0]
    quantizer, reader = package.ModelQuantizer(make_config(package, job)), FileReader(job["feeds"])
    times = measured(lambda: quantizer.quantize_model(job["model"], job["output"], reader))
    return {**times, "import_seconds": import_seconds, "version": version("openquark", "amd-quark")}


if __name__ == "__main__":
    main(quantize)
