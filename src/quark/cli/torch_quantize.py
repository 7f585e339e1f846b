"""``quark torch quantize`` and ``quantize-files``: configure, quantize, write, measure, tell."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.extensions import with_own
from quark.cli.plans import check_plan, plan_in
from quark.cli.torch_refusals import (
    CONVERT_NEEDS,
    check_algorithms,
    check_data,
    check_device,
    check_folder,
    check_model,
    check_names,
    check_output,
    check_reader,
    check_samples,
    split_layers,
    typed_schemes,
)
from quark.cli.torch_request import Converted, FolderJob, InMemory
from quark.cli.torch_verdict import coverage_of, sizes, tell
from quark.config.file_formats import chosen_format
from quark.errors import ConfigError, check_name
from quark.files.folder import drop_detour, new_folder
from quark.files.vocabulary import vocabulary_in
from quark.torch.config.schemes import NAMES, cache_scheme, scheme
from quark.torch.files.headers import FolderUse, check_coded

if TYPE_CHECKING:
    from quark.torch.config.model import QConfig

DTYPES = ("bfloat16", "float16", "float32")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KkMmGg])[Bb]")
SHARD = "5GB"
SLOTS = {"weight": "weights", "input_tensors": "inputs"}
TENSORS = ("*.safetensors", "*.gguf", "*.onnx", "*.onnx.data")  # files with tensors


def run(request: InMemory) -> None:
    """Quantize in memory, and tell on standard output."""
    refuse(request)
    values = chosen_values(request)
    format = checked_format(request, values)
    refuse_without_samples(request, values)
    if values.get("kv_cache"):
        cache_scheme(values["kv_cache"])
    how = FolderUse(loaded=True, code=request.trust_remote_code)
    check_model(request.model, how, values, [request.source.data], format, request.program)
    from quark.torch.files.prequantized import as_float

    with as_float(request.model, request.output, loaded=True) as folder, new_folder(request.output) as work:
        facts = in_memory(replace(request, model=folder, output=work), values, format, request.check)
        facts |= facts_of(request, format, work)
        describe(request, facts, work)
    tell(request, facts, request.json)


def refuse(request: FolderJob, resumed: bool = False) -> None:
    """Refuse what names and folders alone show to be wrong: before torch is loaded, and a tensor read.

    Samples that are missing wait where a format is asked for: it may not have the scheme, with samples or without.
    """
    if request.scheme is not None:
        check_names(request.scheme, request.kv_cache, request.layers)
    check_folder(request.model)
    check_algorithms(with_own(request.algorithms))
    typed = typed_schemes(request.scheme, request.layers)
    if check_reader(typed, request.kv_cache, request.format, request.program) == "gguf":
        vocabulary_in(request.model)
    check_data(request.model, request.source.data)
    check_plan(request.plan_from)
    check_device(request.device)
    check_output(request.output, resumed)
    if request.dtype is not None:
        check_name("--dtype", request.dtype, DTYPES)
    if request.max_shard_size is not None:
        bytes_of(request.max_shard_size)
    typed_alone = {"scheme": request.scheme, "kv_cache": request.kv_cache, "layers": request.layers}
    refuse_without_samples(request, {**typed_alone, "algorithms": with_own(request.algorithms)})


def refuse_without_samples(request: FolderJob, values: Mapping[str, Any]) -> None:
    """Refuse what needs samples, where there are none; ``values``: what is known of the configuration."""
    if values.get("scheme") is not None and request.source.data is None:
        way = (CONVERT_NEEDS,) if isinstance(request, Converted) else ()
        names, layers = values.get("algorithms") or (), values.get("layers") or ()
        check_samples(values["scheme"], values.get("kv_cache"), names, layers, *way)


def refuse_ggml(values: Mapping[str, Any]) -> None:
    """Refuse schemes that are types of GGML where a model goes file by file.

    Raises:
        ConfigError: one is.
    """
    from quark.numerics.ggml import GGML
    from quark.torch.config_file import schemes_of

    kinds = {row.kind for row in GGML.values()}
    if found := next((scheme for scheme in schemes_of(values) if scheme in kinds), None):
        raise ConfigError(
            f"{found} goes into a file from the float weights of a model in memory: `quark torch quantize` writes it; "
            f"file by file int4_wo_32 becomes Q4_0, uint4_wo_32 Q4_1 and int8_wo_per_channel Q8_0"
        )


def computed_in(request: FolderJob, format: str) -> str | None:
    """The name of the type that a model is read in, whichever command reads it; None: its own."""
    return "float32" if format == "onnx" else request.dtype


def dtype_of(name: str | None) -> Any:
    """The type called ``name``."""
    import torch

    return None if name is None else getattr(torch, name)


def bytes_of(size: str) -> int:
    """A size such as 5GB in bytes.

    Raises:
        ConfigError: no size.
    """
    found = SIZE.fullmatch(size.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"--max-shard-size {size!r} must be a number of KB, MB or GB, as in 5GB")
    return int(float(found[1]) * 1000 ** (1 + "KMG".index(found[2].upper())))


def describe(request: FolderJob, facts: Mapping[str, Any], folder: Path) -> None:
    """The model card, and the licence files, into ``folder``, which will be the output."""
    from quark.torch.export.card import Card, write_card

    name = str(request.scheme)
    words = {slot: getattr(scheme(name), slot) for slot in SLOTS} if name in NAMES else {}
    said = [f"{what} {described(words[slot])}" for slot, what in SLOTS.items() if slot in words]
    measured = "perplexity_before" in facts
    card = Card(
        base=request.model.resolve().name,
        scheme=request.named if request.config is None else request.config.name,
        words="; ".join(said) or "as configured",
        format=facts["format"],
        floats=tuple(facts.get("excluded", ())),
        calibration=request.source.data.name if request.source.data else None,
        windows=facts.get("calibration_windows", 0),
        perplexity=(facts["perplexity_before"], facts["perplexity_after"]) if measured else None,
        bytes=(facts["bytes_before"], facts["bytes_after"]),
        not_for=facts.get("not_for", {}),
    )
    write_card(folder, request.model, card)


def described(config: Any) -> str:
    """A tensor's configuration in words."""
    from quark.torch.config.model import QLayerConfig

    stages = QLayerConfig(weight=config).stages("weight")
    return " on ".join(stage.spec.describe() for stage in reversed(stages)) or "float"


