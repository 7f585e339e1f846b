"""One layer of a model quantized at a time: what is needed for it is prepared once, and every trial is cheap.

    prepare, transform the float model once → per candidate: place, calibrate (one pass over the data), parameters
    → per layer and candidate: emit only that layer's tensors, run a few samples, compare with the float outputs

A layer owns its weights, its biases and what it reads; what it makes belongs to the layers that read it, and to it only
where no quantized layer does. So the trials of all layers together hold every quantized tensor once.

The prepared model, the samples and the float outputs lie in a folder: a trial runs in this process or in any that sees
the folder (joblib), and memory holds one model, mapped, and one sample. Bodies of If and Loop are models of their own:
their layers are called ``node/body/name``, and a trial puts the body with one quantized layer into the float model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from quark import parallel
from quark.config.job import Job, for_target
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.rules import Rule
from quark.config.tensor import LayerSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.files.arrays import read_arrays, write_arrays
from quark.files.journal import Journal
from quark.ir.surgery import apart, constant_array, name_of, set_constant
from quark.measure.outputs import Outputs
from quark.onnx import fingerprint
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.samples import rereadable
from quark.onnx.algorithms.stages import transform, tune
from quark.onnx.algorithms.trial import planned
from quark.onnx.bodies import all_known
from quark.onnx.data import checked, inputs_of
from quark.onnx.data_layout import in_layout
from quark.onnx.graph import model as files
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.layer_units import Tensors, Unit, is_float, sizes_of, units_of
from quark.onnx.npu.adapt import adapt
from quark.onnx.npu.simulate import simulate
from quark.onnx.pipeline import prepare
from quark.onnx.qdq.modes import MODES
from quark.onnx.quantization.config.algorithm import AlgoConfig
from quark.onnx.quantization.config.candidates import candidate
from quark.onnx.quantization.config.config import with_options
from quark.onnx.quantization.config.finetune import FineTuneConfig
from quark.onnx.quantization.config.tuners import split, with_tuners
from quark.onnx.ranges import samples_of
from quark.onnx.scratch import Scratch
from quark.onnx.subgraphs import Fed, Made, QuantizedBody, entered, install
from quark.report.process import lent
from quark.search.trials import ONE_BY_ONE, Measured, Pair, TriedModel, Trying, by_function
from quark.search.values import check_distinct

MODEL = "float.onnx"
T = TypeVar("T")
#: The specs of candidates; ``None`` is float.
Layers = Mapping[str, LayerSpec | None]


class Inner(NamedTuple):
    """A body of If or Loop: its file, the place of the graph around it, where it is there, what it reads of it."""

    file: str
    outer: str
    node: str
    attribute: str
    captured: tuple[str, ...]


@dataclass(frozen=True)
class FloatModelFiles:
    """Where trials find what they need; it travels to other processes.

    Attributes:
        folder: the prepared float model, samples and float outputs.
        data: what the samples are called there.
        outputs: names of the float outputs that are compared.
        samples: how many there are.
        job: of the whole model.
        threads: of ONNX Runtime in one trial; ``None``: its choice.
        tuned: files of the models whose weights the algorithms of a candidate have tuned, by candidate.
        bodies: those of If and Loop, by what the names of their layers begin with.
    """

    folder: Path
    data: str
    outputs: tuple[str, ...]
    samples: int
    job: Job
    threads: int | None = None
    tuned: Mapping[str, str] = field(default_factory=dict)
    bodies: Mapping[str, Inner] = field(default_factory=dict)

    def place(self, layer: str) -> str:
        """What the name of a layer begins with where it is in a body; empty in the main graph."""
        return max((one for one in self.bodies if layer.startswith(one)), key=len, default="")

    def graph(self, place: str) -> ir.Model:
        """The float graph of a place, its weights mapped."""
        return opened(str(self.folder / self.bodies[place].file if place else self.model))

    @property
    def model(self) -> Path:
        """The prepared float model."""
        return self.folder / MODEL

    def pairs(self) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """(sample, float outputs), one in memory at a time."""
        for index in range(self.samples):
            yield self.feed(index), self.reference(index)

    def feed(self, index: int) -> dict[str, np.ndarray]:
        """One sample."""
        return read_arrays(self.file(index, "in"))

    def reference(self, index: int) -> dict[str, np.ndarray]:
        """The float outputs for it."""
        return read_arrays(self.file(index, "out"))

    def file(self, index: int, side: str) -> Path:
        """Where one side of a sample is."""
        return self.folder / f"{self.data}.{index}.{side}.safetensors"

    def runner(self, model: ir.Model) -> Runner:
        """A session that gives the outputs of ``model``."""
        return Runner(model, self.outputs, (), replace(Runtime.of(self.job.options), threads=self.threads))

    def measured(self, model: ir.Model, metric: str) -> dict[str, float]:
        """The measures of a quantized model, with its divergence where that is the metric."""
        runner, outputs = self.runner(model), Outputs()
        for feed, reference in self.pairs():
            outputs.update(reference, runner.run(feed).values, metric == "kl")
        return outputs.metrics()

    def called(self, model: ir.Model, function: Callable[[str], T]) -> T:
        """What a function says of the path of a model."""
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "quantized.onnx"
            files.save(model, path)
            return function(str(path))


@dataclass(frozen=True)
class OnnxLayerRuns(TriedModel):
    """The layers of one model.

    Attributes:
        layers: in the order of the graph.
        common: what trials need.
        names: the candidates.
        digest, data: of the model and of the samples.
        moved: inputs whose samples have their channels last in the prepared model.
        job: as it was asked for.
        workers: trials at a time.
    """

    USUAL = "sqnr"
    layers: tuple[Unit, ...]
    common: FloatModelFiles
    names: tuple[str, ...]
    digest: str
    data: str
    moved: frozenset[str]
    job: Job
    workers: int

    def belongs(self) -> dict[str, str]:
        """As the base says."""
        return {"model": self.digest, "data": self.data, **fingerprint.of_job(self.job)}

    def tried(self, pairs: Sequence[Pair], metric: str) -> Iterator[tuple[Pair, Measured]]:
        """As the base says; what two candidates make alike of a layer is measured once."""
        units, alike = {unit.name: unit for unit in self.layers}, dict[bytes, list[Pair]]()
        for pair in pairs:
            alike.setdefault(units[pair[0]].digest(pair[1]), []).append(pair)
        calls = (
            parallel.delayed(trial, self.common, units[name], *(one, metric)) for (name, one), *_ in alike.values()
        )
        for same, measured in zip(alike.values(), parallel.in_threads(calls, self.workers), strict=True):
            yield from ((pair, measured) for pair in same)


def candidate_layers(names: Sequence[str], job: Job) -> dict[str, LayerSpec | None]:
    """The specs of every candidate, as the target of the job wants them.

    Raises:
        ConfigError: an unknown candidate, one that is listed twice, or none.
    """
    check_distinct(names)
    found: dict[str, LayerSpec | None] = {}
    for name in names:
        spec = candidate(split(name)[0])
        rules = replace(job.rules, rules=(Rule((), spec and with_options(spec, job.options), "candidates"),))
        found[name] = for_target(replace(job, rules=rules)).rules.rules[0].layer
    return found


@contextmanager
def open_runs(
    model_input: files.ModelInput,
    job: Job,
    names: Sequence[str],
    reader: Any,
    trying: Trying = ONE_BY_ONE,
) -> Iterator[OnnxLayerRuns]:
    """Prepare, calibrate once, and lay everything out for the trials; no other process works on the ledger meanwhile.

    Args:
        model_input: the float model.
        job: of the whole model; its rules decide which layers may be quantized at all.
        names: the candidates.
        reader: the samples.
        trying: how many trials run at once, and where finished ones are kept.

    Raises:
        ConfigError: a job that is not static, an unknown candidate, or nothing that can be quantized.
        DataError: no samples, or no float output to compare.
    """
    with Scratch(job.options) as scratch, Journal.held(trying.ledger):
        candidates = candidate_layers(names, job)
        try:
            yield _laid_out(model_input, job, candidates, reader, scratch, trying.workers)
        finally:
            opened.cache_clear()  # trials have opened models of a folder that is to be removed


def _laid_out(
    model_input: files.ModelInput,
    job: Job,
    candidates: Layers,
    reader: Any,
    scratch: Scratch,
    workers: int,
) -> OnnxLayerRuns:
    """Everything that trials need."""
    if job.mode != "static":
        raise ConfigError(f"single layers are quantized statically; the configuration asks for the mode {job.mode!r}")
    source, asked = files.load(model_input), job
    digest, known = fingerprint.of_model(source), all_known(source)
    specs = tuple(Rule((), spec, "candidates") for spec in candidates.values() if spec is not None)
    prepared = prepare(source, job.ruled(specs), of=model_input)
    model, job = prepared.model, prepared.job
    reader = in_layout(rereadable(reader), prepared.moved)
    context = JobContext(job, reader, scratch, Journal(), lambda stage, done, total: None, known)
    transform(model, context)
    given = Fed(lambda: iter(samples_of(model, job.options, reader)))
    plans = _planned(model, context, candidates, given)
    for plan in plans.values() if job.npu else ():
        adapt(model.clone(), plan, job)
    threads = None if workers == 1 else max(1, lent() // workers)
    folder = scratch.folder("single layers").resolve()
    ir.save(model.clone(), folder / MODEL, external_data=f"{MODEL}.data")
    common = FloatModelFiles(
        folder, "data", _float_outputs(model), 0, job, threads, _tuned(model, plans, context, folder)
    )
    common, data = lay_out(common, given)
    units = [*units_of(model, plans, list(candidates), sizes_of(model, common.feed(0), job.options))]
    common, inside = _bodies(common, model, candidates, context)
    if not units and not inside:
        raise ConfigError("nothing in the model can be quantized under these candidates")
    outputs, names = len(common.outputs), (*candidates,)
    layers, path = (*units, *inside), str(common.model)
    return OnnxLayerRuns(
        layers, path, common.samples, outputs, common, names, digest, data, prepared.moved, asked, workers
    )


def _bodies(
    common: FloatModelFiles, model: ir.Model, candidates: Layers, context: JobContext
) -> tuple[FloatModelFiles, list[Unit]]:
    """The layers in bodies of If and Loop that samples enter; no candidate tunes weights there, as nothing does."""
    fit = {name: spec for name, spec in candidates.items() if not with_tuners((), {"": name})}
    bodies: dict[str, Inner] = {}
    units: list[Unit] = []
    for body in entered(model, common.job, Fed(lambda: (common.feed(k) for k in range(common.samples)))):
        plans = _planned(body.model, replace(context, job=body.job), fit, body.feeds)
        file = f"body{len(bodies)}.onnx"
        ir.save(body.model.clone(), common.folder / file, external_data=f"{file}.data")
        bodies[body.place] = Inner(file, body.outer, body.node, body.attribute, body.captured)
        sizes = sizes_of(body.model, next(iter(body.feeds)), common.job.options)
        units += units_of(body.model, plans, list(fit), sizes, body.place)
    return replace(common, bodies=bodies), units


def _planned(model: ir.Model, context: JobContext, candidates: Layers, samples: Iterable[Feed]) -> dict[str, Plan]:
    """The whole graph under every candidate, with scales."""
    specs = {name: spec for name, spec in candidates.items() if spec is not None}
    jobs = [context.job.ruled([Rule(("^",), spec, "candidate", strict=False)]) for spec in specs.values()]
    for one in jobs:  # constants that layers share get copies, the same for all candidates
        MODES["static"].place(model, one, context.known)
    return dict(zip(specs, planned(model, jobs, context, lambda: samples, {}), strict=True))


def _tuned(model: ir.Model, plans: Mapping[str, Plan], context: JobContext, folder: Path) -> dict[str, str]:
    """Models with the weights that the algorithms of candidates give every layer, as files in the folder."""
    files_of = {}
    for number, (name, plan) in enumerate(plans.items()):
        algorithms = with_tuners((), {"": name})
        if not algorithms:
            continue
        every = tuple(_alone(one) for one in algorithms)
        work, made = model.clone(), model.clone()
        if context.job.npu:
            simulate(work, plan, context.job)
        tune(work, plan, replace(context, job=replace(context.job, algorithms=every)))
        take_over(made, work, plan.of_role("weight", "bias"))
        files_of[name] = f"tuned{number}.onnx"
        ir.save(made, folder / files_of[name], external_data=f"{files_of[name]}.data")
    return files_of


def _alone(config: AlgoConfig) -> AlgoConfig:
    """The algorithm for all layers, each with the float model's inputs where that can be said, as trials have them."""
    if isinstance(config, FineTuneConfig):
        return replace(config, layers=(), keep_worse=True, drop_ratio=0.0)
    return replace(config, layers=(), keep_worse=True)  # type: ignore[call-arg]


