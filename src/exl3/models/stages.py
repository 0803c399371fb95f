"""Where the blocks of a model lie: consecutive ones on one device are a *stage*, and a step walks the stages in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl3 import ops


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on one device. The first stage embeds, the last one has the head."""

    device: torch.device
    blocks: Sequence[Any]
    first: bool = True
    last: bool = True


def stages_of(model: Any) -> list[Stage]:
    """The stages of a model; anything with embed, blocks, head and a device is one."""
    found: list[Stage] | None = getattr(model, "stages", None)
    return found if found else [Stage(torch.device(model.device), model.blocks)]


def run_stage(model: Any, stage: Stage, x: Tensor | None, batch: Any, head: bool = True) -> Any:
    """The stage's part of a step, all on its device: its blocks, before them the embedding (or the rotary tables), after them the head.
    x: the residual stream `(tokens, hidden_size)` fp32, None for the first stage. Returns the stream, or what `model.head` does."""
    if stage.first:
        x = model.embed(batch)
    else:
        model.prepare(batch)
    for block in stage.blocks:
        x = block(x, batch)
    return model.head(x, batch) if stage.last and head else x


def walk(model: Any, batch: Any, head: bool = True) -> Any:
    """One step through all stages, run from Python; `batch` lies on the first stage's device, the result on the last one's."""
    x = None
    for stage in stages_of(model):
        if not stage.first:
            assert x is not None
            x, batch = ops.move(x, stage.device), batch.on(stage.device)
        x = run_stage(model, stage, x, batch, head)
    return x
