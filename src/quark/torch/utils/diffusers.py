"""Helpers for diffusion models, under the name that users import them from."""

from __future__ import annotations

from quark.torch.diffusion import (
    get_calib_dataloader,
    qconfig_needs_activation_calibration,
    quantize_diffusion_model_in_place,
)

__all__ = ["get_calib_dataloader", "qconfig_needs_activation_calibration", "quantize_diffusion_model_in_place"]
