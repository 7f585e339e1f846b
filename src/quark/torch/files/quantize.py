"""A checkpoint quantized file by file, tensor by tensor: memory holds a tensor and what it becomes.

    headers of all files → skeleton → Plan → for each file: read, quantize, pack, write a tensor at a time
                                                   → index, configuration, the other files of the folder

The numbers are those of ``ModelQuantizer.quantize_model`` and ``export_safetensors``, bit for bit. Files do not depend
on each other: ``workers`` of them are made at once by joblib, whose backends (Ray, Dask) may be on other machines that
see the same folders. A file appears when it is whole. What is there is never deleted; an interrupted job goes on where
it was when it is started again, and a folder with anything else in it is an error.

Static activations are calibrated first, with one decoder block in memory (``static.py``); so is the float model changed
(``changed.py``), and are weights tuned (``tuned.py``).

Not handled: stacked experts of a layout that is not known, which stay float and are named.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quark import parallel
from quark.algorithms.hadamard import Rotation
from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.files.atomic import part_of
from quark.files.folder import is_detour
from quark.files.journal import Journal
from quark.torch.algorithms.hqq import refine, warn_of_fixed
from quark.torch.attention import find_targets
from quark.torch.config.algorithms import HQQConfig
from quark.torch.config.model import QConfig, check_available
from quark.torch.devices import usable
from quark.torch.digest import identity_of
from quark.torch.export.checkpoint import Checkpoint, opened, read_checkpoint
from quark.torch.export.config.config import JsonExporterConfig
from quark.torch.export.described import described
from quark.torch.export.extras import turn_item
from quark.torch.export.in_turn import Pairs, checked_pairs, joined
from quark.torch.export.layout import layout_of_quantizer, store
from quark.torch.export.original import FileNames, renamed_item
from quark.torch.export.shards import Item, is_whole, item_of, write_file
from quark.torch.export.state import named, renamed
from quark.torch.export.vllm_reads import cache_scale_name, warn_of_rounding
from quark.torch.fake_quantize import Quantizer, calibrate_with, parts
from quark.torch.files.algorithms import refined, stages_of
from quark.torch.files.block_files import RunInFiles
from quark.torch.files.carried import (
    CarriedLayers,
    Known,
    Record,
    changed_to,
    codes_under,
    known_of,
    one_scale,
    places_of,
    unchanged,
)
from quark.torch.files.changed import Changes, changed_model, homes
from quark.torch.files.decision import CheckpointDecision, decide, quantizer_of
from quark.torch.files.prequantized import as_float
from quark.torch.files.skeleton import Skeleton, StoredSource, named_type
from quark.torch.files.static import activation_parameters, needs_samples, without_unreached
from quark.torch.files.target import begin, finish, held
from quark.torch.files.tuned import set_scales, tuned_weights
from quark.torch.files.verified import Expected, expected, reading
from quark.torch.layouts import tell_layouts
from quark.torch.matching import weights_in_groups
from quark.torch.shared_scales import has_tensor_scale, share

log = logging.getLogger(__name__)


SCALES = "scales of activations"  # an entry of the journal
Codes = dict[str, torch.Tensor]
Made = tuple[Codes, torch.Tensor, Quantizer]  # stored tensors, what they were made of, and by what


@dataclass(frozen=True)
class FileJob:
    """One file.

    Attributes:
        source, target: folders.
        file: its name in both.
        tensors: what is in it, by the names in memory.
        plan: how tensors are quantized.
        weights: those of the plan, of this file and beside it, that this file needs.
        pack_method: order of codes in a word.
        device: where tensors are quantized.
        given: tensors that are written beside: scales of static activations.
        tuned: where the tuned tensors are, weights with their scales.
        refine: finds better scales for each weight.
        turns: of the layers in it whose inputs are turned when they run.
        outside: names in the file, by names in memory.
        grids: where the grids are that tensors of the source had, by their names there.
        pairs: layers that are one in the file.
        found: what became of these.
        known: that of a file which an interrupted job has finished.
        expected: what is found then.
    """

    source: Path
    target: Path
    file: str
    tensors: Mapping[str, StoredSource]
    plan: Plan
    weights: Mapping[str, StoredSource]
    pack_method: str
    device: str
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tuned: Mapping[str, Path] = field(default_factory=dict)
    refine: HQQConfig | None = None
    turns: Mapping[str, Rotation] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    grids: Mapping[str, Path] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=dict)
    found: list[CarriedLayers] = field(default_factory=list)
    known: CarriedLayers | None = None
    expected: dict[str, Expected] = field(default_factory=dict)

    def run(self) -> tuple[str, CarriedLayers]:
        """Write the file; its name, and what became of the codes that it had."""
        goal = self.target / self.file
        if is_whole(goal) and (self.known is not None or not self.grids):
            return self.file, self.known or CarriedLayers()
        with part_of(goal) as part:
            write_file(part, self.items())
            self.read_back(part)
        return self.file, sum(self.found, CarriedLayers())

    def read_back(self, path: Path) -> None:
        """Compare what was written with what the quantizers make of the source.

        Raises:
            ModelError: a tensor differs; it is named.
        """
        with reading(path, lambda name: self.outside.get(name, name), self.pairs) as read:
            for name, row in self.expected.items():
                row.check(name, read)
        self.expected.clear()

    def items(self) -> list[Item]:
        """All that the file holds."""
        given = (item_of(name, value) for name, value in self.given.items())
        turns = (turn_item(name, turn) for name, turn in self.turns.items())
        made = (*map(self.item, self.tensors), *given, *turns)
        return joined((renamed_item(item, lambda name: self.outside.get(name, name)) for item in made), self.pairs)

    def item(self, name: str) -> Item:
        """What a tensor becomes."""
        stored = self.tensors[name]
        if name not in self.weights:
            return Item({name: (stored.shape, stored.dtype)}, lambda: {name: self.read(name).contiguous()})
        form = layout_of_quantizer(quantizer_of(self.plan, name), stored.shape, self.pack_method).form()
        return Item({named(name, key): entry for key, entry in form.items()}, lambda: self.codes(name))

    def codes(self, name: str) -> dict[str, torch.Tensor]:
        """A tensor quantized and packed."""
        made, value, quantizer = (self.tuned_codes if name in self.tuned else self.own_codes)(name)
        self.expected[name] = expected(value, quantizer, self.pack_method)
        return renamed(name, made)

    def own_codes(self, name: str) -> Made:
        """A tensor under the scales that are found in it, or that it has already."""
        value, quantizer = self.weights[name].read(self.source).to(self.device), quantizer_of(self.plan, name)
        calibrate_with(quantizer, value)
        known = known_of(self.grids, self.weights[name].name)
        if known is not None and name.endswith(".weight"):
            return self.codes_known(name, quantizer, value, known), value, quantizer
        self.search(name, quantizer, value)
        return store(value, quantizer, self.pack_method), value, quantizer

    def codes_known(self, name: str, quantizer: Quantizer, value: torch.Tensor, known: Known) -> Codes:
        """A tensor that was quantized before: the codes that it had, or others where its grid is another one."""
        shared = self.siblings(name) if any(map(has_tensor_scale, parts(quantizer))) else ()
        names = [self.weights[other].name for other in shared]
        together = not names or one_scale(known_of(self.grids, other) for other in names)
        made = codes_under(quantizer, value, known, self.pack_method) if together else None
        if made is None:
            self.search(name, quantizer, value)
            made = store(value, quantizer, self.pack_method)
            self.found.append(changed_to(value, made, quantizer, self.pack_method))
        else:
            self.found.append(unchanged(value))
        return made

    def siblings(self, name: str) -> tuple[str, ...]:
        """The weights that share a tensor scale with this one, itself among them; none where it has its own."""
        return weights_in_groups(self.plan).get(name, ())

    def search(self, name: str, quantizer: Quantizer, value: torch.Tensor) -> None:
        """Scales that are better, or shared."""
        if self.refine is not None and name.endswith(".weight") and refined(self.refine, name):
            refine(quantizer, value, self.refine)
        members = [part for part in parts(quantizer) if has_tensor_scale(part)]
        others = [other for other in self.siblings(name) if other != name] if members else []
        if others:
            share([*members, *(part for other in others for part in self.scales(other))])

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor that stays float."""
        if name not in self.tuned:
            value = self.tensors[name].read(self.source)
        else:
            with opened(self.tuned[name]) as file:
                value = file.get_tensor(name)
        self.expected[name] = expected(value, None, self.pack_method)
        return value

    def tuned_codes(self, name: str) -> Made:
        """A tuned tensor packed, under the scales that it was tuned for."""
        with opened(self.tuned[name]) as file:
            values = {key: file.get_tensor(key) for key in file.keys() if key.startswith(name)}  # noqa: SIM118
        quantizer = quantizer_of(self.plan, name)
        calibrate_with(quantizer, values[name])
        set_scales(quantizer, name, values)
        return store(values[name], quantizer, self.pack_method), values[name], quantizer

    def scales(self, name: str) -> list[Any]:
        """The quantizers of another tensor that have one scale."""
        quantizer = quantizer_of(self.plan, name)
        calibrate_with(quantizer, self.weights[name].read(self.source).to(self.device))
        return [part for part in parts(quantizer) if has_tensor_scale(part)]


