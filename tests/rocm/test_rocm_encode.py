"""The encoder on CPU fibers: the same search as codec.encode_reference, so the same states."""

from __future__ import annotations

import pytest
import torch
from harness import MULTIPLIERS, Library

from exl3 import codec


@pytest.mark.parametrize("codebook,K,window", [("mul1", 4, 0), ("mcg", 6, 64), ("3inst", 8, 0), ("mul1", 3.5, 32), ("mul1", 2, 8)], ids=str)
def test_same_states_as_the_reference(lib: Library, codebook: str, K: float, window: int) -> None:
    torch.manual_seed(1)
    tiles = torch.randn(1, 256) * 0.9
    states, values = lib.encode(tiles, K, codebook, MULTIPLIERS[codebook], window)
    want, want_values = codec.encode_reference(tiles, K, codebook, seam_window=window)
    same = (states.int() & 0xFFFF).eq(want).float().mean()
    error, reference_error = ((v - tiles).square().mean() for v in (values, want_values))
    assert same > 0.98 and abs(float(error / reference_error) - 1) < 1e-4  # sums are rounded in another order: ties may fall either way
    assert torch.equal(values, codec.codebook_table(codebook).float()[states.long() & 0xFFFF])
