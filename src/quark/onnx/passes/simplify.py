"""Simplify with OnnxSlim, when there is something to gain, and only if the outputs stay what they were.

OnnxSlim merges and removes what our own passes leave: chains of Slice, Transpose, Reshape, Unsqueeze or Concat, nodes
that compute the same thing twice, an If whose condition is known. It costs a second on a few hundred nodes and grows
faster than the graph, so :func:`worthwhile` looks first, in linear time; and it sees the model without its large
weights, which the result shares with the original. The result replaces the model only after both gave the same outputs
on one random sample.

Not handled: fusions that need the contents of large weights; folding BatchNormalization has its own pass.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quark.errors import ModelError, check_names
from quark.ir.surgery import input_at, is_constant, name_nodes
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import adopt
from quark.onnx.graph.session import RUNTIME_ERRORS, open_session, quiet_options
from quark.onnx.graph.weightless import through_proto
from quark.onnx.passes import constants, fold_constants

_log = logging.getLogger(__name__)
MERGING = frozenset({"Cast", "Concat", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators of which two in a row are often one."""
ABSORBING = {("Pad", "Conv"), ("Conv", "Mul"), ("Conv", "Add")}
"""Pairs (first, second) where one takes in the other; a second input of Mul or Add must be a constant."""
LEAVE = {"skip_fusion_patterns": ["FusionGemm"], "size_threshold": fold_constants.SMALL}
"""OnnxSlim's MatMul + Add → Reshape, Gemm, Reshape gives nodes new names and types, which rules of users go by; and it
would write out large constants that a model computes (its filters, say) from a few numbers."""
MANY = 1500
"""Nodes above which OnnxSlim runs only when the user asks for it: it takes 8 s on a chain of 2000."""
TOLERANCE = 1e-4
"""Largest difference of an output, relative to its largest value, that counts as rounding."""


def run(
    model: ir.Model,
    options: Mapping[str, object] | None = None,
    always: bool = False,
    sample: Mapping[str, np.ndarray] | None = None,
) -> PassReport:
    """Simplify in place, or leave the model as it is and say why.

    Args:
        model: Replaced in place by what OnnxSlim makes of it; inputs and outputs keep their names and order.
        options: Arguments of ``onnxslim.slim``, such as ``{"skip_fusion_patterns": [...]}`` (default: :data:`LEAVE`).
        always: Run it without looking, on a graph of any size: the user asked for it.
        sample: Feeds to compare the outputs on; a random sample where none is given.

    Returns:
        ``fired`` is the number of nodes that went (at least 1 if anything changed).
    """
    reason = None if always else _not_now(model)
    if reason is not None:
        return PassReport("simplify", refused=(reason,))
    _check(options or {})
    slimmed = _slim(model, {**LEAVE, **(options or {})})
    if isinstance(slimmed, str):
        if options:
            _log.warning("SimplifyModelOptions %s: %s", dict(options), slimmed)
        return PassReport("simplify", refused=(slimmed,))
    before, after = _operators(model), _operators(slimmed)
    if before == after:
        return PassReport("simplify", refused=("OnnxSlim found nothing to do",))
    _restore_inputs(slimmed, model)
    reason = _difference(model, slimmed, sample)
    if reason is not None:
        return PassReport("simplify", refused=(reason,))
    adopt(model, slimmed)
    name_nodes(model)
    constants.run(model)  # OnnxSlim saw no large weights: what an If computed from them is a constant only now
    return PassReport("simplify", fired=max(1, before.total() - after.total()))


