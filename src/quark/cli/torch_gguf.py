"""``quark torch quantize --gguf-type``: a float model rounded to types of GGUF, one for all layers or a mix."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quark.cli.torch_quantize import describe, dtype_of, facts_of, lost_in, refuse
from quark.cli.torch_request import InMemory
from quark.cli.torch_verdict import coverage_of, tell
from quark.files.folder import new_folder


def run(request: InMemory) -> None:
    """Round in memory, write, measure, and tell on standard output."""
    refuse(request)
    from quark.torch.export.gguf_mix import read_types
    from quark.torch.files.prequantized import as_float

    types = read_types(request.gguf_types)
    with as_float(request.model, request.output) as folder, new_folder(request.output) as work:
        facts = in_memory(replace(request, model=folder, output=work), types)
        facts |= facts_of(request, "gguf", work)
        describe(request, facts, work)
    tell(request, facts, request.json)


def in_memory(request: InMemory, wanted: dict[str, str]) -> dict[str, Any]:
    """Load, write, and measure what the file holds."""
    from quark.torch.export.gguf_mix import stored_bytes, take_values, types_of
    from quark.torch.export.gguf_model import check_before, export_gguf, taken_apart
    from quark.torch.export.gguf_tensors import FLOATS
    from quark.torch.language import check_ids, load_model, load_tokenizer, perplexity, read_ids

    source = request.source
    tokenizer = partial(load_tokenizer, request.model, request.trust_remote_code)
    rows = read_ids(source.data, tokenizer) if source.data and request.check else []
    measured = [row[: source.samples * source.seq_len] for row in rows[: source.samples]]
    model: Any = load_model(request.model, request.device, request.trust_remote_code)
    model = model if request.dtype is None else model.to(dtype_of(request.dtype))
    check_ids(model, measured)
    check_before(model.config, Path(request.model))
    apart = taken_apart(model)
    types = types_of(apart, wanted, request.exclude)
    facts: dict[str, Any] = {}
    if measured:
        facts["perplexity_before"] = perplexity(apart, measured, source.seq_len)
    start = time.perf_counter()
    family = model.config.model_type
    loss = export_gguf(model, request.output, family, request.model, layer_types=types, verify=request.verify)
    facts |= lost_in(loss) | coverage_of(*stored_bytes(apart, types, loss.rescued))
    facts["seconds"] = time.perf_counter() - start
    if measured:
        take_values(apart, types, loss.rescued)
        facts["perplexity_after"] = perplexity(apart, measured, source.seq_len)
    floats = [name for name, kind in types.items() if kind in FLOATS]
    return facts | {"quantized_layers": len(types) - len(floats), "excluded": ["lm_head", *floats]}
