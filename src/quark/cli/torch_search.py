"""``quark torch sensitivity`` and ``quark torch search``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.search_output import tell_plan, tell_study, write_both
from quark.cli.search_tables import plan_verdict
from quark.cli.torch_refusals import check_data, check_device, check_folder, check_model, check_names
from quark.cli.torch_request import RankLayers, SearchLayers, TriedLayers
from quark.config.file_formats import chosen_format, format_for
from quark.errors import ConfigError
from quark.report.progress import bars
from quark.search.plan_file import check_kind
from quark.search.target import LANGUAGE, check_one
from quark.search.values import FLOAT
from quark.torch.config_file import check_candidate, read_values, schemes_of
from quark.torch.files.headers import FolderUse

if TYPE_CHECKING:
    from quark.torch.sensitivity import TorchTrying

#: What a layer may become beside the scheme where no candidates are given.
USUAL = ("int8_wo_per_channel", FLOAT)


def candidates_of(request: TriedLayers, scheme: str | None, usual: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The candidates that were typed, or the scheme and the usual ones.

    Raises:
        ConfigError: neither.
    """
    if not (request.candidates or scheme):
        raise ConfigError("give --scheme NAME, or candidates with -c NAME; `quark torch schemes` lists them")
    check_names(scheme, None, ())
    return request.candidates or tuple(dict.fromkeys((str(scheme), *usual)))


def given(request: TriedLayers) -> Path:
    """Where samples come from; refused is what can be seen to be wrong before torch is loaded.

    Raises:
        ConfigError: nobody says; or a device that torch does not have.
        ModelError: the model is not a folder.
    """
    check_folder(request.model)
    check_device(request.device)
    if request.source.data is None:
        raise ConfigError("layers are tried on samples: give a text or token ids with --data FILE")
    check_data(request.model, request.source.data)
    for name in request.candidates:
        if name != FLOAT:
            check_candidate(name)
    how = FolderUse(loaded=True, code=request.trust_remote_code, float=True)
    check_model(request.model, how, data=[request.source.data])
    return request.source.data


def windows_of(request: TriedLayers, data: Path, ahead: int = 0) -> list[dict[str, Any]]:
    """Windows of tokens, as arguments of the model, which is float; of one token more where ``ahead`` is 1."""
    from quark.torch.files.prequantized import check_float
    from quark.torch.language import calibration_samples, load_tokenizer, read_ids, windows

    check_float(request.model)
    source = request.source
    rows = read_ids(data, partial(load_tokenizer, request.model, request.trust_remote_code))
    if not ahead:
        return calibration_samples(rows, source.seq_len, source.samples)
    parts = [part for part in windows(rows, source.seq_len) if len(part) > 1]
    return [{"input_ids": part[None]} for part in parts]


def trying(request: RankLayers | SearchLayers, update: Callable[..., None]) -> TorchTrying:
    """How layers are tried, with a bar."""
    from quark.torch.sensitivity import TorchTrying

    told = partial(update, "layers")
    return TorchTrying(request.workers, request.ledger, told, request.device, request.trust_remote_code)


def run_sensitivity(request: RankLayers) -> None:
    """Rank the layers, on standard output."""
    candidates, data = candidates_of(request, request.scheme), given(request)
    from quark.search.function import check_metric
    from quark.search.trials import MEASURES

    check_metric(request.metric, MEASURES)
    from quark.torch.sensitivity import first_scheme, sensitivity

    first_scheme(candidates)
    samples = windows_of(request, data)
    with bars() as update:
        found = sensitivity(
            request.model,
            samples,
            candidates,
            request.left_float,
            request.metric,
            trying(request, update),
        )
    tell_study(found, request.model, "windows", {}, request.report, request.json)


def asked(request: SearchLayers) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The candidates, and keys and values of the configuration that the plan is to have."""
    values: dict[str, Any] = {} if request.config is None else read_values(request.config)
    values |= {} if request.scheme is None else {"scheme": request.scheme}
    values |= request.left_float
    candidates = candidates_of(request, values.get("scheme"), USUAL)
    from quark.torch.search import whole_values

    whole = values if "scheme" in values else {"scheme": candidates[0].split("+")[0], **values}
    return candidates, whole_values(whole, candidates)


def run_search(request: SearchLayers) -> None:
    """Find a plan, write it, and tell on standard output."""
    data, wanted = given(request), replace(request.wanted, budget=request.wanted.budget or "size")
    check_one(wanted.target, wanted.limit, LANGUAGE)
    chosen_format(None, request.program)
    check_data(request.model, wanted.eval_data)
    check_kind(wanted.output, "--output")
    candidates, values = asked(request)
    from quark.torch.search import ASKED, save_plan, search
    from quark.torch.sensitivity import TorchSearchGoal

    goal = TorchSearchGoal(program=request.program, **wanted.asked())
    ASKED.target(goal, candidates)
    samples = windows_of(request, data)
    held_out = None if wanted.eval_data is None else windows_of(request, wanted.eval_data, ahead=1)
    with bars() as update:
        found = search(
            request.model,
            samples,
            candidates,
            replace(goal, evaluation=held_out),
            values,
            trying(request, update),
        )
    write = partial(save_plan, config=values, found=found, target=wanted.target, budget=wanted.budget)
    read_by = ""
    if request.program is not None:
        chosen = schemes_of({**values, "layers": found.layers})
        read_by = f" --for {request.program} --format {format_for(chosen, request.program)}"
    following = f"quark torch quantize {request.model} -o OUT_DIR --config {wanted.output}{read_by} ..."
    verdict = plan_verdict(found, wanted, following)
    write_both(found, wanted, request.model, verdict, write)
    tell_plan(found, wanted, request.model, verdict)
