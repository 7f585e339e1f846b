"""QuaRot in a graph: turn what linear layers read by an orthogonal matrix R, and their weights with it.

    x W^T = (x R) (W R)^T

Without a file a tensor that linear layers read is turned in front of them (``turning.py``; in blocks, where it has more
channels than ``r_matrix_dim``), by nodes that stay float. Where the layers, rounded as the job rounds them, answer no
better with it (``local.py``), the tensor stays as it is; ``keep_worse=True`` turns all. With ``r_config_path`` the
layers of each pair are turned instead: ``prev_nodes`` write a residual stream, ``next_nodes`` read it behind a norm
without mean (RMSNorm), whose weight goes into them first; that costs nothing at run time.

Source: Ashkboos et al. 2024, "QuaRot". Not handled: norms that take off the mean, R2 to R4 of the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from quark.algorithms.hadamard import Rotation, block_size, rotation
from quark.errors import ConfigError, unknown
from quark.ir.surgery import Names, constant_array, has_array, input_at, name_of
from quark.onnx.algorithms.channels import write_operand
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.linear import Linear, by_input, linear_of
from quark.onnx.algorithms.local import RoundingJudge, judge_of, look
from quark.onnx.algorithms.turning import Turning
from quark.onnx.graph.report import PassReport
from quark.onnx.qdq.slots import STAYS_FLOAT
from quark.onnx.quantization.config.algorithm import QuarotConfig
from quark.reading import read_json

_SEED = 0
_KEYS = ("prev_nodes", "next_nodes", "norm_node")


def run(model: ir.Model, config: QuarotConfig, context: JobContext) -> PassReport:
    """Turn the model, in place.

    Raises:
        ConfigError: a file that cannot be used, or names a node that cannot be turned.
    """
    if config.r_config_path is not None:
        pairs = read_pairs(config.r_config_path)
        for pair in pairs:
            _turn_pair(model, pair, config)
        return PassReport(config.name, len(pairs))
    found, names = by_input(model), Names(model)
    if not found:
        return PassReport(config.name, 0, ("the model has no MatMul or Gemm with a constant matrix",))
    judged = not config.keep_worse and context.job.mode != "nbits"
    judge, refused = judge_of(model, context) if judged else None, []
    seen = look(model, found, context, config.name) if judged else {}
    for value, layers in found.items():
        turn = rotation_for(layers[0].weight.shape[1], config)
        if judge is not None and not _helps(judge, value, layers, seen[str(value.name)].rows, turn):
            refused.append(f"{value.name!r} stays: its layers answer better without")
            continue
        _turn_input(model, names, value, layers, turn)
    return PassReport(config.name, len(found) - len(refused), tuple(refused))


def _helps(judge: RoundingJudge, value: ir.Value, layers: list[Linear], rows: np.ndarray, turn: Rotation) -> bool:
    """Whether the layers' loss is smaller with the rotation."""

    def turned(x: np.ndarray) -> np.ndarray:
        return np.asarray(turn.apply(x.astype(np.float64)), np.float32)

    without = judge.loss(value, layers, rows, lambda x: x, lambda x: x)
    return judge.loss(value, layers, rows, turned, turned) < without


def rotation_for(size: int, config: QuarotConfig) -> Rotation:
    """The rotation of so many channels: the largest blocks that ``r_matrix_dim`` allows."""
    seed = _SEED if config.use_random_had else None
    whole = rotation(size, seed=seed)
    if block_size(whole) <= config.r_matrix_dim:
        return whole
    divisors = (n for n in range(config.r_matrix_dim, 0, -1) if size % n == 0)
    for block in divisors:
        try:
            return rotation(size, block, seed)
        except ConfigError:
            continue
    return whole


