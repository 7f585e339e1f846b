"""Quantize the bodies of If, Loop and Scan: those that hold layers, or all of them (EnableSubgraph).

Each body becomes a model of its own: what it reads of the graph around it becomes inputs (constants become weights),
and the whole flow runs on it: passes, placement, calibration, emission. Its calibration data is what the float model
hands it: for an If, the values around it in every sample that takes that branch; for a Loop or Scan, the state of
every iteration, which is run here one by one. The quantized body then takes the place of the float one. Bodies inside
bodies likewise.

A body that no calibration sample enters stays float, and the report says so: a range that nothing was seen of would be
a guess. So does one that is handed a sequence of tensors, where ranges are wanted. Weights of a body are serialized
once. Calibration methods and speed are searched in each body by what it makes of its own data. Not handled: mixed
precision, whose bound is one for the outputs of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.ir.surgery import all_values, int_attribute, ints_attribute, is_constant, label, read_nothing
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.stages import transform, tune
from quark.onnx.bodies import alone, graphs, in_place, is_wanted, place_of, sequence_of
from quark.onnx.calibration import calibrate
from quark.onnx.data import checked, inputs_of, samples_of
from quark.onnx.diagnosis import located, of_plan, ranked
from quark.onnx.follow import follow
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.integer_lstms import keep_exact
from quark.onnx.npu.adapt import adapt
from quark.onnx.passes import constants
from quark.onnx.pipeline import BODY, run_steps
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.parameters import observed
from quark.onnx.qdq.settings import request_of
from quark.onnx.qdq.slower import all_in_float
from quark.report.values import Weakness

LOOKED_AT = 64
"""Iterations whose values the inputs of a body are held against."""
Choose = Callable[[ir.Model, JobContext], tuple[JobContext, Callable[[Plan], list[PassReport]]]]
_Done = tuple[ir.Model, Plan, tuple[Weakness, ...], tuple[PassReport, ...]]


@dataclass(frozen=True)
class QuantizedBody:
    """A quantized body: where it belongs, and which of its inputs are values of the graph around it."""

    node: str
    attribute: str
    model: ir.Model
    captured: tuple[str, ...]
    plan: Plan
    weak: tuple[Weakness, ...] = ()


@dataclass(frozen=True)
class Made:
    """What became of the bodies of a graph."""

    bodies: tuple[QuantizedBody, ...] = ()
    reports: tuple[PassReport, ...] = ()


def quantize_bodies(model: ir.Model, context: JobContext, choose: Choose) -> Made:
    """Quantize the bodies of the main graph. ``model`` stays as it is; :func:`install` puts the bodies in place.

    Args:
        model: the prepared float model.
        context: its reader has samples for ``model``, read once for each body; ``None`` where no ranges are needed.
        choose: the context with what is chosen on the data of a body, and what writes it into the body's plan.
    """
    bodies, reports, refused, job = [], [], [], context.job
    for node, attribute, graph in graphs(model):
        if not is_wanted(graph, job.options):
            continue
        if not _is_fed(graph, job):
            refused.append(f"{attribute} of {label(node)} stays float: {sequence_of(graph)!r} is a sequence of tensors")
            continue
        body, captured = alone(graph, model)
        fed = partial(_feeds, model, (node, attribute), body, captured, context.reader, _runtime(job))
        feeds = None if context.reader is None else Fed(fed)
        _correct_shapes(body, captured, feeds or ())
        place = place_of(node, attribute)
        with _located(place, job):
            # what is finished of a job is kept by names of the main graph
            made = _quantized(body, replace(context, job=in_place(job, place), reader=feeds, journal=Journal()), choose)
        if isinstance(made, str):
            refused.append(f"{attribute} of {label(node)} stays float: {made}")
            continue
        quantized, plan, weak, told = made
        bodies.append(QuantizedBody(str(node.name), attribute, quantized, captured, plan, weak))
        reports += [replace(one, refused=tuple(f"{place}: {reason}" for reason in one.refused)) for one in told]
    if bodies or refused:
        reports.insert(0, PassReport("subgraphs", len(bodies), tuple(refused)))
    return Made(tuple(bodies), tuple(reports))


@dataclass(frozen=True)
class Entered:
    """A body that is to be quantized, ready for it: what its names begin with, and those of the graph around it; where
    it is there; which of its inputs are values of that graph; what it is fed with; the job as it sees it."""

    place: str
    outer: str
    node: str
    attribute: str
    model: ir.Model
    captured: tuple[str, ...]
    feeds: Fed
    job: Job


def entered(model: ir.Model, job: Job, feeds: Fed, outer: str = "") -> Iterator[Entered]:
    """Every body that is to be quantized and that a sample enters, those inside bodies too, behind what they are in."""
    for node, attribute, graph in graphs(model):
        if not (is_wanted(graph, job.options) and _is_fed(graph, job)):
            continue
        body, captured = alone(graph, model)
        inside = Fed(partial(_feeds, model, (node, attribute), body, captured, feeds, _runtime(job)))
        if next(iter(inside), None) is None:
            continue
        place = place_of(node, attribute)
        _correct_shapes(body, captured, inside)
        ready(body, job)
        found = Entered(outer + place, outer, str(node.name), attribute, body, captured, inside, in_place(job, place))
        yield found
        yield from entered(body, found.job, inside, found.place)


def decided_bodies(model: ir.Model, job: Job, known: Sequence[NodeInfo]) -> Made:
    """What is decided about the bodies, without data; nothing is quantized."""
    found = []
    for node, attribute, graph in graphs(model):
        if is_wanted(graph, job.options) and _is_fed(graph, job):
            body, captured = alone(graph, model)
            ready(body, job)
            own = in_place(job, place_of(node, attribute))
            with _located(place_of(node, attribute), job):
                plan = follow(body, MODES[job.mode].place(body, own, known), own)
                record(plan, decided_bodies(body, own, known))
            found.append(QuantizedBody(str(node.name), attribute, body, captured, plan))
    return Made(tuple(found))


def install(model: ir.Model, made: Made) -> None:
    """Put the quantized bodies into the float model, in place."""
    nodes = {node.name: node for node in model.graph}
    values = {str(value.name): value for value in all_values(model)}
    for body in made.bodies:
        graph = body.model.graph
        for value in [one for one in graph.inputs if one.name in body.captured]:
            value.replace_all_uses_with(values[str(value.name)], replace_graph_outputs=True)
            graph.inputs.remove(value)
        _keep_apart(graph, values)
        read_nothing(nodes[body.node].attributes[body.attribute].as_graph())
        nodes[body.node].attributes[body.attribute] = ir.AttrGraph(body.attribute, graph)
        model.functions.update(body.model.functions)
        for domain, version in graph.opset_imports.items():
            model.graph.opset_imports.setdefault(domain, version)


def weak_inside(made: Made) -> tuple[Weakness, ...]:
    """The layers of the bodies that lose most to their weights, under ``node/body/name``."""
    return ranked(*(located(body.weak, f"{body.node}/{body.attribute}/") for body in made.bodies))


def record(plan: Plan, made: Made) -> None:
    """Add what was decided about the bodies to the plan of the model, under ``node/body/name``."""
    for body in made.bodies:
        prefix = f"{body.node}/{body.attribute}/"
        for tensor in body.plan:
            plan.tensors[prefix + tensor.name] = replace(tensor, name=prefix + tensor.name, group=prefix + tensor.group)
        for node in body.plan.nodes.values():
            plan.nodes[prefix + node.name] = replace(node, name=prefix + node.name)
        plan.floats.update({prefix + name: reason for name, reason in body.plan.floats.items()})
        if body.plan.tuned:
            plan.tuned = with_body(plan.tuned, prefix, body.plan.tuned)


def with_body(tuned: Mapping[str, Any], place: str, inside: Mapping[str, Any]) -> dict[str, Any]:
    """What ``TuneSpeed`` found, with what it found in a body: its nodes under ``place``, its times under ``bodies``."""
    left = [*tuned.get("TunedFloat", ()), *(place + name for name in inside["TunedFloat"])]
    times = {key: value for key, value in inside.items() if key not in ("TunedFloat", "bodies")}
    deeper = {place + name: value for name, value in inside.get("bodies", {}).items()}
    return {**tuned, "TunedFloat": left, "bodies": {**tuned.get("bodies", {}), place: times, **deeper}}


def _keep_apart(graph: ir.Graph, outer: Mapping[str, ir.Value]) -> None:
    """No value of a body has the name of one around it; constants that both have are those around it.

    What the quantizer has added inside may be called as something else is outside.
    """
    for name, value in list(graph.initializers.items()):
        if name in outer and _is_equal(value, outer[name]) and not value.is_graph_output():
            value.replace_all_uses_with(outer[name])
            del graph.initializers[name]
    taken = set(outer)
    for value in (*graph.initializers.values(), *(one for node in graph for one in node.outputs)):
        base, number = str(value.name), 0
        while value.name in taken:
            number += 1
            value.name = f"{base}_body_{number}"


def _is_equal(one: ir.Value, other: ir.Value) -> bool:
    """Whether two values are constants of the same contents."""
    a, b = one.const_value, other.const_value
    if a is None or b is None or not (is_constant(one) and is_constant(other)):
        return False
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def ready(body: ir.Model, job: Job) -> None:
    """Run the passes of bodies, in place."""
    constants.lift_constant_nodes(body.graph)
    run_steps(body, BODY, job)
    infer_shapes(body)


def _quantized(body: ir.Model, context: JobContext, choose: Choose) -> _Done | str:
    """The quantized body, or the reason why it stays float."""
    job, reader, mode = context.job, context.reader, MODES[context.job.mode]
    ready(body, job)
    empty = job.mode == "static" and next(iter(reader or ()), None) is None
    reports = [] if empty else _inside(partial(transform, body, context))
    inner = quantize_bodies(body, context, choose)
    context, told = (context, _nothing) if empty else choose(body, context)
    job = context.job
    plan = follow(body, mode.place(body, job, context.known), job)
    reports += told(plan)
    if not plan.tensors and not inner.bodies and not all_in_float(plan):
        return "nothing in it can be quantized"
    wanted = observed(plan, job.options) if job.mode == "static" else ()
    requests = {tensor.name: request_of(tensor.spec, job.options) for tensor in wanted}
    if requests and empty:
        return "no calibration sample enters it"
    ranges = calibrate(body, requests, reader, Runtime(libraries=job.options.UserCustomOpLibPath)) if requests else {}
    mode.set_parameters(body, plan, ranges, job.options)
    keep_exact(body, plan, reader, job.options)
    reports += adapt(body, plan, job) if job.mode == "static" else []
    weak = ranked(of_plan(body, plan), weak_inside(inner))
    reports += [] if empty else _inside(partial(tune, body, plan, context))
    install(body, inner)
    quantized = mode.emit(body, plan, job.options)
    record(plan, inner)
    return quantized, plan, weak, (*inner.reports, *reports)


def _nothing(plan: Plan) -> list[PassReport]:
    """Nothing was chosen."""
    return []


def _inside(algorithms: Callable[[], list[PassReport]]) -> list[PassReport]:
    """What algorithms did in a body; the layers that they are told to look for may be somewhere else."""
    try:
        return algorithms()
    except ConfigError as error:
        return [PassReport("algorithms", refused=(str(error),))]


@contextmanager
def _located(place: str, job: Job) -> Iterator[None]:
    """What is wrong with the lines of a plan about a body is told with its place."""
    try:
        yield
    except ConfigError as error:
        if job.plan is None:
            raise
        raise ConfigError(f"{error} (in {place})") from error


# ---- its calibration data --------------------------------------------------------------------------------------------


class Fed:
    """Samples that are made anew by every iteration."""

    def __init__(self, make: Callable[[], Iterator[Feed]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Feed]:
        return self._make()


def _is_fed(graph: ir.Graph, job: Job) -> bool:
    """Whether the data of a body can be collected, where the job needs any."""
    return not job.runs_samples or sequence_of(graph) is None


def _runtime(job: Job) -> Runtime:
    """What bodies are run with to see what they hand on: the CPU, and the operators that the user's libraries bring."""
    return Runtime(libraries=job.options.UserCustomOpLibPath)


