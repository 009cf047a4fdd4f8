"""The devices that tests run on: the CPU, the accelerator of this machine if it has one, and the stand-in for one.

The accelerator is whatever ``torch.accelerator`` finds: CUDA, ROCm, XPU, MPS. Tests compare with dense algebra in
float64, and are skipped on a device that has none.
"""

import pytest
import torch

from tests import _standin as standin

CPU = torch.device("cpu")
on_standin = pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)


def _has_float64(device):
    try:
        return torch.ones(2, dtype=torch.float64, device=device).sum().item() == 2.0
    except (RuntimeError, TypeError):
        return False


def accelerators():
    """The real ones: none, or one, on which tensors made without an index live."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type == standin.DEVICE.type:
        return
    device = torch.device(found.type, torch.accelerator.current_device_index())
    missing = pytest.mark.skipif(not _has_float64(device), reason=f"{device} has no float64")
    yield pytest.param(device, id=device.type, marks=missing)


STAND_IN = pytest.param(standin.DEVICE, id="stand-in", marks=on_standin)
REAL = [pytest.param(CPU, id="cpu"), *accelerators()]

devices = pytest.mark.parametrize("device", [*REAL, STAND_IN])
real_devices = pytest.mark.parametrize("device", REAL)  # where the stand-in cannot go
other_devices = pytest.mark.parametrize("device", [*accelerators(), STAND_IN])  # compared with the CPU
