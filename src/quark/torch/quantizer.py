"""``ModelQuantizer``: the torch flow from a float model to a quantized one, in place.

    check → match (which layer gets what) → transform the float model → attach quantizers → weights
          → activations (samples) → tune the weights at final scales → done

Nothing is changed before every check has passed, and whatever raises later is undone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import nn

from quark.config.plan import NodePlan, Plan
from quark.errors import ConfigError, DataError, ModelError
from quark.torch.algorithms.context import ModelContext, Undo
from quark.torch.attention import find_targets
from quark.torch.calibration import calibrate, evaluating
from quark.torch.config.model import QConfig, check_available
from quark.torch.config.type import QuantizationMode
from quark.torch.experts import fuse_untouched, unfuse_experts
from quark.torch.fast_paths import fast_paths, leave_fast_paths, set_fast_paths
from quark.torch.graph.point import points
from quark.torch.kv_cache import cache_quantizers, settle_scales
from quark.torch.layouts import tell_layouts
from quark.torch.learned import learned_scales
from quark.torch.matching import UNSUPPORTED, Matches, is_static, match
from quark.torch.prepare import bake, prepare, restore
from quark.torch.quantized_layer import mark_quantized, quantized_layers
from quark.torch.recurrent import roll_untouched, unroll_recurrent
from quark.torch.shared_scales import share_expert_inputs, share_weight_scales

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
DEFAULT_LEVEL = 1  # leaves the logger as its application has set it
OFFLOADED = ("cpu", "disk")


class ModelQuantizer:
    """Quantizes models by one configuration.

    Args:
        config: how; it is never changed, so it serves many models.
        multi_device: models spread over several devices; only models on one device are available yet.

    Attributes:
        unreached: names of the static activations that no sample reached, in the last model; they stay float.
        plan: every decision about the last model, made before a weight was touched.
    """

    def __init__(self, config: QConfig, multi_device: bool = False) -> None:
        if not isinstance(config, QConfig):
            raise TypeError(f"config must be a quark.torch QConfig, not {type(config).__name__}")
        check_job(config)
        if multi_device:
            raise ConfigError(
                "multi_device=True is not available: put the model on one device, or let `quark torch quantize-files "
                "FOLDER -o NEW --scheme NAME` quantize its folder a block at a time, in little memory"
            )
        self.config = config
        self.unreached: list[str] = []
        self.plan = Plan()
        level = config.log_severity_level
        if level is not None and level in range(len(LEVELS)) and level != DEFAULT_LEVEL:
            logging.getLogger(__package__).setLevel(LEVELS[level])

    def quantize_model(self, model: Model, dataloader: Iterable[Any] | None = None) -> Model:
        """Quantize ``model`` in place; with ``fx_graph_mode`` make the quantized graph of it, and leave it as it is.

        Args:
            model: a float model; its layers become quantized layers, everything else stays.
            dataloader: samples, each a tensor, a mapping, a tuple or a list; needed for static activations and for
                algorithms (which keep them all).

        Returns:
            ``model``; with ``fx_graph_mode`` a new ``torch.fx.GraphModule``.

        Raises:
            ConfigError: a pattern that matches nothing, or a tensor that does not fit its configuration.
            ModelError: a model that cannot be quantized.
            DataError: no samples where they are needed, or NaN. In all cases the model is as it was.
        """
        check_model(model)
        check_job(self.config)
        if self.config.quant_mode is QuantizationMode.fx_graph_mode:
            from quark.torch.graph.quantize import keep, quantize_graph

            graph, self.plan, self.unreached = quantize_graph(model, self.config, dataloader)
            return cast(Model, keep(graph, self.config))
        with ExitStack() as undo:
            found = self.quantize(model, dataloader, undo)
            undo.pop_all()
        self.report(found)
        mark_quantized(model, replace(self.config, exclude=list(found.excluded)))
        return model

    def check(self, model: nn.Module) -> None:
        """Refuse, before any work, what ``quantize_model`` refuses of layers and tensors. The model stays as it is.

        Raises:
            ConfigError, ModelError: as ``quantize_model``.
        """
        check_job(self.config)
        with ExitStack() as undo:
            for put_back in (*unfuse_experts(model).values(), *unroll_recurrent(model).values()):
                undo.callback(put_back)
            self.matched(model)
            find_targets(model, self.config)

    def matched(self, model: nn.Module) -> Matches:
        """What becomes of the layers, checked."""
        found = match(model, self.config)
        if self.config.algo_config:
            from quark.torch.algorithms.registry import check_types

            check_types(found, self.config.algo_config)
        return found

    def quantize(self, model: nn.Module, dataloader: Iterable[Any] | None, undo: ExitStack) -> Matches:
        """All changes; ``undo`` takes them back."""
        experts, recurrent = unfuse_experts(model), unroll_recurrent(model)
        for put_back in (*experts.values(), *recurrent.values()):
            undo.callback(put_back)
        found, attention = self.matched(model), find_targets(model, self.config)
        self.plan = found.plan
        static = [item.layer.name for item in found.quantized if is_static(item)] + attention.static
        if static and dataloader is None:
            raise DataError(
                f"static activations need samples, and dataloader is None: give one, or use is_dynamic=True "
                f"(first of {len(static)} layers: {static[0]!r})"
            )
        samples = list(dataloader or []) if self.config.algo_config else dataloader
        fast, changes = fast_paths(model), Undo()
        undo.callback(set_fast_paths, fast, fast)
        undo.callback(changes.restore)
        undo.callback(restore, found)
        self.improve(model, samples, found, changes, tunes=False)
        prepare(found)
        share_weight_scales(found)
        attention.attach(undo)
        leave_fast_paths(model)
        self.unreached = calibrate(model, samples) if static and samples is not None else []
        self.settle(model)
        self.improve(model, samples, found, changes, tunes=True)
        fuse_untouched(experts)
        idle = roll_untouched(recurrent)
        for name, module in model.named_modules():
            if module in idle:
                found.plan.nodes[name] = NodePlan(name, type(module).__name__, False, UNSUPPORTED)
        return found

    def improve(self, model: nn.Module, samples: Iterable[Any] | None, found: Matches, undo: Undo, tunes: bool) -> None:
        """Run the algorithms of the configuration that transform the float model, or those that tune."""
        configs = self.config.algo_config or []
        if not configs:
            return
        from quark.torch.algorithms.registry import algorithm_of, run_algorithms

        if any(algorithm_of(config).tunes == tunes for config in configs):
            with evaluating(model):
                run_algorithms(configs, ModelContext(model, list(samples or []), found, undo), tunes)

    def settle(self, model: nn.Module) -> None:
        """After calibration: the scales that layers share."""
        settle_scales(model, self.config)
        if self.config.sync_moe_expert_input_amax:
            adopted = share_expert_inputs(model)
            self.unreached = [name for name in self.unreached if name not in adopted]
            if adopted:
                log.info("no sample reached %s; they have the range of the experts beside them", ", ".join(adopted))

    def report(self, found: Matches) -> None:
        """Log what was quantized and what no sample reached."""
        log.info("%d layers quantized, %d excluded", len(found.quantized), len(found.excluded))
        tell_layouts(found)
        if found.unsupported:
            log.warning(
                "%d modules stay float: their weights are of no kind that can be quantized, or they are recurrent and "
                "their projections not named: %s",
                len(found.unsupported),
                ", ".join(found.unsupported),
            )
        if self.unreached:
            log.warning(
                "no sample reached %d activations, which stay float: %s; experts need samples that are routed to them",
                len(self.unreached),
                ", ".join(self.unreached),
            )

    def direct_quantize_checkpoint(
        self,
        pretrained_model_path: str | os.PathLike[str],
        save_path: str | os.PathLike[str],
        keep_excluded_layers_as_original_model_state: bool = False,
        *,
        weight_converters: Any = None,
        device: str | None = None,
        presharded_weights: Any = None,
        workers: int | None = 1,
        dataloader: Iterable[Any] | None = None,
    ) -> Any:
        """Quantize a checkpoint file by file, without a model in memory; see ``quark.torch.files``.

        Args:
            pretrained_model_path: folder with ``config.json`` and safetensors files.
            save_path: new folder; that of an interrupted job is continued.
            keep_excluded_layers_as_original_model_state: what is not quantized is copied as it is, whatever this says.
            weight_converters, presharded_weights: not available.
            device: where tensors are quantized; None: the CPU.
            workers: files made at once; None: as joblib's ``parallel_config`` says.
            dataloader: samples for static activations, which are calibrated with one decoder block in memory.

        Returns:
            Of a checkpoint that was quantized before: how many layers kept their codes, how many were quantized
            again, and what these lose (``kept``, ``anew``, ``loss``); else None.
        """
        from quark.torch.files import quantize_checkpoint

        for name, value in (("weight_converters", weight_converters), ("presharded_weights", presharded_weights)):
            if value is not None:
                raise ConfigError(f"{name} is not available; leave it None")
        where = device or "cpu"
        return quantize_checkpoint(
            pretrained_model_path, save_path, self.config, device=where, workers=workers, samples=dataloader
        )

    @staticmethod
    def freeze(model: Model, quantize: bool | None = None, runtime_options: Any = None) -> Model:
        """Put quantized values in the place of the float weights and biases, in place; learned scales learn no more.

        A weight shared with a layer that is quantized otherwise, or not at all, is no longer shared.

        Args:
            model: from ``quantize_model``.
            quantize: False keeps the float values (and quantizes them when the model runs); None means True.
            runtime_options: native kernels; not available.

        Raises:
            ModelError: a model without quantized layers.
        """
        if runtime_options is not None:
            raise ConfigError("runtime_options asks for native kernels, which are not available; leave it None")
        layers = [layer for _, layer in quantized_layers(model)]
        if not layers:
            raise ModelError(f"{type(model).__name__} has no quantized layer to freeze; quantize_model comes first")
        if quantize is not False:
            bake([layer for layer in layers if not layer.frozen])
            for _, scale in learned_scales(model):
                scale.requires_grad_(False)
        return model


def check_job(config: QConfig) -> None:
    """Refuse, before any work, what no job can use; a configuration may have changed since it was made."""
    check_available(config)
    if config.algo_config:
        from quark.torch.algorithms.registry import check_order

        check_order(config.algo_config)


def check_model(model: nn.Module) -> None:
    """A float model with all its weights in one place."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if any(True for _ in (*quantized_layers(model), *cache_quantizers(model), *points(model))):
        raise ModelError(f"{type(model).__name__} is quantized already; start from the float model")
    devices = getattr(model, "hf_device_map", None) or {}
    away = [name or "the model" for name, device in devices.items() if str(device) in OFFLOADED]
    if (away and len(set(devices.values())) > 1) or "disk" in devices.values():
        raise ModelError(
            f"weights of {', '.join(away)} are offloaded; load the model on one device, or let `quark torch "
            f"quantize-files FOLDER -o NEW --scheme NAME` quantize its folder a block at a time, in little memory"
        )
