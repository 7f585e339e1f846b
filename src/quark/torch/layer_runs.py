"""One layer of a model quantized at a time.

Per candidate all layers get quantizers, calibrated once (and tuned once, where the candidate has algorithms), and all
are off; a trial switches one layer on. What lies before the layer computes the same in every trial: decoder blocks
before its own are skipped, and the hidden state that enters its block comes from one float run.

    trials of a layer in block b of n      cost (n − b) / n of a forward pass per sample

Memory: the model, the hidden states of the samples at one block, and tuned weights beside float ones where an algorithm
changed them. Float outputs lie in files. Not handled: models whose blocks do not hand one hidden state on (every trial
is then a whole forward pass).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from quark.dataclass import dataclass
from quark.errors import DataError, QuarkError
from quark.files.atomic import part_of
from quark.measure.outputs import Outputs, together
from quark.reading import reason_of
from quark.search.trials import Measured, by_function
from quark.torch.algorithms.blocks import Enough, find_blocks, first, handing_on, hooked, record
from quark.torch.calibration import NOT_RUN, described, device_of, evaluating, run, to_device, without_cache
from quark.torch.config.model import QConfig
from quark.torch.fake_quantize import parts
from quark.torch.first_input import first_input
from quark.torch.layers import kind_of
from quark.torch.outputs import answer_tensors
from quark.torch.quantized_layer import QuantLayer, forget_quantized, quantized_layers
from quark.torch.quantizer import ModelQuantizer
from quark.torch.structure import run_model
from quark.torch.template_reading import head_of

#: The output whose divergence is measured, and that tokens are predicted by.
FIRST = "output 0"


@dataclass(frozen=True)
class FloatOutputs:
    """The samples, and the folder with the float outputs for them."""

    samples: Sequence[Any]
    folder: Path

    def reference(self, index: int) -> dict[str, torch.Tensor]:
        """The float outputs for a sample, in their order."""
        found = load_file(self.folder / f"{index}.safetensors")
        return {name: found[name] for name in names_of(len(found))}


def names_of(count: int) -> list[str]:
    """What outputs are called."""
    return [f"output {number}" for number in range(count)]


def outputs_to(model: nn.Module, sample: Any) -> dict[str, torch.Tensor]:
    """The logits, or all tensors of numbers, that a model makes of a sample; float32.

    Raises:
        DataError: it makes none.
    """
    found = [one.detach().float().cpu().contiguous() for one in answer_tensors(run_model(model, sample))]
    whole = [one if one.dim() else one.reshape(1) for one in found]
    whole = [one.clone() if number else one for number, one in enumerate(whole)]  # no file shares any
    return dict(zip(names_of(len(whole)), whole, strict=True))


def ids_of(sample: Any) -> torch.Tensor | None:
    """The tokens of a sample of a language model."""
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return to_device(sample["input_ids"], torch.device("cpu"))
    return None


def lay_out(model: nn.Module, samples: Sequence[Any], folder: Path) -> FloatOutputs:
    """Write the float outputs.

    Raises:
        DataError: no samples, or the model does not run on one.
    """
    if not samples:
        raise DataError("layers are tried on samples, and there are none")
    folder.mkdir(exist_ok=True)
    with running(model):
        for index, sample in enumerate(samples):
            kept = _first_outputs(model, sample, index)
            with part_of(folder / f"{index}.safetensors", SafetensorError) as part:
                save_file(kept, part)
    return FloatOutputs(samples, folder)


def _first_outputs(model: nn.Module, sample: Any, index: int) -> dict[str, torch.Tensor]:
    """``outputs_to``, of a sample that nothing has run on before.

    Raises:
        DataError: the model does not run on it, or makes no output.
    """
    try:
        return outputs_to(model, sample)
    except QuarkError:
        raise
    except NOT_RUN as error:
        raise DataError(
            f"{type(model).__name__} does not run on sample {index}, {described(sample)} ({reason_of(error)}): in "
            "Python, give samples that hold all of its inputs"
        ) from error


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """The model as it is measured: in ``eval()``, without gradients, without a cache of keys and values."""
    with evaluating(model), without_cache(model), torch.no_grad():
        yield


def measure(model: nn.Module, common: FloatOutputs, skip: Callable[[int], Any] | None = None) -> dict[str, float]:
    """Run the samples and compare; ``skip(k)`` is a context in which sample ``k`` runs."""
    return together(outputs_of(model, common, skip)).metrics()


def outputs_of(model: nn.Module, common: FloatOutputs, skip: Callable[[int], Any] | None = None) -> list[Outputs]:
    """The same sample by sample, before anything is divided."""
    made = []
    with running(model):
        for index, sample in enumerate(common.samples):
            with nullcontext() if skip is None else skip(index):
                values = outputs_to(model, sample)
            made.append(compared(model, common, index, values))
    return made


def outputs_before(model: nn.Module, common: FloatOutputs) -> list[Outputs]:
    """Those of the float model, which are laid out; nothing is run."""
    return [compared(model, common, index, common.reference(index)) for index in range(len(common.samples))]


def compared(model: nn.Module, common: FloatOutputs, index: int, values: dict[str, torch.Tensor]) -> Outputs:
    """What a model answered to a sample, against the float outputs; the divergence is that of the first."""
    made, ids = Outputs(), ids_of(common.samples[index])
    made.update(common.reference(index), values, True)
    if head_of(model) is not None and ids is not None and values[FIRST].dim() == 3 and ids.shape[-1] > 1:
        made.follow(values[FIRST], ids)
    return made


@dataclass
class TorchLayerRuns:
    """A model with the quantizers of one candidate, all off.

    Attributes:
        model: the model.
        common: samples and float outputs.
        layers: the layers of the candidate by name.
        undo: takes everything back.
        unreached: quantizers whose tensor no sample reached; they stay off.
        tuned: (float weight, tuned weight) of the layers that an algorithm changed, by name and parameter.
        blocks: decoder blocks that hand one hidden state on; empty: nothing can be skipped.
        at: the block before which ``hidden`` was caught.
        hidden: a tensor per sample.
        values: how many values a block returns; 0: its hidden state alone.
    """

    model: nn.Module
    common: FloatOutputs
    layers: dict[str, QuantLayer]
    undo: ExitStack
    tuned: dict[tuple[str, str], tuple[Any, Any]]
    unreached: set[nn.Module]
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    at: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)
    values: int = 0

    def trial(self, name: str, metric: str = "") -> Measured:
        """The measures of the model with one layer quantized; what the user's function ``metric`` says of it."""
        if ":" in metric:
            with self.quantized(name), running(self.model):
                return by_function(metric, self.model)
        index = self.block_of(name)
        if index < self.at:  # blocks that are skipped now would hand on what they are given
            self.at, self.hidden = 0, []
        if index != self.at:
            self.hidden = [self.entering(index, k) for k in range(len(self.common.samples))] if index else []
            self.at = index
        with self.quantized(name):
            return measure(self.model, self.common, self.skipping)

    @contextmanager
    def quantized(self, name: str) -> Iterator[None]:
        """The model with one layer quantized."""
        self.switch(name, True)
        try:
            yield
        finally:
            self.switch(name, False)

    def switch(self, name: str, on: bool) -> None:
        """Turn the quantizers of a layer on or off."""
        layer = self.layers[name]
        for (owner, key), pair in self.tuned.items():
            if owner == name:
                layer._parameters[key] = pair[int(on)]
        for _, quantizer in layer.quantizers():
            for part in parts(quantizer):
                part.enabled = on and part not in self.unreached
        forget_quantized([layer])

    def block_of(self, name: str) -> int:
        """The number of the block that holds a layer; 0 for layers outside."""
        places = [k for k, block in enumerate(self.blocks) if name.startswith(f"{block}.")]
        return places[0] if places else len(self.blocks) if head_of(self.model) is self.layers[name] else 0

    def entering(self, index: int, k: int) -> torch.Tensor:
        """The hidden state behind block ``index - 1``, in float; nothing behind it runs."""
        caught: list[torch.Tensor] = []

        def end(module: nn.Module, args: Any, output: Any) -> None:
            caught.append(first(output).detach())
            raise Enough

        name = list(self.blocks)[index - 1]
        with suppress(Enough), running(self.model), self.skipping(k), hooked(self.model, {name: end}):
            run(self.model, self.common.samples[k])
        return caught[0]

    def skipping(self, k: int) -> AbstractContextManager[None]:
        """Blocks before ``at`` let everything through; the last of them returns what the float model has there."""
        skipped = list(self.blocks.values())[: self.at]
        return handing_on(skipped, self.values, lambda: self.hidden[k]) if skipped else nullcontext()


