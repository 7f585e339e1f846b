"""Quantized layers: a float layer whose class has been exchanged for one that quantizes its tensors.

    y = Q_out( layer( Q_in(x); Q_w(weight), Q_b(bias) ) )

The object stays the one that the model knows (shared modules, hooks, attributes, names of parameters); its class
becomes ``QuantLayer`` mixed with the float class, and goes back when quantizing fails. What is computed is the float
class's own ``forward``, run on a fake-quantized copy of the object, which holds the quantized weight and bias. So
subclasses with a ``forward`` of their own work, and no layer needs code here.

The copy is made once and kept while the weight stays the same, because quantizing a weight at each call would cost
more than the layer. A change is noticed by the version of the parameter (optimizers, ``load_state_dict``) and by its
address; a change through ``weight.data`` while the model is in ``eval()`` is not. In training the copy is made at
every call, and gradients pass straight through to the float weight, and to scales that are learned. ``freeze`` puts
the quantized values in the place of the float ones and drops the copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from quark.errors import ConfigError, known
from quark.torch.fake_quantize import Quantizer, parts, quantizer_at, straight_through
from quark.torch.first_input import first_key
from quark.torch.layers import KINDS, become, own_parameter

OWN = ("weight", "bias")
SLOT_NAMES = {
    "input_tensors": "input_quantizer",
    "weight": "weight_quantizer",
    "bias": "bias_quantizer",
    "output_tensors": "output_quantizer",
}

OF_QUANTIZERS = re.compile(r"_(scale|zero_point)_\d+$")


class QuantLayer(nn.Module):
    """A layer with quantizers for its tensors; each is None where the tensor stays float.

    Attributes:
        float_class: the class of the layer before.
        frozen: weight and bias hold quantized values.
        compact: weight and bias are codes of a file, decoded at each call and not kept.
        loaded: the codes are those of the file, so that ``weight`` can be what they stand for.
    """

    float_class: type[nn.Module]
    frozen: bool
    compact: bool = False
    loaded: bool = False

    @property
    def input_quantizer(self) -> Quantizer | None:
        """Of the first input."""
        return quantizer_at(self, "input_quantizer")

    @property
    def output_quantizer(self) -> Quantizer | None:
        """Of the output."""
        return quantizer_at(self, "output_quantizer")

    @property
    def weight_quantizer(self) -> Quantizer | None:
        """Of the weight."""
        return quantizer_at(self, "weight_quantizer")

    @property
    def bias_quantizer(self) -> Quantizer | None:
        """Of the bias."""
        return quantizer_at(self, "bias_quantizer")

    def quantizers(self) -> Iterator[tuple[str, Quantizer]]:
        """(slot, quantizer) of the tensors that are quantized."""
        for slot, name in SLOT_NAMES.items():
            quantizer = quantizer_at(self, name)
            if quantizer is not None:
                yield slot, quantizer

    def _run(self, input: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input is None and kwargs:  # under the name that the float layer has for it
            input = kwargs.pop(str(first_key(self, args, kwargs)))
        quantize_input, quantize_output = self.input_quantizer, self.output_quantizer
        if quantize_input is not None:
            input = quantize_input(input)
        output = self.fake_quantized().forward(input, *args, **kwargs)
        return output if quantize_output is None else quantize_output(output)

    forward = _run

    @property
    def weight(self) -> torch.Tensor:
        """The parameter; of codes what they stand for, since models ask for its type, and multiply by it."""
        value = own_parameter(self)
        decodes = self.weight_quantizer if self.compact and self.loaded else None
        return value if decodes is None else decodes(value.detach())

    def fake_quantized(self) -> nn.Module:
        """The float layer with quantized weight and bias."""
        if self.compact:
            return self.with_parameters(lambda name, value: self.own_quantizer(name)(value.detach()))
        learned = self.learned_scales()
        if not self.frozen and (self.training or (learned and torch.is_grad_enabled())):
            return self.with_parameters(lambda name, value: self.own_quantizer(name)(value))
        key = tuple(identity(self._parameters[name]) for name in OWN if name in self._parameters)
        key += tuple(identity(parameter) for parameter in learned)
        kept = self.__dict__.get("_fake_quantized")
        if kept is None or kept[0] != key:
            kept = self.__dict__["_fake_quantized"] = key, self.quantized_parameters()
        values = kept[1]
        return self.with_parameters(lambda name, value: straight_through(value, lambda _: values[name]))

    def learned_scales(self) -> list[torch.Tensor]:
        """The scales of weight and bias that training changes."""
        own = (self._modules[f"{name}_quantizer"] for name in OWN)
        return [
            scale
            for quantizer in own
            if quantizer is not None
            for scale in quantizer._parameters.values()
            if scale is not None
        ]

    def own_quantizer(self, name: str) -> Quantizer:
        """The quantizer of the parameter called ``name``."""
        return known(quantizer_at(self, f"{name}_quantizer"), f"the quantizer of the {name}")

    def with_parameters(self, quantized: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
        """An object of the float class that shares everything with this one but the parameters that are quantized."""
        copy = object.__new__(self.float_class)
        copy.__dict__.update(self.__dict__)
        copy.__dict__["_parameters"] = dict(self._parameters)
        if not self.frozen:
            for name in OWN:
                value = self._parameters.get(name)
                if value is not None and self._modules[f"{name}_quantizer"] is not None:
                    copy.__dict__["_parameters"][name] = quantized(name, value)
        return copy

    @torch.inference_mode(False)
    @torch.no_grad()
    def quantized_parameters(self) -> dict[str, torch.Tensor]:
        """Weight and bias, as far as they have quantizers, quantized."""
        values = {}
        for name in OWN:
            quantizer, value = self._modules[f"{name}_quantizer"], self._parameters.get(name)
            if quantizer is not None and value is not None:
                values[name] = quantizer(value.detach())
        return values

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        forget_quantized([self])
        # the parameter itself is changed in place; another tensor of the same values is not
        own = self._parameters.items() if self.compact else ()
        codes, kept = {name: value.detach() for name, value in own if value is not None}, dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in codes.items():
            self.keep_codes(name, old)
        for name, value in kept.items():  # numbered parameters of quantizers keep their types too
            moved = self._buffers[name]
            if value is not None and moved is not None and OF_QUANTIZERS.search(name):
                self._buffers[name] = value.to(moved.device)
        return self

    def keep_codes(self, name: str, old: torch.Tensor) -> None:
        """Codes move to another device, but a change of type is for numbers."""
        moved = self._parameters[name]
        if moved is not None and self._modules.get(f"{name}_quantizer") is not None:
            self._parameters[name] = nn.Parameter(old.to(moved.device), requires_grad=False)

    def train(self, mode: bool = True) -> QuantLayer:
        """As ``nn.Module.train``; a change of mode has the weight quantized anew."""
        if mode != self.training:
            forget_quantized([self])
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fake_quantized"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return revived, (self.float_class,), self.__getstate__()


def revived(cls: type[nn.Module]) -> QuantLayer:
    """An empty quantized layer of the class that ``cls`` becomes, which has no name that pickle could find."""
    made: QuantLayer = object.__new__(quantized_class(cls))
    return made


def forget_quantized(modules: Iterable[nn.Module]) -> None:
    """Quantized layers among ``modules`` quantize their parameters anew when they are called next."""
    for module in modules:
        if isinstance(module, QuantLayer):
            module.__dict__.pop("_fake_quantized", None)


def identity(parameter: torch.Tensor | None) -> tuple[int, ...]:
    """Changes when a parameter's values may have changed."""
    if parameter is None:
        return ()
    return (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)


