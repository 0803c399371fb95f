"""The EXL3 product against x @ dequant(W) in float64: every rate and codebook, 1 to many rows, odd sizes, all epilogues."""

from __future__ import annotations

import pytest
import torch
from harness import Library, exact_weight, random_weight, relative

from exl3.ops import reference

RATES = [("mul1", k) for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)] + [
    (c, k) for c in ("mcg", "3inst") for k in (1, 2, 3, 4, 5, 6, 7, 8)
]
EXACT = 1e-3  # relative RMS the contract allows; fp16 results alone cost 2e-4


def exact(x: torch.Tensor, w: dict, norm: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    h = x.cpu().double()
    if norm is not None:
        h = reference.rms_norm(h, norm.cpu().double(), eps)
    y = h @ exact_weight(w)
    return y if w["bias"] is None else y + w["bias"].cpu().double()


def check_alone(cuda: Library, w: dict, x: torch.Tensor, y: torch.Tensor, planes: int = 2) -> None:
    """A row has the same bits whatever stands beside it: among few rows, and from there up to 64."""
    few = 8 if w["codebook"] != "mul1" else 4 if planes else 0
    beside = 1 if len(x) <= few else few + 1  # the fewest rows of the same kind of product
    if len(x) <= 64:
        assert torch.equal(cuda.linear(x[-beside:].contiguous(), [w], planes=planes)[0], y[-beside:]), len(x)


def test_emulated_small(emulated: Library) -> None:
    """The portable product, on the emulator (the card's tests below cover the rest)."""
    torch.manual_seed(1)
    a, b = (random_weight(200, n, K, "mul1", "cpu", bias=True, seed=n) for n, K in ((130, 3), (256, 2.5)))
    x = torch.randn(5, 200)
    norm = torch.rand(200)
    for y, w in zip(emulated.linear(x, [a, b], norm=norm, dtype=torch.float32), (a, b)):
        assert relative(y, exact(x, w, norm)) < 1e-5
    b = dict(random_weight(200, 130, 4, "mcg", "cpu", seed=5), suh=a["suh"])
    out = torch.randn(5, 130)
    want = out.double() + torch.nn.functional.silu(exact(x, a)) * exact(x, b)
    emulated.linear(x, [a, b], activation="silu", outs=[out], accumulate=True)
    assert relative(out, want) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("codebook,K", RATES, ids=str)
def test_rates(cuda: Library, codebook: str, K: float) -> None:
    """Every rate and codebook at every kind of row count, at an odd size; outputs poisoned; a second run gives the same bits."""
    torch.manual_seed(int(2 * K))
    w = random_weight(1000, 700, K, codebook, "cuda", bias=True)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40):
        x = torch.randn(rows, 1000, device="cuda").half()
        y = cuda.linear(x, [w])[0]
        want = exact(x, w)
        assert relative(y, want) < EXACT, rows
        assert torch.equal(y, cuda.linear(x, [w])[0]) and cuda.clean("linear")
        check_alone(cuda, w, x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("n_in,n_out", [(4096, 1024), (2048, 5120), (4096, 4096), (8192, 5376)])
@pytest.mark.parametrize("codebook", ["mul1", "mcg"])
def test_shared_column_groups(cuda: Library, codebook: str, n_in: int, n_out: int) -> None:
    """Several blocks share a column group, or one has parts of several: right sums, and the same bits for a row alone. With the last two on
    132 multiprocessors one row is rotated by the product and all of them by a kernel before it (mcg, mul1)."""
    torch.manual_seed(n_in)
    w = random_weight(n_in, n_out, 4, codebook, "cuda", bias=True)
    want = exact_weight(w)
    for rows in (1, 3, 4, 5, 8, 33):
        x = torch.randn(rows, n_in, device="cuda").half()
        y = cuda.linear(x, [w])[0]
        assert relative(y, x.cpu().double() @ want + w["bias"].cpu().double()) < EXACT, rows
        assert torch.equal(y, cuda.linear(x, [w])[0]) and cuda.clean("linear")
        check_alone(cuda, w, x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("planes,limit", [(2, EXACT), (1, 2e-2), (0, EXACT)])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 30])
