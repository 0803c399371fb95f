"""How much memory a device has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from exl3 import settings
from exl3.errors import BackendError


def check_present(device: torch.device) -> None:
    """BackendError where torch has no such card."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BackendError(f"there is no {device}: torch sees {count or 'no'} GPU{'' if count == 1 else 's'}; `exl3 doctor` says more")


def available_bytes(device: torch.device | str) -> int:
    """Bytes that could be allocated on `device` now, before any reserve: free memory of the machine or its container, or of the card,
    there no more than torch.cuda.set_per_process_memory_fraction allows."""
    device = torch.device(device)
    if device.type == "cuda":
        check_present(device)
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)  # torch 2.8 and later
        return min(free + torch.cuda.memory_reserved(device) - used, int(fraction(device) * total) - used)
    return min(_machine_bytes(), _container_bytes())


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 62  # unknown: don't stand in the way


def _container_bytes(root: str = "/sys/fs/cgroup") -> int:
    """What the memory limit of this container leaves; huge where there is none. Cached file pages count as free."""
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int(Path(root, limit_name).read_text())
            used = int(Path(root, used_name).read_text())
            stat = Path(root, limit_name).with_name("memory.stat").read_text().split()
        except (OSError, ValueError):  # no such file, or "max"
            continue
        cached = int(stat[stat.index(cache_key) + 1]) if cache_key in stat else 0
        return max(0, limit - used + cached)
    return 1 << 62


def reserve_bytes(device: torch.device | str) -> int:
    """Bytes to leave free: EXL3_HOST_MEM_RESERVE_MB on the CPU, EXL3_AUTOSPLIT_MARGIN_MB on a card."""
    if torch.device(device).type == "cuda":
        return int(str(settings.get("EXL3_AUTOSPLIT_MARGIN_MB", "cuda"))) << 20
    return int(str(settings.get("EXL3_HOST_MEM_RESERVE_MB"))) << 20