def take_over(model: ir.Model, other: ir.Model, tensors: Iterable[TensorPlan], ending: str = "") -> None:
    """Give ``model`` the constants that ``other`` has under these names; there they have ``ending`` behind."""
    for tensor in tensors:
        values = [
            one.graph.initializers.get(name) for one, name in ((model, f"{tensor.name}{ending}"), (other, tensor.name))
        ]
        array = constant_array(values[1])
        if values[0] is not None and array is not None:
            set_constant(values[0], array)


def _float_outputs(model: ir.Model) -> tuple[str, ...]:
    kinds = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)
    names = tuple(str(value.name) for value in model.graph.outputs if value.dtype in kinds)
    if not names:
        raise DataError("the model has no float output to compare")
    return names


def lay_out(common: FloatModelFiles, samples: Any) -> tuple[FloatModelFiles, str]:
    """Write the samples and the float outputs; the common with their number, and a digest of the samples."""
    model, digest, count = opened(str(common.model)), b"", 0
    runner = common.runner(model)
    for count, feed in enumerate(checked(samples, inputs_of(model)), start=1):
        digest = fingerprint.of_arrays(feed, digest)
        write_arrays(common.file(count - 1, "in"), feed)
        write_arrays(common.file(count - 1, "out"), runner.run(feed).values)
    return replace(common, samples=count), digest.hex()