def test_planes(cuda: Library, planes: int, limit: float, rows: int) -> None:
    torch.manual_seed(3)
    w = random_weight(1024, 512, 4, "mul1", "cuda")
    x = torch.randn(rows, 1024, device="cuda")
    y = cuda.linear(x, [w], planes=planes)[0]
    assert relative(y, exact(x, w)) < limit
    check_alone(cuda, w, x, y, planes)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 12, 33, 130])
@pytest.mark.parametrize("codebook", ["mul1", "mcg"])
def test_groups(cuda: Library, rows: int, codebook: str) -> None:
    """Four matrices of different widths and rates in one call, a norm before them, own or shared input scales."""
    torch.manual_seed(rows)
    sizes = [(896, 4), (128, 4), (256, 4), (300, 3)]
    ws = [random_weight(896, n, K, codebook, "cuda", seed=n, bias=n == 128) for n, K in sizes]
    norm = torch.rand(896, device="cuda") + 0.5
    x = torch.randn(rows, 896, device="cuda") * 30
    for shared in (False, True):
        if shared:
            ws = [dict(w, suh=ws[0]["suh"]) for w in ws]
        for y, w in zip(cuda.linear(x, ws, norm=norm), ws):
            assert relative(y, exact(x, w, norm)) < EXACT
    assert cuda.clean("linear")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 20, 70])
