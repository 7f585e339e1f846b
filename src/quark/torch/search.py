"""Mixed precision of a PyTorch model: which candidate each layer gets, so that a metric meets its target at least cost.

    sensitivities → integer programming → the whole plan quantized for real and measured → … → a configuration file

``quark.search`` decides; this module measures. The model is quantized in place for every measurement and put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from quark.config.file_formats import format_for
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.files.private import private_folder
from quark.search.loop import question_of
from quark.search.parts import split_of
from quark.search.plan_file import base_values, question_words, write_found
from quark.search.plan_metric import PlanMetric
from quark.search.solve import searched
from quark.search.target import LANGUAGE, Asked, SearchGoal, goal_of
from quark.search.ties import fused
from quark.search.trials import ONE_BY_ONE, Trying
from quark.search.values import FLOAT, Found
from quark.torch.config.model import QConfig
from quark.torch.config.schemes import base_name, scheme
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config_file import WHOLE, check_values, split
from quark.torch.digest import digest_of_samples
from quark.torch.export.before_work import check_built_in
from quark.torch.from_values import config_of, template_of
from quark.torch.layer_runs import FloatOutputs, lay_out, measure, running, traffic_of
from quark.torch.quantizer import ModelQuantizer
from quark.torch.sensitivity import NO_USE, TorchSearchGoal, first_scheme, source_of, trials_of


def types_of(name: str) -> str:
    """``inputs/weights`` of a candidate, by what codes are stored as: ``float/int4`` of ``int4_wo_32``."""
    chosen = None if name == FLOAT else scheme(split(name)[0])
    return "/".join(stored_type(getattr(chosen, slot, None)) for slot in ("input_tensors", "weight"))


def stored_type(found: QTensorConfig | list[QTensorConfig] | None) -> str:
    """The narrowest of the types of a tensor: the wider ones are those of its scales, or what it is widened to."""
    if not found:
        return FLOAT
    types = [one.dtype for one in (found if isinstance(found, list) else [found])]
    return str(min(types, key=lambda one: one.to_bitwidth()).value)


@dataclass(frozen=True)
class ModuleMetric(PlanMetric):
    """The metric of a plan, measured on the model, which is put back.

    Attributes:
        model: the float model.
        common: the data that plans are measured on.
    """

    types = staticmethod(types_of)
    model: nn.Module
    common: FloatOutputs

    @contextmanager
    def quantized(self, plan: Mapping[str, str]) -> Iterator[nn.Module]:
        """As the base says; the float model is put back."""
        with ExitStack() as undo:
            if (values := self.settled(plan)) is not None:
                ModelQuantizer(config_of(values, self.model)).quantize(self.model, self.samples, undo)
            with running(self.model):
                yield self.model

    def measures(self, model: nn.Module) -> Mapping[str, float]:
        """As the base says."""
        return measure(model, self.common)

    def macs(self, layers: Sequence[str]) -> Mapping[str, float]:
        """As the base says; those of a part of a layer, as of an LSTM, cannot be counted."""
        traffic = traffic_of(self.model, layers, self.common.samples[0])
        if odd := [name for name in layers if name not in traffic]:
            raise ConfigError(f"the multiplications of {odd[0]!r} cannot be counted: it is a part of a layer")
        return {name: one.macs for name, one in traffic.items()}

    def on(self, samples: Sequence[Any], name: str) -> ModuleMetric:
        """The same on other data, whose float outputs go into a folder called ``name``."""
        common = lay_out(self.model, samples, self.common.folder.parent / name)
        return replace(self, common=common, data=digest_of_samples(samples))


def search(
    model: nn.Module | str | Path,
    samples: Iterable[Any],
    candidates: Sequence[str],
    goal: SearchGoal | str,
    config: Mapping[str, Any] | str | None = None,
    trying: Trying = ONE_BY_ONE,
) -> Found:
    """The cheapest plan that meets a target, or the most precise one within a limit; quantized for real and measured.

    No plan that was measured is better in all. Where none meets the target the nearest comes back, ``met`` False.

    Args:
        model: a float model, which is left as it was, or the folder of one.
        samples: half of them calibrate and try layers, a quarter chooses, a quarter reports; under 4 none is set apart.
        candidates: what a layer may become: schemes, ``scheme+gptq``, ``float``.
        goal: what is asked for, a ``TorchSearchGoal`` where it matters what for; a target such as ``perplexity<=32``.
        config: a scheme, or keys and values of a configuration file: what holds for the whole model.
        trying: how many layers at a time, and where finished measurements are kept; a ``TorchTrying`` for a folder.

    Raises:
        ConfigError: an unknown name, a scheme that the program does not read, too low a limit, a ledger of another job.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    values, asked = whole_values(config, candidates), goal_of(goal)
    target, use = ASKED.target(asked, candidates), asked if isinstance(asked, TorchSearchGoal) else NO_USE
    source, given = source_of(model, trying), list(samples)
    if use.program is not None:
        check_read([split(name)[0] for name in candidates if name != FLOAT], use.program)
    held_out = None if asked.evaluation is None else list(asked.evaluation)
    apart, loaded = split_of(given, held_out, asked.metric is not None), source.load()
    with private_folder() as folder, Journal.held(trying.ledger):
        common = lay_out(loaded, apart.fit, folder / "trials")
        trials = trials_of(source, loaded, common, values, candidates, use)
        if not trials.layers:
            raise ConfigError("the configuration decides about every layer, so there is nothing to search")
        tied = together(loaded, [one.name for one in trials.layers], use.program)
        data = digest_of_samples(common.samples)

        def plans(book: Journal) -> ModuleMetric:
            return ModuleMetric(values, apart.fit, target.metric, asked.metric, book, data, loaded, common)

        return searched(trials, plans, apart, question_of(asked, target, trials.estimated, tied), trying)


