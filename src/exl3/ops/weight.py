"""`Weight`: the handle of one EXL3 matrix, checked once."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from torch import Tensor

from exl3.codec.codebooks import MULTIPLIERS
from exl3.errors import ArgumentError
from exl3.ops import blocks, native

CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
K2 = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16}
"""Twice the rates the format has: 1 to 8 bits and 1.5, 2.5, 3.5."""

_serial = itertools.count()


class Weight:
    """One EXL3 matrix W, y = x @ W + bias (format sections 1.5, 4).

    trellis: int16 `(in_padded/16, out_padded/16, 16*K)`; suh: fp16 `(in_padded,)`; svh: fp16 `(out_padded,)`; bias: `(>= out_features,)`
    or None, kept as fp32. in_features and out_features are the true sizes. codebook: "3inst", "mcg" or "mul1"; multiplier: the
    stored one, default the codebook's own. Where the backend has its own layout the trellis is repacked into it and let go.
    Raises ArgumentError naming what does not fit.
    """

    def __init__(
        self,
        trellis: Tensor,
        suh: Tensor,
        svh: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
        codebook: str,
        multiplier: int | None = None,
    ) -> None:
        if trellis.ndim != 3 or trellis.dtype != torch.int16:
            raise ArgumentError(f"trellis: needs int16 (in/16, out/16, 16*K), got {trellis.dtype} {tuple(trellis.shape)}")
        k2, rest = divmod(trellis.shape[2], 8)
        if rest or k2 not in K2:
            raise ArgumentError(f"trellis: last dimension {trellis.shape[2]} is not 16*K for K in 1..8, 1.5, 2.5, 3.5")
        if codebook not in CODEBOOKS:
            raise ArgumentError(f"codebook {codebook!r}: use one of {', '.join(CODEBOOKS)}")
        if k2 % 2 and codebook != "mul1":
            raise ArgumentError(f"codebook {codebook}: the half rate {k2 / 2} exists for mul1 only")
        self.in_padded, self.out_padded = 16 * trellis.shape[0], 16 * trellis.shape[1]
        for name, true, padded, scale in (("in", in_features, self.in_padded, suh), ("out", out_features, self.out_padded, svh)):
            if padded % 128:
                raise ArgumentError(f"trellis: {name} size {padded} is not a multiple of 128")
            if not 0 < true <= padded:
                raise ArgumentError(f"{name}_features {true} does not fit the trellis, which holds {padded}")
            if scale.shape != (padded,) or scale.dtype != torch.float16:
                raise ArgumentError(f"s{'u' if name == 'in' else 'v'}h: needs float16 ({padded},), got {scale.dtype} {tuple(scale.shape)}")
        if bias is not None and (bias.ndim != 1 or bias.shape[0] < out_features):
            raise ArgumentError(f"bias: needs at least {out_features} values, got {tuple(bias.shape)}")
        for name, t in (("suh", suh), ("svh", svh), ("bias", bias)):
            if t is not None and t.device != trellis.device:
                raise ArgumentError(f"{name}: on {t.device}, the trellis is on {trellis.device}")
        self.in_features, self.out_features = in_features, out_features
        self.codebook = codebook
        self.multiplier = MULTIPLIERS[codebook] if multiplier is None or codebook == "3inst" else multiplier & 0xFFFFFFFF
        self.k2 = k2
        self.device = trellis.device
        self.trellis: Tensor | None = trellis.contiguous()
        self.suh, self.svh = suh.contiguous(), svh.contiguous()
        self.bias = None if bias is None else bias[:out_features].float().contiguous()
        self.serial = next(_serial)
        self.groups: dict[tuple[int, ...], Any] = {}  # what linear knows about this matrix with others, see ops.products
        self._packed: Tensor | None = None
        self._struct: Any = None
        self.address = 0
        if (backend := native.find(self.device)) is not None:
            self._bind(backend)

    def _bind(self, backend: native.Backend) -> None:
        self._describe(self.trellis, 0)
        size = backend.repack_bytes(self.address)
        if size and "repack" in backend.ops:
            self._packed = torch.empty(size + 64, dtype=torch.uint8, device=self.device)
            self._packed = self._packed[-self._packed.data_ptr() % 64 :][:size]
            with native.on(self.device) as stream:
                backend.ops["repack"](blocks.REPACK.pack(self.address, self._packed.data_ptr()), stream)
                native.finish(self.device)
            self._describe(self._packed, 1)
            if "reconstruct" in backend.ops:
                self.trellis = None

    def _describe(self, data: Tensor | None, layout: int) -> None:
        assert data is not None
        packed = blocks.WEIGHT.pack(
            data.data_ptr(), self.suh.data_ptr(), self.svh.data_ptr(), 0 if self.bias is None else self.bias.data_ptr(),
            self.in_features, self.out_features, self.in_padded, self.out_padded,
            self.k2, CODEBOOKS[self.codebook], self.multiplier, layout,
        )  # fmt: skip
        if self._struct is None:
            self._struct = ctypes.create_string_buffer(packed, len(packed))
            self.address = ctypes.addressof(self._struct)
        else:
            self._struct[:] = packed

    @property
    def K(self) -> int | float:
        """Bits per weight of the trellis."""
        return self.k2 // 2 if self.k2 % 2 == 0 else self.k2 / 2

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        held = (self.trellis, self._packed, self.suh, self.svh, self.bias)
        return sum(t.nbytes for t in held if t is not None)

    def reconstruct(self, original_basis: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix itself: `(in_padded, out_padded)` fp16 in the rotated basis, or with `original_basis` `(in_features, out_features)`
        fp32 with rotations and scales applied (format section 4.2). `dtype`: float32 or float16."""
        dtype = dtype or (torch.float32 if original_basis else torch.float16)
        backend = native.find(self.device)
        if backend is not None and "reconstruct" in backend.ops:
            shape = (self.in_features, self.out_features) if original_basis else (self.in_padded, self.out_padded)
            out = torch.empty(shape, dtype=dtype, device=self.device)
            block = blocks.RECONSTRUCT.pack(self.address, out.data_ptr(), blocks.DTYPES[dtype], original_basis)
            native.launch(backend.ops["reconstruct"], self.device, block, out, self)
            return out
        from exl3 import codec

        assert self.trellis is not None
        multiplier = None if self.codebook == "3inst" else self.multiplier
        if original_basis:
            full = codec.dequantize(self.trellis, self.suh, self.svh, self.codebook, multiplier)
            return full[: self.in_features, : self.out_features].to(dtype)
        return codec.decode(self.trellis, self.codebook, multiplier).to(dtype)

    def __repr__(self) -> str:
        return f"Weight({self.in_features}, {self.out_features}, K={self.K}, codebook={self.codebook}, device={self.device})"