def facts_of(request: FolderJob, format: str, folder: Path) -> dict[str, Any]:
    """What is told of every job: names, sizes, and the method of a source that was quantized before, with its cache
    if the output has none.

    ``folder``: where the output is.
    """
    from quark.torch.export.checkpoint import method_of
    from quark.torch.files.folder_caches import cache_of

    facts: dict[str, Any] = {"model": str(request.model), "output": str(request.output), "scheme": request.named}
    method = method_of(request.model)
    decoded = {} if method is None else {"decoded_from": method}
    if (cache := cache_of(request.model)) and format != "onnx" and not cache_of(folder):
        decoded["cache_left_float"] = cache
    before, after = sizes((request.model, folder), TENSORS)
    return {**facts, "format": format, **decoded, "bytes_before": before, "bytes_after": after}


def in_memory(request: FolderJob, values: dict[str, Any], format: str, check: bool) -> dict[str, Any]:
    """Load, quantize, write, and measure."""
    from quark.torch.config_file import schemes_of
    from quark.torch.language import (
        calibration_samples,
        check_ids,
        first_windows,
        load_model,
        load_tokenizer,
        perplexity,
        read_ids,
    )

    refuse_by_shapes(request, values, format)
    source, remote = request.source, request.trust_remote_code
    tokenizer = partial(load_tokenizer, request.model, remote)
    rows = read_ids(source.data, tokenizer) if source.data else []
    samples = calibration_samples(rows, source.seq_len, source.samples)
    model = load_model(request.model, request.device, remote, dtype_of(computed_in(request, format)))
    check_ids(model, [sample["input_ids"][0] for sample in samples])
    config = decided(model, request, values, format)
    facts = told_readers(model, request, config, schemes_of(values), format)
    measured = first_windows(rows, source.seq_len, source.samples) if check else []
    if measured:
        facts["perplexity_before"] = perplexity(model, measured, source.seq_len)
    facts |= quantized(model, request, config, samples, format)
    if measured:
        facts["perplexity_after"] = perplexity(model, measured, source.seq_len)
    return facts


