"""Small networks of transformers that choose among their own values, with random weights, as ONNX models.

torch's newer exporter writes RT-DETR, DETR, Mask2Former and SuperPoint. It gives up on D-FINE and Grounding DINO, and
writes a Deformable DETR that reads a tensor which nothing makes: these come from the older one, which computes the
sampling places of the last two in float64, for which ONNX Runtime has no GridSample: float32 here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
import transformers
from onnx import numpy_helper

SIDE = 64
_SIZES = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_LEVELS = ["stage2", "stage3", "stage4"]
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_LAYERS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, **_HEADS}
_NO_TIMM = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
_REAL_TIME = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [32, 48, 64],
    "d_model": 32,
    "num_queries": 20,
    "decoder_in_channels": [32, 32, 32],
    "decoder_layers": 2,
    "num_labels": 7,
    "num_denoising": 0,
    **_HEADS,
}


def rt_detr() -> Any:
    backbone = transformers.RTDetrResNetConfig(**_SIZES, out_features=_LEVELS)
    config = transformers.RTDetrConfig(backbone_config=backbone, use_timm_backbone=False, eval_size=None, **_REAL_TIME)
    return transformers.RTDetrForObjectDetection(config)


def d_fine() -> Any:
    stages = {"stage_in_channels": [16, 16, 32, 48], "stage_mid_channels": [8, 16, 16, 24]}
    stages |= {"stage_out_channels": [16, 32, 48, 64], "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [2] * 4}
    sizes = {"embedding_size": 16, "depths": [1] * 4, "hidden_sizes": [16, 32, 48, 64], "stem_channels": [3, 8, 16]}
    backbone = transformers.HGNetV2Config(**sizes, **stages, out_features=_LEVELS)
    return transformers.DFineForObjectDetection(transformers.DFineConfig(backbone_config=backbone, **_REAL_TIME))


def detr() -> Any:
    backbone = transformers.ResNetConfig(**_SIZES, out_features=["stage4"])
    config = transformers.DetrConfig(backbone_config=backbone, num_queries=10, num_labels=7, **_NO_TIMM, **_LAYERS)
    return transformers.DetrForObjectDetection(config)


def deformable_detr() -> Any:
    backbone = transformers.ResNetConfig(**_SIZES, out_features=_LEVELS)
    stages = {"two_stage": True, "with_box_refine": True, "two_stage_num_proposals": 10, "num_feature_levels": 3}
    config = transformers.DeformableDetrConfig(
        backbone_config=backbone, num_queries=10, num_labels=7, **stages, **_NO_TIMM, **_LAYERS
    )
    return transformers.DeformableDetrForObjectDetection(config)


def _swin(levels: list[str]) -> Any:
    heads = {"num_heads": [1, 2, 2, 2], "window_size": 2}
    return transformers.SwinConfig(image_size=SIDE, embed_dim=16, depths=[1] * 4, out_features=levels, **heads)


def mask2former() -> Any:
    wide = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 4}
    config = transformers.Mask2FormerConfig(
        backbone_config=_swin(["stage1", *_LEVELS]),
        encoder_feedforward_dim=64,
        dim_feedforward=64,
        encoder_layers=2,
        decoder_layers=3,
        num_queries=10,
        num_labels=7,
        **wide,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config)


def grounding_dino() -> Any:
    text = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    numbers = {"num_queries": 10, "num_feature_levels": 3, "max_text_len": 16}
    config = transformers.GroundingDinoConfig(
        backbone_config=_swin(_LEVELS), text_config=text, **numbers, **_NO_TIMM, **_LAYERS
    )
    return transformers.GroundingDinoForObjectDetection(config)


def super_point() -> Any:
    wide = {"decoder_hidden_size": 64, "keypoint_decoder_dim": 65, "descriptor_decoder_dim": 64}
    config = transformers.SuperPointConfig(encoder_hidden_sizes=[16, 16, 32, 32], keypoint_threshold=0.0005, **wide)
    return transformers.SuperPointForKeypointDetection(config)


#: network -> its results, and whether torch's newer exporter writes it.
NETWORKS = {
    rt_detr: (("logits", "pred_boxes"), True),
    d_fine: (("logits", "pred_boxes"), False),
    detr: (("logits", "pred_boxes"), True),
    deformable_detr: (("logits", "pred_boxes"), False),
    mask2former: (("class_queries_logits", "masks_queries_logits"), True),
    grounding_dino: (("logits", "pred_boxes"), False),
    super_point: (("keypoints", "scores", "descriptors"), True),
}


class _Pictures(torch.nn.Module):
    """A network of pictures alone; ``words``: what else it reads."""

    def __init__(self, model: Any, results: tuple[str, ...], words: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.results, self.words = model, results, words

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model(pixel_values=pixels, **self.words)
        return tuple(getattr(found, name) for name in self.results)


def exported(build: Any, path: Path) -> onnx.ModelProto:
    """The network as an ONNX model that reads ``pixels``, [1, 3, SIDE, SIDE]."""
    torch.manual_seed(0)
    results, newer = NETWORKS[build]
    words = {}
    if build is grounding_dino:
        words = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
        words["token_type_ids"] = torch.zeros(1, 4, dtype=torch.long)
    model = _Pictures(build().eval(), results, words)
    names = {"input_names": ["pixels"], "output_names": list(results), "external_data": False, "verbose": False}
    with torch.no_grad():
        pictures = (torch.randn(1, 3, SIDE, SIDE),)
        torch.onnx.export(model, pictures, path, dynamo=newer, opset_version=18 if newer else 20, **names)
    return _in_float32(onnx.load(path))


def _in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.value_info[:]
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.DOUBLE:
                attribute.i = onnx.TensorProto.FLOAT
            if attribute.HasField("t"):
                _narrow(attribute.t)
    for tensor in model.graph.initializer:
        _narrow(tensor)
    return model


def _narrow(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == onnx.TensorProto.DOUBLE:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("f4"), tensor.name))
