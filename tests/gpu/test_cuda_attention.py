"""Attention of libexl3_cuda on a card against a softmax in float64 over the stored values: decode steps and prefill chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Library, relative
from test_portable import make_batch, make_cache

from exl3.ops import reference

DIMS = (64, 96, 128, 192, 256)
DRAFTS = [(295, 5), (39, 1), (0, 1)]  # a draft of five tokens, a single one, the very first
CHUNKS = [(250, 50), (10, 31)]  # more tokens than a recorded step has: the prefill kernel

pytestmark = pytest.mark.gpu


def exact(q: torch.Tensor, c: Any, b: Any, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: Any = None) -> torch.Tensor:
    """The formula in float64, token by token."""
    y = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // c.kv_heads
    rows: dict[int, Any] = {}
    for t, (row, p) in enumerate(zip(b.token_row.tolist(), b.positions.tolist())):
        if row < 0:
            continue
        if row not in rows:
            n = max(at for r, at in zip(b.token_row.tolist(), b.positions.tolist()) if r == row) + 1
            rows[row] = [x.repeat_interleave(group, 1) for x in reference.cache_read(c, b.block_table[row], 0, n, torch.float64)]
        first = max(0, p - window + 1) if window else 0
        k, v = (x[first : p + 1] for x in rows[row])
        s = torch.einsum("hd,phd->hp", q[t].double(), k) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        extra = s.new_full((s.shape[0], 1), -torch.inf) if sinks is None else sinks.double()[:, None]
        w = torch.cat([s, extra], 1).softmax(1)[:, :-1]
        y[t] = torch.einsum("hp,phd->hd", w, v)
    return y


def filled(
    lib: Library, dim: int, kv: int, bits: tuple[int, int], runs: list[tuple[int, int]], pages: int = 0, compand: float = 0.0
) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A cache that holds all positions the runs see and NaN elsewhere, and the batch of the runs with two padding tokens."""
    pages = pages or 2 * len(runs)
    c = make_cache(lib, kv, dim, *bits, compand, pages=pages)
    for t in (c.k_scale, c.v_scale):
        if t is not None:
            t.fill_(float("nan"))
    full = make_batch(lib, [(0, first + n) for first, n in runs], pages=pages, padding=0)
    k, v = (torch.randn(len(full.positions), kv, dim, device=lib.device).half() for _ in range(2))
    reference.cache_append(c, k, v, full)
    return c, make_batch(lib, runs, pages=pages, padding=2)


