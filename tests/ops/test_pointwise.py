"""Norms, rotary, activations and in-place operations against fp64 formulas and torch's own functions."""

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import poisoned, rms_error

from exl3 import ops
from exl3.errors import ArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 576), (3, 1), (2, 7), (5, 4097), (64, 128)])
def test_rms_norm_is_the_formula(dtype, rows, n):
    x, w = torch.randn(rows, n).to(dtype), torch.randn(n)
    got = ops.rms_norm(x, w, 1e-5, out=poisoned((rows, n), dtype))
    want = F.rms_norm(x.double(), (n,), w.double(), 1e-5)
    assert rms_error(got, want) < TOLERANCE[dtype]
    assert torch.equal(ops.rms_norm(x, w, 1e-5, dtype=dtype), got)


def test_rms_norm_without_weight_mixed_dtypes_and_strides():
    big = torch.randn(4, 100)
    x = big[:, 10:74]
    got = ops.rms_norm(x, None, 1e-6, dtype=torch.float16)
    assert got.dtype == torch.float16
    assert rms_error(got, F.rms_norm(x.double(), (64,), None, 1e-6)) < 6e-4
    out = poisoned((4, 200))
    ops.rms_norm(x, None, 1e-6, out=out[:, 32:96])
    assert out[:, :32].isnan().all() and out[:, 96:].isnan().all() and not out[:, 32:96].isnan().any()


def test_rms_norm_adds_the_residual_first():
    x, residual, w = torch.randn(3, 65).half(), torch.randn(3, 65), torch.randn(65)
    want = residual + x.float()
    got = ops.rms_norm(x, w, 1e-6, residual=residual, dtype=torch.float32)
    assert torch.equal(residual, want)
    assert rms_error(got, F.rms_norm(want.double(), (65,), w.double(), 1e-6)) < 3e-7


def test_rms_norm_accumulates():
    x, w, out = torch.randn(3, 65), torch.randn(65), torch.randn(3, 65)
    want = out.double() + F.rms_norm(x.double(), (65,), w.double(), 1e-6)
    assert ops.rms_norm(x, w, 1e-6, out=out, accumulate=True) is out
    assert rms_error(out, want) < 3e-7


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_layer_norm_without_bias(shift):
    x, w = torch.randn(3, 333) + shift, torch.randn(333)
    assert rms_error(ops.rms_norm(x, w, 1e-5, subtract_mean=True), F.layer_norm(x.double(), (333,), w.double(), None, 1e-5)) < 1e-6


def test_a_row_does_not_depend_on_the_batch():
    x, w = torch.randn(50, 999), torch.randn(999)
    whole = ops.rms_norm(x, w, 1e-5)
    for i in (0, 17, 49):
        assert torch.equal(ops.rms_norm(x[i : i + 1], w, 1e-5), whole[i : i + 1])


def test_norm_of_large_values_and_nan():
    x = torch.full((2, 64), 1e15)
    assert torch.allclose(ops.rms_norm(x, None, 1e-6), torch.ones(2, 64))
    x[1, 3] = float("nan")
    y = ops.rms_norm(x, None, 1e-6)
    assert not y[0].isnan().any() and y[1].isnan().all()


def test_rotary_table_at_far_positions():
    positions = torch.tensor([0, 1, 255, 131071, 1_000_000], dtype=torch.int32)
    inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64.0)
    cos, sin = ops.rotary_table(positions, inv_freq, 1.25)
    angle = positions.double()[:, None] * inv_freq.double()
    assert (cos - 1.25 * angle.cos()).abs().max() < 1e-7 * 2
    assert (sin - 1.25 * angle.sin()).abs().max() < 1e-7 * 2


