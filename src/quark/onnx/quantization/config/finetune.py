"""``AdaRoundConfig``, ``AdaQuantConfig`` and ``AutoRoundConfig``: fine-tuning of weights, layer by layer."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import ClassVar

from quark.errors import nearest
from quark.onnx.quantization.config.algo_base import AlgoConfig, is_names, is_number, is_whole

DEFAULT_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")
_SHOWN = ", ".join(DEFAULT_TYPES)
_FLAGS = ("early_stop", "selective_update", "update_bias", "output_qdq", "dynamic_batch", "parallel", "pin_memory")


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
        pin_memory: hold samples where a GPU fetches them by itself.
        use_gds: not available; files go through the processor.
        shrinkage: pull weights towards their float values where the positions in the samples are few for the inputs of
            a layer, and would be fitted by roundings that mean nothing on other data.
        keep_worse: keep trained weights even where the model as a whole is worse with them, on calibration data.
        layers: names or ^patterns of the only layers that are trained; empty: all.
    """

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
    cache_dir: str | None = None
    log_period: int | float = 100
    ref_model_path: str | None = None
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

    def __post_init__(self) -> None:
        for name in ("data_size", "batch_size", "num_batches", "num_iterations", "num_workers"):
            self._require(name, is_whole(getattr(self, name), 1), "it is a whole number of at least 1")
        for name in ("fixed_seed", "output_index"):
            self._require(name, is_whole(getattr(self, name), 0), "it is a whole number of at least 0")
        for name in (*_FLAGS, "select_max_mem_layer", "use_gds", "shrinkage", "keep_worse"):
            self._require(name, isinstance(getattr(self, name), bool), "it is True or False")
        for name in ("drop_ratio", "warm_start"):
            self._require(name, is_number(getattr(self, name), 0, 1), "it is a number from 0 to 1")
        self._require("learning_rate", is_number(self.learning_rate, 1e-30), "it is a positive number")
        self._require("log_period", is_number(self.log_period, 0), "it is a number of steps; 0 is no log")
        self._require("reg_param", is_number(self.reg_param, 0), "it is a number of at least 0")
        self._require("mem_opt_level", self.mem_opt_level in (0, 1, 2), "allowed: 0, 1, 2")
        for name in ("lr_adjust", "beta_range"):
            value = getattr(self, name)
            pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(is_number(side, 0) for side in value)
            empty = name == "lr_adjust" and value in (None, (), [])
            self._require(name, pair or empty, "it is a pair of numbers")
        for name in ("cache_dir", "ref_model_path"):
            value = getattr(self, name)
            self._require(name, value is None or isinstance(value, (str, os.PathLike)), "it is a path, or None")
        self._require("layers", is_names(self.layers), "it is a list of names or ^patterns of layers")
        types = self.target_op_type
        self._require(
            "target_op_type", isinstance(types, (tuple, list)) and len(types) > 0, f"it is a list of {_SHOWN}"
        )
        for one in types:
            what = f"it is a list of {_SHOWN}.{nearest(str(one), DEFAULT_TYPES)}"
            self._require("target_op_type", one in DEFAULT_TYPES, what)
        self._require("use_gds", not self.use_gds, "reading past the processor is not available; leave it False")

    def _leave(self, why: str, *names: str) -> None:
        """Refuse values other than the defaults."""
        defaults = {one.name: one.default for one in fields(FineTuneConfig)}
        for name in names:
            value = getattr(self, name)
            same = (tuple(value) if isinstance(value, list) else value) == defaults[name]
            self._require(name, same, f"{why}; leave it at {defaults[name]}")


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

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._leave("only AdaRoundConfig has a use for it", "reg_param", "beta_range", "warm_start")
        self._leave("AutoRound trains no biases", "update_bias")
