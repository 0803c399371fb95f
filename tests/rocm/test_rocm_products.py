"""RDNA's products on CPU fibers against x @ dequant(W) in float64: every rate and codebook, both matrix layouts and none, all epilogues."""

from __future__ import annotations

import pytest
import torch
from harness import Library, exact_weight, random_weight, relative

from exl3.ops import reference

RATES = [("mul1", k) for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)] + [(c, k) for c in ("mcg", "3inst") for k in range(1, 9)]
EXACT = 1e-3  # relative RMS; activations travel as halves


def exact(x: torch.Tensor, w: dict, norm: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    h = x.double()
    if norm is not None:
        h = reference.rms_norm(h, norm.double(), eps)
    y = h @ exact_weight(w)
    return y if w["bias"] is None else y + w["bias"].double()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("codebook,K", RATES, ids=str)
def test_few_rows(lib: Library, codebook: str, K: float) -> None:
    w = random_weight(300, 200, K, codebook, "cpu")
    x = torch.randn(5, 300)
    y = lib.linear(x, [w], dtype=torch.float32)[0]
    assert relative(y, exact(x, w)) < EXACT
    for rows in (1, 2, 3):  # one row gives the same bits whatever stands beside it
        assert torch.equal(lib.linear(x[:rows].contiguous(), [w], dtype=torch.float32)[0], y[:rows])
    assert lib.clean("linear")


@pytest.mark.parametrize("codebook,K", RATES[:11] + RATES[11:19], ids=str)
def test_many_rows(gemm: Library, codebook: str, K: float) -> None:
    w = random_weight(200, 128, K, codebook, "cpu")
    x = torch.randn(35, 200)
    assert relative(gemm.linear(x, [w], dtype=torch.float32)[0], exact(x, w)) < EXACT
    assert gemm.clean("linear")


def test_many_rows_of_the_oldest_codebook(gemm: Library) -> None:
    w = random_weight(128, 128, 4, "3inst", "cpu")
    x = torch.randn(70, 128)  # two tiles of rows
    assert relative(gemm.linear(x, [w], dtype=torch.float32)[0], exact(x, w)) < EXACT


@pytest.mark.parametrize("rows", [1, 7, 12, 20])
def test_groups(lib: Library, rows: int) -> None:
    """Matrices of different widths and rates in one call, a norm before them, own or shared input scales."""
    kinds = ((256, 4, "mul1"), (128, 4, "mul1"), (100, 3, "mul1"), (128, 4, "mcg"))
    ws = [random_weight(256, n, K, c, "cpu", seed=n, bias=n == 128) for n, K, c in kinds]
    norm, x = torch.rand(256) + 0.5, torch.randn(rows, 256) * 30
    for shared in (False, True):
        if shared:
            ws = [dict(w, suh=ws[0]["suh"]) for w in ws]
        for y, w in zip(lib.linear(x, ws, norm=norm), ws):
            assert relative(y, exact(x, w, norm)) < EXACT
    assert lib.clean("linear")


@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("rates", [(4, 4), (2, 3)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation(gemm: Library, rows: int, rates: tuple[int, int], activation: str) -> None:
    if rows == 2 and "gemv" not in gemm_kinds(gemm):
        pytest.skip("this mock has the products of many rows only")
    gate, up = (random_weight(128, 200, K, "mul1", "cpu", seed=s, bias=True) for s, K in enumerate(rates))
    x = torch.randn(rows, 128)
    y = gemm.linear(x, [gate, up], activation=activation, dtype=torch.float32)[0]
    assert relative(y, reference.activate(exact(x, gate), activation) * exact(x, up)) < 2 * EXACT
    assert gemm.clean("linear")


def gemm_kinds(library: Library) -> str:
    return "gemv gemm" if b"gfx11" in library.table.describe(0) else "gemm"


@pytest.mark.parametrize("rows", [3, 18])
def test_accumulate_and_dtypes(lib: Library, rows: int) -> None:
    w = random_weight(256, 200, 4, "mul1", "cpu")
    x = torch.randn(rows, 260).half()[:, :256]
    out = torch.randn(rows, 210)[:, :200]
    want = out.double() + exact(x, w)
    lib.linear(x, [w], outs=[out], accumulate=True)
    assert relative(out, want) < EXACT
    for dtype, limit in ((torch.float16, EXACT), (torch.bfloat16, 4e-3)):
        assert relative(lib.linear(x.to(dtype), [w], dtype=dtype)[0], exact(x.to(dtype), w)) < limit


@pytest.mark.parametrize("scale", [1e-6, 1e5])
def test_ranges(lib: Library, scale: float) -> None:
    """Tiny and huge inputs, one channel a thousand times the others, a row of zeros, all values alike; NaN stays NaN."""
    for codebook in ("mul1", "mcg"):
        w = random_weight(512, 128, 4, codebook, "cpu")
        for rows in (1, 20):
            x = torch.randn(rows, 512) * scale
            x[:, 77] *= 1000
            assert relative(lib.linear(x, [w], dtype=torch.float32)[0], exact(x, w)) < EXACT
            x[0] = 1
            assert relative(lib.linear(x[:1], [w], dtype=torch.float32)[0], exact(x[:1], w)) < EXACT
            x[0] = 0
            assert not bool(lib.linear(x, [w], dtype=torch.float32)[0][0].any())
            x[0, 3] = float("nan")
            assert bool(lib.linear(x, [w], dtype=torch.float32)[0][0].isnan().all())


def test_nothing_outside_is_read_or_written(lib: Library) -> None:
    """A trellis that ends with its memory: the last lanes' words must not lie behind it (run under the address checks of mprotect)."""
    import ctypes
    import mmap

    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    for K in (1, 1.5, 3, 3.5, 5, 6, 7):
        w = random_weight(128, 128, K, "mul1", "cpu")
        size = w["trellis"].nbytes
        span = -(-size // page) * page
        memory = mmap.mmap(-1, span + page)
        buffer = (ctypes.c_char * (span + page)).from_buffer(memory)
        start = ctypes.addressof(buffer)
        assert not libc.mprotect(ctypes.c_void_p(start + span), page, 0)
        ctypes.memmove(start + span - size, w["trellis"].data_ptr(), size)
        whole = torch.frombuffer(memory, dtype=torch.int16, count=size // 2, offset=span - size)
        guarded = dict(w, trellis=whole.view(w["trellis"].shape))
        for rows in (1, 17):
            x = torch.randn(rows, 128)
            assert torch.equal(lib.linear(x, [guarded])[0], lib.linear(x, [w])[0])
        libc.mprotect(ctypes.c_void_p(start + span), page, 3)


def test_refusals(lib: Library) -> None:
    w = random_weight(128, 128, 4, "mul1", "cpu")
    x = torch.randn(1, 128)
    with pytest.raises(RuntimeError, match="does not exist"):
        lib.linear(x, [dict(random_weight(128, 128, 2.5, "mul1", "cpu"), codebook="mcg")])
    with pytest.raises(RuntimeError, match="fp32"):
        lib.linear(x, [w], accumulate=True)
    with pytest.raises(RuntimeError, match="xielu"):
        lib.linear(x, [w, w], activation="xielu")
