"""Where weights and blocks lie, and what that needs. Knows no model."""

import importlib.util

import torch

from kvruntime.engine_config import Device
from kvruntime.errors import InvalidRequest

__all__ = ["require_device"]


def require_device(device: Device) -> None:
    """Refuse a device that cannot be used here, and say what it lacks. `InvalidRequest`."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise InvalidRequest(
            f"device cuda needs an NVIDIA GPU and a torch that is built for CUDA, "
            f"got torch {torch.__version__} and no GPU"
        )
    if importlib.util.find_spec("cupy") is None:
        raise InvalidRequest(
            "device cuda needs the CUDA kernels: pip install 'kvruntime[cuda13]', or [cuda12]"
        )