def _check(options: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` for an argument that ``onnxslim.slim``, which takes any, would ignore."""
    if options:
        from onnxslim.cli._main import OnnxSlimKwargs

        known = list(OnnxSlimKwargs.__annotations__)
        check_names("argument of onnxslim in SimplifyModelOptions", options, known)


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _not_now(model: ir.Model) -> str | None:
    gain = worthwhile(model)
    if gain is None:
        return "nothing to gain"
    if len(model.graph) > MANY:
        return f"{gain}, but OnnxSlim would take long on {len(model.graph)} nodes: switch it on to run it all the same"
    return None


# ---- the cheap look --------------------------------------------------------------------------------------------------


def worthwhile(model: ir.Model) -> str | None:
    """What OnnxSlim would find to do in the main graph, None where a linear look finds nothing."""
    seen: set[tuple] = set()
    for node in model.graph:
        found = _merges(node) or _known_branch(node) or _repeats(node, seen)
        if found is not None:
            return found
    return None


def _merges(node: ir.Node) -> str | None:
    """A node and the one before it that may become one node."""
    for value in node.inputs[:1] if node.op_type != "Concat" else node.inputs:
        before = value.producer() if value is not None else None
        if before is None or len(before.outputs[0].uses()) != 1:
            continue
        pair = (before.op_type, node.op_type)
        absorbed = pair in ABSORBING and (node.op_type == "Conv" or is_constant(input_at(node, 1)))
        alike = pair[0] == pair[1] and node.op_type in MERGING and len(before.inputs) == len(node.inputs)
        if absorbed or alike:
            return f"{pair[0]} and {pair[1]} in a row"
    return None


def _known_branch(node: ir.Node) -> str | None:
    return "an If whose condition is known" if node.op_type == "If" and is_constant(node.inputs[0]) else None


def _repeats(node: ir.Node, seen: set[tuple]) -> str | None:
    """The same operator on the same inputs a second time (nodes that hold a tensor or graph are not looked at)."""
    attributes = sorted((attr.name, str(attr.value)) for attr in node.attributes.values() if _is_plain(attr))
    if len(attributes) < len(node.attributes) or not node.inputs or "Random" in node.op_type:
        return None
    key = (node.domain, node.op_type, *(id(value) for value in node.inputs), *attributes, len(node.outputs))
    if key in seen:
        return f"{node.op_type} computed twice"
    seen.add(key)
    return None


def _is_plain(attr: ir.Attr) -> bool:
    kinds = ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")
    return not attr.is_ref() and attr.type.name in kinds


# ---- OnnxSlim --------------------------------------------------------------------------------------------------------


def _slim(model: ir.Model, options: Mapping[str, object]) -> ir.Model | str:
    """The simplified model, or the reason why there is none."""
    from onnxslim import slim  # 0.3 s that most models do not need

    def edit(proto: onnx.ModelProto) -> onnx.ModelProto:
        made = _slimmed(slim, proto.SerializeToString(deterministic=True), _Given(options))
        return onnx.ModelProto.FromString(made)

    levels = {name: logging.getLogger(name).level for name in ("onnxslim", "")}
    try:
        return through_proto(model, edit)
    except Exception as error:  # noqa: BLE001  (it raises anything, AssertionError too; the flow goes on without it)
        return f"OnnxSlim failed: {type(error).__name__}: {error}"
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class _Given(dict[str, object]):
    """Options that a cache tells apart."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


@lru_cache(maxsize=1)
def _slimmed(slim: Callable[..., object], proto: bytes, options: _Given) -> bytes:
    """A model without its large weights, simplified; the last one is kept: trials of one model all begin with it."""
    result = slim(onnx.ModelProto.FromString(proto), **options)
    if not isinstance(result, onnx.ModelProto):
        raise ModelError("it returned no model")
    return result.SerializeToString()


def _restore_inputs(slimmed: ir.Model, model: ir.Model) -> None:
    """Graph inputs that nothing reads any more are still part of the interface; so is the order of all of them.

    One that has a default (an initializer that is an input too) goes with its last reader: ONNX Runtime drops defaults
    that nothing reads, and would then ask for the input.
    """
    present = {value.name: value for value in slimmed.graph.inputs}
    present |= {name: value for name, value in slimmed.graph.initializers.items() if name not in present}
    inputs = []
    for value in model.graph.inputs:
        kept = present.get(value.name)
        if not value.is_initializer() or (kept is not None and (kept.uses() or kept.is_graph_output())):
            inputs.append(kept or ir.Value(name=value.name, shape=value.shape, type=value.type))
        elif kept is not None and kept.is_initializer():
            del slimmed.graph.initializers[str(value.name)]
    slimmed.graph.inputs[:] = inputs


# ---- the check -------------------------------------------------------------------------------------------------------


def _difference(model: ir.Model, slimmed: ir.Model, sample: Mapping[str, np.ndarray] | None) -> str | None:
    """The reason not to use ``slimmed``, None where it gives the outputs of ``model`` on a sample."""
    names = [value.name for value in model.graph.outputs]
    if [value.name for value in slimmed.graph.outputs] != names:
        return "OnnxSlim changed the names of the outputs"
    expected: list[object] | str = "an input has a type that no random sample can be made of"
    for feeds in [sample] if sample is not None else [_random_feeds(model, 2), _random_feeds(model, 1)]:
        expected = expected if feeds is None else _outputs(model, feeds)
        if feeds is not None and not isinstance(expected, str):
            got = _outputs(slimmed, feeds)
            return (
                f"the model of OnnxSlim does not run: {got}" if isinstance(got, str) else _compare(names, got, expected)
            )
    return f"the result of OnnxSlim cannot be compared with the model, which does not run: {expected}"


def _random_feeds(model: ir.Model, unknown: int) -> dict[str, np.ndarray] | None:
    """One random sample: normal floats, integers 0 and 1; unknown dimensions become ``unknown``."""
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        if value.dtype is None or value.shape is None or value.dtype.numpy().kind not in "biuf":
            return None
        shape = [size if isinstance(size, int) else unknown for size in value.shape]
        floats = value.dtype.is_floating_point()
        sample = rng.standard_normal(shape) if floats else rng.integers(0, 2, shape)
        feeds[str(value.name)] = np.asarray(sample, value.dtype.numpy())
    return feeds


def _outputs(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[object] | str:
    options = quiet_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return open_session(model, options).run(None, dict(feeds))
    except RUNTIME_ERRORS as error:
        return str(error)


def _compare(names: Sequence[str | None], got: Sequence[object], expected: Sequence[object]) -> str | None:
    for name, ours, theirs in zip(names, got, expected, strict=True):
        if not (isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray)):
            return f"the output {name!r} is not a tensor, so the result cannot be compared"
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"OnnxSlim changes the shape or type of the output {name!r}"
        unit = max(1.0, float(np.max(np.abs(np.nan_to_num(theirs.astype(np.float64))), initial=0)))
        if not np.allclose(ours, theirs, rtol=0, atol=TOLERANCE * unit, equal_nan=True):
            return f"OnnxSlim changes the output {name!r}"
    return None