@dataclass(frozen=True)
class JobSettings:
    """How a checkpoint is quantized, beside its configuration: as the arguments of ``quantize_checkpoint``."""

    pack_method: str
    device: str
    workers: int | None
    samples: Iterable[Any] | None
    describe: Callable[[Path], None] | None
    program: str | None
    max_shard_size: int | None


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: QConfig,
    *,
    pack_method: str = "reorder",
    device: str = "cpu",
    workers: int | None = 1,
    samples: Iterable[Any] | None = None,
    describe: Callable[[Path], None] | None = None,
    program: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
) -> CarriedLayers | None:
    """Quantize the checkpoint in ``source`` into the folder ``target``.

    Args:
        source: ``config.json`` and safetensors files (with their index, if they are several); one that was quantized
            before is decoded, and keeps its codes where the new grid holds their values.
        target: a new or empty folder, or that of the same job, interrupted.
        config: how; of the algorithms all but SVDQuant, and one of those that tune.
        pack_method: order of 4-bit codes in a word, "reorder" or "order".
        device: where tensors are quantized, and where blocks run on samples, one at a time.
        workers: files made at once, by processes of joblib, and parts of the samples that run through a block at once
            for an algorithm that tunes; None: as joblib's ``parallel_config`` says.
        samples: for static activations and algorithms, as ``quantize_model`` takes them.
        describe: writes what is to lie beside the tensors (a model card) into ``target``, before it is marked as done.
        program: that will read it, if it is known, as ``export_safetensors`` takes it.
        dtype: that the float tensors are read in, before they are quantized or stay; None: as they are.
        max_shard_size: bytes of tensors per file at most, where more than one are in it; None: a file for each of the
            source.

    Returns:
        Of a source that was quantized before: what became of its codes.

    Raises:
        DataError: static activations without samples, or values that are not finite.
        ConfigError: an algorithm that needs the whole model, a pattern that matches nothing, a target that holds
            something else, more than 1,024 workers, or a device that is not there.
        ModelError: files that are missing or broken.
    """
    check_available(config)
    usable(device)
    how = JobSettings(pack_method, device, workers, samples, describe, program, max_shard_size)
    # absolute: joblib keeps its processes, which may be in the folder of an earlier call
    goal = Path(target).expanduser().resolve()
    with as_float(Path(source).expanduser().resolve(), goal) as folder:
        return quantize_float(in_type(read_checkpoint(folder), dtype), goal, config, how)


