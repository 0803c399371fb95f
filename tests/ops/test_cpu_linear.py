"""The CPU's trellis product and its pieces, in every instruction tier this CPU has, against float64 and the pure-torch codec."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_library import Library, NativeError, find, random_matrix

from exl3 import codec

TIERS = ("scalar", "avx2", "avx512")
RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
CASES = [("mul1", K) for K in RATES] + [(c, K) for c in ("mcg", "3inst") for K in (1, 2, 3, 4, 5, 6, 7, 8)]
MULTIPLIERS = (0xFF7A83E5, 0x00000001, 0xAC564B05)  # an early file's own, a degenerate and an odd one


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=TIERS)
def library(request, tmp_path_factory):
    path = find()
    assert path is not None, "libexl3_cpu.so was not found"
    library = Library(path, request.param, tmp_path_factory.mktemp("tier"))
    if library.tier != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return library


def dequantized(m, multiplier=None):
    """W in float64 by the codec."""
    tensors = [torch.from_numpy(m[k]) for k in ("trellis", "suh", "svh")]
    return codec.dequantize(*tensors, m["codebook"], multiplier).double().numpy()


def inputs(rows, n, seed=0):
    """Gaussian rows and the kinds that quantized activations find hard."""
    x = np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)
    if rows > 1:
        x[1] *= 1e-3
        x[1, 5] = 300.0  # one channel dwarfs the rest
    if rows > 2:
        x[2] = 1.0
    if rows > 3:
        x[3] = 0.0
    return x


def relative(got, want):
    """Largest relative RMS error of the rows; rows that must be zero must be zero."""
    size = np.sqrt((want**2).sum(1))
    error = np.sqrt(((got.astype(np.float64) - want) ** 2).sum(1))
    assert (error[size == 0] == 0).all()
    return (error[size > 0] / size[size > 0]).max()


@pytest.mark.parametrize(("codebook", "K"), CASES)
def test_decodes_bit_exactly(library, codebook, K):
    m = random_matrix(3, 128, 256, K, codebook)
    want = codec.decode(torch.from_numpy(m["trellis"]), codebook).numpy()
    for repack in (True, False):
        got = library.reconstruct(library.weight(**m, repack=repack))
        assert np.array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("codebook", ["mul1", "mcg"])
@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_stored_multipliers_count(library, codebook, multiplier):
    m = random_matrix(4, 128, 128, 3, codebook)
    weight = library.weight(**m, multiplier=multiplier)
    want = codec.decode(torch.from_numpy(m["trellis"]), codebook, multiplier).numpy()
    assert np.array_equal(library.reconstruct(weight).view(np.uint16), want.view(np.uint16))
    x = inputs(2, 128)
    assert relative(library.linear(x, [weight])[0], x.astype(np.float64) @ dequantized(m, multiplier)) < 1e-3


def test_original_basis(library):
    m = random_matrix(5, 256, 384, 4, "mul1")
    weight = library.weight(**m, in_features=200, out_features=300)
    got = library.reconstruct(weight, original_basis=True)
    want = dequantized(m)[:200, :300]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("codebook", "K"), CASES)
def test_product(library, codebook, K):
    m = random_matrix(6, 384, 256, K, codebook)
    weight, exact = library.weight(**m), dequantized(m)
    x = inputs(6, 384)
    want = x.astype(np.float64) @ exact
    for planes, bound in ((2, 1e-3), (1, 2e-2), (0, 2e-6)):
        got = library.linear(x, [weight], planes=planes)[0]
        assert relative(got, want) < bound
        for row in (0, 1, 5):  # a row does not depend on its neighbours
            assert np.array_equal(library.linear(x[row : row + 1], [weight], planes=planes)[0][0], got[row])


def test_worst_input_for_one_scale_a_block(library):
    """An input that the rotation turns into a single spike per block leaves the other 127 values a 11-fold smaller share of the range."""
    for codebook in ("mul1", "mcg"):
        m = random_matrix(7, 256, 256, 4, codebook)
        spike = np.full(256, 0.05, np.float32)
        spike[[3, 200]] = 1.0
        x = codec.rotate(torch.from_numpy(spike)[None]).numpy() / m["suh"].astype(np.float32)
        got = library.linear(np.ascontiguousarray(x), [library.weight(**m)])[0]
        assert relative(got, x.astype(np.float64) @ dequantized(m)) < 1e-3


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_true_sizes(library, rows):
    """Columns beyond in_features are not read, beyond out_features not written; 130 rows are two batches."""
    m = random_matrix(8, 256, 384, 2.5, "mul1")
    bias = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    weight = library.weight(**m, bias=bias, in_features=200, out_features=300)
    wide = np.full((rows, 256), np.nan, np.float32)
    wide[:, :200] = inputs(rows, 200)
    out = np.full((rows, 320), 7.0, np.float32)
    library.linear(wide, [weight], out=[out])
    want = wide[:, :200].astype(np.float64) @ dequantized(m)[:200, :300] + bias
    assert relative(out[:, :300], want) < 1e-3
    assert (out[:, 300:] == 7.0).all()
    assert np.array_equal(out[0], library.linear(wide[:1], [weight], out=[np.full((1, 320), 7.0, np.float32)])[0][0])


def test_groups(library):
    """Four matrices of other sizes, rates and codebooks in one call equal four calls, with one shared rotation or each its own."""
    kinds = ((256, 4, "mul1"), (128, 2, "mul1"), (384, 3, "mcg"), (128, 6, "3inst"))
    parts = [random_matrix(10 + i, 256, n, K, c) for i, (n, K, c) in enumerate(kinds)]
    x = inputs(5, 256)
    for shared in (False, True):
        if shared:
            for m in parts[1:]:
                m["suh"] = parts[0]["suh"]
        weights = [library.weight(**m) for m in parts]
        together = library.linear(x, weights, shared_suh=shared)
        for y, w, m in zip(together, weights, parts):
            assert np.array_equal(y, library.linear(x, [w])[0])
            assert relative(y, x.astype(np.float64) @ dequantized(m)) < 1e-3


def test_wide_input_and_many_outputs(library):
    """One row of more inputs than a thread rotates for itself, and two threads on enough columns to share."""
    for n_in, n_out in ((8320, 128), (128, 4096)):
        m = random_matrix(15, n_in, n_out, 1, "mul1")
        weight, x = library.weight(**m), inputs(1, n_in)
        got = library.linear(x, [weight])[0]
        assert relative(got, x.astype(np.float64) @ dequantized(m)) < 1e-3
        assert np.array_equal(library.linear(x, [weight], threads=2)[0], got)


ACTIVATIONS = {
    1: torch.nn.functional.silu,
    2: torch.nn.functional.gelu,
    3: lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
    4: lambda g: torch.relu(g).square(),
    6: torch.relu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_norm_activation_and_residual(library, activation):
    rng = np.random.default_rng(2)
    gate, up = (random_matrix(20 + i, 256, 256, 4, "mul1") for i in range(2))
    for m in (gate, up):
        m["svh"] = (m["svh"] * 20).astype(np.float16)  # results of size 1, so that the activation bends
    norm = rng.uniform(0.5, 1.5, 200).astype(np.float32)
    x = inputs(3, 200) * 40
    normed = x.astype(np.float64)
    normed = normed / np.sqrt((normed**2).mean(1, keepdims=True) + 1e-5) * norm
    g, u = (torch.from_numpy(normed @ dequantized(m)[:200, :250]) for m in (gate, up))
    weights = [library.weight(**m, in_features=200, out_features=250) for m in (gate, up)]
    want = (ACTIVATIONS[activation](g) * u).numpy()
    assert relative(library.linear(x, weights, norm=norm, eps=1e-5, activation=activation)[0], want) < 2e-3
    residual = rng.standard_normal((3, 250)).astype(np.float32)
    added = library.linear(x, weights, norm=norm, eps=1e-5, activation=activation, out=[residual.copy()], accumulate=True)[0]
    assert relative(added, want + residual) < 2e-3


def test_dtypes(library):
    m = random_matrix(9, 256, 256, 4, "mul1")
    weight, exact = library.weight(**m), dequantized(m)
    x = torch.from_numpy(inputs(2, 256))
    half, brain = x.half(), x.bfloat16()
    got = library.linear(half.numpy(), [weight], out=[np.zeros((2, 256), np.float16)])[0]
    assert relative(got, half.double().numpy() @ exact) < 2e-3
    got = library.linear(brain.view(torch.int16).numpy().view(np.uint16), [weight], x_dtype="bfloat16")[0]
    assert relative(got, brain.double().numpy() @ exact) < 1e-3


def test_threads_do_not_matter(library):
    weights = [library.weight(**random_matrix(30 + i, 256, n, 4, "mul1")) for i, n in enumerate((384, 128))]
    x = inputs(9, 256)
    one = library.linear(x, weights)
    for threads in (2, 3):
        for a, b in zip(one, library.linear(x, weights, threads=threads)):
            assert np.array_equal(a, b)


def test_a_nan_stays_in_its_row(library):
    weight = library.weight(**random_matrix(11, 256, 256, 4, "mul1"))
    x = inputs(3, 256)
    clean = library.linear(x, [weight])[0]
    for bad in (np.nan, np.inf):
        x[1, 7] = bad
        y = library.linear(x, [weight])[0]
        assert np.isnan(y[1]).any() and not np.isfinite(y[1]).all()
        assert np.array_equal(y[[0, 2]], clean[[0, 2]])


def test_wrong_arguments_are_named(library):
    m = random_matrix(12, 128, 128, 4, "mul1")
    x = inputs(1, 128)
    with pytest.raises(NativeError, match="repack"):
        library.linear(x, [library.weight(**m, repack=False)])
    with pytest.raises(NativeError, match="one input size"):
        library.linear(x, [library.weight(**m), library.weight(**random_matrix(13, 256, 128, 4, "mul1"))])
    with pytest.raises(NativeError, match="gate, up"):
        library.linear(x, [library.weight(**m)], activation=1)
    with pytest.raises(NativeError, match="fp32"):
        library.linear(x, [library.weight(**m)], out=[np.zeros((1, 128), np.float16)], accumulate=True)


def test_rotate(library):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 200)).astype(np.float32)
    pre, post = rng.standard_normal(200).astype(np.float32), rng.standard_normal(256).astype(np.float32)
    wide = torch.nn.functional.pad(torch.from_numpy(x * pre).double(), (0, 56))
    want = codec.rotate(wide).numpy() * post
    assert np.abs(library.rotate(x, pre, post) - want).max() < 1e-5
    half = x.astype(np.float16)
    want = codec.rotate(torch.nn.functional.pad(torch.from_numpy(half).double(), (0, 56))).numpy()
    assert np.abs(library.rotate(half) - want).max() < 2e-3


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense(library, weight_dtype):
    rng = np.random.default_rng(4)
    weight = torch.from_numpy(rng.standard_normal((77, 203)).astype(np.float32)).to(weight_dtype)
    x, bias = rng.standard_normal((6, 203)).astype(np.float32), rng.standard_normal(77).astype(np.float32)
    raw = weight.view(torch.int16).numpy() if weight_dtype == torch.bfloat16 else weight.numpy()
    want = x.astype(np.float64) @ weight.double().numpy().T
    code = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}[weight_dtype]
    got = library.dense(x, raw, bias, weight_dtype=code)
    assert relative(got, want + bias) < 1e-6
    assert np.array_equal(library.dense(x[2:3], raw, bias, weight_dtype=code)[0], got[2])
    start = rng.standard_normal((6, 77)).astype(np.float32)
    assert relative(library.dense(x, raw, out=start.copy(), weight_dtype=code), want + start) < 1e-6
    assert np.array_equal(library.dense(x, raw, bias, weight_dtype=code, threads=2), got)
