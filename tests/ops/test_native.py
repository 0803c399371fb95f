"""The door to the libraries: missing and stale ones refuse in one line, torch runs where it must, the self-test finds faults."""

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from exl3 import codec, ops
from exl3.errors import ArgumentError, BackendError
from exl3.ops import blocks, native, products


def small_weight(n_in=200, n_out=100, k=4, codebook="mul1", **changes):
    shape = (-(-n_in // 128) * 8, -(-n_out // 128) * 8, round(16 * k))
    arguments = {
        "trellis": torch.randint(-32768, 32768, shape, dtype=torch.int16),
        "suh": torch.randn(16 * shape[0]).half(),
        "svh": torch.randn(16 * shape[1]).half(),
        "bias": torch.randn(n_out),
        "in_features": n_in,
        "out_features": n_out,
        "codebook": codebook,
        **changes,
    }
    return ops.Weight(**arguments), arguments


def test_argument_blocks_have_the_headers_sizes():
    from exl3 import _native

    assert _native.block_bytes() == blocks.SIZES


def test_backend_tells_what_it_is():
    library = ops.backend("cpu")
    assert library.name == "cpu" and library.path.name.startswith(("libexl3_cpu", "exl3_cpu"))
    assert any(tier in library.describe(0) for tier in ("scalar", "avx2", "avx512"))
    with pytest.raises(BackendError, match="device 1"):
        library.describe(1)
    assert "cpu" in ops.describe()["cpu"]


def test_all_operations_are_there():
    names = {name for name in blocks.SIZES if name != "weight"}
    assert set(ops.backend("cpu").ops) == names


def test_a_device_without_a_library_is_one_line():
    with pytest.raises(BackendError, match="no kernel library serves") as e:
        ops.backend("meta")
    assert "\n" not in str(e.value)


def test_a_missing_library_runs_the_torch_form_and_says_so_once(monkeypatch):
    monkeypatch.setattr(native, "_backends", {})
    monkeypatch.setattr(native, "_candidates", lambda name: [Path("/nonexistent/libexl3_cpu.so")])
    x = torch.randn(2, 8)
    with pytest.warns(RuntimeWarning, match="libexl3_cpu is not installed"):
        y = ops.rms_norm(x, None, 1e-5)
    assert torch.allclose(y, torch.nn.functional.rms_norm(x, (8,), None, 1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.rms_norm(x, None, 1e-5)


def test_a_file_that_is_no_library_and_a_stale_one_refuse(tmp_path):
    from exl3 import _native

    text = tmp_path / "libexl3_cpu.so"
    text.write_text("not a library")
    with pytest.raises(BackendError, match="cannot load"):
        _native.open(str(text))
    with pytest.raises(BackendError, match="not an exl3 kernel library"):
        _native.open(_native.__file__)


@pytest.mark.skipif(sys.platform != "linux", reason="needs an ELF library")
@pytest.mark.parametrize("left", [0.999, 0.5, 0.01])
def test_a_library_cut_short_refuses(tmp_path, left):
    """The linker would map it all the same, and the process would end with a bus error."""
    from exl3 import _native

    whole = Path(_native.__file__).read_bytes()
    library = tmp_path / "libexl3_cpu.so"
    library.write_bytes(whole[: int(len(whole) * left)])
    with pytest.raises(BackendError, match=r"cut short by \d+ bytes: pip install"):
        native.Backend(library)
    library.write_bytes(whole)
    with pytest.raises(BackendError, match="not an exl3 kernel library"):
        native.Backend(library)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a C compiler by name")
def test_a_library_of_another_interface_refuses(tmp_path):
    from exl3 import _native

    source, library = tmp_path / "stale.c", tmp_path / "stale.so"
    source.write_text("struct { int abi, bytes; } table = {0, 8}; void* exl3_get_backend(void) { return &table; }")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    with pytest.raises(BackendError, match="stale") as e:
        _native.open(str(library))
    assert "\n" not in str(e.value)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a C compiler by name")
@pytest.mark.parametrize("bytes_of_table", ["offsetof(exl3_backend, dense)", "sizeof(exl3_backend) + 8"])
def test_a_library_with_fewer_or_more_operations_serves_those_it_has(tmp_path, bytes_of_table):
    from exl3 import _native

    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(f"""#include <stddef.h>
        #include "exl3/ops.h"
        static int linear(const exl3_linear_args* a, void* s) {{ return 0; }}
        static exl3_backend table = {{EXL3_ABI, {bytes_of_table}, .name = "other", .linear = linear, .dense = (void*)1}};
        const exl3_backend* exl3_get_backend(void) {{ return &table; }}""")
    include = Path(__file__).parents[2] / "cpp/include"
    try:
        subprocess.run(["cc", f"-I{include}", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    assert set(_native.open(str(library)).ops) == ({"linear"} if "offsetof" in bytes_of_table else {"linear", "dense"})


def test_blocks_of_a_wrong_size_are_refused():
    op = ops.backend("cpu").ops["add"]
    with pytest.raises(BackendError, match="size"):
        op(b"123", 1)


def test_errors_of_the_library_are_typed_and_named():
    y = torch.zeros(4)
    with pytest.raises(ArgumentError, match="add on cpu: unknown dtype code 9"):
        ops.backend("cpu").ops["add"](blocks.ADD.pack(y.data_ptr(), y.data_ptr(), 4, 9, 1.0), 1)


def test_the_self_test_passes_and_finds_faults(monkeypatch):
    ops.self_test("cpu")
    library = ops.backend("cpu")
    broken = dict(library.ops)

    def no_op(block, stream):
        y = blocks.ACT_MUL.unpack(block)[2]
        ctypes.memset(y, 0, 16)

    broken["act_mul"] = no_op
    monkeypatch.setattr(library, "ops", broken)
    with pytest.raises(BackendError, match="self-test"):
        ops.self_test("cpu")


def test_importing_ops_opens_no_library():
    code = "import exl3, sys; import exl3.ops; assert 'exl3._native' not in sys.modules, 'opened'"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_weight_reconstructs_as_the_codec(codebook):
    w, a = small_weight(codebook=codebook)
    assert torch.equal(w.reconstruct(), codec.decode(a["trellis"], codebook))
    full = codec.dequantize(a["trellis"], a["suh"], a["svh"], codebook)[:200, :100]
    assert torch.allclose(w.reconstruct(original_basis=True), full, atol=1e-4 * float(full.abs().max()))
    assert w.K == 4 and w.nbytes > 0 and "K=4" in repr(w)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"trellis": torch.zeros(16, 8, 64, dtype=torch.int32)}, "trellis"),
        ({"trellis": torch.zeros(16, 8, 60, dtype=torch.int16)}, "trellis"),
        ({"trellis": torch.zeros(16, 8, 72, dtype=torch.int16)}, "trellis"),
        ({"trellis": torch.zeros(15, 8, 64, dtype=torch.int16)}, "128"),
        ({"trellis": torch.zeros(16, 8, 40, dtype=torch.int16), "codebook": "mcg"}, "half rate"),
        ({"suh": torch.zeros(255).half()}, "suh"),
        ({"svh": torch.zeros(128)}, "svh"),
        ({"bias": torch.zeros(99)}, "bias"),
        ({"in_features": 257}, "in_features"),
        ({"out_features": 0}, "out_features"),
        ({"codebook": "mul2"}, "mul2"),
        ({"suh": torch.zeros(256, device="meta").half()}, "meta"),
    ],
)
def test_weights_are_checked_once_and_named(changes, word):
    with pytest.raises(ArgumentError, match=word):
        small_weight(**changes)


def test_linear_checks_its_arguments():
    w, _ = small_weight()
    other, _ = small_weight(n_in=128)
    x = torch.randn(3, 200)
    for call, word in (
        (lambda: ops.linear(torch.randn(3, 199), w), "x"),
        (lambda: ops.linear(torch.randn(200), w), "x"),
        (lambda: ops.linear(x.double(), w), "x"),
        (lambda: ops.linear(x, (w, other)), "one group"),
        (lambda: ops.linear(x, (w,) * 5), "1 to 4"),
        (lambda: ops.linear(x, torch.randn(4, 4)), "Weight|has"),
        (lambda: ops.linear(x, w, norm=torch.randn(199)), "norm"),
        (lambda: ops.linear(x, w, activation="silu"), "two weights"),
        (lambda: ops.linear(x, (w, w), activation="xielu"), "act_mul"),
        (lambda: ops.linear(x, w, accumulate=True), "out"),
        (lambda: ops.linear(x, w, out=torch.randn(3, 100).half(), accumulate=True), "out"),
        (lambda: ops.linear(x, w, out=torch.randn(2, 100)), "rows"),
        (lambda: ops.linear(x, (w, w), out=(torch.randn(3, 100),)), "out"),
        (lambda: ops.linear(x, w, out=x[:, :100]), "share memory"),
        (lambda: ops.linear(x, w, dtype=torch.int32), "dtype"),
        (lambda: ops.dense(x, torch.randn(4, 199)), "x"),
        (lambda: ops.dense(x, torch.randn(4, 200), torch.randn(3)), "bias"),
        (lambda: ops.rotate(x, n_padded=200), "n_padded"),
        (lambda: ops.encode(torch.randn(2, 255), 4, "mul1"), "tiles"),
        (lambda: ops.encode(torch.randn(2, 256), 4, "mul3"), "mul3"),
    ):
        with pytest.raises((ArgumentError, AttributeError), match=word):
            call()


def test_linear_groups_dtypes_and_accumulation():
    w, _ = small_weight()
    v, _ = small_weight(n_out=260, k=3)
    dense_w, dense_v = w.reconstruct(True), v.reconstruct(True)
    x, norm = torch.randn(3, 200), torch.rand(200)
    h = torch.nn.functional.rms_norm(x, (200,), norm, 1e-5)
    a, b = ops.linear(x, (w, v), norm=norm, eps=1e-5)
    for got, want in ((a, h @ dense_w + w.bias), (b, h @ dense_v + v.bias)):
        assert (got - want).norm() < 1e-3 * want.norm()
    out = torch.randn(3, 100)
    want = out + x @ dense_w + w.bias
    assert ops.linear(x, w, out=out, accumulate=True) is out and (out - want).norm() < 1e-3 * want.norm()
    y = ops.linear(x, (w, w), activation="silu", dtype=torch.float16)
    g = x @ dense_w + w.bias
    want = torch.nn.functional.silu(g) * g
    assert y.dtype == torch.float16 and (y - want).norm() < 3e-3 * want.norm()


def test_gradients_run_through_the_torch_form():
    w, _ = small_weight()
    x = torch.randn(3, 200, requires_grad=True)
    ops.linear(x, w).sum().backward()
    assert torch.allclose(x.grad, w.reconstruct(True).sum(1).expand(3, 200), rtol=1e-3, atol=1e-3 * float(x.grad.abs().max()))


def test_no_rows_at_all():
    w, _ = small_weight()
    assert ops.linear(torch.randn(0, 200), w).shape == (0, 100)
    assert ops.rms_norm(torch.randn(0, 8), None, 1e-5).shape == (0, 8)
    assert ops.embedding(torch.zeros(0, dtype=torch.int32), torch.randn(4, 8)).shape == (0, 8)
    assert ops.act_mul(torch.randn(0, 8), None, "silu").shape == (0, 8)


def test_one_plane_stays_within_its_bound(monkeypatch):
    w, _ = small_weight()
    x = torch.randn(4, 200)
    want = x @ w.reconstruct(True) + w.bias
    errors = []
    for n in (2, 1):
        monkeypatch.setattr(products, "planes", n)
        errors.append(float((ops.linear(x, w) - want).norm() / want.norm()))
    assert errors[0] < 1e-3 and errors[1] < 3e-2