def open_runs(model: nn.Module, config: QConfig, common: FloatOutputs) -> TorchLayerRuns:
    """Attach the quantizers of a candidate, calibrate and tune them, and turn all off. ``undo.close()`` ends it.

    Raises:
        ConfigError, ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    before = {name: dict(module._parameters) for name, module in model.named_modules()}
    undo = ExitStack()
    try:
        ModelQuantizer(config).quantize(model, common.samples, undo)
        layers = dict(quantized_layers(model))
        tuned = {
            (name, key): (before[name][key], value)
            for name, layer in layers.items()
            for key, value in layer._parameters.items()
            if name in before and value is not before[name].get(key)
        }
        off: set[nn.Module] = {
            p for layer in layers.values() for _, one in layer.quantizers() for p in parts(one) if not p.enabled
        }
        runs = TorchLayerRuns(model, common, layers, undo, tuned, off)
        for name in layers:
            runs.switch(name, False)
        find_chain(runs)
    except BaseException:
        undo.close()
        raise
    return runs


def find_chain(runs: TorchLayerRuns) -> None:
    """Fill in the blocks of a model that hands one hidden state from block to block, whatever the sample."""
    for k, sample in enumerate(runs.common.samples):
        with running(runs.model):
            blocks, stream = record(runs.model, find_blocks(runs.model), [sample])
        runs.blocks, runs.values = dict(blocks.modules) if blocks.path else {}, stream.values
        if not runs.blocks or not hands_on_all(runs, k):
            runs.blocks = {}
            return


def hands_on_all(runs: TorchLayerRuns, k: int) -> bool:
    """Whether a model without all of its blocks but the last has its outputs: none is of an earlier block."""
    last = len(runs.blocks) - 1
    try:
        runs.hidden, runs.at = [runs.entering(last, k)] * (k + 1) if last else [], last
        with running(runs.model), runs.skipping(k):
            found = outputs_to(runs.model, runs.common.samples[k])
    finally:
        runs.at, runs.hidden = 0, []
    known = runs.common.reference(k)
    return found.keys() == known.keys() and all(torch.equal(found[name], known[name]) for name in known)


class Traffic(NamedTuple):
    """What a layer does for one sample: elements that it reads, multiplications of its weight."""

    inputs: float = 0
    macs: float = 0


def traffic_of(model: nn.Module, names: Sequence[str], sample: Any) -> dict[str, Traffic]:
    """What layers do for one sample; those that are no modules of their own, such as parts of an LSTM, are left out."""
    modules = dict(model.named_modules())
    found = {name: Traffic() for name in names if name in modules}

    def counting(name: str) -> Callable[..., None]:
        def _count(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            x, before = first_input(module, args, kwargs), found[name]
            if isinstance(x, torch.Tensor):
                found[name] = Traffic(before.inputs + x.numel(), before.macs + macs(module, x, output))

        return _count

    with running(model), hooked(model, {name: counting(name) for name in found}, True):
        run(model, to_device(sample, device_of(model)))
    return found


def macs(module: nn.Module, given: torch.Tensor, output: Any) -> float:
    """Multiplications of one call: every value of the weight, once for each position that it is applied at."""
    kind, weight = kind_of(module), module._parameters.get("weight")
    if kind is None or kind.features is None or weight is None or not isinstance(output, torch.Tensor):
        return 0
    if isinstance(module, _ConvTransposeNd):  # [in, out / groups, ...]: applied at every position of the input
        return weight.numel() * given.numel() / weight.shape[0]
    return weight.numel() * output.numel() / weight.shape[1 if kind.transposed else 0]