# ---- one trial -------------------------------------------------------------------------------------------------------


def trial(common: FloatModelFiles, unit: Unit, candidate: str, metric: str) -> Measured:
    """Quantize one layer, with the weights that the candidate's algorithms gave it, and measure; ``size`` is that of
    its constants."""
    model = single(common, unit, candidate)
    size = {"size": stored_bytes(common, unit.name, unit.tensors[candidate], model)}
    model = whole(common, unit.name, model)
    if ":" in metric:
        return common.called(model, partial(by_function, metric)) | size
    return common.measured(model, metric) | size


def single(common: FloatModelFiles, unit: Unit, candidate: str) -> ir.Model:
    """The float graph that a layer is in, with this layer quantized; its weights are those that the candidate's
    algorithms made."""
    place, tensors = common.place(unit.name), unit.tensors[candidate]
    model, name, before = apart(common.graph(place)), unit.name.removeprefix(place), set()
    if candidate in common.tuned and not place:
        tuned = apart(opened(str(common.folder / common.tuned[candidate])))
        take_over(model, tuned, [tensor for tensor in tensors if tensor.role != "activation"])
    plan = Plan({tensor.name: tensor for tensor in tensors}, {name: NodePlan(name, unit.kind, True, "alone")})
    if common.job.npu and not place:
        before = {node.name for node in model.graph}
        simulate(model, plan, common.job)
        made = {name_of(node) for node in model.graph} - before
        for tensor in tensors:
            plan.put(tensor if tensor.readers is None else replace(tensor, readers=tensor.readers | made))
    return MODES["static"].emit(model, plan, common.job.options)


