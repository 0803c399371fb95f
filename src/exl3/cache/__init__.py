"""Tensors a conversation leaves on a device: `batch` (one step's tokens, packed), `cache` (paged keys and values). No policy."""

from exl3.cache.batch import Batch
from exl3.cache.cache import PAGE, Cache, Layer

__all__ = ["PAGE", "Batch", "Cache", "Layer"]
