"""-d and -dr: which devices work on a conversion, and how much of it each gets."""

from __future__ import annotations

import math

import torch

from exl3.errors import ArgumentError, UnsupportedError
from exl3.models.loading import default_device


def choose_devices(devices: str | None) -> list[torch.device]:
    """`-d`: cpu, cuda, cuda:N or GPU ordinals, several with commas between; default a usable GPU, else the CPU."""
    if devices is None:
        device = default_device()
        return [torch.device("cuda", 0) if device.type == "cuda" else device]
    names = [n.strip() for n in str(devices).split(",") if n.strip()]
    if not names:
        raise ArgumentError("devices is empty; use cpu, cuda:N or GPU numbers")
    found = [_device(name, devices) for name in names]
    if len({d.type for d in found}) > 1:
        raise ArgumentError(f"devices {devices}: GPUs and the CPU don't share a conversion; give GPUs alone")
    if found[0].type == "cuda" and len(set(found)) < len(found):
        raise ArgumentError(f"devices {devices}: a GPU is named twice")
    return found


def _device(name: str, devices: str) -> torch.device:
    name = f"cuda:{name}" if name.isdigit() else name
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"devices {devices!r} is not a device; use cpu, cuda:N or a GPU number") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ArgumentError(
                f"device {name}: this machine has {count} usable GPUs; use -d cpu" + (f" or 0..{count - 1}" if count else "")
            )
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise UnsupportedError(f"device {name}: conversion runs on cpu and cuda")
    return device


def read_ratios(text: str, count: int) -> list[float] | None:
    """`-dr`: one positive number for each of `count` devices; None where nothing is given."""
    if not text.strip():
        return None
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"device_ratios {text!r}: numbers with commas between are needed, as in 1,1,3") from None
    if len(ratios) != count:
        raise ArgumentError(f"device_ratios {text!r} has {len(ratios)} numbers for {count} devices; give one for each")
    if not all(math.isfinite(r) and r > 0 for r in ratios):
        raise ArgumentError(f"device_ratios {text!r}: every number must be above 0; leave a device out of -d instead")
    return ratios
