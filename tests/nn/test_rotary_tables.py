"""Inverse frequencies of every rope kind against values worked out by hand (rotary dim 16, theta 1e4) and against fp64 formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from exl3.cache import Batch
from exl3.errors import FormatError, UnsupportedError
from exl3.nn import Rotary, rope_parameters
from exl3.nn.rotary import frequencies


def settings(**keys: Any) -> dict[str, Any]:
    return rope_parameters({"rope_theta": 1e4, "rope_scaling": keys or None, "max_position_embeddings": 64})


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
FIRST_FOUR = [
    ({}, None, [1, 0.316228, 0.1, 0.0316228], 1.0),
    ({"type": "linear", "factor": 4}, None, [0.25, 0.0790569, 0.025, 0.00790569], 1.0),
    (LLAMA3, None, [1, 0.244385, 0.013042, 0.00395285], 1.0),
    (YARN, None, [1, 0.237171, 0.05, 0.00790569], 1.138629),
    (YARN | {"factor": 16}, None, None, 1.277259),
    ({"rope_type": "dynamic", "factor": 2}, 128, [1, 0.270296, 0.07306, 0.0197478], 1.0),
    ({"rope_type": "dynamic", "factor": 2}, 64, [1, 0.316228, 0.1, 0.0316228], 1.0),
]


@pytest.mark.parametrize(("keys", "length", "expected", "scale"), FIRST_FOUR)
def test_known_values(keys: dict[str, Any], length: int | None, expected: list[float] | None, scale: float) -> None:
    inv_freq, factor = frequencies(settings(**keys), 16, length)
    assert inv_freq.dtype == torch.float32 and inv_freq.shape == (8,)
    assert factor == pytest.approx(scale, rel=1e-6)
    if expected is not None:
        assert inv_freq[:4].tolist() == pytest.approx(expected, rel=2e-5)  # as many digits as the values have


def test_llama3_formula() -> None:
    inv_freq, _ = frequencies(settings(**LLAMA3), 16)
    for i in range(8):
        f = 1e4 ** (-2 * i / 16)
        wavelength = 2 * math.pi / f
        if wavelength < 64 / 4:
            expected = f
        elif wavelength > 64 / 1:
            expected = f / 8
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * f / 8 + smooth * f
        assert float(inv_freq[i]) == pytest.approx(expected, rel=1e-6)


def test_dynamic_base() -> None:
    inv_freq, _ = frequencies(settings(rope_type="dynamic", factor=2), 16, 128)
    assert inv_freq.double().tolist() == pytest.approx([35097.92 ** (-2 * i / 16) for i in range(8)], rel=1e-6)


def test_longrope() -> None:
    short, long = [1.0 + i for i in range(8)], [10.0 + i for i in range(8)]
    keys = {"type": "su", "short_factor": short, "long_factor": long, "original_max_position_embeddings": 64, "factor": 4.0}
    base = [1e4 ** (-2 * i / 16) for i in range(8)]
    for length, factors in ((None, short), (64, short), (65, long)):
        inv_freq, scale = frequencies(settings(**keys), 16, length)
        assert scale == pytest.approx(1.154701, rel=1e-6)
        assert inv_freq.double().tolist() == pytest.approx([b / f for b, f in zip(base, factors)], rel=1e-6)
    with pytest.raises(FormatError, match="long_factor needs 8 numbers above 0, has 3"):
        frequencies(settings(**keys | {"long_factor": [1, 2, 3]}), 16)


def test_yarn_mscales_and_given_factor() -> None:
    assert frequencies(settings(**YARN, mscale=1.0, mscale_all_dim=1.0), 16)[1] == 1.0
    expected = (0.1 * 0.5 * math.log(4) + 1) / (0.1 * 2.0 * math.log(4) + 1)
    assert frequencies(settings(**YARN, mscale=0.5, mscale_all_dim=2.0), 16)[1] == pytest.approx(expected, rel=1e-9)
    assert frequencies(settings(**YARN, attention_factor=1.5), 16)[1] == 1.5


def test_yarn_without_truncation() -> None:
    dim, base, trained = 16, 1e4, 64
    ends = [dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    inv_freq, _ = frequencies(settings(**YARN, truncate=False), 16)
    for i in range(8):
        ramp = min(max((i - low) / (high - low), 0), 1)
        f = base ** (-2 * i / dim)
        assert float(inv_freq[i]) == pytest.approx(f * (1 - ramp) + f / 4 * ramp, rel=1e-6)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_kind_is_named(key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'spiral'.*default, linear, dynamic, llama3, yarn, longrope"):
        Rotary(settings(**{key: "spiral"}), 16)


def test_missing_key_is_named() -> None:
    with pytest.raises(FormatError, match="'llama3' needs low_freq_factor, high_freq_factor"):
        Rotary(settings(rope_type="llama3", factor=8.0), 16)


@pytest.mark.parametrize("partial", [0.0625, 1.5])
def test_impossible_rotary_dimension(partial: float) -> None:
    with pytest.raises(FormatError, match="rotary dimension"):
        Rotary(rope_parameters({"partial_rotary_factor": partial}), 16)


def test_spellings_agree() -> None:
    old = rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5})
    new = rope_parameters({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}})
    by_kind = rope_parameters({"rope_parameters": {"full_attention": {**new}, "sliding_attention": {"rope_theta": 1.0}}}, "full_attention")
    assert old == new == by_kind


def batch(lengths: list[int]) -> Batch:
    rows = [torch.arange(n, dtype=torch.int32) for n in lengths]
    return Batch(
        ids=torch.zeros(sum(lengths), dtype=torch.int32),
        positions=torch.cat(rows),
        token_row=torch.cat([torch.full_like(row, r) for r, row in enumerate(rows)]),
        row_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )


def test_longrope_chooses_by_row() -> None:
    """One packed batch, a short row and a long one: each has the table of its own length."""
    keys = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    rotary = Rotary(settings(**keys), 16)
    b = batch([10, 70])
    cos, sin = rotary.table(b)
    assert rotary.table(b)[0] is cos  # computed once a step
    for rows, factor in ((slice(0, 10), 1.0), (slice(10, 80), 4.0)):
        angle = b.positions[rows].double()[:, None] * (1e4 ** (-torch.arange(0, 16, 2).double() / 16) / factor)
        assert torch.allclose(cos[rows].double(), angle.cos() * 1.154701, atol=1e-5)
        assert torch.allclose(sin[rows].double(), angle.sin() * 1.154701, atol=1e-5)


def test_over_a_cache_the_context_decides() -> None:
    keys = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    for max_tokens, factor in ((64, 1.0), (65, 4.0)):
        rotary = Rotary(settings(**keys), 16)
        rotary.max_tokens = max_tokens
        b = batch([10])
        b.cache = object()  # type: ignore[assignment]
        cos, _ = rotary.table(b)
        angle = b.positions.double()[:, None] * (1e4 ** (-torch.arange(0, 16, 2).double() / 16) / factor)
        assert torch.allclose(cos.double(), angle.cos() * 1.154701, atol=1e-5)