def test_rotary_table_switches_per_row_to_the_long_frequencies():
    positions = torch.tensor([5, 6, 5, 0], dtype=torch.int32)
    token_row = torch.tensor([0, 0, 1, -1], dtype=torch.int32)
    lengths = torch.tensor([4096, 4097], dtype=torch.int32)
    short, long = torch.rand(8), torch.rand(8)
    cos, sin = ops.rotary_table(positions, short, 1.0, long=(long, 1.5, 4096, token_row, lengths))
    freq = torch.stack([short, short, long, short]).double()
    scale = torch.tensor([1, 1, 1.5, 1]).double()[:, None]
    angle = positions.double()[:, None] * freq
    assert torch.allclose(cos.double(), angle.cos() * scale, atol=1e-7) and torch.allclose(sin.double(), angle.sin() * scale, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 32), (80, 80), (256, 64), (96, 48)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_is_a_complex_product(dtype, head_dim, rotary_dim, interleaved, normed):
    tokens, q_heads, k_heads = 5, 6, 2
    qkv = torch.randn(tokens, (q_heads + 2 * k_heads) * head_dim).to(dtype)
    q = qkv[:, : q_heads * head_dim].view(tokens, q_heads, head_dim)
    k = qkv[:, q_heads * head_dim : (q_heads + k_heads) * head_dim].view(tokens, k_heads, head_dim)
    untouched = qkv[:, (q_heads + k_heads) * head_dim :].clone()
    cos, sin = ops.rotary_table(torch.arange(tokens, dtype=torch.int32) * 37, torch.rand(rotary_dim // 2))
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if normed else (None, None)

    def expected(x, w):
        x = x.double()
        if w is not None:
            x = F.rms_norm(x, (head_dim,), w.double(), 1e-6)
        r, half = x[..., :rotary_dim], rotary_dim // 2
        z = torch.complex(r[..., 0::2], r[..., 1::2]) if interleaved else torch.complex(r[..., :half], r[..., half:])
        z = z * torch.complex(cos, sin).to(torch.complex128)[:, None]
        r = torch.view_as_real(z).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
        return torch.cat([r, x[..., rotary_dim:]], -1)

    want_q, want_k = expected(q, norms[0]), expected(k, norms[1])
    ops.rotary_(q, k, cos, sin, rotary_dim, interleaved=interleaved, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
    assert rms_error(q, want_q) < TOLERANCE[dtype] and rms_error(k, want_k) < TOLERANCE[dtype]
    assert torch.equal(qkv[:, (q_heads + k_heads) * head_dim :], untouched)


def test_rotary_with_norms_only_and_without_k():
    q, w = torch.randn(3, 2, 64), torch.randn(64)
    want = F.rms_norm(q.double(), (64,), w.double(), 1e-6)
    ops.rotary_(q, None, None, None, 0, q_norm=w, eps=1e-6)
    assert rms_error(q, want) < 3e-7


def xielu(x):
    # as transformers' XIELUActivation computes it: alpha_p 0.9, alpha_n 1.1 (after softplus), beta 0.5, eps -1e-6
    x = x.double()
    return torch.where(x > 0, 0.9 * x * x + 0.5 * x, 1.1 * (torch.expm1(x.clamp(max=-1e-6)) - x) + 0.5 * x)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "xielu": xielu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("gated", [True, False])
def test_activations(dtype, activation, gated):
    gate, up = (4 * torch.randn(3, 1001)).to(dtype), torch.randn(3, 1001).to(dtype)
    params = (0.9, 1.1, 0.5, -1e-6) if activation == "xielu" else None
    got = ops.act_mul(gate, up if gated else None, activation, params)
    want = ACTIVATIONS[activation](gate.double()) * (up.double() if gated else 1)
    assert got.dtype == dtype and rms_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_at_the_ends(activation):
    x = torch.tensor([[-1e4, -200.0, -90.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 90.0, 1e4, float("nan")]])
    got, want = ops.act_mul(x, None, activation), ACTIVATIONS[activation](x.double())
    assert got[0, -1].isnan() and torch.allclose(got[:, :-1].double(), want[:, :-1], rtol=1e-5, atol=1e-7)


def test_act_mul_of_strided_halves():
    both = torch.randn(4, 96)
    assert rms_error(ops.act_mul(both[:, :48], both[:, 48:], "silu"), F.silu(both[:, :48].double()) * both[:, 48:]) < 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4095, 4097, 100_003])
def test_add_and_softcap(dtype, n):
    y, x = torch.randn(n), torch.randn(n).to(dtype)
    want = y.double() + 0.5 * x.double()
    assert ops.add_(y, x, 0.5) is y and rms_error(y, want) < 1e-7
    z = 30 * torch.randn(n)
    want = 30 * torch.tanh(0.7 * z.double() / 30)
    assert rms_error(ops.softcap_(z.clone(), 0.7, 30.0), want) < 3e-7
    assert torch.equal(ops.softcap_(z.clone(), 0.25, 0.0), z * 0.25)


def test_softcap_keeps_small_values():
    x = torch.tensor([1e-6, -1e-4, 0.3, 5.0, 1e6, -float("inf")])
    got = ops.softcap_(x.clone(), 1.0, 50.0)
    assert torch.allclose(got.double(), 50 * torch.tanh(x.double() / 50), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [torch.float32, torch.float16])
def test_embedding(dtype, out):
    table = torch.randn(50, 33).to(dtype)
    ids = torch.tensor([0, 49, 7, -1, 50, 7, 2**31 - 1], dtype=torch.int32)
    got = ops.embedding(ids, table, 2.5, dtype=out)
    want = table.double()[ids.clamp(0, 49).long()] * 2.5
    want[[3, 4, 6]] = 0
    assert got.dtype == out and rms_error(got, want) < (1e-7 if out == torch.float32 else 6e-4)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [256, 576])
