"""CUDA kernels on the CPU emulator: indices, layouts, rings and epilogues of the tensor core kernels, tested where there is no card."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_cuda_attention as test_attention_on_card
import test_portable
import torch
from harness import ROOT, Library, exact_weight, random_weight, relative

from exl3.ops import blocks, reference

HERE = Path(__file__).parent

ATTENTION = [
    f"attention{name}"
    for name in (".h", *(f"_{part}.cuh" for part in ("codes", "fetch", "fresh", "products", "merge", "decode", "prefill")), ".cu")
]

pytestmark = pytest.mark.slow


def as_cpp(text: str) -> str:
    """A CUDA source as C++ for cuda_on_cpu.h."""
    ours = r"cuda_runtime\.h|cuda_fp16\.h|\w+\.cuh|(?:parts|product|even|wide|attention|stdint|exl3/ops)\.h|\.\./cpp/gpu/\w+\.h"
    text = re.sub(rf'#include [<"](?:{ours})[>"]\n', "", text)
    text = text.replace("#pragma once", "").replace("#ifdef __CUDACC__", "#if 1")
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?uint8_t (\w+)\[\];", r"uint8_t* \1 = shared_space;", text)
    text = text.replace("__shared__ __align__(8)", "alignas(8) static").replace("__shared__", "static")
    return re.sub(r'asm\("lop3\.b32[^\n]*', "p = (p & 0x8fff8fffu) ^ 0x3b603b60u;", text)


def compiled(directory: Path, name: str, sources: list[str], *flags: str) -> ctypes.CDLL:
    (directory / "source.inc").write_text("\n".join(as_cpp((ROOT / "cuda" / s).read_text()) for s in sources))
    path = directory / f"{name}.so"
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-w", f"-I{ROOT / 'cpp' / 'include'}", f"-I{directory}", f"-I{HERE}"]
    subprocess.run([*command, *flags, str(HERE / f"{name}.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


class WithAttention:
    """The emulated library with cuda/attention.cu in the place of the portable attention."""

    def __init__(self, emulated: Library, library: ctypes.CDLL) -> None:
        library.on_cpu_workspace.restype = ctypes.c_int64
        self.emulated, self.library, self.spaces = emulated, library, {}
        self.device = emulated.device
        self.ops = {
            **emulated.ops,
            "attention": lambda block, stream: library.on_cpu(block, None),
            "attend": lambda block, stream: library.on_cpu_attend(block, None),
        }
        self.table = self

    def __getattr__(self, name: str) -> Any:
        value = getattr(Library, name)
        return value.__get__(self) if callable(value) else value

    def attention_workspace(self, block: bytes) -> int:
        return self.library.on_cpu_workspace(block)

    def last_error(self) -> bytes:
        return b"refused"


@pytest.fixture(scope="module")
def attention(emulated: Library, tmp_path_factory: Any) -> WithAttention:
    return WithAttention(emulated, compiled(tmp_path_factory.mktemp("attention"), "cuda_attention_on_cpu", ATTENTION))


@pytest.fixture(scope="module")
def product(tmp_path_factory: Any) -> ctypes.CDLL:
    return compiled(
        tmp_path_factory.mktemp("product"),
        "cuda_product_on_cpu",
        ["product.h", "trellis.cuh", "rotate.cuh", "stamps.cuh", *(f"product{part}.cuh" for part in ("_input", "_finish", "_ring", ""))],
    )


def compiled_even(directory: Path, *flags: str) -> ctypes.CDLL:
    sources = ["product.h", "trellis.cuh", "even.h", "rotate.cuh", "stamps.cuh"]
    sources += [f"even{part}.cuh" for part in ("_ring", "_input", "_finish", "")]
    return compiled(directory, "cuda_even_on_cpu", sources, *flags)


@pytest.fixture(scope="module")
def even(tmp_path_factory: Any) -> ctypes.CDLL:
    return compiled_even(tmp_path_factory.mktemp("even"))


@pytest.fixture(scope="module")
def long_even(tmp_path_factory: Any) -> ctypes.CDLL:
    """With the steps of sm_90a, the last of which may reach beyond the inputs."""
    return compiled_even(tmp_path_factory.mktemp("long_even"), "-DEXL3_TEST_LONG_STEPS")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: Any) -> ctypes.CDLL:
    sources = ["product.h", "trellis.cuh", "rotate.cuh", "wide.h", *(f"wide{part}.cuh" for part in ("_finish", "", "_input", "_mma"))]
    sources += ["wide_split.h", "reconstruct.cuh"]
    return compiled(tmp_path_factory.mktemp("wide"), "cuda_wide_on_cpu", sources)


@pytest.mark.parametrize("case", [c for c in test_portable.CASES if c[0] != 512], ids=str)
def test_attention(attention: WithAttention, case: tuple) -> None:
    torch.manual_seed(0)
    test_portable.test_attention(attention, case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "codebook,K,rows,n_in,n_out,activation,dtype",
    [
        ("mul1", 4, 132, 300, 200, None, torch.float32),
        ("mul1", 4, 36, 700, 256, "silu", torch.float16),
        ("mul1", 1.5, 40, 1100, 128, None, torch.float16),
        ("mcg", 7, 20, 520, 100, None, torch.float16),
        ("3inst", 7, 33, 1300, 128, "gelu_tanh", torch.bfloat16),
        ("mul1", 4, 3, 17000, 128, None, torch.float32),
    ],
)
def test_wide(
    wide: ctypes.CDLL, codebook: str, K: float, rows: int, n_in: int, n_out: int, activation: str | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    w = random_weight(n_in, n_out, K, codebook, "cpu", bias=True)
    x, norm = torch.randn(rows, n_in), torch.rand(n_in) + 0.5
    y = (torch.randn(rows, n_out) if activation else torch.full((rows, n_out), float("nan"))).to(dtype)
    want = reference.rms_norm(x.double(), norm.double(), 1e-5) @ exact_weight(w) + w["bias"].double()
    if activation:
        want = want * reference.activate(y.double(), activation)
    struct = Library.weight(None, w)  # type: ignore[arg-type]
    block = blocks.LINEAR.pack(
        x.data_ptr(), norm.data_ptr(), ctypes.addressof(struct), 0, 0, 0, y.data_ptr(), 0, 0, 0, n_in, n_out, 0, 0, 0, 0, 0, 1e-5, rows, 1,
        0, blocks.DTYPES[dtype], 2, 1, blocks.ACTIVATIONS[activation], 0,
    )  # fmt: skip
    assert wide.on_cpu(block) == 0
    assert relative(y, want) < (4e-3 if dtype == torch.bfloat16 else 7e-4)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 13, 30, 57, 66, 74])
def test_wide_split(wide: ctypes.CDLL, most: int) -> None:
    """Each step of a tile is one cluster's; who finishes a tile waits for just those that send, and nobody waits before it has sent."""
    for steps in (2, 4, 6, 10, 16, 18, 32, 48, 64, 224, 450):
        for tiles in (*range(1, 3 * most + 3), 7 * most + 1, 11 * most - 1):
            assert wide.check_split(tiles, steps, most) == 0, (tiles, steps)


