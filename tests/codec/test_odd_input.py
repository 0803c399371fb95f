"""Whatever comes in, a function of the codec answers or raises an Exl3Error: nothing else, and no crash."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3 import codec
from exl3.errors import Exl3Error

DTYPES = [torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool]
DTYPES += [torch.uint8, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 33, 40, 128]), max_size=4))
    while torch.Size(shape).numel() > 40_000:
        shape[shape.index(max(shape))] = 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 1.0, 1e5, float("inf")]))
    x = torch.nan_to_num(x, nan=0.0, posinf=7e4, neginf=-7e4) if draw(st.booleans()) else x
    x = x.to(draw(st.sampled_from(DTYPES)))
    if x.dim() > 1 and draw(st.booleans()):
        x = x.transpose(0, 1)
    return x[..., ::2] if x.dim() and draw(st.booleans()) else x


ANYTHING = st.one_of(tensors(), tensors(), st.sampled_from([None, 1.5, "x", -1, True, [1], float("nan")]))
RATE = st.sampled_from([*codec.RATES, 0, 9, 4.5, -1, "4", None, True, float("nan"), float("inf")])
CODEBOOK = st.sampled_from([*codec.CODEBOOKS, "MUL1", None, 3])
MULTIPLIER = st.sampled_from([None, None, 0, -1, 2**32, 1.5, "7", True])
SIZE = st.sampled_from([1, 2, 32, 128, 3, 0, -1, None, 2.0])
DIM = st.sampled_from([0, 1, -1, 5, None])
BITS = st.sampled_from([1, 2, 3, 8, 9, None, 4.0, True])
COMPAND = st.sampled_from([0, 0.65, 1, 2, -1, float("nan"), None])

CALLS = {
    "unpack": (ANYTHING,),
    "pack": (ANYTHING, RATE),
    "decode": (ANYTHING, CODEBOOK, MULTIPLIER),
    "dequantize": (ANYTHING, ANYTHING, ANYTHING, CODEBOOK, MULTIPLIER),
    "codebook_table": (CODEBOOK, MULTIPLIER),
    "tiles_to_matrix": (ANYTHING,),
    "matrix_to_tiles": (ANYTHING,),
    "unpack_signs": (ANYTHING,),
    "pack_signs": (ANYTHING,),
    "rotate": (ANYTHING, SIZE, DIM),
    "is_tail_biting": (ANYTHING, RATE),
    "kv_quantize": (ANYTHING, BITS, COMPAND),
    "kv_dequantize": (ANYTHING, ANYTHING, BITS, COMPAND),
    "unpack_rings": (ANYTHING, st.sampled_from([160, 256, 32, 17, 0, -16])),
    "pack_rings": (ANYTHING, ANYTHING, RATE),
    "embedding_decode": (ANYTHING, ANYTHING, st.sampled_from([0, 1, 256, -1])),
    "ngram_decode": (ANYTHING, ANYTHING, ANYTHING, ANYTHING),
    "ngram_rows": (ANYTHING, ANYTHING, ANYTHING, ANYTHING, st.just(2)),
    "rate_of_width": (st.sampled_from([0, 16, 24, 17, -16, 1000, None, "x", 16.0]),),
    "check_rate": (RATE,),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_answers_or_typed_error(name, data):
    arguments = [data.draw(strategy) for strategy in CALLS[name]]
    with contextlib.suppress(Exl3Error):
        getattr(codec, name)(*arguments)


@given(
    K=st.sampled_from(codec.RATES),
    codebook=st.sampled_from(codec.CODEBOOKS),
    blocks=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    scale=st.sampled_from([0.0, 1e-7, 1.0, 6e4]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_every_bit_pattern_is_a_weight(K, codebook, blocks, scale, seed):
    """Any trellis and finite scales give finite weights, and x @ W is the cheap way round as well."""
    generator = torch.Generator().manual_seed(seed)
    trellis = torch.randint(-32768, 32768, (8 * blocks[0], 8 * blocks[1], int(16 * K)), dtype=torch.int16, generator=generator)
    suh = (torch.randn(128 * blocks[0], generator=generator) * scale).clamp(-6e4, 6e4).half()
    svh = torch.randn(128 * blocks[1], generator=generator).half()
    if K != int(K) and codebook != "mul1":
        with pytest.raises(Exl3Error):
            codec.dequantize(trellis, suh, svh, codebook)
        return
    w = codec.dequantize(trellis, suh, svh, codebook)
    assert torch.isfinite(w).all()
    x = torch.randn(3, 128 * blocks[0], generator=generator)
    y = codec.rotate(codec.rotate(x * suh.float()) @ codec.decode(trellis, codebook).float()) * svh.float()
    assert (x @ w - y).norm() <= 1e-5 * y.norm() + 1e-30
