"""``AdaRoundConfig``, ``AdaQuantConfig`` and ``AutoRoundConfig``: fine-tuning of weights, layer by layer."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, ClassVar

from quark.config.algorithm import ALIKE, COUNT, INDEX, NOT_NEGATIVE, Allowed, Bounds, one_of
from quark.dataclass import dataclass
from quark.errors import nearest
from quark.onnx.quantization.config.algo_base import AlgoConfig

DEFAULT_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")


def is_pair(values: Any) -> bool:
    """Whether there are two numbers, and none below 0."""
    return len(values) == 2 and min(values) >= 0


@dataclass(frozen=True)
class FineTuneConfig(AlgoConfig):
    """What both algorithms share.

    Attributes:
        optim_device: device of torch that trains: "cpu", "cuda", "cuda:1", …
        infer_device: where ONNX Runtime collects the layers' data: "cpu" or "cuda[:n]".
        fixed_seed: of the order of the samples.
        data_size: samples used at most.
        batch_size: samples per step.
        num_batches: steps between two looks of ``early_stop``; 1: a tenth of all steps, in AdaRound a fiftieth.
        num_iterations: steps per layer.
        learning_rate: of Adam.
        early_stop: end a layer when nothing is left to gain: in AdaQuant when a stretch of steps was no better than the
            best one before, in AdaRound when every rounding is decided.
        output_index: the model's output that ``selective_update`` compares.
        lr_adjust: (error, rate): the learning rate of layers whose error before training is larger.
        target_op_type: operator types whose layers are trained.
        selective_update: keep a layer only if the model's output comes nearer to the float model's.
        update_bias: train biases too.
        output_qdq: include the quantization of the layer's result in what is trained.
        drop_ratio: share of batches with the quantized model's input; the others have the float model's.
        mem_opt_level: 0 keeps the targets of all layers, 1 those of one layer, 2 puts everything on disk.
        cache_dir: folder for level 2; a temporary one by default.
        log_period: steps between two lines of the log.
        ref_model_path: another float model, with the same tensor names, whose tensors are the targets.
        dynamic_batch: let ONNX Runtime take ``batch_size`` samples at once; the model's first axis must be free.
        parallel: train layers that do not depend on each other at the same time.
        select_max_mem_layer: first try one step of the layer that needs most memory.
        num_workers: threads of ``parallel``.
        pin_memory: keep samples in pinned memory, which a GPU reads directly.
        use_gds: not available; files go through the processor.
        shrinkage: pull weights towards their float values where the positions in the samples are few for the inputs of
            a layer, and would be fitted by roundings that mean nothing on other data.
        keep_worse: keep trained weights even where the model as a whole is worse with them, on calibration data.
        layers: names or ^patterns of the only layers that are trained; empty: all.
    """

    BOUNDS: ClassVar[Bounds] = {
        **ALIKE["adaround"],
        **dict.fromkeys(("num_batches", "num_workers"), COUNT),
        "output_index": INDEX,
        "log_period": NOT_NEGATIVE,
        "mem_opt_level": one_of(0, 1, 2),
        "lr_adjust": Allowed("a pair of numbers, or None", lambda pair: not pair or is_pair(pair)),
        "target_op_type": Allowed(f"a list of {', '.join(DEFAULT_TYPES)}", bool),
    }
    optim_device: str = "cpu"
    infer_device: str = "cpu"
    fixed_seed: int = 1705472343
    data_size: int = 1_000_000_000
    batch_size: int = 1
    num_batches: int = 1
    num_iterations: int = 1000
    learning_rate: float = 0.1
    early_stop: bool = False
    output_index: int = 0
    lr_adjust: tuple[float, float] | None = None
    target_op_type: tuple[str, ...] | list[str] = DEFAULT_TYPES
    selective_update: bool = False
    update_bias: bool = False
    output_qdq: bool = False
    drop_ratio: float = 1.0
    mem_opt_level: int = 1
    cache_dir: str | os.PathLike[str] | None = None
    log_period: int | float = 100
    ref_model_path: str | os.PathLike[str] | None = None
    dynamic_batch: bool = False
    parallel: bool = False
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20, 2)
    warm_start: float = 0.2
    select_max_mem_layer: bool = False
    num_workers: int = 1
    pin_memory: bool = False
    use_gds: bool = False
    shrinkage: bool = True
    keep_worse: bool = False
    layers: tuple[str, ...] | list[str] = ()

    def check(self) -> None:
        """Layers that can be trained, and what is not available."""
        for one in (one for one in self.target_op_type if one not in DEFAULT_TYPES):
            self.need(False, "target_op_type", f"a list of {', '.join(DEFAULT_TYPES)}.{nearest(one, DEFAULT_TYPES)}")
        self.need(not self.use_gds, "use_gds", "False: reading past the processor is not available")

    def _leave(self, why: str, *names: str) -> None:
        """Refuse values other than the defaults."""
        defaults = {one.name: one.default for one in fields(FineTuneConfig)}
        for name in names:
            value = getattr(self, name)
            same = (tuple(value) if isinstance(value, list) else value) == defaults[name]
            self.need(same, name, f"{defaults[name]}: {why}")


@dataclass(frozen=True)
class AdaRoundConfig(FineTuneConfig):
    """AdaRound: learn whether each weight is rounded up or down. For integer weights.

    Attributes:
        reg_param: weight of the term that drives every rounding to up or down.
        beta_range: exponent of that term at its beginning and its end.
        warm_start: share of the steps before that term counts.
    """

    name: ClassVar[str] = "adaround"


@dataclass(frozen=True)
class AdaQuantConfig(FineTuneConfig):
    """AdaQuant: train weights (and biases) through their rounding. For every format.

    ``reg_param``, ``beta_range`` and ``warm_start`` are there for AMD Quark's signature and keep their defaults: they
    belong to the roundings that AdaRound decides.

    Attributes:
        reg_param, beta_range, warm_start: of AdaRound; any value but the default is refused.
    """

    name: ClassVar[str] = "adaquant"
    num_iterations: int = 3000
    learning_rate: float = 1e-5

    def check(self) -> None:
        """Those of all that tune, and what belongs to AdaRound."""
        super().check()
        self._leave("only AdaRoundConfig has a use for it", "reg_param", "beta_range", "warm_start")


@dataclass(frozen=True)
class AutoRoundConfig(FineTuneConfig):
    """AutoRound: learn what is added to each weight before it is rounded, by the signs of its gradients.

    Layer by layer, at scales that stay; the torch flow learns whole blocks, and clips. Biases stay as they are. For
    every format. Not in AMD Quark's ONNX flow.

    Attributes:
        num_iterations, learning_rate, batch_size: as ``iters``, ``lr`` and ``batch_size`` of the torch flow; the rate
            is in parts of a code.
        reg_param, beta_range, warm_start: of AdaRound; any value but the default is refused.
        update_bias: refused.
    """

    name: ClassVar[str] = "autoround"
    num_iterations: int = 200
    learning_rate: float = 1 / 200
    batch_size: int = 8

    def check(self) -> None:
        """Those of all that tune, and what belongs to AdaRound."""
        super().check()
        self._leave("only AdaRoundConfig has a use for it", "reg_param", "beta_range", "warm_start")
        self._leave("AutoRound trains no biases", "update_bias")
