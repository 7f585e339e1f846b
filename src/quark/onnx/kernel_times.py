"""What each layer takes on ONNX Runtime, for the budget ``latency``: kernel times of uniformly quantized models.

Per candidate, the model is quantized with all layers under it, runs with the profiler on, and every kernel's time goes
to a layer: by the name of its node (fused kernels keep that of the operator that computes), Q and DQ pairs to the layer
that reads them, renamed convolutions to the layer whose result they are called after. The cost of a layer is the median
over the inferences. Adding up says nothing of the Q/DQ pairs that only meet at a border between two formats.

Not handled: kernels that carry none of these names; the layout changes of the runtime are among them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.errors import OutputError
from quark.ir.surgery import name_of
from quark.numerics.metrics import median
from quark.onnx.data import Feed
from quark.onnx.graph import model as files
from quark.onnx.graph.run import session_options
from quark.onnx.graph.session import Runtime, open_session

if TYPE_CHECKING:
    from quark.onnx.layer_runs import FloatModelFiles
    from quark.search.values import Study

#: Inferences that are counted, after some that are not.
RUNS, WARM = 20, 5
KERNEL = "_kernel_time"
Quantized = Callable[[Mapping[str, str]], AbstractContextManager[str]]


def with_latency(study: Study, common: FloatModelFiles, quantized: Quantized) -> Study:
    """The study with the cost ``latency``, in seconds.

    Args:
        study: of the layers.
        common: of the trials.
        quantized: the path of the model of a plan (candidate by layer), for a while.
    """
    model = files.load(common.model)
    seconds = {}
    for name in study.candidates:
        fits = {layer: name if study.of(layer, name) else study.candidates[0] for layer in study.layers}
        with quantized(fits) as path:
            names = owners(model, study.layers)
            seconds[name] = layer_seconds(
                Path(path), next(common.pairs())[0], common.job.options, common.threads, names
            )
    trials = (
        replace(one, costs={**one.costs, "latency": seconds[one.candidate].get(one.layer, 0.0)}) for one in study.trials
    )
    return replace(study, trials=tuple(trials))


def layer_seconds(
    path: Path, feed: Feed, options: Options, threads: int | None, names: Mapping[str, str]
) -> dict[str, float]:
    """Median seconds of the kernels of every layer, of the model at ``path``; ``names``: as ``owners`` gives them."""
    found: dict[str, float] = defaultdict(float)
    for kernel, seconds in kernel_seconds(path, feed, options, threads).items():
        layer = layer_of(kernel, names)
        if layer is not None:
            found[layer] += seconds
    return dict(found)


def kernel_seconds(path: Path, feed: Feed, options: Options, threads: int | None) -> dict[str, float]:
    """Median seconds of every kernel of the model at ``path``, by its name."""
    session_values = session_options(Runtime(libraries=options.UserCustomOpLibPath, threads=threads))
    session_values.enable_profiling = True
    session_values.profile_file_prefix = str(path.parent / "profile")
    session = open_session(files.load(path), session_values, options.ExecutionProviders)
    for _ in range(WARM + RUNS):
        session.run(None, feed)
    profile = Path(session.end_profiling())
    try:
        events = json.loads(profile.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:  # a full disk, or a limit of a file's size: ONNX Runtime says nothing
        raise OutputError(
            f"{str(profile)!r}, to which ONNX Runtime writes the seconds of every kernel, ends after "
            f"{profile.stat().st_size} bytes: give more room to the folder of temporary files (TmpDir)"
        ) from error
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
            times[event["name"].removesuffix(KERNEL)].append(event["dur"] * 1e-6)
    return {kernel: median(np.array(seconds[WARM:] or seconds)) for kernel, seconds in times.items()}


def layer_of(kernel: str, names: Mapping[str, str]) -> str | None:
    """The layer of a kernel: that of the longest known name that the kernel's begins with."""
    made = f"<{kernel.removesuffix('_nchwc')}"
    if kernel.endswith("_nchwc") and made in names:
        return names[made]
    fits = [name for name in names if kernel == name or (kernel.startswith(name) and not kernel[len(name)].isalnum())]
    return names[max(fits, key=len)] if fits else None


def owners(model: ir.Model, layers: Sequence[str]) -> dict[str, str]:
    """Names of nodes and tensors, and the layer each belongs to; ``<name`` for what a layer makes."""
    known = set(layers)
    found: dict[str, str] = {}
    for node in model.graph:
        layer = name_of(node)
        if layer not in known:
            continue
        for value in node.inputs:
            if value is not None and value.name:
                found.setdefault(value.name, layer)
        for name in _made(node, known):
            found[f"<{name}"] = layer
    return {**found, **{layer: layer for layer in layers}}


def _made(node: ir.Node, layers: set[str]) -> list[str]:
    """The outputs of a layer, and of the nodes that follow it and are not layers."""
    names, value = [], node.outputs[0]
    while value.name:
        names.append(value.name)
        uses = list(value.uses())
        if len(uses) != 1 or name_of(uses[0].node) in layers:
            break
        value = uses[0].node.outputs[0]
    return names
