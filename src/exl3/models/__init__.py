"""Model families. Reading order: config, model, llama, then any other family; then tensors (checkpoint to modules), memory,
registry, loading."""

from exl3.models.loading import load, locate
from exl3.models.model import Block, Model
from exl3.models.registry import FAMILIES, build

__all__ = ["FAMILIES", "Block", "Model", "build", "load", "locate"]
