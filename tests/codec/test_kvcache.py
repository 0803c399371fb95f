"""Cache codes against the vectors of the format's text and a float64 restatement, one code at a time."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3 import codec
from exl3.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parent))
import oracle

H32 = oracle.hadamard(32)
PLANES = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}


def code_of(words: np.ndarray, bits: int, j: int) -> int:
    """Code j of a group of `bits` words, straight from the text: planes from the largest, most significant bits first."""
    code, first = 0, 0
    for width in PLANES[bits]:
        word = int(words[first + j * width // 32])
        code = code << width | (word >> (j * width % 32)) & ((1 << width) - 1)
        first += width
    return code


def hex_words(codes: torch.Tensor) -> str:
    return " ".join(f"{int(w) & 0xFFFFFFFF:08X}" for w in codes.flatten())


@pytest.mark.parametrize(
    "bits, words",
    [(3, "AAA9A996 AAAAAAA8 00000016"), (4, "88868778 88888884 88888880 88888888"), (5, "88868778 88888884 88888880 88888888 00000002")],
)
def test_vectors_of_the_format_text(bits, words):
    codes, scales = codec.kv_quantize((torch.arange(32) - 15.5).half(), bits)
    assert codes.dtype == torch.int32 and scales.dtype == torch.float16
    assert hex_words(codes) == words
    assert int(scales.view(torch.int16)) == 0x51A8


@given(
    bits=st.integers(2, 8),
    compand=st.sampled_from([0.0, 0.3, 0.65, 0.95]),
    seed=st.integers(0, 2**31),
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 50.0, 2000.0]),
    groups=st.integers(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_codes_are_the_nearest_cells(bits, compand, seed, magnitude, groups):
    """Every code is the cell of its rotated value, and decoding gives the cell's middle, in float64."""
    x = (torch.randn(3, 32 * groups, generator=torch.Generator().manual_seed(seed)) * magnitude).half()
    codes, scales = codec.kv_quantize(x, bits, compand)
    assert codes.shape == (3, groups * bits) and scales.shape == (3, groups)
    y = x.double().numpy().reshape(-1, 32) @ H32
    s = np.abs(y).max(axis=1) + 1e-10
    np.testing.assert_allclose(scales.double().numpy().reshape(-1), s, rtol=2**-10, atol=2**-24)
    words = codes.numpy().reshape(-1, bits).view(np.uint32)
    levels = 1 << bits
    decoded = np.empty_like(y)
    for g in range(len(y)):
        for j in range(32):
            q = code_of(words[g], bits, j)
            u = y[g, j] / s[g]
            lo, hi = 2 * q / levels - 1, 2 * (q + 1) / levels - 1
            if compand:
                lo, hi = (compand * t + (1 - compand) * t**3 for t in (lo, hi))
            assert lo - 1e-5 <= u <= hi + 1e-5
            t = (2 * q + 1) / levels - 1
            decoded[g, j] = (compand * t + (1 - compand) * t**3 if compand else t) * float(scales.reshape(-1)[g])
    rotated = codec.kv_dequantize(codes, scales, bits, compand, rotated=True)
    np.testing.assert_allclose(rotated.numpy().reshape(-1, 32), decoded, rtol=1e-5, atol=1e-6 * float(s.max()))
    back = codec.kv_dequantize(codes, scales, bits, compand)
    assert back.dtype == torch.float16 and back.shape == x.shape
    np.testing.assert_allclose(back.double().numpy().reshape(-1, 32), decoded @ H32, rtol=2**-10, atol=1e-5 * float(s.max()) + 2**-24)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_survives(bits):
    """Packing and unpacking all codes in all places: a group whose scale is 1 decodes to the grid."""
    words = torch.randint(-(2**31), 2**31, (40, bits), dtype=torch.int64, generator=torch.Generator().manual_seed(bits)).int()
    ones = torch.ones(40, 1, dtype=torch.float16)
    t = codec.kv_dequantize(words, ones, bits, rotated=True)
    expected = [[(2 * code_of(w.view(np.uint32), bits, j) + 1) / 2**bits - 1 for j in range(32)] for w in words.numpy()]
    np.testing.assert_array_equal(t.numpy(), np.array(expected, dtype=np.float32))
    # the largest value of each group is not 1, but its own cell's middle: quantize what the codes say, in the fp64 basis
    x = torch.from_numpy(np.array(expected) @ H32).half()
    _, scales = codec.kv_quantize(x, bits)
    top = np.abs(np.array(expected)).max(axis=1)
    np.testing.assert_allclose(scales.double().numpy()[:, 0], top, rtol=2e-3)