def checked_format(request: FolderJob, values: dict[str, Any]) -> str:
    """The format that is meant.

    Raises:
        ConfigError: it has no such layers, or the program that is to read it does not read them there.
    """
    from quark.torch.config_file import schemes_of

    caches = request.kv_cache or values.get("kv_cache")
    return check_reader(schemes_of(values), caches, request.format, request.program)


def chosen_values(request: FolderJob) -> dict[str, Any]:
    """Keys and values of a configuration file: the file's, or those of a scheme, and what the command line adds.

    Raises:
        ConfigError: a name or value that cannot work.
    """
    from quark.torch.config_file import WHOLE, check_values, read_values

    values: dict[str, Any] = {"scheme": request.scheme} if request.config is None else read_values(request.config)
    layers = {**layer_schemes(request.layers), **(values.get("layers") or {})}
    added = {
        "algorithms": [*(values.get("algorithms") or []), *with_own(request.algorithms)],
        "kv_cache": request.kv_cache or values.get("kv_cache"),
        "layers": layers,
    }
    given = {key: value for key, value in added.items() if value}
    given |= request.left_float
    if WHOLE in values and given:
        raise ConfigError(f"{request.config} is a whole QConfig; leave out what would change its {', '.join(given)}")
    values |= given
    check_values(values)
    return values


def decided(model: Any, request: FolderJob, values: dict[str, Any], format: str) -> QConfig:
    """How a model is quantized; refused, before anything runs, where the format or a tensor does not fit it."""
    from quark.torch import ModelQuantizer

    config = fitted(model, request, values, format, model.dtype)
    ModelQuantizer(config).check(model)
    return config


def fitted(model: Any, request: FolderJob, values: dict[str, Any], format: str, dtype: Any) -> QConfig:
    """How a model, or its skeleton, of a type is quantized; refused where the format does not fit it."""
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.write_as import config_for
    from quark.torch.from_values import config_of

    config = planned(request, config_for(config_of(values, model), format, request.program, dtype))
    check_before_work(model, config, format, request.program, request.model)
    return config


def told_readers(
    model: Any, request: FolderJob, config: QConfig, schemes: Sequence[str], format: str
) -> dict[str, Any]:
    """Facts: which programs read the file, and why others do not that read its scheme elsewhere."""
    from quark.torch.export.readers import readers

    known = [[scheme] for scheme in schemes]
    return told(request, lambda: readers(model, config, known, request.kv_cache, format, request.model))


def told(request: FolderJob, ask: Callable[[], Mapping[str, str]]) -> dict[str, Any]:
    """Facts of what reads a file, by program why it does not; asked where nobody said which program it is for."""
    found = ask() if request.program is None else {request.program: ""}
    return {
        "readers": [name for name, why in found.items() if not why],
        "not_for": {name: why for name, why in found.items() if why},
    }


def refuse_by_shapes(request: FolderJob, values: dict[str, Any], format: str) -> None:
    """Refuse what names and shapes alone show not to fit, before the weights are read: there may be many.

    Nothing is known before of a checkpoint whose own code makes its modules, or that is no safetensors.
    """
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.files.quantize import in_type
    from quark.torch.files.skeleton import float_type, read_skeleton
    from quark.torch.matching import match_skeleton
    from quark.torch.recurrent import unroll_recurrent

    if format == "onnx" or not any(request.model.glob("*.safetensors")):  # for ONNX, the model itself is run
        return
    checkpoint = in_type(read_checkpoint(request.model), dtype_of(request.dtype))
    if "auto_map" not in checkpoint.config:
        dtype = float_type(checkpoint)
        model = read_skeleton(checkpoint).model.to(dtype)  # formats are asked what it computes in
        config = fitted(model, request, values, format, dtype)
        unroll_recurrent(model)  # as in memory: patterns may name what is in its cells
        match_skeleton(model, config)


