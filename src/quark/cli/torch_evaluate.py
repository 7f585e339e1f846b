"""``quark torch evaluate`` and ``quark torch schemes``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from quark.cli.output import print_json, show
from quark.cli.torch_refusals import check_data, check_device, check_folder, check_model
from quark.cli.torch_request import Evaluate
from quark.errors import ConfigError
from quark.report import Table
from quark.torch.files.headers import FolderUse


def run(request: Evaluate) -> None:
    """Measure, and tell on standard output.

    Raises:
        ConfigError: nothing to measure.
    """
    if request.data is None and request.metric is None:
        raise ConfigError("nothing to measure: give --data (perplexity), --metric FILE.py:FUNCTION, or both")
    check_folder(request.model)
    check_device(request.device)
    check_data(request.model, request.data)
    check_model(request.model, FolderUse(loaded=True, code=request.trust_remote_code), data=[request.data])
    from quark.torch.language import first_windows, load_metric, load_model, load_tokenizer, perplexity, read_ids

    tokenizer = partial(load_tokenizer, request.model, request.trust_remote_code)
    function = load_metric(request.metric) if request.metric else None
    rows = read_ids(request.data, tokenizer) if request.data else []
    rows = rows if request.samples is None else first_windows(rows, request.seq_len, request.samples)
    model = load_model(request.model, request.device, request.trust_remote_code)
    facts: dict[str, Any] = {"model": str(request.model)}
    if rows:
        facts |= {"tokens": sum(map(len, rows)), "perplexity": perplexity(model, rows, request.seq_len)}
    if function is not None:
        value = function(model, tokenizer())
        facts |= dict(value) if isinstance(value, Mapping) else {function.__name__: value}
    if request.json:
        print_json(facts)
        return
    rows_ = tuple((name, f"{value:.4f}" if isinstance(value, float) else str(value)) for name, value in facts.items())
    show(Table(str(request.model), ("fact", "value"), rows_))


def run_schemes(json: bool) -> None:
    """List the schemes."""
    from quark.torch.config.schemes import KV_SCHEMES, scheme, scheme_names

    layers: Mapping[str, tuple[str, ...]]
    layers = {name: (words(scheme(name), "weight"), words(scheme(name), "input_tensors")) for name in scheme_names()}
    caches = {name: tuple(described(spec.to_quantization_spec()) for spec in pair) for name, pair in KV_SCHEMES.items()}
    if json:
        print_json({"layers": layers, "kv_cache": caches})
        return
    rows = tuple((name, *pair) for name, pair in layers.items())
    show(
        Table("Schemes of layers", ("name", "weights", "inputs"), rows, "Use one with `quark torch quantize --scheme`.")
    )
    rows = tuple((name, *pair) for name, pair in caches.items())
    show(Table("Schemes of attention caches", ("name", "keys", "values"), rows, "Use one with `--kv-cache`."))


def words(layer: Any, slot: str) -> str:
    """How a tensor of a layer is quantized."""
    return described(getattr(layer, slot))


def described(config: Any) -> str:
    """A tensor configuration in words."""
    if config is None:
        return "float"
    stages = config if isinstance(config, list) else [config]
    return ", then ".join(stage_words(stage) for stage in stages)


def stage_words(config: Any) -> str:
    """One stage in words."""
    element = config.mx_element_dtype.name if config.mx_element_dtype else ""
    group = f" of {config.group_size}" if config.group_size and config.qscheme else ""
    scheme = f" {config.qscheme.name}{group}" if config.qscheme else f" blocks of {config.to_stage().format.size}"
    scales = f", {config.scale_format} scales" if config.scale_format not in (None, "float32") else ""
    dynamic = ", dynamic" if config.is_dynamic else ""
    return f"{config.dtype.name}{element}{scheme}{scales}{dynamic}"
