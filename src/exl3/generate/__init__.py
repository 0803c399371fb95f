"""The engine: jobs that share a model and a paged cache.

Files in reading order: text and stream (tokens to text, stop strings), sampling, presets and drawing (samplers), pages (page table and
prefix tree), segments and step (recorded steps), arguments and job, filters and masks (constrained output), draft (speculation), options,
conveniences and generator (the scheduler), aio (asyncio), api (`Model.generate`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Generator": "generator",
    "Job": "job",
    "AsyncGenerator": "aio",
    "AsyncJob": "aio",
    "generate": "api",
    "GenerationResult": "api",
    "Filter": "filters",
    "LLGuidanceFilter": "filters",
    "CustomSampler": "sampling",
    "ComboSampler": "presets",
    "DefaultSampler": "presets",
    "ArgmaxSampler": "presets",
}

__all__ = sorted(_LAZY)

if TYPE_CHECKING:
    from exl3.generate.aio import AsyncGenerator as AsyncGenerator
    from exl3.generate.aio import AsyncJob as AsyncJob
    from exl3.generate.generator import Generator as Generator
    from exl3.generate.job import Job as Job


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'exl3.generate' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"exl3.generate.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