@pytest.mark.parametrize(
    "codebook,K,n_in,n_out", [("mul1", 4, 200, 250), ("mul1", 1.5, 128, 128), ("mcg", 7, 130, 256), ("3inst", 7, 256, 2)]
)
def test_reconstruct(wide: ctypes.CDLL, codebook: str, K: float, n_in: int, n_out: int) -> None:
    w = random_weight(n_in, n_out, K, codebook, "cpu")
    out = torch.full((n_in, n_out), float("nan"), dtype=torch.float16)
    struct = Library.weight(None, w)  # type: ignore[arg-type]
    assert wide.reconstruct_on_cpu(blocks.RECONSTRUCT.pack(ctypes.addressof(struct), out.data_ptr(), blocks.DTYPES[out.dtype], 1)) == 0
    assert relative(out, exact_weight(w)) < 6e-4


@pytest.fixture(scope="module")
def read(tmp_path_factory: Any) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("read"), "cuda_read_on_cpu", ["attention.h", "attention_codes.cuh", "read.cu"])


@pytest.mark.parametrize("bits,compand", [((2, 3), 0.0), ((4, 16), 0.0), ((5, 6), 0.65), ((7, 8), 0.0)])
def test_cache_read(emulated: Library, read: ctypes.CDLL, bits: tuple[int, int], compand: float) -> None:
    c = test_portable.make_cache(emulated, 3, 64, *bits, compand, pages=2)
    batch = test_portable.make_batch(emulated, [(0, 300)], pages=2, padding=0)
    k, v = (torch.randn(300, 3, 64).half() for _ in range(2))
    reference.cache_append(c, k, v, batch)
    got = [torch.full((90, 3, 64), float("nan"), dtype=torch.float16) for _ in range(2)]
    table = batch.block_table[0].contiguous()
    block = blocks.CACHE_READ.pack(*emulated.layer(c), *(t.data_ptr() for t in got), table.data_ptr(), 200, 90, 1)
    assert read.on_cpu(block, None) == 0
    for t, want in zip(got, reference.cache_read(c, table, 200, 90, torch.float32)):
        assert relative(t, want) < 3e-4


