"""``quark torch``: commands, options and help. The work is imported when a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from quark.cli.common import Json
from quark.cli.groups import CommandGroup
from quark.cli.paths import Guarded
from quark.cli.torch_request import (
    Converted,
    Evaluate,
    Explained,
    FileByFile,
    For,
    Format,
    InMemory,
    Predicted,
    RankLayers,
    Scheme,
    SearchLayers,
)
from quark.cli.values import takes_values

torch_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Quantize and evaluate PyTorch language models.")


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch quantize llama/ -o llama-int4/ --scheme int4_wo_128`

`quark torch quantize llama/ -o llama-fp8/ --scheme fp8 --kv-cache fp8 --data calibration.txt`

`quark torch quantize llama/ -o llama-w4a16/ --scheme int4_wo_128 --format compressed-tensors --for vllm`

`quark torch quantize llama/ -o llama-gguf/ --scheme int4_wo_32 --for llama.cpp`

`quark torch quantize llama/ -o llama-q4k/ --scheme Q4_K --layer '*down_proj=Q6_K' --for llama.cpp`""",
)
@takes_values()
def quantize(request: InMemory) -> None:
    """Quantize a language model, for transformers, vLLM, llama.cpp or onnxruntime-genai.

    Schemes with static activations and algorithms need data; about 128 windows of text like the real one are enough.
    """
    from quark.cli import torch_quantize

    torch_quantize.run(request)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch plan llama/ --scheme int4_wo_128`

`quark torch plan llama/ --scheme fp8 --layer '*.down_proj=int8_wo_per_channel' --tensors --plan plan.json`""",
)
@takes_values()
def plan(request: Predicted) -> None:
    """Show what a quantization would do, from the names and shapes in the files; no weight is read.

    What is quantized with which data type by which rule, what stays float and why, sizes, and which programs read it.
    """
    from quark.cli import torch_plan

    torch_plan.run(request)


@torch_app.command(
    cls=Guarded, epilog="**Example**: `quark torch explain llama/ model.layers.0.mlp.down_proj.weight -s int4_wo_128`"
)
@takes_values()
def explain(
    request: Explained,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A layer, or its weight, bias, input or output.")],
    json: Json = False,
) -> None:
    """Say what one layer or tensor would become, and by which rule."""
    from quark.cli import torch_plan

    torch_plan.run_explain(request, name, json)


@torch_app.command(
    "quantize-files",
    cls=Guarded,
    epilog="""**Examples**

`quark torch quantize-files llama/ -o llama-int4/ --scheme int4_wo_128`

`quark torch quantize-files llama/ -o llama-fp8/ --scheme fp8 --kv-cache fp8 --data calibration.txt`""",
)
@takes_values()
def quantize_files(request: FileByFile) -> None:
    """Quantize a checkpoint file by file, for models larger than memory; the result is the same.

    Schemes with static activations need data; its windows run with one decoder block in memory. Repeat the command to
    continue an interrupted job.
    """
    from quark.cli import torch_quantize

    torch_quantize.run_files(request)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch sensitivity llama/ --scheme int4_wo_128 --data calibration.txt --report layers.html`

`quark torch sensitivity llama/ -c int4_wo_128 -c int4_wo_128+gptq -c mxfp4 --data calibration.txt`""",
)
@takes_values(samples=8)
def sensitivity(request: RankLayers) -> None:
    """Rank the layers by what the model loses when only that layer is quantized.

    One calibration for each candidate, then every layer alone; decoder blocks before a layer are not computed again.
    """
    from quark.cli import torch_search

    torch_search.run_sensitivity(request)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch search llama/ -o plan.yaml --target "kl<=0.01" -c int4_wo_32 -c int8_wo_per_channel --data text.txt`

`quark torch search llama/ -o plan.yaml --target "perplexity<=32" --budget bits -c mxfp4 -c mxfp8 --data text.txt`

`quark torch quantize llama/ -o llama-mixed/ --config plan.yaml --data text.txt`""",
)
@takes_values(samples=8)
def search(request: SearchLayers) -> None:
    """Find a mixed-precision plan: a scheme for every layer, so that a metric meets its target at the lowest cost.

    Every layer is tried alone, integer programming chooses, the whole plan is quantized and measured, until it holds;
    then it is compared with one scheme for all layers. Exit code 3: the target is out of reach, the nearest is written.
    """
    from quark.cli import torch_search

    torch_search.run_search(request)


@torch_app.command(cls=Guarded, epilog="**Example**: `quark torch evaluate llama-int4/ --data test.txt --seq-len 2048`")
@takes_values()
def evaluate(request: Evaluate) -> None:
    """Measure a float or quantized model: perplexity of a text, and a metric of your own."""
    from quark.cli import torch_evaluate

    torch_evaluate.run(request)


@torch_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark torch convert llama-int4/ -o llama-w4a16/ --format compressed-tensors`

`quark torch convert deepseek-fp8/ -o deepseek-mxfp4/ --requantize mxfp4`""",
)
@takes_values()
def convert(request: Converted) -> None:
    """Write a quantized model in another format, with its codes and scales."""
    from quark.cli import torch_quantize

    torch_quantize.run_convert(request)


@torch_app.command(epilog="**Example**: `quark torch formats --scheme int4_wo_128 --for vllm`")
def formats(scheme: Scheme = None, format: Format = None, program: For = None, json: Json = False) -> None:
    """List which schemes each format can hold, and which programs read them.

    The table is what those programs did with files that quark wrote: the class that read a layer, or the error.
    """
    from quark.cli import torch_formats

    torch_formats.run(scheme, format, program, json)


@torch_app.command()
def schemes(json: Json = False) -> None:
    """List the schemes of layers and of attention caches."""
    from quark.cli import torch_evaluate

    torch_evaluate.run_schemes(json)
