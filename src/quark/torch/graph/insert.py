"""The quantizers of a plan, put into the graph."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule, Node

from quark.errors import known
from quark.numerics.affine import LARGEST_BIAS
from quark.numerics.granularity import Channel, Tensor
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.graph.bias import BiasQuantizer
from quark.torch.graph.place import Places
from quark.torch.graph.point import QuantizationPoint
from quark.torch.layers import own_parameter
from quark.torch.learned import learning_quantizer
from quark.torch.plan_rows import stages_in
from quark.torch.quantized_layer import QuantLayer

FOLDER = "quantizers"


def insert(model: GraphModule, places: Places) -> None:
    """Add a module per quantizer, and a call of it wherever a tensor is quantized."""
    made: dict[str, str] = {}
    read = {row: spot for row, spot in places.spots.items() if spot.readers}
    for row, spot in {**read, **places.spots}.items():
        call = call_after(model, spot.tensor, point_of(model, row, places, made))
        for reader in spot.readers or [user for user in spot.tensor.users if user is not call]:
            reader.replace_input_with(spot.tensor, call)
    model.graph.lint()
    model.recompile()


def point_of(model: GraphModule, row: str, places: Places, made: dict[str, str]) -> str:
    """The name of the quantizer of a row of the plan, which is made where it is not there yet."""
    group, tensor = places.quantizer_of(row)
    if group not in made:
        leaf = tensor.replace(".", "_")
        base = name = f"{FOLDER}.{leaf}_" if hasattr(nn.Module, leaf) else f"{FOLDER}.{leaf}"  # such as ``to``
        number = 1
        while name in made.values():
            number += 1
            name = f"{base}_{number}"
        stages = stages_in(places.layers.plan, row)
        model.add_submodule(name, QuantizationPoint(learning_quantizer(stages, f"the tensor {tensor!r}", False)))
        made[group] = name
    return made[group]


def call_after(model: GraphModule, tensor: Node, name: str) -> Node:
    """A call of the module ``name`` on ``tensor``; after all inputs of the graph, if it is one."""
    place = tensor
    while tensor.op in ("placeholder", "get_attr") and place.next.op in ("placeholder", "get_attr"):
        place = place.next
    with model.graph.inserting_after(place):
        call = model.graph.call_module(name, (tensor,))
    call.meta = {"val": tensor.meta.get("val")}
    return call


def align_biases(model: GraphModule) -> None:
    """Let int32 biases have the scale of what they are added to, s_input s_weight, whenever it is asked for."""
    for node in model.graph.nodes:
        layer = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, QuantLayer):
            continue
        source, weight, bias = point_before(model, node), layer.weight_quantizer, layer.bias_quantizer
        if not (isinstance(source, FakeQuantize) and isinstance(weight, FakeQuantize)):
            continue
        if isinstance(bias, FakeQuantize) and fits(layer, source, weight, bias):
            layer._modules["bias_quantizer"] = BiasQuantizer(bias, source, weight)


def point_before(model: GraphModule, node: Node) -> FakeQuantize | None:
    """The quantizer of the input of a layer, however far the values have moved since."""
    before = node.args[0]
    while isinstance(before, Node) and before.op == "call_function" and before.args:
        before = before.args[0]
    module = (
        model.get_submodule(str(before.target)) if isinstance(before, Node) and before.op == "call_module" else None
    )
    found = module.quantizer if isinstance(module, QuantizationPoint) else None
    return found if isinstance(found, FakeQuantize) else None


def fits(layer: QuantLayer, source: FakeQuantize, weight: FakeQuantize, bias: FakeQuantize) -> bool:
    """Whether the product of the scales is one scale per tensor or per output channel, of codes of 32 bits that hold b.

    Beside weights that are all but zero a bias keeps a scale of its own.
    """
    if any(part.scale is None or part.stage.is_block for part in (source, weight, bias)):
        return False
    of_outputs = isinstance(weight.granularity, Tensor) or weight.granularity == Channel(0)
    if isinstance(layer, nn.ConvTranspose2d):  # [in, out / groups, ...]
        of_outputs = isinstance(weight.granularity, Tensor) or (weight.granularity == Channel(1) and layer.groups == 1)
    if not (isinstance(source.granularity, Tensor) and of_outputs and bias.stage.format.onnx_type == "INT32"):
        return False
    value = own_parameter(layer, "bias").detach().double().abs()
    return bool(
        (value <= LARGEST_BIAS * known(source.scale, "a scale") * known(weight.scale, "a scale").double()).all()
    )
