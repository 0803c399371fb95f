"""`Cache` and `Layer`: the paged key/value tensors a conversation leaves on a device. Which page belongs to whom is the engine's affair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl3 import ops
from exl3.cache.batch import Batch
from exl3.errors import ArgumentError, ResourceError
from exl3.ops.memory import available_bytes

PAGE = 256
"""Tokens in a page."""


class Layer:
    """One layer's keys and values: fp16 `(pages, 256, kv_heads, head_dim)` at 16 bits, else int32 codes `(pages, 256, groups*bits)` with
    fp16 scales `(pages, 256, groups)`, groups = kv_heads*head_dim/32 (format section 5). Keys and values have their own number of bits."""

    def __init__(
        self, pages: int, kv_heads: int, head_dim: int, device: torch.device, k_bits: int = 16, v_bits: int = 16, compand: float = 0.0
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.k_bits, self.v_bits, self.compand = k_bits, v_bits, compand
        self.k, self.k_scale = self._tensors(pages, k_bits, device)
        self.v, self.v_scale = self._tensors(pages, v_bits, device)

    def _tensors(self, pages: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if bits == 16:
            return torch.zeros(pages, PAGE, self.kv_heads, self.head_dim, dtype=torch.float16, device=device), None
        groups = self.kv_heads * self.head_dim // 32
        codes = torch.zeros(pages, PAGE, groups * bits, dtype=torch.int32, device=device)
        return codes, torch.zeros(pages, PAGE, groups, dtype=torch.float16, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]

    def append(self, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Stores k and v `(tokens, kv_heads, head_dim)` of the batch's tokens."""
        ops.cache_append(self, k, v, batch)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, *rotation: Any, **options: Any) -> Tensor:
        """Norms, rotation, append and attention in one operation: `ops.attend`."""
        return ops.attend(q, k, v, self, batch, *rotation, **options)

    def attend(
        self, q: Tensor, batch: Batch, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal attention of q `(tokens, heads, head_dim)` over what is stored, this step's tokens included -> the same shape."""
        return ops.attention(q, self, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


def _shapes(config: Any) -> list[tuple[int, int]]:
    """(kv_heads, head_dim) of each layer, from an object or a dict with the Hugging Face names; a `cache_shapes` list wins."""
    get = config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    shapes = get("cache_shapes")
    if shapes is not None:
        return [(int(h), int(d)) for h, d in shapes]
    layers, heads = get("num_hidden_layers"), get("num_attention_heads")
    kv_heads = get("num_key_value_heads") or heads
    head_dim = get("head_dim") or (get("hidden_size") // heads if heads and get("hidden_size") else None)
    if not layers or not kv_heads or not head_dim:
        raise ArgumentError("cache: the configuration has no num_hidden_layers, num_key_value_heads or head_dim")
    return [(int(kv_heads), int(head_dim))] * int(layers)


class Cache:
    """Pages of keys and values for every layer of a model.

    config: the model's configuration (num_hidden_layers, num_key_value_heads, head_dim, or a list `cache_shapes` of (kv_heads, head_dim)
    per layer, and `cache_devices`, the device of each, where they are on several); max_tokens: room for this many tokens, rounded up to
    whole pages of 256; k_bits, v_bits: 16 (fp16) or 2 .. 8; compand: a of the compander of the quantized codes, 0 off. Raises
    ArgumentError for values that cannot work, ResourceError where memory does not suffice, before any is taken.
    """

    def __init__(
        self, config: Any, max_tokens: int, device: torch.device | str = "cpu", k_bits: int = 16, v_bits: int = 16, compand: float = 0.0
    ) -> None:
        for name, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
            if not isinstance(bits, int) or (bits != 16 and not 2 <= bits <= 8):
                raise ArgumentError(f"cache: {name} {bits!r}: use 16 or 2 to 8")
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ArgumentError(f"cache: max_tokens {max_tokens!r} must be a whole number of at least 1")
        if not 0 <= compand < 1:
            raise ArgumentError(f"cache: compand {compand} must be at least 0 (off) and below 1")
        shapes = _shapes(config)
        for i, (_, head_dim) in enumerate(shapes):
            step = 8 if k_bits == v_bits == 16 else 32
            if head_dim % step or head_dim > 512:
                raise ArgumentError(
                    f"cache: layer {i} has head_dim {head_dim}; {k_bits}/{v_bits}-bit caches take multiples of {step} up to 512"
                )
        self.device = torch.device(device)
        places = (None if isinstance(config, dict) else getattr(config, "cache_devices", None)) or [self.device] * len(shapes)
        self.pages = -(-max_tokens // PAGE)
        self.max_tokens = self.pages * PAGE
        self.k_bits, self.v_bits, self.compand = k_bits, v_bits, compand
        for place in dict.fromkeys(places):
            need = sum(self.bytes_per_token(h, d, k_bits, v_bits) for (h, d), p in zip(shapes, places) if p == place) * self.max_tokens
            self._check_room(need, place)
        try:
            self.layers = [Layer(self.pages, h, d, place, k_bits, v_bits, compand) for (h, d), place in zip(shapes, places, strict=True)]
        except RuntimeError as e:
            if not isinstance(e, torch.OutOfMemoryError) and "alloc" not in str(e):
                raise
            self.layers = []
            self._refuse(need, place, "the device had none left")

    def _check_room(self, need: int, device: torch.device) -> None:
        """ResourceError before anything is allocated where `need` bytes are more than there are."""
        if device.type in ("cpu", "cuda") and need > (have := available_bytes(device)):
            self._refuse(need, device, f"{have / 2**30:.2f} GiB are free")

    def _refuse(self, need: int, device: torch.device, found: str) -> None:
        bits = "16" if self.k_bits == self.v_bits == 16 else f"{self.k_bits}/{self.v_bits}"
        raise ResourceError(
            f"cache: {self.max_tokens} tokens at {bits} bits need {need / 2**30:.2f} GiB on {device}, {found}; ask for fewer tokens or bits"
        )

    @staticmethod
    def bytes_per_token(kv_heads: int, head_dim: int, k_bits: int = 16, v_bits: int = 16) -> int:
        """Bytes one token takes in one layer, scales included."""
        n = kv_heads * head_dim
        return sum(2 * n if bits == 16 else n * bits // 8 + n // 16 for bits in (k_bits, v_bits))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for layer in self.layers for t in layer.tensors)

    def copy_page(self, src: int, dst: int) -> None:
        """Copies one page of every layer: all 256 tokens of page `src` to page `dst`."""
        for page in (src, dst):
            if not 0 <= page < self.pages:
                raise ArgumentError(f"cache: page {page} is outside 0 .. {self.pages - 1}")
        for layer in self.layers:
            for t in layer.tensors:
                t[dst].copy_(t[src])
