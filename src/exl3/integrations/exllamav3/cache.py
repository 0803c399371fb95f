"""`Cache` as exllamav3 has it: made before the model is loaded, filled with tensors when it is."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from exl3.cache import Cache as Inner
from exl3.errors import ArgumentError, UnsupportedError


class CacheLayer:
    """Base of the layer kinds; they only name a storage here."""


class CacheLayer_fp16(CacheLayer):
    """fp16 keys and values."""


class CacheLayer_quant(CacheLayer):
    """Keys and values of 2 to 8 bits."""


class _Unsupported(CacheLayer):
    pass


class CacheLayer_MLA_fp16(_Unsupported):
    """Latent cache; not supported yet."""


class CacheLayer_MLA_quant(_Unsupported):
    """Quantized latent cache; not supported yet."""


class CacheLayer_dsa(_Unsupported):
    """Sparse-attention pools; not supported yet."""


class RecurrentCache:
    """Checkpoints of recurrent states; no supported model has any."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("RecurrentCache: models with recurrent layers are not supported by exl3 yet")


class Cache:
    """Room for `max_num_tokens` (a multiple of 256) tokens of a model that is yet to be loaded."""

    def __init__(
        self,
        model: Any,
        max_num_tokens: int,
        layer_type: type | None = None,
        max_batch_size: int = 16,
        max_history: int = 0,
        recurrent_dtype: torch.dtype = torch.half,
        k_bits: int | None = None,
        v_bits: int | None = None,
        compand_a: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ArgumentError(f"Cache: unknown argument {next(iter(kwargs))!r}")
        if max_num_tokens % 256 or max_num_tokens < 256:
            raise AssertionError(f"max_num_tokens must be a multiple of 256, got {max_num_tokens}")
        layer_type = layer_type or CacheLayer_fp16
        if issubclass(layer_type, _Unsupported):
            raise UnsupportedError(f"Cache: {layer_type.__name__} is not supported by exl3 yet; use CacheLayer_fp16 or CacheLayer_quant")
        quantized = issubclass(layer_type, CacheLayer_quant)
        if quantized and (k_bits is None or v_bits is None):
            raise ArgumentError("Cache: CacheLayer_quant needs k_bits and v_bits, 2 to 8")
        self.model, self.config = model, model.config
        self.max_num_tokens, self.layer_type = max_num_tokens, layer_type
        self.k_bits, self.v_bits = (k_bits or 16, v_bits or 16) if quantized else (16, 16)
        self.compand_a = compand_a
        self.num_slots, self.max_history = max_batch_size, max_history
        self.inner: Inner | None = None
        self.attach_to_model(model)

    @property
    def initialized(self) -> bool:
        """Whether the tensors are there."""
        return self.inner is not None

    @property
    def layers(self) -> Any:
        """The layers, by index."""
        return {} if self.inner is None else dict(enumerate(self.inner.layers))

    def attach_to_model(self, model: Any) -> None:
        """The model makes the tensors when it is loaded; at once if it is."""
        self.model = model
        model.cache_weakrefs.append(weakref.ref(self))
        if model.inner is not None:
            self.alloc()

    def detach_from_model(self, model: Any = None) -> None:
        """Gives the tensors back."""
        self.model.cache_weakrefs = [w for w in self.model.cache_weakrefs if w() not in (self, None)]
        self.free()

    def alloc(self) -> None:
        """Makes the tensors."""
        m = self.model.inner
        self.inner = Inner(m, self.max_num_tokens, m.device, self.k_bits, self.v_bits, self.compand_a)

    def free(self) -> None:
        """Drops the tensors."""
        self.inner = None

    def copy_page(self, target: Cache, from_page: int, to_page: int, num_tokens: int = 256) -> None:
        """Copies one page, within this cache or to another of the same shape."""
        assert self.inner is not None and target.inner is not None, "the model is not loaded"
        for a, b in zip(self.inner.layers, target.inner.layers):
            for s, t in zip(a.tensors, b.tensors):
                t[to_page, :num_tokens].copy_(s[from_page, :num_tokens])

    def get_all_tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [] if self.inner is None else [t for layer in self.inner.layers for t in layer.tensors]
