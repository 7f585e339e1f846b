"""What transformers makes of a GGUF file: it reads the entries of its own tables, and all others are those that the
class of a configuration starts with. So it is asked, before any work, what it makes of a file that has the numbers of
a network and no tensors.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.errors import ConfigError
from quark.torch.export.gguf_architectures import add_numbers, read_of, row_of
from quark.torch.export.gguf_table import DECODERS
from quark.torch.export.language_part import language_part

LLAMAS = ("mistral", "ministral", "helium")  # whose networks are Llama's, which their files are read as
TIED = ("falcon", "bloom")  # whose heads are always read as tied
BY_TENSORS = ("use_qkv_bias", "use_parallel_residual")  # entries that are told by the tensors of a file
SILENT = re.compile(  # entries that change no answer, or are read with the vocabulary
    r"_token_ids?$|^_|dropout|pdrop|initializer|^output_|^return_|use_cache|aux_loss|jitter|pretraining_tp|version$|"
    r"^model_type$|^architectures$|dtype$|^vocab_size$|chunk_size|max_position|^use_mamba|^use_associative|time_step_"
    r"(min|max|floor|init|scale)|rescale_|residual_in_fp32|full_attn_idxs|^id2label$|^label2id$|^problem_type$"
)
OTHERS = "--for llama.cpp and --format quark have it"


def check_gguf(model: Any) -> None:
    """Refuse what transformers makes another network of than the one that a GGUF file is of.

    Args:
        model: its tensors need no values.

    Raises:
        ConfigError: an architecture that it does not read, a tensor that would be left out or has another shape there,
            or an entry; the first is named.
    """
    from transformers import AutoModelForCausalLM

    model = language_part(model, DECODERS)
    config = model.config
    try:
        read = config_read(config)
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(read)
    except Exception as error:  # its reasons are of every kind
        raise ConfigError(
            f"transformers reads no GGUF file of this model ({' '.join(str(error).split()):.160}); {OTHERS}"
        ) from error
    theirs = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    told = [
        f"{name!r} of {list(value.shape)}"
        for name, value in model.state_dict().items()
        if theirs.get(name) != tuple(value.shape)
    ]
    known = read_of(config, config.to_dict())
    told += [f"{name} {value!r}" for name, value in unread(config.to_dict(), read.to_dict()) if name in known]
    if read.model_type != config.model_type and config.model_type not in LLAMAS:
        told.insert(0, f"the model_type {config.model_type!r}: it is {read.model_type!r} there")
    if told:
        raise ConfigError(
            f"transformers makes another network of a GGUF file, without {told[0]}: its table of entries for "
            f"{read.model_type} (GGUF_CONFIG_MAPPING) lacks what this configuration says; {OTHERS}"
        )


def config_read(config: Any) -> Any:
    """The configuration that transformers reads in a file of a network."""
    import gguf
    from transformers import CONFIG_MAPPING, PretrainedConfig

    row = row_of(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.gguf"
        writer = gguf.GGUFWriter(path, row.name)
        add_numbers(writer, config, row)
        writer.add_name(type(config).__name__)
        writer.add_token_list(["-"])  # a list must be there; the file has one for each word
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        asked: Any = PretrainedConfig
        found = dict(asked.get_config_dict(folder, gguf_file=path.name)[0])
    found |= {name: getattr(config, name) for name in BY_TENSORS if name in found}
    found["tie_word_embeddings"] = config.tie_word_embeddings or row.name in TIED
    return CONFIG_MAPPING[found.pop("model_type")](**{**found, "vocab_size": config.vocab_size})


def unread(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the entries that are others there."""
    for name, value in ours.items():
        if not SILENT.search(name) and not alike(value, theirs.get(name)):
            yield name, value


def alike(ours: Any, theirs: Any) -> bool:
    """Whether an entry says the same; nothing is as good as 0 or False, and further entries within are none of ours."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(alike(value, theirs.get(name)) for name, value in ours.items())
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs or not (ours or theirs))