def whole(common: FloatModelFiles, name: str, model: ir.Model) -> ir.Model:
    """The float model with the graph that a layer is in, as ``single`` made it, in its place."""
    place = common.place(name)
    while place:
        body = common.bodies[place]
        around, place = apart(common.graph(body.outer)), body.outer
        install(around, Made((QuantizedBody(body.node, body.attribute, model, body.captured, Plan()),)))
        model = around
    return model


def stored_bytes(common: FloatModelFiles, name: str, tensors: Tensors, model: ir.Model) -> float:
    """Bytes of a layer's constants in the graph in which it is quantized: codes, scales, zero points, what stays float.

    An initializer belongs to the tensor with the longest name that its own begins with.
    """
    place = common.place(name)
    before = common.graph(place).graph
    node = next(node for node in before if node.name == name.removeprefix(place))
    own = {value.name for value in node.inputs if value is not None and value.const_value is not None}
    roles = {tensor.name: tensor.role for tensor in tensors}
    kept = [value for key, value in model.graph.initializers.items() if key in own and key not in roles]
    size = sum(value.const_value.nbytes for value in kept if value.const_value is not None and is_float(value))
    for key, value in model.graph.initializers.items():
        owners = [tensor for tensor in roles if key == tensor or key.startswith(f"{tensor}_")]
        if (key in before.initializers and key not in roles) or not owners or value.const_value is None:
            continue
        size += value.const_value.nbytes if roles[max(owners, key=len)] != "activation" else 0
    return float(size)


@lru_cache(maxsize=16)
def opened(path: str) -> ir.Model:
    """A model of a folder, its weights mapped; it stays open in this process for the trials that follow."""
    return files.load(path)