def quantized(model: Any, request: FolderJob, config: QConfig, samples: Sequence[Any], format: str) -> dict[str, Any]:
    """Quantize a model and write it."""
    from quark.torch import ModelQuantizer
    from quark.torch.export.write_as import export_as
    from quark.torch.files.carried import carry_over
    from quark.torch.files.carried import facts_of as facts_of_carried
    from quark.torch.language import samples_of_ids
    from quark.torch.quantized_layer import quantized_layers, stored_apart

    start = time.perf_counter()
    quantizer = ModelQuantizer(config)
    with samples_of_ids(type(model).__name__):
        quantizer.quantize_model(model, samples or None)
    carried = carry_over(model, request.model, config.shared_scale_groups)
    size = bytes_of(request.max_shard_size or SHARD)
    loss = export_as(model, request.output, format, request.model, size, request.verify, request.program)
    coverage = coverage_of(*stored_apart(model, () if loss is None else loss.rescued))
    return {
        **lost_in(loss),
        **facts_of_carried(carried),
        **coverage,
        "seconds": time.perf_counter() - start,
        "quantized_layers": sum(1 for _ in quantized_layers(model)),
        "excluded": list(model.quant_config.exclude),
        "unreached": quantizer.unreached,
        "calibration_windows": len(samples),
    }


def lost_in(loss: Any) -> dict[str, Any]:
    """Facts of what a file loses against the values of the model; none of a format that has them as they are."""
    return {} if loss is None else {"file_loss": loss.relative, "kept_as_f32": loss.rescued}


def run_files(request: FolderJob) -> None:
    """Quantize file by file, and tell on standard output."""
    refuse(request, resumed=True)
    values, start = chosen_values(request), time.perf_counter()
    format = checked_format(request, values)
    refuse_ggml(values)
    refuse_without_samples(request, values)
    check_model(request.model, FolderUse(), values, [request.source.data], format, request.program)
    from quark.torch.devices import usable
    from quark.torch.files.prequantized import as_float
    from quark.torch.language import samples_of_ids

    usable(request.device)
    with as_float(request.model, request.output) as folder, samples_of_ids("the model"):
        facts = by_files(request, folder, format)
    tell(request, facts | {"seconds": time.perf_counter() - start}, request.json)


def by_files(request: FolderJob, folder: Path, format: str) -> dict[str, Any]:
    """Quantize the float checkpoint in ``folder`` file by file, and convert where another format is wanted."""
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.files.carried import facts_of as facts_of_carried
    from quark.torch.files.foreign import convert
    from quark.torch.files.quantize import float_bytes, in_type, quantize_checkpoint
    from quark.torch.files.skeleton import float_type, read_skeleton
    from quark.torch.files.target import on_the_way
    from quark.torch.language import batches, calibration_samples, load_tokenizer, read_ids

    source, dtype = request.source, dtype_of(computed_in(request, format))
    checkpoint = in_type(read_checkpoint(folder), dtype)
    rows = read_ids(source.data, partial(load_tokenizer, folder)) if source.data else []
    samples = batches(calibration_samples(rows, source.seq_len, source.samples), request.batch_size)
    skeleton = read_skeleton(checkpoint).model.to(float_type(checkpoint))
    if format != "quark" and not hasattr(skeleton, "config"):
        raise ConfigError(
            f"{str(request.model)!r} names the architecture {checkpoint.config.get('architectures')}, which "
            f"transformers does not have, and file by file it goes into the quark format alone; `quark torch quantize "
            f"--trust-remote-code` runs the code of the folder, where it has some"
        )
    config = config_of_files(replace(request, model=folder), format, checkpoint, skeleton, samples)
    schemes = typed_schemes(request.scheme, request.layers)
    facts = told_readers(skeleton, request, config, schemes, format)
    facts |= {"calibration_windows": sum(len(batch["input_ids"]) for batch in samples)}
    facts |= coverage_of(*float_bytes(checkpoint, config))

    def finish(work: Path) -> None:
        facts.update(facts_of(request, format, work))
        describe(request, facts, work)

    size = None if request.max_shard_size is None else bytes_of(request.max_shard_size)
    final = request.output.expanduser().resolve()
    own: dict[str, Any] = {"describe": finish, "program": request.program, "max_shard_size": size}
    with nullcontext(request.output) if format == "quark" else on_the_way(final, request.model) as goal:
        how = {"device": request.device, "workers": request.workers, "samples": samples or None, "dtype": dtype}
        carried = quantize_checkpoint(folder, goal, config, **how, **(own if goal == request.output else {}))
        if goal != request.output:
            with new_folder(request.output) as work:
                facts.update(lost_in(convert(goal, work, format, request.program, size or bytes_of(SHARD))))
                finish(work)
                drop_detour(final)
    return {**facts, **facts_of_carried(carried)}


