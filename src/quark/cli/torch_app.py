"""``quark torch``: commands, options and help. The work is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

torch_app = typer.Typer(no_args_is_help=True, help="Quantize and evaluate PyTorch language models.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A folder with config.json and safetensors files.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="A new folder for the quantized model.")]
Scheme = Annotated[
    str, typer.Option("--scheme", "-s", help="How layers are quantized; `quark torch schemes` lists them.")
]
Layers = Annotated[
    list[str] | None,
    typer.Option("--layer", metavar="GLOB=SCHEME", help="Another scheme for some layers; may be repeated."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Layers that stay float, in the place of the usual ones; may be repeated."),
]
Text = Annotated[
    Path | None, typer.Option("--data", help="Text (.txt, .jsonl) or token ids (.npz, .npy, rows are documents).")
]
Length = Annotated[int, typer.Option("--seq-len", min=2, help="Tokens in a window.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder brings.")]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")]


@torch_app.command(
    epilog="""**Examples**

`quark torch quantize llama/ -o llama-int4/ --scheme int4_wo_128`

`quark torch quantize llama/ -o llama-fp8/ --scheme fp8 --kv-cache fp8 --data calibration.txt`"""
)
def quantize(
    model: ModelDir,
    output: Output,
    scheme: Scheme,
    algorithm: Annotated[
        list[str] | None, typer.Option("--algorithm", "-a", help="An algorithm, such as gptq; may be repeated.")
    ] = None,
    kv_cache: Annotated[str | None, typer.Option("--kv-cache", help="How keys and values are quantized.")] = None,
    data: Text = None,
    samples: Annotated[int, typer.Option(min=1, help="Use at most so many windows of the data.")] = 128,
    seq_len: Length = 512,
    layer: Layers = None,
    exclude: Exclude = None,
    device: Device = "cpu",
    check: Annotated[bool, typer.Option(help="Measure the perplexity of the data before and after.")] = True,
    trust_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Quantize a language model into a folder that the usual serving programs load.

    Schemes with static activations and algorithms need data; about 128 windows of text like the real one are enough.
    """
    from quark.cli import torch_quantize
    from quark.cli.torch_quantize import Request, Source

    names = tuple(algorithm or ()), tuple(layer or ()), None if exclude is None else tuple(exclude)
    source = Source(data, samples, seq_len)
    torch_quantize.run(Request(model, output, scheme, kv_cache, *names, source, device, trust_remote_code), check, json)


@torch_app.command(
    "quantize-files", epilog="**Example**: `quark torch quantize-files llama/ -o llama-int4/ --scheme int4_wo_128`"
)
def quantize_files(
    model: ModelDir,
    output: Output,
    scheme: Scheme,
    layer: Layers = None,
    exclude: Exclude = None,
    workers: Annotated[int, typer.Option(min=1, help="Files that are made at once.")] = 1,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Quantize a checkpoint file by file: for models larger than memory, and the same result.

    An interrupted job goes on where it was when the command is repeated.
    """
    from quark.cli import torch_quantize

    torch_quantize.run_files(model, output, (scheme, tuple(layer or ()), exclude), workers, device, json)


@torch_app.command(epilog="**Example**: `quark torch evaluate llama-int4/ --data test.txt --seq-len 2048`")
def evaluate(
    model: ModelDir,
    data: Text = None,
    seq_len: Length = 512,
    metric: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Your metric: function(model, tokenizer) → a number or a dict."),
    ] = None,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    json: Json = False,
) -> None:
    """Measure a float or quantized model: perplexity of a text, and a metric of your own."""
    from quark.cli import torch_evaluate

    torch_evaluate.run(torch_evaluate.Request(model, data, seq_len, metric, device, trust_remote_code), json)


@torch_app.command()
def schemes(json: Json = False) -> None:
    """List the schemes of layers and of attention caches."""
    from quark.cli import torch_evaluate

    torch_evaluate.run_schemes(json)