CLASSES: dict[type[nn.Module], type[QuantLayer]] = {}


def quantized_class(cls: type[nn.Module]) -> type[QuantLayer]:
    """``QuantLayer`` mixed with ``cls``, named ``Quant...``; always the same class for the same ``cls``."""
    if cls not in CLASSES:
        CLASSES[cls] = type(f"Quant{cls.__name__}", (QuantLayer, cls), {"float_class": cls, "__module__": __name__})
    return CLASSES[cls]


QuantLinear, QuantConv1d, QuantConv2d, QuantConv3d, QuantConvTranspose2d, QuantEmbedding, QuantEmbeddingBag = (
    quantized_class(kind.type) for kind in KINDS
)


def mark_quantized(model: Any, config: object) -> None:
    """Write on a model that it is quantized, and how; one of diffusers does not save itself any more."""
    model.quant_config, model.quark_quantized = config, True
    if is_diffusers(model):
        model.__dict__["save_pretrained"] = _refuse_to_save


def _refuse_to_save(*_: object, **__: object) -> NoReturn:
    """In the place of ``save_pretrained`` of diffusers, which would write tensors that it cannot load.

    Raises:
        ConfigError: whatever is given.
    """
    raise ConfigError(
        "save_pretrained writes a model that was quantized in memory in a way that diffusers cannot load: write it "
        "with export_safetensors(model, folder) of quark.torch; of a pipeline, save it with the float model, empty the "
        "folder of the part, and export it there"
    )


def is_diffusers(model: nn.Module) -> bool:
    """Whether ``model`` is a ``ModelMixin``."""
    return has_base(model, "diffusers.models.modeling_utils", "ModelMixin")


def has_base(model: nn.Module, module: str, name: str) -> bool:
    """Whether a class, named so that its library need not be imported, is a base of the model's."""
    return any((cls.__module__, cls.__name__) == (module, name) for cls in type(model).__mro__)


def weight_quantizer(layer: nn.Module) -> Quantizer:
    """The quantizer of a weight, which there must be."""
    return known(quantizer_at(layer, "weight_quantizer"), "the quantizer of the weight")


def attach(module: nn.Module, quantizers: dict[str, Quantizer | None]) -> None:
    """Turn a float layer into a quantized one, with a quantizer (or None) for each slot."""
    for slot, name in SLOT_NAMES.items():
        module._modules[name] = quantizers[slot]
        module.__dict__.pop(name, None)
    module.__dict__["frozen"] = False
    become(module, quantized_class(type(module)))


def detach(module: nn.Module) -> None:
    """Undo ``attach``."""
    if isinstance(module, QuantLayer):
        for name in SLOT_NAMES.values():
            module._modules.pop(name, None)
        for name in ("_fake_quantized", "frozen", "compact", "loaded"):
            module.__dict__.pop(name, None)
        become(module, module.float_class)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantLayer]]:
    """(name, layer) of the quantized layers of a model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantLayer))


def stored_apart(model: nn.Module, whole: Collection[str] = ()) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes, in their float types, of the parameters that become codes, and of the others.

    Args:
        model: a quantized one.
        whole: names of parameters that have quantizers, and stay float in the file.
    """
    own = {f"{path}.{slot}" for path, layer in quantized_layers(model) for slot, _ in layer.quantizers() if slot in OWN}
    own -= set(whole)
    sizes = {name: value.numel() * value.element_size() for name, value in model.named_parameters()}
    others = {name: size for name, size in sizes.items() if name not in own}
    return {name: size for name, size in sizes.items() if name in own}, others


def static_parts(layer: QuantLayer) -> Iterator[tuple[str, Any]]:
    """(slot, stage) of the activations whose range is found by calibration."""
    for slot, quantizer in layer.quantizers():
        if slot in ("input_tensors", "output_tensors"):
            yield from ((slot, part) for part in parts(quantizer) if part.stage.calibrated)