def config_of_files(request: FolderJob, format: str, checkpoint: Any, skeleton: Any, samples: Sequence[Any]) -> QConfig:
    """How the checkpoint is quantized; refused where the samples or the format do not fit it."""
    from quark.torch import LLMTemplate
    from quark.torch.export.before_work import check_before_work
    from quark.torch.export.write_as import config_for
    from quark.torch.files.skeleton import float_type
    from quark.torch.language import check_ids

    check_ids(skeleton, [row for batch in samples for row in batch["input_ids"]])
    template = LLMTemplate.for_model(skeleton)
    layers, only = layer_schemes(request.layers), request.left_float.get("exclude")
    config = template.get_config(
        str(request.scheme), with_own(request.algorithms), request.kv_cache, layer_config=layers, exclude_layers=only
    )
    config = replace(config, exclude=[*config.exclude, *request.exclude])
    config = planned(request, config_for(config, format, request.program, float_type(checkpoint)))
    check_before_work(skeleton, config, format, request.program, request.model)
    return config


def planned(request: FolderJob, config: QConfig) -> QConfig:
    """The configuration, changed so that it decides as the file of ``--plan-from`` says."""
    if request.plan_from is None:
        return config
    from quark.torch.export.checkpoint import read_checkpoint
    from quark.torch.from_plan import config_from

    return config_from(plan_in(request.plan_from), read_checkpoint(request.model), config)


def run_convert(request: Converted) -> None:
    """Write a quantized model in another format, with its codes or by quantizing it again; and tell.

    Raises:
        ConfigError: codes that cannot be carried over, and nobody said that they may be made anew.
    """
    check_folder(request.model)
    format = chosen_format(request.format, request.program)
    if request.scheme is None:
        check_coded(request.model)
        check_output(request.output)
    from quark.torch.export.checkpoint import method_of
    from quark.torch.export.readers import readers_of_codes, schemes_in
    from quark.torch.files.folder_caches import cache_of
    from quark.torch.files.foreign import move, quantized_model

    if request.scheme is not None:
        run_files(request)
        return
    method = method_of(request.model)
    start = time.perf_counter()
    with new_folder(request.output) as work:
        model = quantized_model(request.model)
        lost = lost_in(move(model, request.model, work, format, request.program))
        facts = facts_of(request, format, work) | lost | {"scheme": f"{method} codes, unchanged", "unchanged": True}
        facts["schemes"] = [name for names in schemes_in(model) for name in names]
        facts |= told(request, lambda: readers_of_codes(model, cache_of(work), format, request.model))
        facts.pop("decoded_from")
        describe_moved(request, facts, work)
    tell(request, facts | {"seconds": time.perf_counter() - start}, request.json)


def describe_moved(request: Converted, facts: Mapping[str, Any], folder: Path) -> None:
    """The card and the licences of codes that were carried over, into ``folder``, which will be the output."""
    from quark.torch.export.card import Card, write_card

    lost = facts.get("file_loss") or 0.0
    words = "carried over unchanged" if not lost else f"carried over, scales rounded by {lost:.1g} of the values' norm"
    size = facts["bytes_before"], facts["bytes_after"]
    who = {"not_for": facts["not_for"], "readers": tuple(facts["readers"])}
    card = Card(request.model.resolve().name, "codes", words, facts["format"], (), None, 0, None, size, **who)
    write_card(folder, request.model, card)


def layer_schemes(texts: Sequence[str]) -> dict[str, str]:
    """The schemes of single layers.

    Raises:
        ConfigError: not GLOB=SCHEME, or an unknown scheme.
    """
    found = split_layers(texts)
    for name in found.values():
        scheme(name)
    return found