def _feeds(
    model: ir.Model,
    place: tuple[ir.Node, str],
    body: ir.Model,
    captured: tuple[str, ...],
    reader: Any,
    runtime: Runtime,
) -> Iterator[dict[str, np.ndarray]]:
    """What the float model hands to a body, sample by sample and iteration by iteration."""
    node, attribute = place
    sources = [str(value.name) for value in node.inputs if value is not None and not is_constant(value)]
    runner = Runner(model, list(dict.fromkeys([*captured, *sources])), runtime=runtime)
    # a body that no sample enters hands none to those inside it
    for sample in reader if isinstance(reader, Fed) else checked(samples_of(reader), inputs_of(model)):
        seen = runner.run(sample).values
        around = {name: seen[name] for name in captured}
        given = [_value(value, seen) for value in node.inputs]
        if node.op_type == "If":
            wanted = "then_branch" if bool(np.asarray(given[0]).reshape(())) else "else_branch"
            if wanted == attribute:
                yield around
        elif node.op_type == "Loop":
            yield from _iterations(body, given, around, runtime)
        else:
            yield from _steps(node, body, given, around, runtime)


def _steps(
    node: ir.Node,
    body: ir.Model,
    given: list[np.ndarray | None],
    around: Mapping[str, np.ndarray],
    runtime: Runtime,
) -> Iterator[dict[str, np.ndarray]]:
    """The feeds of every step of a Scan: its state, and one slice of every tensor that it goes through."""
    names = [str(value.name) for value in body.graph.inputs if value.name not in around]
    arrays, count = [np.asarray(value) for value in given], int_attribute(node, "num_scan_inputs", 0)
    state, through = arrays[: len(arrays) - count], arrays[len(arrays) - count :]
    axes = ints_attribute(node, "scan_input_axes") or [0] * count
    backwards = ints_attribute(node, "scan_input_directions") or [0] * count
    turned = [
        np.moveaxis(one, axis, 0)[:: -1 if back else 1]
        for one, axis, back in zip(through, axes, backwards, strict=True)
    ]
    kept = [str(value.name) for value in body.graph.outputs[: len(state)]]
    runner = Runner(_unshaped(body), kept, runtime=runtime)
    for step in zip(*turned, strict=True):
        feed = {**dict(zip(names, [*state, *map(np.ascontiguousarray, step)], strict=True)), **around}
        yield feed
        found = runner.run(feed).values if kept else {}
        state = [found[name] for name in kept]