@pytest.mark.parametrize(
    "dim,heads,kv,bits,options",
    [
        (128, 2, 1, (16, 16), {}),
        (64, 3, 1, (4, 5), {"softcap": 20.0}),
        (96, 2, 1, (8, 3), {"window": 33, "with_sinks": True}),
        (192, 1, 1, (7, 6), {}),
    ],
    ids=str,
)
def test_prefill(attention: WithAttention, dim: int, heads: int, kv: int, bits: tuple[int, int], options: dict[str, Any]) -> None:
    test_attention_on_card.check(attention, dim, heads, kv, bits, test_attention_on_card.CHUNKS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [64, 96, 192, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_as_operands(attention: WithAttention, dim: int, bits: int) -> None:
    """Head sizes with an odd number of groups or several reads a position; rows of one and of several splits."""
    test_attention_on_card.check(attention, dim, 4, 2, (bits, bits), [(505, 3), (39, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("case", test_attention_on_card.FRESH[1:10:2], ids=str)
def test_attend(attention: WithAttention, case: dict) -> None:
    test_attention_on_card.check_attend(attention, **case)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 5, 16])
def test_attend_gives_a_row_the_same_bits(attention: WithAttention, bits: int) -> None:
    test_attention_on_card.attend_beside_others(attention, bits, dim=64)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 5, 16])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(attention: WithAttention, bits: int) -> None:
    test_attention_on_card.same_beside_others(attention, bits, 3, 1, dim=64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dim,bits,runs",
    [(128, (16, 16), "CHUNKS"), (128, (8, 8), "CHUNKS"), (256, (16, 16), "DRAFTS")],
    ids=str,
)
def test_one_stage_where_shared_memory_is_small(attention: WithAttention, dim: int, bits: tuple[int, int], runs: str) -> None:
    """99 KiB a block, as cards of 8.6, 8.9 and 12.0 have."""
    attention.library.on_cpu_shared(99 * 1024)
    try:
        test_attention_on_card.check(attention, dim, 1, 1, bits, getattr(test_attention_on_card, runs))  # type: ignore[arg-type]
    finally:
        attention.library.on_cpu_shared(232448)


def check_group(
    library: ctypes.CDLL,
    codebook: str,
    K: float,
    rows: int,
    n_in: int,
    sizes: list[int],
    activation: str | None,
    grid: int,
    shared: bool,
) -> None:
    """A group of matrices, or gate and up, behind a norm; outputs poisoned."""
    torch.manual_seed(rows)
    ws = [random_weight(n_in, n, K, codebook, "cpu", bias=True, seed=i) for i, n in enumerate(sizes)]
    if shared:
        ws = [dict(w, suh=ws[0]["suh"]) for w in ws]
    x, norm = torch.randn(rows, n_in), torch.rand(n_in) + 0.5
    count = 1 if activation else len(ws)
    ys = [torch.full((rows, n), float("nan")) for n in sizes[:count]]
    normed = reference.rms_norm(x.double(), norm.double(), 1e-5)
    wants = [normed @ exact_weight(w) + w["bias"].double() for w in ws]
    if activation:
        wants = [reference.activate(wants[0], activation) * wants[1]]
    structs = [Library.weight(None, w) for w in ws]  # type: ignore[arg-type]
    pad, gap = [0] * (4 - len(ws)), [0] * (4 - count)
    block = blocks.LINEAR.pack(
        x.data_ptr(), norm.data_ptr(), *(ctypes.addressof(s) for s in structs), *pad, *(y.data_ptr() for y in ys), *gap, n_in,
        *(y.stride(0) for y in ys), *gap, 0, 0, 1e-5, rows, len(ws), 0, 0,
        2, shared or len(ws) == 1, blocks.ACTIVATIONS[activation], 0,
    )  # fmt: skip
    assert library.on_cpu(block, grid) == 0
    for y, want in zip(ys, wants):
        assert relative(y, want) < (1e-3 if activation else 5e-4)


@pytest.mark.parametrize(
    "codebook,K,rows,n_in,sizes,activation,grid",
    [
        ("mul1", 4, 1, 1000, [700], None, 7),  # runs that end in the middle of column groups
        ("mul1", 4, 1, 1000, [128], None, 8),  # a group shared by many blocks
        ("mul1", 4, 4, 300, [256, 130], None, 2),
        ("mul1", 4, 2, 300, [256, 130], None, 5),
        ("mul1", 4, 3, 700, [300, 300], "silu", 4),
        ("mul1", 4, 2, 700, [300, 300], "silu", 7),
        ("mul1", 4, 1, 128, [2600], None, 2),  # more parts in a run than are described at a time
        ("mul1", 3, 2, 100, [1400, 1400], "silu", 2),
        ("3inst", 7, 3, 128, [1500], None, 1),
        ("mul1", 1.5, 2, 1200, [128], None, 1),
        ("mul1", 3, 1, 1000, [700], None, 5),
        ("mcg", 7, 2, 520, [100], None, 2),
        ("3inst", 7, 6, 520, [260, 100], None, 5),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_product(
    product: ctypes.CDLL, codebook: str, K: float, rows: int, n_in: int, sizes: list[int], activation: str | None, grid: int, shared: bool
) -> None:
    check_group(product, codebook, K, rows, n_in, sizes, activation, grid, shared)


@pytest.mark.parametrize(
    "codebook,K,most,kind", [("mul1", 4, 4, "product"), ("3inst", 7, 8, "product"), ("mul1", 4, 20, "even"), ("mul1", 4, 20, "long_even")]
)
def test_a_row_has_the_same_bits_alone(request: pytest.FixtureRequest, codebook: str, K: float, most: int, kind: str) -> None:
    """Many rows take other steps or instances than one; runs begin and end within chunks of inputs."""
    library = request.getfixturevalue(kind)
    w = random_weight(2048, 256, K, codebook, "cpu", bias=False, seed=1)
    x, struct = torch.randn(most, 2048), Library.weight(None, w)  # type: ignore[arg-type]

    def run(rows: int) -> torch.Tensor:
        y = torch.full((rows, 256), float("nan"))
        head = (x.data_ptr(), 0, ctypes.addressof(struct), 0, 0, 0, y.data_ptr(), 0, 0, 0, 2048, 256, 0, 0, 0, 0, 0)
        block = blocks.LINEAR.pack(*head, 1e-5, rows, 1, 0, 0, 2, 1, 0, 0)
        assert library.on_cpu(block, 19) == 0
        return y

    all_rows = run(most)
    assert relative(all_rows, x.double() @ exact_weight(w)) < 5e-4
    for rows in (1, 3, most // 2):
        assert torch.equal(run(rows), all_rows[:rows])


@pytest.mark.parametrize(
    "codebook,K,rows,n_in,sizes,activation,grid",
    [
        ("mul1", 4, 1, 1000, [700], None, 7),
        ("mul1", 4, 8, 300, [300, 300], "silu", 5),
        ("mul1", 4, 7, 384, [256, 130], None, 13),
        ("mul1", 4, 9, 1000, [700], None, 7),  # runs that end in the middle of column groups
        ("mul1", 4, 12, 300, [256, 130], None, 13),  # more blocks than column groups; a group of matrices
        ("mul1", 4, 20, 384, [300, 300], "silu", 4),
        ("mul1", 1.5, 40, 1100, [128], None, 3),
        ("mul1", 4, 9, 8400, [128], None, 2),  # more input than stays in registers
        ("3inst", 7, 12, 520, [260], None, 4),
        ("mcg", 7, 16, 384, [200, 200], "gelu_tanh", 5),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["even", "long_even"])
def test_even(
    request: pytest.FixtureRequest, kind: str, codebook: str, K: float, rows: int, n_in: int, sizes: list[int], activation: str | None,
    grid: int, shared: bool,
) -> None:  # fmt: skip
    check_group(request.getfixturevalue(kind), codebook, K, rows, n_in, sizes, activation, grid, shared)