def in_type(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Checkpoint:
    """A checkpoint whose float tensors are read in ``dtype``, as its configuration then says."""
    if dtype is None:
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != "torch_dtype"}
    return replace(checkpoint, config={**config, "dtype": str(dtype).removeprefix("torch.")}, dtype=dtype)


def float_bytes(checkpoint: Checkpoint, config: QConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes, in the float types of the model, of the tensors that become codes, and of the others, by name."""
    return decide(checkpoint, config).stored_apart()


def quantize_float(checkpoint: Checkpoint, goal: Path, config: QConfig, how: JobSettings) -> CarriedLayers | None:
    """The job, of a checkpoint that is float or was decoded."""
    grids, size = places_of(checkpoint.folder), how.max_shard_size
    decision = decide(checkpoint, config)
    skeleton, found, plan, tensors = decision.skeleton, decision.found, decision.found.plan, decision.tensors
    static = needs_samples(found, attention := find_targets(skeleton.model, config), how.samples)
    stages = stages_of(config, plan, static, how.samples)
    samples = None if how.samples is None else list(how.samples)  # read once: what is digested is what is used
    warn_of_stacked(tensors)
    warn_of_types(checkpoint, () if grids else decision.weights.values())
    tell_layouts(found)
    layers = {name.removesuffix(".weight") for name in decision.weights if name.endswith(".weight")}
    if not is_detour(goal):
        warn_of_rounding(layers, config, "quark", how.program)

    def entry_of(config: QConfig) -> dict[str, Any]:
        stored, told = JsonExporterConfig(pack_method=how.pack_method), replace(config, exclude=list(found.excluded))
        return described(told, stored, skeleton.model, skeleton.names, layers)

    pairs, halves = joined_layers(skeleton, config, how.program if not is_detour(goal) else None)
    for_vllm = how.program == "vllm" and bool(pairs or config.kv_cache_quant_config)
    asked = {"program": how.program if for_vllm else None, "dtype": checkpoint.dtype, "max_shard_size": size}
    told_too = {key: value for key, value in asked.items() if value is not None}
    made = is_detour(goal) or not goal.exists()
    journal = begin(goal, identity_of(checkpoint, {**entry_of(config), **told_too}, how.device, samples))
    with held(goal, journal, made):
        over = RunInFiles(checkpoint, config, plan, journal, samples or (), how.device, how.workers)
        scales = static_scales(over) if static else {}
        changes = changed_model(over, stages.change)
        jobs = jobs_of(
            checkpoint, goal, replace(decision, tensors=homes(changes, tensors)), how.pack_method, how.device
        )
        jobs = with_scales(jobs if size is None else split(jobs, size, halves), scales)
        if stages.tune is not None:
            tuned = tuned_weights(over, stages.tune, changes)
            jobs = [replace(job, tuned=tuned) for job in jobs]
        if stages.refine is not None:
            names = (name for name in decision.weights if name.endswith(".weight") and refined(stages.refine, name))
            warn_of_fixed([quantizer_of(plan, name) for name in names])
        jobs = [with_names(changed(job, changes, stages.refine), skeleton, for_vllm, pairs) for job in jobs]
        records = run([replace(job, grids=grids, found=[]) for job in jobs], how.workers, journal)
        entry = entry_of(without_unreached(config, found, attention.caches, scales) if static else config)
        beside = {"quantization_config": entry, **({"tie_word_embeddings": False} if changes.untied else {})}
        finish(goal, checkpoint, {job.file: job.items() for job in jobs}, beside, how.describe)
        journal.remove()
    return sum(records, CarriedLayers()) if grids else None


def static_scales(job: RunInFiles) -> dict[str, torch.Tensor]:
    """Scales of static activations by their names in a file; those of an interrupted job are the job's.

    They come in one order in either case, so that a job that went on writes the same files.
    """
    if (kept := job.journal.file(SCALES)) is not None:
        return dict(sorted(load_file(kept).items()))
    made = activation_parameters(job)
    scales = {name: value.cpu().contiguous() for name, value in made.items()}
    separate = {name: value.clone() for name, value in scales.items()}
    job.journal.finish_file(SCALES, lambda part: save_file(separate, part))
    return dict(sorted(scales.items()))


def joined_layers(skeleton: Skeleton, config: QConfig, program: str | None) -> tuple[Pairs, Pairs]:
    """The layers that are one in files for a program, by names outside and by those in memory."""
    names = (skeleton.names, FileNames()) if program == "vllm" else ()
    outside, inside = (checked_pairs(skeleton.model, config, one) for one in names) if names else ({}, {})
    return outside, inside


def changed(job: FileJob, changes: Changes, refine: HQQConfig | None) -> FileJob:
    """A job whose changed tensors are read from where they are, and that refines scales."""
    tensors = {name: changes.tensors.get(name, stored) for name, stored in job.tensors.items()}
    weights = {name: changes.tensors.get(name, stored) for name, stored in job.weights.items()}
    turns = {name: turn for name, turn in changes.turns.items() if f"{name}.weight" in tensors}
    return replace(job, tensors=tensors, weights=weights, turns=turns, refine=refine)


def with_names(job: FileJob, skeleton: Skeleton, for_vllm: bool, pairs: Pairs) -> FileJob:
    """A job that knows the names of its tensors outside, and which become one."""
    names = [name for item in job.items() for name in item.form]
    outside = {name: skeleton.outside(name, job.weights) for name in names}
    told = {name: cache_scale_name(own) for name, own in outside.items()} if for_vllm else outside
    return replace(job, outside=told, pairs=pairs)


def with_scales(jobs: list[FileJob], scales: Mapping[str, torch.Tensor]) -> list[FileJob]:
    """The jobs with the scales that belong to them: beside a tensor of the same module, or of one within."""
    homes: dict[str, str] = {}
    for job in jobs:
        for name in job.tensors:
            for end in (k for k, letter in enumerate(name) if letter == "."):
                homes.setdefault(name[:end], job.file)
    weights = {name.removesuffix(".weight"): job.file for job in jobs for name in job.tensors}
    of_file: dict[str, dict[str, torch.Tensor]] = {job.file: {} for job in jobs}
    for name, value in scales.items():
        module = name.rpartition(".")[0]
        of_file[weights.get(module) or homes[module]][name] = value
    return [replace(job, given=of_file[job.file]) for job in jobs]


def warn_of_stacked(tensors: Mapping[str, StoredSource]) -> None:
    """Name the stacked experts, which stay float."""
    stacked = [name for name, stored in tensors.items() if len(stored.shape) == 3 and "expert" in name]
    if stacked:
        log.warning("%d tensors of stacked experts stay float: %s", len(stacked), ", ".join(stacked))


def warn_of_types(checkpoint: Checkpoint, weights: Iterable[StoredSource]) -> None:
    """Say that weights are quantized as they are stored, where a model in memory would have another type."""
    named = named_type(checkpoint)
    other = next((one.dtype for one in weights if named is not None and one.dtype is not named), None)
    if other is not None and checkpoint.dtype is None:
        types = (str(one).removeprefix("torch.") for one in (named, other))
        log.warning(
            "config.json names the type %s, in which `quark torch quantize` reads the weights; the files hold %s, and "
            "that is quantized here: --dtype (dtype) makes them one",
            *types,
        )


def jobs_of(
    checkpoint: Checkpoint, goal: Path, decision: CheckpointDecision, pack_method: str, device: str
) -> list[FileJob]:
    """One job a file."""
    jobs, every = [], decision.weights
    groups = weights_in_groups(decision.found.plan)
    for file in checkpoint.files:
        own = {name: stored for name, stored in decision.tensors.items() if stored.file == file}
        weights = {name: every[name] for key in own if key in every for name in (key, *groups.get(key, ()))}
        kept = {name: row for name, row in decision.found.plan.tensors.items() if name in weights}
        jobs.append(FileJob(checkpoint.folder, goal, file, own, Plan(kept), weights, pack_method, device))
    return jobs


def split(jobs: list[FileJob], size: int, pairs: Pairs) -> list[FileJob]:
    """The same tensors in files of at most ``size`` bytes; a tensor that is larger has one of its own, and those that
    become one (``pairs``: by names in memory) stay together."""
    groups: list[tuple[FileJob, list[str]]] = []
    firsts = {half: halves[0] for halves in pairs.values() for half in halves}
    for job in jobs:
        left, together = 0, dict[str, list[str]]()
        for name in job.tensors:
            layer, _, own = name.rpartition(".")
            together.setdefault(f"{firsts.get(layer, layer)}.{own}", []).append(name)
        for names in together.values():
            need = sum(job.item(name).size for name in names)
            if need > left:
                groups.append((job, []))
                left = size
            groups[-1][1].extend(names)
            left -= need
    count = len(groups)
    if count == len(jobs):
        return jobs
    return [
        replace(
            job,
            file=f"model-{number:05d}-of-{count:05d}.safetensors",
            tensors={name: job.tensors[name] for name in own},
        )
        for number, (job, own) in enumerate(groups, 1)
    ]


def run(jobs: list[FileJob], workers: int | None, journal: Journal) -> list[CarriedLayers]:
    """All jobs, with a progress bar where there is a terminal; what became of the codes of each file."""
    from joblib import delayed

    from quark.report.progress import bars

    with bars() as update:
        useful = workers and min(workers, max(len(jobs), 1))  # joblib starts every process that it is allowed
        jobs = [replace(job, known=carried_before(journal, job.file)) for job in jobs]
        results = parallel.results((delayed(FileJob.run)(job) for job in jobs), useful, ordered=False)
        found: dict[str, CarriedLayers] = {}
        for done, (file, carried) in enumerate(results, 1):
            found[file] = carried
            if jobs[0].grids:
                journal.finish(f"codes of {file}", asdict(carried))
            update("quantize files", done, len(jobs))
    return [found[job.file] for job in jobs]


def carried_before(journal: Journal, file: str) -> CarriedLayers | None:
    """What became of the codes of a file that an interrupted job has finished."""
    record = journal.done(f"codes of {file}", Record)
    return None if record is None else CarriedLayers(**vars(record))
