"""The Plan that a quantized folder was made by, read off its description and the headers and scales of its tensors.

Folders of quark, of the custom modes (fp8, awq), and what ``foreign`` reads: GPTQ, AWQ, compressed-tensors, MXFP4. No
weight is decoded. How a scale was found is in no file: rows name the method of the description, or the usual.
"""

from __future__ import annotations

from pathlib import Path

from quark.config.plan import Plan
from quark.errors import ModelError
from quark.torch.config.model import QConfig
from quark.torch.experts import unfuse_experts
from quark.torch.export.checkpoint import method_of, read_checkpoint
from quark.torch.export.reload import scheme_of
from quark.torch.files.folder_caches import caches_in
from quark.torch.files.foreign import OWN, coded_folder, config_of, empty_model, layers_of_model
from quark.torch.files.skeleton import architecture_of
from quark.torch.matching import match


def plan_of(folder: Path) -> Plan:
    """The plan of the quantized model in a folder.

    Raises:
        ConfigError: a folder that is float, or of a method that is not read.
        ModelError: files that are missing, broken, or do not fit the model.
    """
    if method_of(folder) in OWN:
        checkpoint = read_checkpoint(folder)
        config: QConfig = scheme_of(checkpoint).config
        model = architecture_of(checkpoint, buffers=True, eager=config.softmax_quant_spec is not None)
        if model is None:
            raise ModelError(f"{str(folder / 'config.json')!r} names no architecture that transformers has")
        unfuse_experts(model)
    else:
        source = coded_folder(folder)
        model = empty_model(source.checkpoint)
        config = config_of(model, layers_of_model(model, source), caches_in(model, source.checkpoint))
    plan = match(model, config, skeleton=True, stored=True).plan
    plan.read_from = str(folder)
    return plan