def _turn_input(model: ir.Model, names: Names, value: ir.Value, layers: list[Linear], turn: Rotation) -> None:
    """The rotation in front of the layers, and their weights turned."""
    turning = Turning(model, names, value, turn, layers[0].weight.dtype)
    for node in turning.nodes:
        node.meta[STAYS_FLOAT] = "QuaRot: it turns what the layers behind it read"
    model.graph.insert_before(layers[0].node, turning.nodes)
    for layer in layers:
        layer.write(turn.apply(layer.weight.astype(np.float64)).reshape(-1, turn.size))
        layer.node.replace_input_with(0, turning.value)


# ---- pairs of a file -------------------------------------------------------------------------------------------------


def read_pairs(path: str) -> list[dict[str, Any]]:
    """The ``R1_pairs`` of a file.

    Raises:
        ConfigError: the file is missing, no JSON, or lacks a key.
    """
    data = read_json(path, ConfigError, "r_config_path:")
    pairs = data.get("R1_pairs") if isinstance(data, dict) else None
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError(f"r_config_path: {path!r} has no list R1_pairs")
    for pair in pairs:
        if not isinstance(pair, dict) or not all(_is_named(key, value) for key, value in pair.items()):
            raise ConfigError(f"r_config_path: a pair in {path!r} is not an object of names: {pair!r:.80}")
        for key in pair:
            if key not in _KEYS:
                raise ConfigError(f"r_config_path: {unknown('key of a pair', key, _KEYS)}")
        if not pair.get("prev_nodes") or not pair.get("next_nodes"):
            raise ConfigError(f"r_config_path: a pair in {path!r} needs prev_nodes and next_nodes")
    return pairs


def _is_named(key: object, value: object) -> bool:
    """The norm is a name, or left out; the others are lists of names."""
    if key == "norm_node":
        return value is None or isinstance(value, str)
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _turn_pair(model: ir.Model, pair: dict[str, Any], config: QuarotConfig) -> None:
    nodes = {name_of(node): node for node in model.graph}
    for name in (*pair["prev_nodes"], *pair["next_nodes"], *([pair["norm_node"]] if pair.get("norm_node") else [])):
        if name not in nodes:
            raise ConfigError(f"r_config_path: {unknown('node', name, nodes)}")
    readers = [_linear(nodes[name]) for name in pair["next_nodes"]]
    if pair.get("norm_node"):
        _fold_norm(nodes[pair["norm_node"]], readers)
    turn = rotation_for(readers[0].weight.shape[1], config)
    for layer in readers:
        layer.write(turn.apply(layer.weight.astype(np.float64)))
    for name in pair["prev_nodes"]:
        _turn_output(nodes[name], turn)


def _linear(node: ir.Node) -> Linear:
    layer = linear_of(node)
    if layer is None:
        raise ConfigError(
            f"r_config_path: {node.name!r} is a {node.op_type} that cannot be turned; it takes a MatMul "
            "or Gemm with a constant matrix"
        )
    return layer


def _turn_output(node: ir.Node, turn: Rotation) -> None:
    """Turn what a layer, or a table of embeddings, writes."""
    if node.op_type == "Gather":
        table = np.asarray(constant_array(input_at(node, 0)))
        write_operand(node, 0, turn.apply(table.astype(np.float64)).astype(table.dtype))
        return
    layer = _linear(node)
    layer.write(turn.apply(layer.weight.T.astype(np.float64)).T)
    bias = constant_array(input_at(node, 2))
    if bias is not None:
        write_operand(node, 2, turn.apply(bias.astype(np.float64)).astype(bias.dtype))


def _fold_norm(node: ir.Node, readers: list[Linear]) -> None:
    """Multiply a norm's weight into the layers that read it; the norm keeps ones."""
    positions = [k for k, value in enumerate(node.inputs) if has_array(value)]
    if node.op_type not in ("Mul", "RMSNormalization") or not positions:
        raise ConfigError(
            f"r_config_path: norm_node {node.name!r} is a {node.op_type}; it takes the Mul with the norm's weight, or "
            "an RMSNormalization"
        )
    weight = np.asarray(constant_array(node.inputs[positions[0]]))
    for layer in readers:
        layer.write(layer.weight * weight.reshape(-1))
    write_operand(node, positions[0], np.ones_like(weight))