def test_embedding_rings_equal_the_codec(bits, n):
    from exl3 import codec

    groups = -(-n // 256)
    trellis = torch.randint(-32768, 32768, (9, groups, 1 + 16 * bits), dtype=torch.int16)
    trellis[:, :, 0] = (torch.rand(9, groups) * 0.05).half().view(torch.int16)
    trellis = trellis.view(9, -1)
    signs = torch.where(torch.rand(groups, 256) < 0.5, -1.0, 1.0).half()
    ids = torch.tensor([8, 0, 3, 99, 3], dtype=torch.int32)
    got = ops.embedding(ids, ops.RingTable(trellis, signs, n), 3.0)
    want = codec.embedding_decode(trellis, signs, n)[ids.clamp(max=8).long()] * 3.0
    want[3] = 0
    assert got.shape == (5, n) and rms_error(got, want) < 3e-7


def test_take_rows():
    x = torch.randn(7, 12)
    assert torch.equal(ops.take_rows(x, torch.tensor([6, 0, 0], dtype=torch.int32)), x[[6, 0, 0]])


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: ops.rms_norm(torch.randn(2, 8), torch.randn(7), 1e-5), "weight"),
        (lambda: ops.rms_norm(torch.randn(2, 8), torch.randn(8).half(), 1e-5), "weight"),
        (lambda: ops.rms_norm(torch.randn(2, 8).double(), None, 1e-5), "x"),
        (lambda: ops.rms_norm(torch.randn(8), None, 1e-5), "x"),
        (lambda: ops.rms_norm(torch.randn(8, 4).t(), None, 1e-5), "contiguous"),
        (lambda: ops.rms_norm(torch.randn(1, 8).expand(3, 8), None, 1e-5, residual=torch.randn(1, 8).expand(3, 8)), "residual"),
        (lambda: ops.rms_norm(torch.randn(2, 8), None, 1e-5, out=torch.randn(3, 8)), "out"),
        (lambda: ops.rms_norm(torch.randn(2, 8), None, 1e-5, out=torch.randn(2, 8).half(), accumulate=True), "out"),
        (lambda: (lambda t: ops.rms_norm(t[0:2], None, 1e-5, out=t[1:3]))(torch.randn(3, 8)), "share memory"),
        (lambda: (lambda t: ops.rms_norm(t, None, 1e-5, residual=t))(torch.randn(3, 8)), "share memory"),
        (lambda: ops.rotary_(torch.randn(2, 3, 8), torch.randn(2, 1, 8).half(), None, None, 0), "k"),
        (lambda: ops.rotary_(torch.randn(2, 3, 8), None, torch.randn(2, 3), torch.randn(2, 3), 8), "cos"),
        (lambda: ops.rotary_(torch.randn(2, 3, 8), None, torch.randn(2, 5), torch.randn(2, 5), 10), "rotary_dim"),
        (lambda: ops.act_mul(torch.randn(2, 8), torch.randn(2, 8), "mish"), "mish"),
        (lambda: ops.act_mul(torch.randn(2, 8), None, "xielu"), "params"),
        (lambda: ops.act_mul(torch.randn(2, 8), torch.randn(2, 9), "silu"), "up"),
        (lambda: ops.add_(torch.randn(4).half(), torch.randn(4)), "y"),
        (lambda: ops.embedding(torch.tensor([1]), torch.randn(4, 4)), "ids"),
        (lambda: ops.embedding(torch.tensor([1], dtype=torch.int32), torch.randn(4, 8)[:, ::2]), "table"),
        (lambda: ops.rotary_table(torch.arange(4), torch.rand(4)), "positions"),
        (lambda: ops.add_(torch.randn(4, device="meta"), torch.randn(4, device="meta")), "meta"),
        (lambda: ops.add_(torch.randn(4), torch.randn(4, device="meta")), "meta"),
    ],
)
def test_bad_arguments_are_named(call, word):
    with pytest.raises(ArgumentError, match=word):
        call()


def test_fake_tensors_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 8)
    with pytest.raises(ArgumentError, match="FakeTensor"):
        ops.rms_norm(x, None, 1e-5)


def test_gradients_flow_through_the_torch_form():
    x, w = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    ops.act_mul(ops.rms_norm(x, w, 1e-5), None, "silu").sum().backward()
    want = torch.autograd.grad(F.silu(F.rms_norm(x, (16,), w, 1e-5)).sum(), (x, w))
    assert torch.allclose(x.grad, want[0], atol=1e-6) and torch.allclose(w.grad, want[1], atol=1e-6)
    with torch.no_grad():
        assert not ops.rms_norm(x, w, 1e-5).requires_grad