def _value(value: ir.Value | None, seen: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if value is None:
        return None
    return value.const_value.numpy() if is_constant(value) and value.const_value is not None else seen[str(value.name)]


def _iterations(
    body: ir.Model, given: list[np.ndarray | None], around: Mapping[str, np.ndarray], runtime: Runtime
) -> Iterator[dict[str, np.ndarray]]:
    """The feeds of every iteration of a Loop: its number, its condition, its state.

    ONNX wants scalars for the first two; ONNX Runtime hands one value in one dimension to a body that declares it so.
    """
    formal = [value for value in body.graph.inputs if value.name not in around]
    ranks = [1 if value.shape is not None and len(value.shape) == 1 else 0 for value in formal[:2]]
    outputs = [str(value.name) for value in body.graph.outputs]
    runner = Runner(_unshaped(body), outputs, runtime=runtime)
    limit = None if given[0] is None else int(np.asarray(given[0]).reshape(()))
    condition = True if len(given) < 2 or given[1] is None else bool(np.asarray(given[1]).reshape(()))
    state, number = [np.asarray(value) for value in given[2:]], 0
    while condition and (limit is None or number < limit):
        counted = [
            np.full((1,) * rank, value) for rank, value in zip(ranks, (np.int64(number), condition), strict=True)
        ]
        feed = {**{str(one.name): value for one, value in zip(formal, [*counted, *state], strict=True)}, **around}
        yield feed
        found = runner.run(feed).values
        condition = bool(np.asarray(found[outputs[0]]).reshape(()))
        state, number = [found[name] for name in outputs[1 : 1 + len(state)]], number + 1


def _unshaped(body: ir.Model) -> ir.Model:
    """The body with inputs of any shape."""
    made = body.clone()
    for value in made.graph.inputs:
        value.shape = None
    return made


def _correct_shapes(body: ir.Model, captured: tuple[str, ...], feeds: Iterable[Feed]) -> None:
    """Take back, in place, shapes of inputs that do not hold.

    What enters the body of a Loop or Scan may have another shape than its input declares, and another in the next
    iteration: runtimes read the shape of what comes. The body alone is a model, and is held to what it declares.
    """
    handed = [value for value in body.graph.inputs if value.name not in captured]
    for feed in islice(feeds if handed else (), LOOKED_AT):
        for value in handed:
            found = np.shape(feed[str(value.name)])
            if value.shape is None or len(value.shape) != len(found):
                value.shape = None
                continue
            sizes = zip(value.shape, found, strict=True)
            value.shape = ir.Shape(None if isinstance(size, int) and size != n else size for size, n in sizes)