@pytest.mark.parametrize("codebook,K", [("mul1", 4), ("3inst", 2), ("mul1", 2.5)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation(cuda: Library, rows: int, codebook: str, K: float, activation: str) -> None:
    torch.manual_seed(rows)
    gate, up = (random_weight(640, 900, K, codebook, "cuda", seed=s, bias=True) for s in (1, 2))
    x = torch.randn(rows, 640, device="cuda").half()
    for shared in (False, True):
        if shared:
            up = dict(up, suh=gate["suh"])
        y = cuda.linear(x, [gate, up], activation=activation)[0]
        want = reference.activate(exact(x, gate), activation) * exact(x, up)
        assert relative(y, want) < 2 * EXACT


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 24, 100])
def test_accumulate(cuda: Library, rows: int) -> None:
    torch.manual_seed(rows)
    w = random_weight(2048, 1024, 4, "mul1", "cuda")
    x = torch.randn(rows, 2100, device="cuda").half()[:, :2048]
    out = torch.randn(rows, 1100, device="cuda")[:, :1024]
    want = out.cpu().double() + exact(x, w)
    cuda.linear(x, [w], outs=[out], accumulate=True)
    assert relative(out, want) < EXACT


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("y_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(cuda: Library, x_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = random_weight(512, 384, 3, "mul1", "cuda")
    for rows in (1, 6, 11, 200):
        x = torch.randn(rows, 512, device="cuda").to(x_dtype)
        assert relative(cuda.linear(x, [w], dtype=y_dtype)[0], exact(x, w)) < (4e-3 if y_dtype == torch.bfloat16 else EXACT)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_ranges(cuda: Library, scale: float) -> None:
    """Tiny and huge inputs, and one channel a thousand times the others, keep their precision."""
    torch.manual_seed(0)
    for codebook in ("mul1", "mcg"):
        w = random_weight(4096, 256, 4, codebook, "cuda")
        for rows in (1, 8, 32, 128, 300):
            x = torch.randn(rows, 4096, device="cuda") * scale
            x[:, 77] *= 1000
            assert relative(cuda.linear(x, [w], dtype=torch.float32)[0], exact(x, w)) < EXACT
            x[0] = 0
            assert not bool(cuda.linear(x, [w], dtype=torch.float32)[0][0].any())


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(cuda: Library, value: float) -> None:
    """NaN and Inf in a row come out as such; other rows are untouched."""
    torch.manual_seed(0)
    for codebook in ("mul1", "mcg"):
        w = random_weight(1024, 256, 4, codebook, "cuda")
        for rows in (2, 5, 20, 200):
            x = torch.randn(rows, 1024, device="cuda")
            clean = cuda.linear(x, [w], dtype=torch.float32)[0]
            x[1, 77] = value
            y = cuda.linear(x, [w], dtype=torch.float32)[0]
            assert not bool(y[1].isfinite().any())
            assert torch.equal(y[0], clean[0]) and torch.equal(y[2:], clean[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("n_in,n_out", [(128, 128), (14336, 256), (256, 8320), (128, 40000), (28672, 128), (100, 60)])
def test_shapes(cuda: Library, n_in: int, n_out: int) -> None:
    torch.manual_seed(0)
    for codebook, K in (("mul1", 4), ("mcg", 6), ("mul1", 8)):
        w = random_weight(n_in, n_out, K, codebook, "cuda")
        for rows in (1, 2, 8, 16, 48, 150):
            x = torch.randn(rows, n_in, device="cuda").half()
            assert relative(cuda.linear(x, [w])[0], exact(x, w)) < EXACT, (codebook, K, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 65, 127, 256, 300, 700])
@pytest.mark.parametrize("codebook,K", [("mul1", 4), ("mul1", 3), ("mcg", 4), ("3inst", 8), ("mul1", 1.5), ("mul1", 7)])
def test_prefill(cuda: Library, rows: int, codebook: str, K: float) -> None:
    torch.manual_seed(rows)
    w = random_weight(1500, 1100, K, codebook, "cuda", bias=True)
    x = torch.randn(rows, 1500, device="cuda")
    norm = torch.rand(1500, device="cuda") + 0.5
    y = cuda.linear(x, [w], norm=norm, dtype=torch.float32)[0]
    assert relative(y, exact(x, w, norm)) < EXACT
    assert torch.equal(y, cuda.linear(x, [w], norm=norm, dtype=torch.float32)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [130, 200, 300])
@pytest.mark.parametrize("codebook,K", [("mul1", 4), ("mcg", 4), ("mul1", 1.5), ("mul1", 7)])
def test_prefill_of_many_columns(cuda: Library, rows: int, codebook: str, K: float) -> None:
    """Enough columns that a block takes 256 rows."""
    torch.manual_seed(rows)
    w = random_weight(384, 13700, K, codebook, "cuda")
    x = torch.randn(rows, 384, device="cuda").half()
    assert relative(cuda.linear(x, [w])[0], exact(x, w)) < EXACT


@pytest.mark.gpu
@pytest.mark.parametrize("codebook,K", RATES, ids=str)
def test_prefill_rates(cuda: Library, no_wgmma: Library, codebook: str, K: float) -> None:
    """Every rate and codebook with wgmma, in tiles of 128 and of 256 rows, and without; outputs poisoned, results repeat."""
    torch.manual_seed(int(2 * K))
    w = random_weight(840, 900, K, codebook, "cuda", bias=True)
    for rows in (100, 240, 390):
        x = torch.randn(rows, 840, device="cuda").half()
        want = exact(x, w)
        for lib in (cuda, no_wgmma):
            y = lib.linear(x, [w])[0]
            assert relative(y, want) < EXACT, rows
            assert torch.equal(y, lib.linear(x, [w])[0]) and lib.clean("linear")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n_in,n_out,rows",
    [
        (4000, 250, 300), (384, 17000, 500), (256, 13000, 1000), (7168, 300, 130), (130, 8500, 2500),
        (2048, 3500, 1000), (3072, 2048, 1000),  # on 132 multiprocessors some clusters have ends of tiles; as many as have a tile
        (1024, 6400, 1000), (128, 21200, 256),
    ],
)  # fmt: skip
def test_prefill_shares(cuda: Library, n_in: int, n_out: int, rows: int) -> None:
    """Fewer tiles than the card has places, a little more, several rounds and a rest: tiles whole and in shares, in the same call."""
    torch.manual_seed(rows)
    w = random_weight(n_in, n_out, 4, "mul1", "cuda")
    x = torch.randn(rows, n_in, device="cuda").half()
    want = exact(x, w)
    first = cuda.linear(x, [w])[0]
    assert relative(first, want) < EXACT
    out = torch.randn(rows, n_out, device="cuda")
    want = out.cpu().double() + want
    cuda.linear(x, [w], outs=[out], accumulate=True)
    assert relative(out, want) < EXACT
    for _ in range(3):
        assert torch.equal(first, cuda.linear(x, [w])[0]) and cuda.clean("linear")


@pytest.mark.gpu
@pytest.mark.parametrize("n_in,n_out,rows", [(2048, 3500, 1000), (1024, 6400, 1000), (256, 700, 300)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prefill_shares_of_gate_and_up(cuda: Library, n_in: int, n_out: int, rows: int, dtype: torch.dtype) -> None:
    """The same with gate and up, whose results pass through y; in both 16-bit types."""
    torch.manual_seed(rows)
    gate, up = (random_weight(n_in, n_out, 4, "mul1", "cuda", seed=s, bias=True) for s in (1, 2))
    x = torch.randn(rows, n_in, device="cuda").half()
    want = torch.nn.functional.silu(exact(x, gate)) * exact(x, up)
    first = cuda.linear(x, [gate, up], activation="silu", dtype=dtype)[0]
    assert relative(first, want) < (8e-3 if dtype == torch.bfloat16 else 2 * EXACT)
    for _ in range(3):
        assert torch.equal(first, cuda.linear(x, [gate, up], activation="silu", dtype=dtype)[0]) and cuda.clean("linear")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [70, 300])
@pytest.mark.parametrize("codebook", ["mul1", "3inst"])
def test_prefill_groups(cuda: Library, no_wgmma: Library, rows: int, codebook: str) -> None:
    """Groups, and gate with up, at many rows: own and shared input scales, widths of an odd number of blocks."""
    torch.manual_seed(rows)
    sizes = [(5000, 4), (128, 4), (600, 4), (3300, 2)]
    ws = [random_weight(896, n, K, codebook, "cuda", seed=n, bias=n == 600) for n, K in sizes]
    gate, up = (random_weight(896, 1200, 4, codebook, "cuda", seed=s) for s in (1, 2))
    norm = torch.rand(896, device="cuda") + 0.5
    x = torch.randn(rows, 896, device="cuda") * 30
    for shared in (False, True):
        if shared:
            ws, up = [dict(w, suh=ws[0]["suh"]) for w in ws], dict(up, suh=gate["suh"])
        gated = torch.nn.functional.silu(exact(x, gate, norm)) * exact(x, up, norm)
        for lib in (cuda, no_wgmma):
            for y, w in zip(lib.linear(x, ws, norm=norm), ws):
                assert relative(y, exact(x, w, norm)) < EXACT
            for dtype in (torch.float16, torch.float32):
                assert relative(lib.linear(x, [gate, up], norm=norm, activation="silu", dtype=dtype)[0], gated) < 2 * EXACT


@pytest.mark.gpu
def test_replay(cuda: Library) -> None:
    """A recorded call replayed with new contents equals the eager call bit for bit."""
    torch.manual_seed(0)
    w = random_weight(1024, 1024, 4, "mul1", "cuda")
    for rows in (1, 4, 8, 16, 64, 200):
        x, y = torch.randn(rows, 1024, device="cuda").half(), torch.empty(rows, 1024, device="cuda", dtype=torch.half)
        cuda.linear(x, [w], outs=[y])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda.linear(x, [w], outs=[y])
            cuda.linear(y, [w], outs=[y])
        x.normal_()
        graph.replay()
        first = y.clone()
        want = cuda.linear(cuda.linear(x, [w])[0], [w])[0]
        assert torch.equal(first, want)


@pytest.mark.gpu
def test_refusals(cuda: Library) -> None:
    w = random_weight(256, 256, 4, "mul1", "cuda")
    x = torch.randn(1, 256, device="cuda").half()
    with pytest.raises(RuntimeError, match="does not exist"):
        cuda.linear(x, [dict(random_weight(256, 256, 2.5, "mul1", "cuda"), codebook="mcg")])
    with pytest.raises(RuntimeError, match="fp32"):
        cuda.linear(x, [w], accumulate=True)
    with pytest.raises(RuntimeError, match="xielu"):
        cuda.linear(x, [w, w], activation="xielu")


def test_describe(cuda_or_not: tuple) -> None:
    """With a card: its name. Without: null and one sentence that says why."""
    table, has_card = cuda_or_not
    text = table.describe(0)
    if has_card:
        assert b"compute capability" in text
    else:
        assert text is None and table.last_error()
