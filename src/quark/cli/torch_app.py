"""``quark torch``: commands, options and help. The work is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark import parallel
from quark.cli.common import (
    Backend,
    ChartReport,
    Compare,
    Estimate,
    Json,
    LedgerPath,
    Limit,
    PlanFrom,
    PlanOutput,
    PlanPath,
    Rounds,
    Threads,
)
from quark.cli.paths import FOLDER, Guarded, Overwrite, Reads, Writes

torch_app = typer.Typer(no_args_is_help=True, help="Quantize and evaluate PyTorch language models.")


def scheme_names() -> list[str]:
    """What a shell completes ``--scheme`` with."""
    from quark.torch.config.schemes import ROWS

    return list(ROWS)


ModelDir = Annotated[
    Path, Reads(), typer.Argument(metavar="MODEL_DIR", help="A folder with config.json and safetensors files.")
]
Output = Annotated[Path, Writes(FOLDER), typer.Option("--output", "-o", help="A new folder for the quantized model.")]
Scheme = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        "-s",
        autocompletion=scheme_names,
        help="How layers are quantized; `quark torch schemes` lists them.",
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option("--layer", metavar="GLOB=SCHEME", help="Another scheme for some layers; may be repeated."),
]
ConfigFile = Annotated[
    Path | None,
    Reads(),
    typer.Option("--config", help="A configuration file instead of a scheme, such as a plan of `search`."),
]
Candidates = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        "-c",
        metavar="NAME",
        help="What a layer may become: a scheme, with `+gptq` and the like behind, or `float`; may be repeated.",
    ),
]
Tried = Annotated[int, typer.Option("--samples", min=1, help="Use at most so many windows of the data.")]
Workers = Annotated[int, typer.Option(min=1, max=parallel.MOST, help="Processes that try layers; each loads it.")]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Layers that stay float beside the usual ones; may be repeated."),
]
ExcludeOnly = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude-only", metavar="GLOB", help="Layers that stay float instead of the usual ones; may be repeated."
    ),
]
Text = Annotated[
    Path | None,
    Reads(),
    typer.Option("--data", help="Text (.txt, .jsonl) or token ids (.npz, .npy, rows are documents)."),
]
Algorithms = Annotated[
    list[str] | None, typer.Option("--algorithm", "-a", help="An algorithm, such as gptq; may be repeated.")
]
Cache = Annotated[str | None, typer.Option("--kv-cache", help="How keys and values are quantized.")]
Samples = Annotated[int, typer.Option(min=1, help="Use at most so many windows of the data.")]
Length = Annotated[int, typer.Option("--seq-len", min=2, help="Tokens in a window.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="How files are laid out: quark (the default), compressed-tensors, awq, gptq, fp8, modelopt, gguf or onnx.",
    ),
]
For = Annotated[
    str | None,
    typer.Option("--for", help="The program that is to read it: vllm, transformers, llama.cpp or onnxruntime-genai."),
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder brings.")]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")]


def check_choice(scheme: str | None, config: Path | None) -> None:
    """One of the two says how layers are quantized.

    Raises:
        typer.BadParameter: neither or both.
    """
    if (scheme is None) == (config is None):
        raise typer.BadParameter("give --scheme NAME or --config FILE" + ("" if scheme is None else ", not both"))


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch quantize llama/ -o llama-int4/ --scheme int4_wo_128`

`quark torch quantize llama/ -o llama-fp8/ --scheme fp8 --kv-cache fp8 --data calibration.txt`

`quark torch quantize llama/ -o llama-w4a16/ --scheme int4_wo_128 --format compressed-tensors --for vllm`

`quark torch quantize llama/ -o llama-gguf/ --scheme int4_wo_32 --for llama.cpp`""",
)
def quantize(
    model: ModelDir,
    output: Output,
    scheme: Scheme = None,
    config: ConfigFile = None,
    algorithm: Algorithms = None,
    kv_cache: Cache = None,
    data: Text = None,
    samples: Samples = 128,
    seq_len: Length = 512,
    layer: Layers = None,
    exclude: Exclude = None,
    exclude_only: ExcludeOnly = None,
    format: Format = None,
    program: For = None,
    plan_from: PlanFrom = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="What stays float, in this type: bfloat16, float16 or float32; else the source's."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Tensors per file at most, such as 5GB or 500MB.")
    ] = "5GB",
    device: Device = "cpu",
    check: Annotated[bool, typer.Option(help="Measure the perplexity of the data before and after.")] = True,
    verify: Annotated[bool, typer.Option(help="Read the files back and compare them with the model.")] = True,
    trust_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Quantize a language model into a folder that the usual serving programs load.

    Schemes with static activations and algorithms need data; about 128 windows of text like the real one are enough.
    """
    from quark.cli import torch_quantize
    from quark.cli.torch_request import Request, Source, left_float

    check_choice(scheme, config)
    names = tuple(algorithm or ()), tuple(layer or ()), left_float(exclude, exclude_only)
    request = Request(
        model,
        output,
        scheme,
        kv_cache,
        *names,
        Source(data, samples, seq_len),
        device,
        trust_remote_code,
        config,
        format,
        program,
        dtype,
        max_shard_size,
        verify,
        plan_from,
    )
    torch_quantize.run(request, check, json)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch plan llama/ --scheme int4_wo_128`

`quark torch plan llama/ --scheme fp8 --layer '*.down_proj=int8_wo_per_channel' --tensors --plan plan.json`""",
)
def plan(
    model: ModelDir,
    scheme: Scheme = None,
    config: ConfigFile = None,
    algorithm: Algorithms = None,
    kv_cache: Cache = None,
    layer: Layers = None,
    exclude: Exclude = None,
    exclude_only: ExcludeOnly = None,
    format: Format = None,
    program: For = None,
    tensors: Annotated[bool, typer.Option(help="Also list every quantized tensor.")] = False,
    plan: PlanPath = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Show what a quantization would do, from the names and shapes in the files; no weight is read.

    What is quantized with which data type by which rule, what stays float and why, sizes, and which programs read it.
    """
    from quark.cli import torch_plan
    from quark.cli.torch_quantize import unmade

    check_choice(scheme, config)
    names = tuple(algorithm or ()), tuple(layer or ()), exclude, exclude_only
    torch_plan.run(unmade(model, scheme, config, kv_cache, *names, format, program), tensors, plan, json)


@torch_app.command(
    cls=Guarded, epilog="**Example**: `quark torch explain llama/ model.layers.0.mlp.down_proj.weight -s int4_wo_128`"
)
def explain(
    model: ModelDir,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A layer, or its weight, bias, input or output.")],
    scheme: Scheme = None,
    config: ConfigFile = None,
    algorithm: Algorithms = None,
    kv_cache: Cache = None,
    layer: Layers = None,
    exclude: Exclude = None,
    exclude_only: ExcludeOnly = None,
    json: Json = False,
) -> None:
    """Say what one layer or tensor would become, and by which rule."""
    from quark.cli import torch_plan
    from quark.cli.torch_quantize import unmade

    check_choice(scheme, config)
    names = tuple(algorithm or ()), tuple(layer or ()), exclude, exclude_only
    torch_plan.run_explain(unmade(model, scheme, config, kv_cache, *names), name, json)


@torch_app.command(
    "quantize-files",
    cls=Guarded,
    epilog="""**Examples**

`quark torch quantize-files llama/ -o llama-int4/ --scheme int4_wo_128`

`quark torch quantize-files llama/ -o llama-fp8/ --scheme fp8 --kv-cache fp8 --data calibration.txt`""",
)
def quantize_files(
    model: ModelDir,
    output: Output,
    scheme: Annotated[
        str, typer.Option("--scheme", "-s", help="How layers are quantized; `quark torch schemes` lists them.")
    ],
    algorithm: Algorithms = None,
    kv_cache: Cache = None,
    data: Text = None,
    samples: Samples = 128,
    seq_len: Length = 512,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", min=1, help="Windows that run at once; files are read again for each batch."),
    ] = 8,
    layer: Layers = None,
    exclude: Exclude = None,
    exclude_only: ExcludeOnly = None,
    format: Format = None,
    program: For = None,
    plan_from: PlanFrom = None,
    workers: Annotated[int, typer.Option(min=1, max=parallel.MOST, help="Files that are made at once.")] = 1,
    backend: Backend = None,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a checkpoint file by file: for models larger than memory, and the same result.

    Schemes with static activations need data; its windows run with one decoder block in memory. An interrupted job goes
    on where it was when the command is repeated.
    """
    from quark.cli import torch_quantize
    from quark.cli.torch_request import Request, Source, left_float

    names = tuple(algorithm or ()), tuple(layer or ()), left_float(exclude, exclude_only)
    source = Source(data, samples, seq_len)
    request = Request(
        model, output, scheme, kv_cache, *names, source, device, False, None, format, program, plan_from=plan_from
    )
    torch_quantize.run_files(request, batch_size, workers, json)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch sensitivity llama/ --scheme int4_wo_128 --data calibration.txt --report layers.html`

`quark torch sensitivity llama/ -c int4_wo_128 -c int4_wo_128+gptq -c mxfp4 --data calibration.txt`""",
)
def sensitivity(
    model: ModelDir,
    scheme: Scheme = None,
    candidate: Candidates = None,
    data: Text = None,
    samples: Tried = 8,
    seq_len: Length = 512,
    exclude: Exclude = None,
    exclude_only: ExcludeOnly = None,
    metric: Annotated[
        str,
        Reads(function=True),
        typer.Option(help="What ranks the layers: kl, sqnr, mse, cosine, or FILE.py:FUNCTION of the model."),
    ] = "kl",
    workers: Workers = 1,
    backend: Backend = None,
    ledger: LedgerPath = None,
    report: ChartReport = None,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Rank the layers by what the model loses when only that layer is quantized.

    One calibration for each candidate, then every layer alone; decoder blocks before a layer are not computed again.
    """
    from quark.cli import torch_search
    from quark.cli.torch_request import Source, left_float

    names = tuple(candidate or ()), left_float(exclude, exclude_only)
    given = Source(data, samples, seq_len)
    request = torch_search.Request(model, scheme, None, *names, given, workers, ledger, device, trust_remote_code)
    torch_search.run_sensitivity(request, metric, report, json)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch search llama/ -o plan.yaml --target "kl<=0.01" -c int4_wo_32 -c int8_wo_per_channel --data text.txt`

`quark torch search llama/ -o plan.yaml --target "perplexity<=32" --budget bits -c mxfp4 -c mxfp8 --data text.txt`

`quark torch quantize llama/ -o llama-mixed/ --config plan.yaml --data text.txt`""",
)
def search(
    model: ModelDir,
    output: PlanOutput,
    target: Annotated[
        str | None, typer.Option(metavar="METRIC<=X", help="What the whole quantized model has to reach.")
    ] = None,
    limit: Limit = None,
    budget: Annotated[
        str, typer.Option(help="What is to be small: size, bits, latency (for an MI300X), or a .yaml of energies.")
    ] = "size",
    metric: Annotated[
        str | None,
        Reads(function=True),
        typer.Option(metavar="FILE.py:FUNCTION", help="Your metric for the target: function(model) → a number."),
    ] = None,
    scheme: Scheme = None,
    config: ConfigFile = None,
    candidate: Candidates = None,
    data: Text = None,
    eval_data: Annotated[
        Path | None, Reads(), typer.Option("--eval-data", help="What whole plans are measured on, as --data.")
    ] = None,
    samples: Tried = 8,
    seq_len: Length = 512,
    exclude: Exclude = None,
    exclude_only: ExcludeOnly = None,
    compare: Compare = True,
    rounds: Rounds = 8,
    estimate: Estimate = False,
    program: Annotated[
        str | None,
        typer.Option("--for", help="What will read it: vllm wants layers that it fuses, and experts, in one scheme."),
    ] = None,
    workers: Workers = 1,
    backend: Backend = None,
    ledger: LedgerPath = None,
    report: ChartReport = None,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Find a mixed-precision plan: a scheme for every layer, so that a metric meets its target at least cost.

    Every layer is tried alone, integer programming chooses, the whole plan is quantized and measured, until it holds;
    then it is compared with one scheme for all layers. Exit code 3: the target is out of reach, the nearest is written.
    """
    from quark.cli import torch_search
    from quark.cli.search_tables import Wanted
    from quark.cli.torch_request import Source, left_float

    if scheme is not None and config is not None:
        raise typer.BadParameter("give --scheme or --config, not both: the file names its scheme")
    names = tuple(candidate or ()), left_float(exclude, exclude_only)
    given = Source(data, samples, seq_len)
    request = torch_search.Request(
        model, scheme, config, *names, given, workers, ledger, device, trust_remote_code, program
    )
    wanted = Wanted(output, target, limit, budget, metric, eval_data, compare, rounds, estimate)
    torch_search.run_search(request, wanted, report, json)


@torch_app.command(cls=Guarded, epilog="**Example**: `quark torch evaluate llama-int4/ --data test.txt --seq-len 2048`")
def evaluate(
    model: ModelDir,
    data: Text = None,
    seq_len: Length = 512,
    metric: Annotated[
        str | None,
        Reads(function=True),
        typer.Option(metavar="FILE.py:FUNCTION", help="Your metric: function(model, tokenizer) → a number or a dict."),
    ] = None,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Measure a float or quantized model: perplexity of a text, and a metric of your own."""
    from quark.cli import torch_evaluate

    torch_evaluate.run(torch_evaluate.Request(model, data, seq_len, metric, device, trust_remote_code), json)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch convert llama-int4/ -o llama-w4a16/ --format compressed-tensors`

`quark torch convert deepseek-fp8/ -o deepseek-mxfp4/ --requantize mxfp4`""",
)
def convert(
    model: ModelDir,
    output: Output,
    format: Format = None,
    program: For = None,
    requantize: Annotated[
        str | None, typer.Option(metavar="SCHEME", help="Decode the model and quantize it again, tensor by tensor.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a quantized model in another format, with the codes and scales that it has."""
    from quark.cli import torch_quantize
    from quark.cli.torch_request import Request, Source

    given = Source(None, 1, 2)
    request = Request(model, output, requantize, None, (), (), {}, given, "cpu", False, None, format, program)
    torch_quantize.run_convert(request, json)


@torch_app.command(epilog="**Example**: `quark torch formats --scheme int4_wo_128 --for vllm`")
def formats(scheme: Scheme = None, format: Format = None, program: For = None, json: Json = False) -> None:
    """List which scheme can be written in which format, and which program reads it there.

    The table is what those programs did with files that quark wrote: the class that read a layer, or the error.
    """
    from quark.cli import torch_formats

    torch_formats.run(scheme, format, program, json)


@torch_app.command()
def schemes(json: Json = False) -> None:
    """List the schemes of layers and of attention caches."""
    from quark.cli import torch_evaluate

    torch_evaluate.run_schemes(json)
