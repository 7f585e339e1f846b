"""Where models run, by name: asked before anything is read."""

from __future__ import annotations

import torch

from quark.errors import ConfigError


def usable(device: str | torch.device) -> torch.device:
    """The device, on which a tensor has been made.

    Raises:
        ConfigError: no name of a device, or one that this torch or this machine does not have.
    """
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:  # what torch raises, by how it was built
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(f"the device {str(device)!r} cannot be used here: {reason:.200}") from error
    if found.type == "meta":
        raise ConfigError("the device 'meta' holds no values, so that nothing can be computed there")
    return found
