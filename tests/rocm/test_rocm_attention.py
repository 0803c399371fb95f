"""RDNA's attention, of few and of many tokens, on CPU fibers against exl3.ops.reference: head sizes, groups, caches, windows, sinks."""

from __future__ import annotations

import pytest
import torch
from harness import Library, relative
from test_portable import make_batch, make_cache

from exl3.ops import reference

CASES = [
    # dim, heads, kv, k bits, v bits, window, softcap, sinks
    (64, 4, 4, 16, 16, 0, 0.0, False),
    (128, 6, 1, 16, 16, 0, 0.0, True),  # two blocks of queries, the second half empty
    (128, 4, 2, 4, 4, 0, 0.0, False),
    (96, 3, 1, 8, 3, 30, 20.0, True),
    (32, 2, 1, 7, 2, 0, 0.0, False),
    (256, 3, 1, 16, 6, 0, 0.0, False),
    (512, 2, 1, 5, 16, 25, 0.0, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(lib: Library, case: tuple) -> None:
    dim, heads, kv, k_bits, v_bits, window, softcap, with_sinks = case
    torch.manual_seed(0)
    c = make_cache(lib, kv, dim, k_bits, v_bits)
    full = make_batch(lib, [(0, 70), (0, 260)], padding=0)
    k, v = (torch.randn(len(full.positions), kv, dim).half() for _ in range(2))
    reference.cache_append(c, k, v, full)
    # two tokens, one token (across a page where the window hides the rest), padding
    b = make_batch(lib, [(68, 2), (258 if window else 20, 1)], padding=1)
    q = torch.randn(len(b.positions), heads, dim).half()
    sinks = torch.randn(heads) if with_sinks else None
    y = lib.attention(q, c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    want = reference.attention(q.float(), c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    assert relative(y, want) < 2e-3
    assert not bool(y[-1:].any()) and lib.clean("attention")
    assert torch.equal(y, lib.attention(q, c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks))


PREFILL = [
    # dim, heads, kv, k bits, v bits, window, softcap, sinks, first position of the long row
    (64, 9, 3, 16, 16, 0, 0.0, False, 7),  # two heads a block, the second of the last chunk missing
    (128, 4, 1, 4, 6, 0, 0.0, True, 0),
    (96, 2, 2, 8, 3, 20, 30.0, False, 200),  # one head a block, 64 tokens; the window ends amid a page
    (32, 8, 1, 16, 5, 0, 0.0, False, 230),  # across a page
    (256, 2, 1, 16, 16, 0, 0.0, True, 3),
    (224, 1, 1, 3, 16, 25, 0.0, False, 40),
]


@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_prefill(gemm: Library, case: tuple) -> None:
    """A step of one long row between single tokens of others and padding: each group of tokens goes one way or the other."""
    dim, heads, kv, k_bits, v_bits, window, softcap, with_sinks, start = case
    torch.manual_seed(0)
    c = make_cache(gemm, kv, dim, k_bits, v_bits, pages=6)
    rows = [(5, 1), (start, 75), (60, 2)]
    full = make_batch(gemm, [(0, first + count) for first, count in rows], padding=0)
    k, v = (torch.randn(len(full.positions), kv, dim).half() for _ in range(2))
    reference.cache_append(c, k, v, full)
    b = make_batch(gemm, rows, padding=5)
    q = (torch.randn(len(b.positions), heads, dim) * 2).half()
    sinks = torch.randn(heads) if with_sinks else None
    y = gemm.attention(q, c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    want = reference.attention(q.float(), c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    for row in range(3):
        mine = b.token_row == row
        assert relative(y[mine], want[mine]) < 2e-3, row
    assert not bool(y[-5:].any()) and gemm.clean("attention")
