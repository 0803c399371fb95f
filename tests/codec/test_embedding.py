"""Ring-quantized embedding and n-gram rows against a bit-by-bit decoder and the format's text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3 import codec
from exl3.errors import ArgumentError, FormatError, NumericalError

sys.path.insert(0, str(Path(__file__).parent))
import oracle


def random_rings(n: int, words: int, seed: int = 0) -> torch.Tensor:
    rings = torch.randint(-32768, 32768, (n, words), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    rings[:, 0] = torch.linspace(0.1, 2.0, n).half().view(torch.int16)
    return rings


@pytest.mark.parametrize("dim", [160, 256])
@pytest.mark.parametrize("K", range(1, 9))
def test_rings(K, dim):
    rings = random_rings(3, 1 + dim * K // 16, K)
    states, scales = codec.unpack_rings(rings, dim)
    assert states.shape == (3, dim) and scales.dtype == torch.float16
    for n in range(3):
        assert states[n].tolist() == oracle.lsb_ring_states(rings[n].numpy().view(np.uint16), K, dim)
    assert torch.equal(scales, torch.linspace(0.1, 2.0, 3).half())
    assert codec.is_tail_biting(states, K)
    assert torch.equal(codec.pack_rings(states, scales, K), rings)


@given(K=st.integers(1, 8), dim=st.sampled_from([160, 256]), n=st.integers(0, 4), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_pack_inverts_unpack(K, dim, n, seed):
    rings = random_rings(n, 1 + dim * K // 16, seed)
    assert torch.equal(codec.pack_rings(*codec.unpack_rings(rings, dim), K), rings)


@pytest.mark.parametrize("K, hidden", [(2, 256), (4, 576), (7, 300)])
def test_embedding_rows(K, hidden):
    groups = -(-hidden // 256)
    trellis = random_rings(2 * groups, 1 + 16 * K).view(2, -1)
    signs = (1 - 2 * torch.randint(0, 2, (groups, 256), generator=torch.Generator().manual_seed(2))).half()
    rows = codec.embedding_decode(trellis, signs, hidden)
    assert rows.shape == (2, hidden) and rows.dtype == torch.float32
    assert codec.embedding_rate(trellis, signs) == K
    expected = np.empty((2, groups * 256))
    for n in range(2):
        for g in range(groups):
            ring = trellis[n].view(groups, -1)[g].numpy().view(np.uint16)
            values = [float(oracle.value(s, "mul1")) for s in oracle.lsb_ring_states(ring, K, 256)]
            scale = float(ring[:1].view(np.float16)[0])
            expected[n, 256 * g : 256 * g + 256] = np.array(values) * scale @ oracle.hadamard(256) * signs[g].double().numpy()
    np.testing.assert_allclose(rows.numpy(), expected[:, :hidden], rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("K", [1, 4])
def test_ngram_rows_decode(K):
    trellis = random_rings(5, 1 + 10 * K)
    bias = torch.randn(3, 160, generator=torch.Generator().manual_seed(1)).half()
    offsets = torch.tensor([0, 100, 250])
    rows = torch.tensor([0, 99, 100, 249, 1000])
    out = codec.ngram_decode(trellis, rows, bias, offsets)
    for n, head in enumerate([0, 0, 1, 1, 2]):
        ring = trellis[n].numpy().view(np.uint16)
        values = np.array([float(oracle.value(s, "mul1")) for s in oracle.lsb_ring_states(ring, K, 160)])
        expected = values * float(ring[:1].view(np.float16)[0]) + bias[head].double().numpy()
        np.testing.assert_allclose(out[n].numpy(), expected, rtol=1e-6, atol=1e-6)


def wrap(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def test_ngram_row_numbers():
    """Against Python integers: wrap-around products, xor, non-negative remainder, EOS as a wall."""
    eos, multipliers = 2, [2**62 + 12345, 7919, -(2**61) + 3]
    sizes, offsets = [101, 103, 107, 109], [0, 101, 204, 311]
    ids = [5, 9, 2, 11, 70000, 2, 2, 8, 1]
    got = codec.ngram_rows(torch.tensor(ids), torch.tensor(multipliers), torch.tensor(sizes), torch.tensor(offsets), eos)
    assert got.shape == (9, 4)
    for p in range(len(ids)):
        for n in (2, 3):
            mix = 0
            for q in range(n):
                wall = p - q < 0 or eos in ids[p - q : p]
                mix ^= wrap((eos if wall else ids[p - q]) * multipliers[q])
            for h in (2 * (n - 2), 2 * (n - 2) + 1):
                assert int(got[p, h]) == mix % sizes[h] + offsets[h]
    tables = [torch.tensor(t) for t in (multipliers, sizes, offsets)]
    assert torch.equal(codec.ngram_rows(torch.tensor(ids[:1]), *tables, eos), got[:1])


@pytest.mark.parametrize("K, limit", [(2, 0.09), (4, 0.008)])
def test_embedding_encode_and_decode(K, limit):
    """Relative squared error close to that of the search on Gaussian values (0.068, 0.0045)."""
    rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(3)) * torch.tensor([[0.01], [1.0], [30.0], [0.0]])
    trellis, signs = codec.embedding_encode(rows, K)
    assert trellis.shape == (4, 2 * (1 + 16 * K)) and trellis.dtype == torch.int16 and signs.dtype == torch.float16
    back = codec.embedding_decode(trellis, signs, 300)
    error = (back - rows).square().sum(dim=1) / rows.square().sum(dim=1)
    assert (error[:3] < limit).all() and (back[3] == 0).all()
    again, _ = codec.embedding_encode(rows[1:2], K, signs)
    assert torch.equal(again, trellis[1:2])


def test_rows_beyond_fp16():
    with pytest.raises(NumericalError, match="beyond fp16"):
        codec.encode_rings(torch.randn(2, 160) * 1e25, 2)
    with pytest.raises(NumericalError):
        codec.encode_rings(torch.full((1, 160), torch.nan), 2)
    tiny = codec.encode_rings(torch.full((1, 160), 1e-30), 2)
    assert float(codec.unpack_rings(tiny, 160)[1]) == 0


def test_ring_scale_is_the_best_one():
    targets = torch.randn(2, 160, generator=torch.Generator().manual_seed(5))
    rings = codec.encode_rings(targets, 3)
    states, scales = codec.unpack_rings(rings, 160)
    values = codec.codebook_table("mul1")[states].double()
    best = (targets * values).sum(dim=1) / (values * values).sum(dim=1)
    torch.testing.assert_close(scales.double(), best, rtol=1e-3, atol=0)


S = torch.ones(2, 256, dtype=torch.float16)
LONG = {n: torch.ones(n, dtype=torch.int64) for n in (1, 3)}


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: codec.unpack_rings(torch.zeros(2, 64, dtype=torch.int16), 256), FormatError),
        (lambda: codec.unpack_rings(torch.zeros(2, 1, dtype=torch.int16), 256), FormatError),
        (lambda: codec.unpack_rings(torch.zeros(2, 145, dtype=torch.int16), 256), FormatError),
        (lambda: codec.unpack_rings(torch.zeros(2, 17), 256), FormatError),
        (lambda: codec.pack_rings(torch.zeros(2, 256, dtype=torch.int32), torch.zeros(2), 2.5), ArgumentError),
        (lambda: codec.pack_rings(torch.zeros(2, 256, dtype=torch.int32), torch.zeros(3), 2), ArgumentError),
        (lambda: codec.embedding_decode(torch.zeros(4, 33, dtype=torch.int16), S, 300), FormatError),
        (lambda: codec.embedding_decode(torch.zeros(4, 36, dtype=torch.int16), S, 300), FormatError),
        (lambda: codec.embedding_decode(torch.zeros(4, 34, dtype=torch.int16), S, 513), ArgumentError),
        (lambda: codec.embedding_decode(torch.zeros(4, 34), S, 300), FormatError),
        (lambda: codec.embedding_decode(torch.zeros(4, 34, dtype=torch.int16), S[:, :128], 300), FormatError),
        (lambda: codec.embedding_encode(torch.zeros(4, 34), 0), ArgumentError),
        (lambda: codec.embedding_encode(torch.zeros(4, 34), 4, S), ArgumentError),
        (lambda: codec.ngram_decode(torch.zeros(4, 11, dtype=torch.int16), LONG[3], torch.zeros(1, 160), LONG[1]), FormatError),
        (lambda: codec.ngram_decode(torch.zeros(1, 11, dtype=torch.int16), 0 * LONG[1], torch.zeros(1, 160), LONG[1]), ArgumentError),
        (lambda: codec.ngram_rows(LONG[1], LONG[3], LONG[3], LONG[3], 0), ArgumentError),
    ],
)
def test_typed_errors(call, error):
    with pytest.raises(error):
        call()