@pytest.mark.parametrize("bits, error", [(2, 0.45), (3, 0.22), (4, 0.11), (5, 0.055), (6, 0.028), (8, 0.008)])
def test_error_of_gaussian_values(bits, error):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).half()
    back = codec.kv_dequantize(*codec.kv_quantize(x, bits), bits)
    relative = float((back.float() - x.float()).norm() / x.float().norm())
    assert error / 3 < relative < error


def test_zero_stays_zero():
    for bits in (2, 5, 8):
        codes, scales = codec.kv_quantize(torch.zeros(2, 64, dtype=torch.float16), bits)
        assert (scales == 0).all() and (codec.kv_dequantize(codes, scales, bits) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_visible_in_their_group_only(bad):
    x = torch.ones(1, 64, dtype=torch.float16)
    x[0, 3] = bad
    back = codec.kv_dequantize(*codec.kv_quantize(x, 4), 4)
    assert not torch.isfinite(back[0, :32]).any() and torch.isfinite(back[0, 32:]).all()


def test_compander_ends():
    """a = 1 is the identity, like 0; a close to 1 hardly differs."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)).half()
    plain, scales = codec.kv_quantize(x, 6)
    same, _ = codec.kv_quantize(x, 6, 1.0)
    assert torch.equal(plain, same)
    assert torch.equal(codec.kv_dequantize(plain, scales, 6), codec.kv_dequantize(plain, scales, 6, 1.0))


def test_leading_dimensions():
    x = torch.randn(2, 3, 5, 64).half()
    codes, scales = codec.kv_quantize(x, 3)
    assert codes.shape == (2, 3, 5, 6) and scales.shape == (2, 3, 5, 2)
    one, _ = codec.kv_quantize(x[1, 2, 4], 3)
    assert torch.equal(codes[1, 2, 4], one)
    assert codec.kv_quantize(torch.zeros(0, 64).half(), 4)[0].shape == (0, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: codec.kv_quantize(torch.zeros(4, 33).half(), 4),
        lambda: codec.kv_quantize(torch.zeros(4, 32).int(), 4),
        lambda: codec.kv_quantize(torch.zeros(4, 32).half(), 1),
        lambda: codec.kv_quantize(torch.zeros(4, 32).half(), 9),
        lambda: codec.kv_quantize(torch.zeros(4, 32).half(), 4.0),
        lambda: codec.kv_quantize(torch.zeros(4, 32).half(), 4, -0.1),
        lambda: codec.kv_quantize(torch.zeros(4, 32).half(), 4, math.nan),
        lambda: codec.kv_dequantize(torch.zeros(4, 4).int(), torch.zeros(4, 1), 4),
        lambda: codec.kv_dequantize(torch.zeros(4, 4).long(), torch.zeros(4, 1).half(), 4),
        lambda: codec.kv_dequantize(torch.zeros(4, 5).int(), torch.zeros(4, 1).half(), 4),
        lambda: codec.kv_dequantize(torch.zeros(3, 4).int(), torch.zeros(4, 1).half(), 4),
    ],
)
def test_typed_errors(call):
    with pytest.raises(ArgumentError):
        call()