def check_read(schemes: Sequence[str], program: str) -> None:
    """Refuse schemes that a program does not read."""
    if format_for([base_name(name) for name in schemes], program) != "onnx":
        for name in schemes:
            check_built_in(QConfig(scheme(name)), program)


def together(model: nn.Module, layers: Sequence[str], program: str | None) -> list[tuple[str, ...]]:
    """Groups of layers that a program reads as one: vLLM fuses queries, keys and values, gate and up, and experts."""
    if program != "vllm":
        return []
    return fused(layers, template_of(model, True).read_together())


def whole_values(config: Mapping[str, Any] | str | None, candidates: Sequence[str]) -> dict[str, Any]:
    """Keys and values of what holds for the whole model.

    Raises:
        ConfigError: a candidate or value that cannot work, or a whole ``QConfig``.
    """
    first = first_scheme(candidates)
    values = base_values(first if config is None else config, "scheme")
    if WHOLE in values:
        raise ConfigError("a search needs a configuration file with the key scheme, not a whole QConfig")
    check_values(values)
    return values


#: What this flow can be asked for.
ASKED = Asked(("kl", "perplexity", "sqnr", "cosine", "mse"), "kl", LANGUAGE, types_of)


def save_plan(
    path: Path, config: Mapping[str, Any] | str | None, found: Found, target: str | None, budget: str
) -> None:
    """Write a plan as a configuration file that ``quark torch quantize --config`` reads.

    Args:
        path: ends in .yaml, .yml or .json.
        config: as of ``search``.
        found: what it returned.
        target, budget: what was asked for, for the reader of the file.
    """
    values, asked = whole_values(config, found.study.candidates), question_words(target, budget)
    how = (
        "Lines under layers: a scheme (`quark torch schemes`), with +gptq and the like behind, or float.",
        "Edit them, and run: quark torch quantize MODEL_DIR -o OUT_DIR --config THIS_FILE --data TEXT",
    )
    write_found(path, {**values, "found": {"target": asked}}, found, asked, how)
