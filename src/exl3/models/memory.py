"""How much memory a model takes, from headers alone, and how much there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3.cache import Cache
from exl3.errors import ResourceError


def available_bytes(device: torch.device | str) -> int:
    """Bytes that could be allocated on `device` now, before any reserve: free memory of the machine or its container, or of the card,
    there no more than torch.cuda.set_per_process_memory_fraction allows."""
    device = torch.device(device)
    if device.type == "cuda":
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
    """Bytes to leave free: EXL3_HOST_MEM_RESERVE_MB on the CPU, 512 MiB on a card (context, libraries)."""
    if torch.device(device).type == "cuda":
        return 512 << 20
    from exl3 import settings

    return int(str(settings.get("EXL3_HOST_MEM_RESERVE_MB"))) << 20


def cache_bytes_per_token(model: Any, k_bits: int = 16, v_bits: int = 16) -> int:
    """Bytes one token takes in the cache, all layers."""
    return sum(Cache.bytes_per_token(heads, head_dim, k_bits, v_bits) for heads, head_dim in model.cache_shapes)


@dataclass(frozen=True)
class Need:
    """Bytes a load takes: weights as they will lie in memory, cache, workspace (activations of one prefill chunk and the logits)."""

    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes


def workspace_bytes(model: Any, tokens: int = 2048) -> int:
    """Bytes of activations for a prefill chunk of `tokens`: stream, q/k/v, intermediate and a row of logits, in fp32."""
    c = model.config
    width = 2 * c.hidden_size + 2 * (c.num_attention_heads + c.kv_heads) * c.head_size + 3 * c.intermediate_size
    return int(4 * (tokens * width + 16 * c.vocab_size))


def check(need: Need, device: torch.device | str, what: str) -> None:
    """Raise ResourceError unless `need` fits on `device` beside the reserve."""
    have, reserve = available_bytes(device), reserve_bytes(device)
    if need.total_bytes > have - reserve:
        mib = 1 << 20
        hint = "" if torch.device(device).type == "cuda" else ", or a smaller EXL3_HOST_MEM_RESERVE_MB"
        raise ResourceError(
            f"{what} needs {need.total_bytes / mib:.0f} MiB on {device} (weights {need.weights_bytes / mib:.0f}, "
            f"cache {need.cache_bytes / mib:.0f}, workspace {need.workspace_bytes / mib:.0f}); {have / mib:.0f} MiB are free, "
            f"of which {reserve / mib:.0f} stay in reserve. Use fewer max_tokens, a lower bitrate, another device{hint}"
        )