def check(
    lib: Library,
    dim: int,
    heads: int,
    kv: int,
    bits: tuple[int, int],
    runs: list[tuple[int, int]],
    *,
    pages: int = 0,
    compand: float = 0.0,
    dtype: torch.dtype = torch.float16,
    with_sinks: bool = False,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    c, b = filled(lib, dim, kv, bits, runs, pages, compand)
    q = torch.randn(len(b.positions), heads, dim, device=lib.device).to(dtype)
    options |= {"scale": dim**-0.5, "sinks": torch.randn(heads, device=lib.device) if with_sinks else None}
    y = lib.attention(q, c, b, **options)
    assert relative(y, exact(q, c, b, **options)) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    assert not bool(y[-2:].any())
    assert torch.equal(y, lib.attention(q, c, b, **options)) and lib.clean("attention")


@pytest.mark.parametrize("runs", [DRAFTS, CHUNKS], ids=["decode", "prefill"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("dim", DIMS)
def test_head_sizes_and_bits(cuda: Library, dim: int, bits: int, runs: list) -> None:
    check(cuda, dim, 4, 2, (bits, bits), runs)


@pytest.mark.parametrize("runs", [DRAFTS, CHUNKS], ids=["decode", "prefill"])
@pytest.mark.parametrize("bits", [(16, 4), (2, 16), (8, 3), (5, 7)])
def test_keys_and_values_of_different_bits(cuda: Library, bits: tuple[int, int], runs: list) -> None:
    check(cuda, 128, 4, 1, bits, runs)


@pytest.mark.parametrize("runs", [DRAFTS, CHUNKS], ids=["decode", "prefill"])
@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_compander(cuda: Library, bits: int, runs: list) -> None:
    check(cuda, 128, 2, 1, (bits, bits), runs, compand=0.65)


@pytest.mark.parametrize("runs", [DRAFTS, CHUNKS], ids=["decode", "prefill"])
@pytest.mark.parametrize("bits", [4, 5, 16])
@pytest.mark.parametrize(
    "window,softcap,sinks", [(1, 0, True), (16, 0, False), (17, 0, True), (64, 20.0, False), (65, 5.0, True), (130, 0, True)]
)
def test_windows_soft_caps_sinks(cuda: Library, window: int, softcap: float, sinks: bool, bits: int, runs: list) -> None:
    check(cuda, 128, 4, 1, (bits, bits), runs, window=window, softcap=softcap, with_sinks=sinks)


@pytest.mark.parametrize("heads,kv", [(1, 1), (3, 1), (12, 1), (32, 1), (40, 8), (7, 7)])
@pytest.mark.parametrize("runs", [DRAFTS, CHUNKS], ids=["decode", "prefill"])
def test_groups_of_heads(cuda: Library, heads: int, kv: int, runs: list) -> None:
    for bits in (4, 16):
        check(cuda, 64, heads, kv, (bits, bits), runs)


@pytest.mark.parametrize("bits", [4, 8, 6, 16])
def test_long_rows(cuda: Library, bits: int) -> None:
    check(cuda, 128, 8, 2, (bits, bits), [(5000, 2), (3999, 1), (700, 4)], pages=60)
    check(cuda, 128, 8, 2, (bits, bits), [(5000, 100), (3999, 1), (700, 40)], pages=66)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_types(cuda: Library, dtype: torch.dtype) -> None:
    for runs in (DRAFTS, CHUNKS):
        check(cuda, 128, 4, 2, (16, 16), runs, dtype=dtype)


@pytest.mark.parametrize("bits", [4, 5, 16])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(cuda: Library, bits: int, tokens: int) -> None:
    same_beside_others(cuda, bits, tokens, 90 if tokens > 64 else 1)


def same_beside_others(lib: Library, bits: int, tokens: int, beside: int, dim: int = 128) -> None:
    """One row of `tokens` alone, and between rows of `beside` and 2 tokens; decode tokens also one by one."""
    torch.manual_seed(1)
    runs = [(300, beside), (600, tokens), (40, 2)]
    c, b = filled(lib, dim, 2, (bits, bits), runs, pages=12)
    q = torch.randn(len(b.positions), 8, dim, device=lib.device).half()
    mine = slice(beside, beside + tokens)

    def part(at: slice) -> SimpleNamespace:
        return SimpleNamespace(positions=b.positions[at].clone(), token_row=b.token_row[at].clone(), block_table=b.block_table)

    together = lib.attention(q, c, b, scale=0.1)[mine]
    assert torch.equal(together, lib.attention(q[mine].clone(), c, part(mine), scale=0.1))
    if tokens <= 8:
        for t in range(mine.start, mine.stop):
            one = slice(t, t + 1)
            assert torch.equal(together[t - mine.start :][:1], lib.attention(q[one].clone(), c, part(one), scale=0.1))


LONG = [(700, 3), (39, 1), (513, 8)]
FRESH: list[dict[str, Any]] = [
    {},
    {"bits": (4, 4)},
    {"bits": (8, 8), "runs": LONG},
    {"bits": (5, 3), "compand": 0.6, "runs": [(30, 3)]},
    {"bits": (16, 4), "dim": 64},
    {"dim": 64, "heads": 3, "kv": 3, "norms": True, "runs": LONG},
    {"dim": 96, "rotary": 48, "interleaved": True},
    {"dim": 96, "rotary": 96, "bits": (6, 6)},
    {"dim": 192, "rotary": 64, "norms": True, "dtype": torch.bfloat16},
    {"dim": 256, "heads": 4, "kv": 1, "norms": True, "window": 100, "runs": LONG},
    {"heads": 12, "kv": 1, "runs": [(600, 8), (100, 8)]},
    {"rotary": 0, "norms": True, "dtype": torch.float32},
    {"rotary": 0, "window": 70, "softcap": 20.0, "sinks": True, "runs": LONG},
]


def check_attend(
    lib: Library,
    dim: int = 128,
    heads: int = 4,
    kv: int = 2,
    bits: tuple[int, int] = (16, 16),
    runs: list[tuple[int, int]] = DRAFTS,
    rotary: int | None = None,
    interleaved: bool = False,
    norms: bool = False,
    compand: float = 0.0,
    dtype: torch.dtype = torch.float16,
    sinks: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Rotation, append and attention in one call, against the reference of each in float64; nothing else in the cache is touched."""
    torch.manual_seed(0)
    dev = lib.device
    c, b = filled(lib, dim, kv, bits, runs, 3 * len(runs), compand)
    tokens, rotary = len(b.positions), dim if rotary is None else rotary
    q, k, v = (torch.randn(tokens, n, dim, device=dev).to(dtype) for n in (heads, kv, kv))
    table = None
    if rotary:
        angles = b.positions[:, None].double() * 0.7 ** torch.arange(rotary // 2, device=dev)
        table = (angles.cos().float(), angles.sin().float())
    weights = tuple(torch.rand(dim, device=dev) + 0.5 for _ in range(2)) if norms else (None, None)
    options = {"scale": dim**-0.5, "window": window, "softcap": softcap, "sinks": torch.randn(heads, device=dev) if sinks else None}
    names = ("k", "v", "k_scale", "v_scale")
    want = SimpleNamespace(**{**vars(c), **{n: None if (t := getattr(c, n)) is None else t.clone() for n in names}})
    before = {n: t.clone() for n in names if (t := getattr(c, n)) is not None}
    wq, wk = q.double(), k.double()
    if rotary or norms:
        cos, sin = (None, None) if table is None else table
        reference.rotary_(wq, wk, cos, sin, rotary, interleaved=interleaved, q_norm=weights[0], k_norm=weights[1], eps=1e-6)
    wq, wk = wq.to(dtype), wk.to(dtype)
    reference.cache_append(want, wk, v, b)
    y = lib.attend(q, k, v, c, b, table, interleaved=interleaved, norms=weights if norms else None, **options)
    assert relative(y, exact(wq, c, b, **options)) < (4e-3 if dtype == torch.bfloat16 else 1.2e-3)
    assert not bool(y[-2:].any()) and lib.clean("attention")
    touched = torch.zeros(c.k.shape[0], 256, dtype=torch.bool, device=dev)
    live = b.token_row >= 0
    pages = b.block_table[b.token_row[live].long(), (b.positions[live] // 256).long()].long()
    touched[pages, (b.positions[live] % 256).long()] = True
    for name, was in before.items():
        now = getattr(c, name)
        assert torch.equal(now[~touched].view(torch.int16), was[~touched].view(torch.int16)), name
    for row in range(len(runs)):
        first, n = runs[row]
        got = reference.cache_read(c, b.block_table[row], first, n, torch.float64)
        expected = reference.cache_read(want, b.block_table[row], first, n, torch.float64)
        for side in range(2):  # a code next to a border may fall on its other side
            assert relative(got[side], expected[side]) < (2e-3 if bits[side] == 16 else 0.5 / 2 ** bits[side])


def attend_beside_others(lib: Library, bits: int, dim: int = 128) -> None:
    """A draft of five tokens beside other rows leaves the same output and cache, bit for bit, as its tokens one by one."""
    torch.manual_seed(1)
    runs = [(300, 1), (600, 5), (254, 4)]
    c, b = filled(lib, dim, 2, (bits, bits), runs, pages=12)
    names = ("k", "v", "k_scale", "v_scale")
    other = SimpleNamespace(**{**vars(c), **{n: None if (t := getattr(c, n)) is None else t.clone() for n in names}})
    tokens = len(b.positions)
    q, k, v = (torch.randn(tokens, n, dim, device=lib.device).half() for n in (8, 2, 2))
    angles = b.positions[:, None].double() * 0.7 ** torch.arange(dim // 2, device=lib.device)
    table = (angles.cos().float(), angles.sin().float())
    together = lib.attend(q, k, v, c, b, table, scale=0.1)
    for t in range(10):
        at = slice(t, t + 1)
        alone = SimpleNamespace(positions=b.positions[at].clone(), token_row=b.token_row[at].clone(), block_table=b.block_table)
        y = lib.attend(q[at], k[at], v[at], other, alone, (table[0][at].clone(), table[1][at].clone()), scale=0.1)
        assert torch.equal(together[at], y), t
    for name in names:
        if getattr(c, name) is not None:
            assert torch.equal(getattr(c, name).view(torch.int16), getattr(other, name).view(torch.int16)), name


@pytest.mark.parametrize("case", FRESH, ids=str)
def test_attend(cuda: Library, case: dict) -> None:
    check_attend(cuda, **case)


@pytest.mark.parametrize("bits", [4, 8, 3, 16])
def test_attend_gives_a_row_the_same_bits(cuda: Library, bits: int) -> None:
    attend_beside_others(cuda, bits)


@pytest.mark.parametrize("bits", [4, 16])
def test_attend_of_a_prefill_chunk_and_of_a_head_without_a_kernel(cuda: Library, bits: int) -> None:
    check_attend(cuda, runs=CHUNKS, bits=(bits, bits), norms=True)
    check_attend(cuda, dim=160, bits=(bits, bits))
