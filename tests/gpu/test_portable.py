"""Every small operation against exl3.ops.reference, on the emulator and on the card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness import Library, exact_weight, random_weight, relative

from exl3.ops import blocks, reference
from exl3.ops.sampling import SampleParams, pack_sample_params

D = blocks.DTYPES


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def nan(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["plain", "residual", "mean", "accumulate"])
def test_rms_norm(lib: Library, dtype: torch.dtype, mode: str) -> None:
    rows, n = 3, 333
    x = torch.randn(rows, n + 5, device=lib.device).to(dtype)[:, :n]
    w = torch.randn(n, device=lib.device)
    residual = torch.randn(rows, n, device=lib.device) if mode == "residual" else None
    y_dtype = torch.float32 if mode == "accumulate" else dtype
    y = torch.randn(rows, n, device=lib.device) if mode == "accumulate" else nan(rows, n, dtype=y_dtype, device=lib.device)
    want_residual = None if residual is None else residual.clone()
    want = reference.rms_norm(
        x, w, 1e-5, residual=want_residual, subtract_mean=mode == "mean", out=y.clone(), accumulate=mode == "accumulate"
    )
    block = blocks.RMS_NORM.pack(
        x.data_ptr(), 0 if residual is None else residual.data_ptr(), w.data_ptr(), y.data_ptr(), x.stride(0), n, n, rows, n, D[dtype],
        D[y_dtype], 1e-5, mode == "mean", mode == "accumulate",
    )  # fmt: skip
    lib.call("rms_norm", block)
    assert relative(y, want) < (1e-6 if y_dtype == torch.float32 else 4e-3)
    if residual is not None:
        assert relative(residual, want_residual) < 1e-6


@pytest.mark.parametrize("n", [1000, 8192, 8200])
def test_rms_norm_of_many_rows(lib: Library, n: int) -> None:
    """fp32 to fp16: from 65 rows on CUDA has a kernel of its own, up to 8192 columns."""
    x = (torch.randn(70, n + 8, device=lib.device) * 3)[:, :n]
    for w in (torch.randn(n, device=lib.device), None):
        y = nan(70, n + 4, dtype=torch.float16, device=lib.device)[:, :n]
        block = blocks.RMS_NORM.pack(
            x.data_ptr(), 0, 0 if w is None else w.data_ptr(), y.data_ptr(), n + 8, 0, n + 4, 70, n, 0, D[torch.float16], 1e-5, 0, 0
        )
        lib.call("rms_norm", block)
        assert relative(y, reference.rms_norm(x.double(), None if w is None else w.double(), 1e-5)) < 5e-4


@pytest.mark.parametrize("n,n_padded", [(128, 128), (200, 256), (384, 512)])
def test_rotate(lib: Library, n: int, n_padded: int) -> None:
    x = torch.randn(5, n, device=lib.device)
    pre, post = torch.randn(n, device=lib.device), torch.randn(n_padded, device=lib.device)
    y = nan(5, n_padded, dtype=torch.float32, device=lib.device)
    lib.call("rotate", blocks.ROTATE.pack(x.data_ptr(), y.data_ptr(), pre.data_ptr(), post.data_ptr(), n, n_padded, 5, n, n_padded, 0, 0))
    assert relative(y, reference.rotate(x, pre, post, n_padded)) < 1e-6


def test_rotary_table(lib: Library) -> None:
    positions = torch.tensor([0, 5, 131071, 70000], dtype=torch.int32, device=lib.device)
    rows = torch.tensor([0, 0, 1, -1], dtype=torch.int32, device=lib.device)
    lengths = torch.tensor([10, 140000], dtype=torch.int32, device=lib.device)
    f, g = (torch.rand(24, device=lib.device) for _ in range(2))
    for long in (None, (g, 1.5, 4096, rows, lengths)):
        cos, sin = (nan(4, 24, dtype=torch.float32, device=lib.device) for _ in range(2))
        block = blocks.ROTARY_TABLE.pack(
            positions.data_ptr(), rows.data_ptr(), lengths.data_ptr(), f.data_ptr(), g.data_ptr() if long else 0, cos.data_ptr(),
            sin.data_ptr(), 4, 24, 4096, 1.25, 1.5,
        )  # fmt: skip
        lib.call("rotary_table", block)
        want = reference.rotary_table(positions, f, 1.25, long=long)
        assert (cos - want[0]).abs().max() < 1e-6 and (sin - want[1]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "tokens,dim,rotary_dim,interleaved,norm",
    [
        (5, 64, 64, False, True),
        (5, 80, 32, False, False),
        (5, 128, 96, True, True),
        (5, 512, 512, False, True),
        (70, 128, 128, False, False),  # from 65 on CUDA has kernels of its own
        (70, 96, 96, False, False),
        (70, 128, 64, False, False),
        (70, 256, 256, False, True),
        (70, 128, 64, False, True),
    ],
)
def test_rotary(lib: Library, tokens: int, dim: int, rotary_dim: int, interleaved: bool, norm: bool) -> None:
    heads, kv = 3, 2
    qkv = torch.randn(tokens, (heads + kv) * dim + 8, device=lib.device).half()
    q, k = qkv[:, : heads * dim].view(tokens, heads, dim), qkv[:, heads * dim : (heads + kv) * dim].view(tokens, kv, dim)
    angle = torch.rand(tokens, rotary_dim // 2, device=lib.device) * 6
    cos, sin = angle.cos(), angle.sin()
    qn, kn = (torch.rand(dim, device=lib.device) if norm else None for _ in range(2))
    want = qkv.float()
    wq = want[:, : heads * dim].view(tokens, heads, dim)
    wk = want[:, heads * dim : (heads + kv) * dim].view(tokens, kv, dim)
    reference.rotary_(wq, wk, cos, sin, rotary_dim, interleaved=interleaved, q_norm=qn, k_norm=kn, eps=1e-6)
    block = blocks.ROTARY.pack(
        q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), 0 if qn is None else qn.data_ptr(), 0 if kn is None else kn.data_ptr(),
        qkv.stride(0), qkv.stride(0), tokens, heads, kv, dim, rotary_dim, D[torch.float16], interleaved, 1e-6,
    )  # fmt: skip
    lib.call("rotary", block)
    assert relative(qkv, want) < 5e-4


def make_cache(lib: Library, kv: int, dim: int, k_bits: int, v_bits: int, compand: float = 0.0, pages: int = 6) -> SimpleNamespace:
    def side(bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if bits == 16:
            return torch.full((pages, 256, kv, dim), float("nan"), dtype=torch.float16, device=lib.device), None
        groups = kv * dim // 32
        data = torch.full((pages, 256, groups * bits), -1, dtype=torch.int32, device=lib.device)
        return data, torch.full((pages, 256, groups), float("nan"), dtype=torch.float16, device=lib.device)

    k, ks = side(k_bits)
    v, vs = side(v_bits)
    return SimpleNamespace(k=k, v=v, k_scale=ks, v_scale=vs, kv_heads=kv, head_dim=dim, k_bits=k_bits, v_bits=v_bits, compand=compand)


def make_batch(lib: Library, rows: list[tuple[int, int]], pages: int = 6, padding: int = 1) -> SimpleNamespace:
    """rows: (first position, tokens) of each row; `padding` tokens at the end belong to no row."""
    positions, token_row = [], []
    for r, (first, count) in enumerate(rows):
        positions += range(first, first + count)
        token_row += [r] * count
    positions += [0] * padding
    token_row += [-1] * padding
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).view(len(rows), -1).to(torch.int32)
    return SimpleNamespace(
        positions=torch.tensor(positions, dtype=torch.int32, device=lib.device),
        token_row=torch.tensor(token_row, dtype=torch.int32, device=lib.device),
        block_table=table.to(lib.device).contiguous(),
    )


def append(lib: Library, c: SimpleNamespace, k: torch.Tensor, v: torch.Tensor, b: SimpleNamespace) -> None:
    block = blocks.CACHE_APPEND.pack(
        *lib.layer(c), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), b.positions.data_ptr(), b.token_row.data_ptr(),
        b.block_table.data_ptr(), len(k), b.block_table.stride(0), D[k.dtype],
    )  # fmt: skip
    lib.call("cache_append", block)


@pytest.mark.parametrize("k_bits,v_bits,compand", [(16, 16, 0.0), (8, 4, 0.0), (4, 3, 0.65), (7, 2, 0.0), (6, 5, 0.0), (16, 4, 0.0)])
@pytest.mark.parametrize("more", [3, 80])  # from 65 tokens on CUDA has a kernel of its own
def test_cache(lib: Library, k_bits: int, v_bits: int, compand: float, more: int) -> None:
    kv, dim = 2, 64
    got, want = (make_cache(lib, kv, dim, k_bits, v_bits, compand) for _ in range(2))
    b = make_batch(lib, [(250, 12), (0, more)])
    k, v = (torch.randn(len(b.positions), kv, dim, device=lib.device).half() for _ in range(2))
    append(lib, got, k, v, b)
    reference.cache_append(want, k, v, b)
    for a, r in ((got.k, want.k), (got.v, want.v)):
        # a code next to a rounding edge may fall either way
        assert (a != r).logical_and(~((a != a) & (r != r))).float().mean() < 1e-3
    start, count = 250, 12
    ks, vs = (nan(count, kv, dim, dtype=torch.float32, device=lib.device) for _ in range(2))
    table = b.block_table[0].contiguous()
    lib.call(
        "cache_read",
        blocks.CACHE_READ.pack(*lib.layer(got), ks.data_ptr(), vs.data_ptr(), table.data_ptr(), start, count, D[torch.float32]),
    )
    rk, rv = reference.cache_read(got, table, start, count, torch.float32)
    assert relative(ks, rk) < 1e-3 and relative(vs, rv) < 1e-3
    assert relative(ks, k[:12]) < 2.0 ** (1 - min(k_bits, 11)) and relative(vs, v[:12]) < 2.0 ** (1 - min(v_bits, 11))
    ks, vs = (nan(more, kv, dim, dtype=torch.float16, device=lib.device) for _ in range(2))
    table = b.block_table[1].contiguous()
    lib.call("cache_read", blocks.CACHE_READ.pack(*lib.layer(got), ks.data_ptr(), vs.data_ptr(), table.data_ptr(), 0, more, D[ks.dtype]))
    rk, rv = reference.cache_read(got, table, 0, more, torch.float32)
    assert relative(ks, rk) < 1e-3 and relative(vs, rv) < 1e-3


CASES = [
    # dim, heads, kv, k bits, v bits, window, softcap, sinks
    (64, 4, 4, 16, 16, 0, 0.0, False),
    (128, 8, 2, 16, 16, 0, 0.0, False),
    (128, 4, 1, 4, 4, 0, 0.0, False),
    (128, 6, 2, 8, 3, 0, 30.0, True),
    (64, 5, 1, 5, 7, 100, 0.0, True),
    (256, 4, 2, 16, 16, 70, 0.0, False),
    (96, 3, 1, 16, 6, 0, 0.0, True),
    (128, 32, 1, 2, 2, 0, 0.0, False),
    (512, 2, 1, 16, 16, 0, 0.0, False),
    (80 + 16, 2, 2, 16, 4, 33, 20.0, False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(lib: Library, case: tuple) -> None:
    dim, heads, kv, k_bits, v_bits, window, softcap, with_sinks = case
    c = make_cache(lib, kv, dim, k_bits, v_bits)
    full = make_batch(lib, [(0, 300), (0, 40), (0, 1)], padding=0)
    k, v = (torch.randn(len(full.positions), kv, dim, device=lib.device).half() for _ in range(2))
    append(lib, c, k, v, full)
    b = make_batch(lib, [(295, 5), (39, 1), (0, 1)], padding=2)  # a draft of five, a single token, the very first token, padding
    q = torch.randn(len(b.positions), heads, dim, device=lib.device).half()
    sinks = torch.randn(heads, device=lib.device) if with_sinks else None
    y = lib.attention(q, c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    want = reference.attention(q.float(), c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    assert relative(y, want) < 2e-3
    assert not bool(y[-2:].any())
    again = lib.attention(q, c, b, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    assert torch.equal(y, again) and lib.clean("attention")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows,n", [(3, 77), (70, 2088)])  # from 65 rows of fp16 on CUDA has a kernel of its own
def test_act_mul(lib: Library, activation: str, dtype: torch.dtype, rows: int, n: int) -> None:
    gate, up = (torch.randn(rows, n, device=lib.device).to(dtype) * 3 for _ in range(2))
    params = (0.8, 0.7, 0.5, -1e-6)
    for u in (up, None):
        y = nan(rows, n, dtype=dtype, device=lib.device)
        block = blocks.ACT_MUL.pack(
            gate.data_ptr(), 0 if u is None else u.data_ptr(), y.data_ptr(), n, n, n, rows, n, D[dtype],
            blocks.ACTIVATIONS[activation], *params,
        )  # fmt: skip
        lib.call("act_mul", block)
        want = reference.act_mul(gate.float(), None if u is None else u.float(), activation, params)
        assert relative(y, want) < {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]


def test_add_softcap(lib: Library) -> None:
    y = torch.randn(1003, device=lib.device)
    x = torch.randn(1003, device=lib.device).bfloat16()
    want = y + 0.5 * x.float()
    lib.call("add", blocks.ADD.pack(x.data_ptr(), y.data_ptr(), 1003, D[torch.bfloat16], 0.5))
    assert relative(y, want) < 1e-6
    for cap in (0.0, 30.0):
        z = torch.randn(999, device=lib.device) * 50
        want = reference.softcap_(z.clone(), 0.7, cap)
        lib.call("softcap", blocks.SOFTCAP.pack(z.data_ptr(), 999, 0.7, cap))
        assert relative(z, want) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding(lib: Library, dtype: torch.dtype) -> None:
    table = torch.randn(50, 130, device=lib.device).to(dtype)
    ids = torch.tensor([3, 49, -1, 50, 0], dtype=torch.int32, device=lib.device)
    y = nan(5, 130, dtype=torch.float32, device=lib.device)
    lib.call("embedding", blocks.EMBEDDING.pack(ids.data_ptr(), table.data_ptr(), 0, y.data_ptr(), 130, 5, 130, 50, D[dtype], 0, 0, 1.5))
    assert relative(y, reference.embedding(ids, table, 1.5)) < 1e-6


@pytest.mark.parametrize("K", [1, 3, 4, 8])
def test_embedding_ring(lib: Library, K: int) -> None:
    from exl3 import codec

    n, vocab = 300, 9
    g = torch.Generator().manual_seed(K)
    table = torch.randint(-32768, 32768, (vocab, 2 * (1 + 16 * K)), dtype=torch.int16, generator=g)
    table[:, 0], table[:, 1 + 16 * K] = 0x3000, 0x3155  # scales
    signs = (torch.randint(0, 2, (2, 256), generator=g) * 2 - 1).half()
    ids = torch.tensor([0, 8, 4, 9, -1], dtype=torch.int32)
    want = torch.zeros(5, n)
    want[:3] = codec.embedding_decode(table[ids[:3].long()], signs, n)
    ids, table, signs = ids.to(lib.device), table.to(lib.device), signs.to(lib.device)
    y = nan(5, n, dtype=torch.float32, device=lib.device)
    lib.call(
        "embedding", blocks.EMBEDDING.pack(ids.data_ptr(), table.data_ptr(), signs.data_ptr(), y.data_ptr(), n, 5, n, vocab, 0, 0, K, 1.0)
    )
    assert relative(y, want) < 1e-6


@pytest.mark.parametrize("codebook,K", [("mul1", k) for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)] + [("mcg", 4), ("3inst", 3)])
def test_reconstruct(lib: Library, codebook: str, K: float) -> None:
    from exl3 import codec

    w = random_weight(200, 250, K, codebook, lib.device)
    got = lib.reconstruct(w, False, torch.float16).cpu()
    assert torch.equal(got, codec.decode(w["trellis"].cpu(), codebook, None if codebook == "3inst" else w["multiplier"]).half())
    assert relative(lib.reconstruct(w, True, torch.float32), exact_weight(w)) < 1e-6


@pytest.mark.parametrize(
    "x_dtype,w_dtype", [(torch.float32, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_dense(lib: Library, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x = torch.randn(11, 203, device=lib.device).to(x_dtype)
    w = torch.randn(77, 203, device=lib.device).to(w_dtype)
    bias = torch.randn(77, device=lib.device)
    y = nan(11, 77, dtype=torch.float32, device=lib.device)
    block = blocks.DENSE.pack(x.data_ptr(), w.data_ptr(), bias.data_ptr(), y.data_ptr(), 203, 77, 11, 203, 77, D[x_dtype], D[w_dtype], 0, 0)
    lib.call("dense", block)
    assert relative(y, x.double() @ w.double().T + bias) < 1e-5


def run_sample(
    lib: Library, logits: torch.Tensor, params: list[SampleParams], history: torch.Tensor | None = None, used: torch.Tensor | None = None
):
    rows, vocab = logits.shape
    packed = pack_sample_params(params, lib.device)
    ids = torch.full((rows,), -7, dtype=torch.int32, device=lib.device)
    probs = nan(rows, dtype=torch.float32, device=lib.device)
    head = (
        logits.data_ptr(), logits.stride(0), packed.data_ptr(), 0 if history is None else history.data_ptr(),
        0 if history is None else history.stride(0), 0 if used is None else used.data_ptr(), ids.data_ptr(), probs.data_ptr(),
    )  # fmt: skip
    space = lib.space("sample", lib.table.sample_workspace(blocks.SAMPLE.pack(*head, 0, 0, rows, vocab)))
    lib.call("sample", blocks.SAMPLE.pack(*head, space.data_ptr(), space.numel(), rows, vocab))
    return ids.cpu(), probs.cpu(), reference.sample(logits, packed, history, used)


def test_sample(lib: Library) -> None:
    vocab = 997
    kinds = [
        SampleParams(temperature=0.0),
        SampleParams(),
        SampleParams(top_k=5),
        SampleParams(top_p=0.6),
        SampleParams(min_p=0.1),
        SampleParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
        SampleParams(temperature=1.7, top_p=0.5, temperature_last=True),
        SampleParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        SampleParams(temperature=0.0, repetition_penalty=1.5),
    ]
    params = [SampleParams(**{**vars(p), "seed": 77 + s, "counter": s}) for p in kinds for s in range(4)]
    logits = torch.randn(len(params), vocab, device=lib.device) * 3
    logits[:, 11] = -float("inf")
    history = torch.randint(-1, vocab + 1, (len(params), 20), dtype=torch.int32, device=lib.device)
    history[:, 3] = history[:, 4]
    history[:, 5] = logits.argmax(1).int()
    used = torch.randint(0, 21, (len(params),), dtype=torch.int32, device=lib.device)
    ids, probs, (want, want_probs) = run_sample(lib, logits, params, history, used)
    assert torch.equal(ids, want.cpu())
    assert torch.allclose(probs, want_probs.cpu(), rtol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "two values", "one value of many", "two bins"])
def test_sample_of_many_close_values(lib: Library, kind: str) -> None:
    """More values in one bin of the histogram than are ranked one by one: a second round, and ties in their thousands."""
    vocab, random = 12000, torch.Generator().manual_seed(4)
    options = [{"top_p": 0.5}, {"top_k": 4000}, {"top_k": 9000, "top_p": 0.9}, {"temperature": 3.0, "top_p": 0.3}, {"top_k": 1}]
    params = [SampleParams(**o, seed=5 + i, counter=i) for i, o in enumerate(options)]
    x = torch.randn(len(params), vocab, generator=random) * 0.02
    if kind == "two values":
        x = (x > 0.01).float() * 0.5
    elif kind == "one value of many":
        x[:, torch.randperm(vocab, generator=random)[:5000]] = 0.01
    elif kind == "two bins":
        x = x * 0.01 + (torch.rand(x.shape, generator=random) < 0.5).float()
    ids, probs, (want, want_probs) = run_sample(lib, x.to(lib.device), params)
    assert torch.equal(ids, want.cpu())
    assert torch.allclose(probs, want_probs.cpu(), rtol=1e-4)


def test_sample_ties_and_bad_rows(lib: Library) -> None:
    logits = torch.zeros(5, 600, device=lib.device)
    logits[1, 5] = float("nan")
    logits[2, 5] = float("inf")
    logits[3] = -float("inf")
    logits[4, 100:] = -float("inf")
    params = [SampleParams(top_p=0.25, seed=5, counter=9)] * 5
    ids, probs, (want, want_probs) = run_sample(lib, logits, params)
    assert torch.equal(ids, want.cpu()) and ids.tolist()[1:4] == [-1, -1, -1]
    assert torch.allclose(probs, want_probs.cpu(), rtol=1e-5)
