"""The smaller names: filters, embeddings, adapters, tensor collections, helpers. What exl3 lacks refuses by name."""

from __future__ import annotations

import gc
import importlib.util
import time
from typing import Any

import torch

from exl3.errors import UnsupportedError
from exl3.generate.filters import Filter, LLGuidanceFilter

__all__ = ["Filter", "LLGuidanceFilter"]

llguidance_available = importlib.util.find_spec("llguidance") is not None
FIRST_MM_EMBEDDING_INDEX = 1_000_000_000


class _Allocator:
    """Hands out runs of ids for embeddings."""

    def __init__(self) -> None:
        self.next_token_index = FIRST_MM_EMBEDDING_INDEX


global_allocator = _Allocator()


class MMEmbedding:
    """Embeddings of images; not supported yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("MMEmbedding: images are not supported by exl3 yet")


class FormatronFilter(Filter):
    """Constraints by formatron; not supported: use LLGuidanceFilter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("FormatronFilter is not supported by exl3; use LLGuidanceFilter (JSON schema, regex, Lark, GBNF)")


class LoRA:
    """Adapters; not supported yet."""

    @staticmethod
    def from_directory(model: Any, directory: str, lora_scaling: float = 1.0) -> LoRA:
        """Refuses."""
        raise UnsupportedError("LoRA: adapters are not supported by exl3's stand-in for exllamav3 yet")


class SafetensorsCollection:
    """The tensors of a model directory."""

    def __init__(self, directory: str, load_method: str | None = None) -> None:
        from exl3.files import Checkpoint

        self.directory = str(directory)
        self._checkpoint = Checkpoint.open(directory)

    def has_tensor(self, key: str) -> bool:
        """Whether there is a tensor of this name."""
        return key in self._checkpoint.tensors

    def list_tensors(self, prefix: str | None = None, only_serializable: bool = False) -> dict[str, dict[str, Any]]:
        """name -> shape, bytes and dtype of all tensors at or below `prefix`."""
        return {
            k: {"shape": list(t.shape), "n_bytes": t.nbytes, "dtype": str(t.dtype)}
            for k, t in self._checkpoint.tensors.items()
            if prefix is None or k == prefix or k.startswith(f"{prefix}.")
        }

    def get_tensor(
        self, key: str, device: Any = "cpu", optional: bool = False, allow_bf16: bool = False, **kwargs: Any
    ) -> torch.Tensor | None:
        """One tensor; bf16 becomes fp16 unless allowed."""
        if not self.has_tensor(key):
            if optional:
                return None
            raise KeyError(f"{self.directory}: no tensor {key}")
        tensor = self._checkpoint.read([key])[key]
        if tensor.dtype == torch.bfloat16 and not allow_bf16:
            tensor = tensor.half()
        return tensor.to(device)


class VariantSafetensorsCollection:
    """Tensors mixed from several directories; not supported yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("VariantSafetensorsCollection is not supported by exl3 yet")


def refuse_transformers() -> None:
    """Loads the transformers integration if this build of exl3 has one."""
    try:
        importlib.import_module("exl3.integrations.transformers")
    except ImportError:
        raise UnsupportedError("exllamav3.integration.transformers: this build of exl3 has no transformers integration") from None


class Timer:
    """`with Timer() as t: ...` then t.interval, in seconds."""

    interval = 0.0

    def __enter__(self) -> Timer:
        self.start_time = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.end_time = time.perf_counter()
        self.interval = self.end_time - self.start_time


def free_mem() -> None:
    """Collects garbage and empties the device's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
