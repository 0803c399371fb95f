"""Rings, tile order, codebooks, rotation and weights against the vectors of the format's text, tensors quantized by
exllamav3 on a GPU, and a bit-by-bit decoder in plain Python."""

from __future__ import annotations

import hashlib
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from exl3 import codec
from exl3.errors import ArgumentError, FormatError

sys.path.insert(0, str(Path(__file__).parent))
import oracle

DATA = Path(__file__).parent.parent / "data" / "exllamav3_linear.safetensors"
LAYERS = ["3inst.K1", "3inst.K2", "3inst.K4", "3inst.K7", "mcg.K2", "mcg.K3", "mcg.K6", "mcg.K8"]
LAYERS += ["mul1.K1", "mul1.K2", "mul1.K2.5", "mul1.K4", "mul1.K5", "mul1.K8"]

# format text, section 8: CRC32 of states and of the decoded matrix, for the trellis of `numbered`
DIGESTS = {
    1: ("55c8e4e0", "d66f4faa", "cef9f0e1", "ddd45490"),
    2: ("1d898a65", "8a67c652", "936d8da3", "6a7561de"),
    3: ("d17455fe", "4b5314b3", "f6b9186f", "102a1360"),
    4: ("5ee27103", "9c8080b7", "b4b3ac32", "17afd31f"),
    5: ("c48a9c77", "39bef937", "926ea92b", "8d592cea"),
    6: ("a21700e1", "841d88df", "7d53ed63", "c7d940ad"),
    7: ("dc934f2d", "75cd03ea", "595c5916", "d223b3a3"),
    8: ("ebcdefef", "dc5a2e19", "c6da8cbc", "00fcebc6"),
    1.5: ("19be36dc", None, None, "2a5075a6"),
    2.5: ("29ecdcfd", None, None, "b3d731b5"),
    3.5: ("6b1cfebf", None, None, "d200a922"),
}


def numbered(K: float) -> torch.Tensor:
    n = np.arange(64 * int(16 * K), dtype=np.uint64)
    words = ((n * 40503 + 12345) ^ (n >> np.uint64(3))) & np.uint64(0xFFFF)
    return torch.from_numpy(words.astype(np.uint16).view(np.int16).reshape(8, 8, -1))


def random_trellis(rows: int, cols: int, K: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32768, (rows, cols, int(16 * K)), dtype=torch.int16, generator=generator)


def crc(t: torch.Tensor) -> str:
    return f"{zlib.crc32(t.contiguous().view(torch.int16).numpy().astype('<i2').tobytes()):08x}"


@pytest.mark.parametrize("K", codec.RATES)
def test_digests_of_the_format_text(K):
    states, *matrices = DIGESTS[K]
    trellis = numbered(K)
    assert f"{zlib.crc32(codec.unpack(trellis).numpy().astype('<u2').tobytes()):08x}" == states
    for codebook, expected in zip(codec.CODEBOOKS, matrices):
        if expected is not None:
            assert crc(codec.decode(trellis, codebook)) == expected


@pytest.mark.parametrize("K", codec.RATES)
def test_unpack_matches_a_walk_along_the_ring(K):
    trellis = random_trellis(1, 2, K)
    states = codec.unpack(trellis)
    assert states.dtype == torch.int32 and states.shape == (1, 2, 256)
    for n in range(2):
        assert states[0, n].tolist() == oracle.ring_states(trellis[0, n].numpy().view(np.uint16), K)


def test_anchors_of_the_format_text():
    tile = torch.zeros(1, 1, 64, dtype=torch.int16)
    tile[0, 0, 0], tile[0, 0, 1] = 0x5678, 0x1234
    assert codec.unpack(tile)[0, 0, :8].tolist() == [0x0001, 0x0012, 0x0123, 0x1234, 0x2345, 0x3456, 0x4567, 0x5678]
    tile = torch.zeros(1, 1, 64, dtype=torch.int16)
    tile[0, 0, 62] = 0xABCD - 65536
    states = codec.unpack(tile)[0, 0].tolist()
    assert states[255] == 0xABCD and states[:4] == [0xBCD0, 0xCD00, 0xD000, 0]
    tile = torch.zeros(1, 1, 40, dtype=torch.int16)
    tile[0, 0, 0], tile[0, 0, 1] = 0x5678, 0x1234
    assert codec.unpack(tile)[0, 0, :10].tolist() == [0, 2, 9, 0x48, 0x123, 0x91A, 0x2468, 0x2345, 0x8D15, 0x68AC]


@given(K=st.sampled_from(codec.RATES), rows=st.integers(0, 3), cols=st.integers(0, 3), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_pack_inverts_unpack(K, rows, cols, seed):
    trellis = random_trellis(rows, cols, K, seed)
    states = codec.unpack(trellis)
    assert codec.is_tail_biting(states, K)
    assert torch.equal(codec.pack(states, K), trellis)
    for dtype in (torch.int64, torch.int16):
        assert torch.equal(codec.pack(states.to(dtype), K), trellis)


@given(K=st.sampled_from(codec.RATES), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_pack_keeps_only_the_new_bits(K, seed):
    """States that do not overlap: what comes back agrees in the low D(i) bits."""
    states = torch.randint(0, 65536, (2, 1, 256), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    new = torch.tensor(codec.fresh_bits(K))
    assert int(new.sum()) == 256 * K
    back = codec.unpack(codec.pack(states, K))
    assert torch.equal(back & ((1 << new) - 1), states & ((1 << new) - 1))


def test_pack_leaves_its_input_alone_and_takes_views():
    states = codec.unpack(random_trellis(4, 4, 3))
    copy = states.clone()
    assert torch.equal(codec.pack(states[1:, ::2], 3), codec.pack(states[1:, ::2].contiguous(), 3))
    assert torch.equal(states, copy)
    trellis = random_trellis(4, 6, 2.5)
    assert torch.equal(codec.unpack(trellis[:, 1:3]), codec.unpack(trellis[:, 1:3].contiguous()))
    assert torch.equal(codec.decode(trellis[::2], "mul1"), codec.decode(trellis[::2].contiguous(), "mul1"))


@pytest.mark.parametrize("changed", [0, 17, 255])
def test_is_tail_biting_sees_one_wrong_bit(changed):
    states = codec.unpack(random_trellis(1, 1, 4))
    states[0, 0, changed] ^= 0x8000
    assert not codec.is_tail_biting(states, 4)


def test_stream_order():
    row, col = codec.tile_coordinates()
    assert [(int(r), int(c)) for r, c in zip(row, col)] == [oracle.place(i) for i in range(256)]
    first = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8)]
    first += [(2, 0), (3, 0), (10, 0), (11, 0), (2, 8), (3, 8), (10, 8), (11, 8)]
    assert [oracle.place(i) for i in range(16)] == first
    tiles = torch.arange(2 * 3 * 256).view(2, 3, 256)
    matrix = codec.tiles_to_matrix(tiles)
    for kb, nb, i in [(0, 0, 0), (0, 2, 37), (1, 1, 255), (1, 0, 128), (1, 2, 91)]:
        r, c = oracle.place(i)
        assert matrix[16 * kb + r, 16 * nb + c] == tiles[kb, nb, i]
    assert torch.equal(codec.matrix_to_tiles(matrix), tiles)


# format text, section 3: states 0, 1, 2, 3, 255, 256, 4096, 32768, 43690, 65535
SPOTS = {
    "3inst": "3A25 BB5B 3B74 34B6 3CD1 3C3F 3560 B7F8 BB35 B110",
    "mcg": "3F60 304E BA13 3AB8 BD26 BAF0 BEFF B915 BFBA 3ACD",
    "mul1": "C2E8 3921 B72D 3239 3AB3 B3DB B84B BAF2 39B9 B936",
}
TABLES = {
    "3inst": ("4c83d524", "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea", 1.24371092, 0.00021044, 10598),
    "mcg": ("d2d13c52", "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9", 1.24411185, -0.00003693, 10746),
    "mul1": ("2bdf05c5", "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8", 1.00031207, -0.00193109, 913),
}


@pytest.mark.parametrize("codebook", codec.CODEBOOKS)
def test_codebook_tables(codebook):
    table = codec.codebook_table(codebook)
    crc32, sha, rms, mean, distinct = TABLES[codebook]
    assert crc(table) == crc32
    assert hashlib.sha256(table.view(torch.int16).numpy().astype("<i2").tobytes()).hexdigest() == sha
    assert codec.codebook_rms(codebook) == pytest.approx(rms, abs=1e-8)
    assert float(table.double().mean()) == pytest.approx(mean, abs=1e-8)
    assert len(table.unique()) == distinct
    spots = table[[0, 1, 2, 3, 255, 256, 4096, 32768, 43690, 65535]].view(torch.int16)
    assert " ".join(f"{int(v) & 0xFFFF:04X}" for v in spots) == SPOTS[codebook]


@pytest.mark.parametrize("codebook", ["mcg", "mul1"])
@pytest.mark.parametrize("multiplier", [0xFF7A83E5, 0x83DCD12D, 1, 0, 0xFFFFFFFF, -2080374785, -(2**31)])
def test_stored_multipliers(codebook, multiplier):
    table = codec.codebook_table(codebook, multiplier)
    for state in (0, 1, 2, 513, 40000, 65535):
        assert table[state].item() == oracle.value(state, codebook, multiplier % 2**32)
    assert torch.equal(table, codec.codebook_table(codebook, multiplier & 0xFFFFFFFF))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_quantized_by_exllamav3(name):
    tensors = load_file(DATA)
    with safe_open(DATA, "pt") as f:
        digest = f.metadata()[f"{name}.inner.crc32"]
    codebook, rate = name.split(".", 1)
    t = {k: tensors.get(f"{name}.{k}") for k in ("trellis", "suh", "svh", "x1", "y1", "x16", "y16", "inner", "weight", "mcg", "mul1")}
    marker = t.get(codebook)
    multiplier = None if marker is None else int(marker)
    inner = codec.decode(t["trellis"], codebook, multiplier)
    assert inner.dtype == torch.float16 and inner.shape == (256, 128)
    assert crc(inner) == digest
    w = codec.dequantize(t["trellis"], t["suh"], t["svh"], codebook, multiplier)
    assert w.dtype == torch.float32 and w.shape == (256, 128)
    exact = oracle.dequantize(inner.numpy(), t["suh"].numpy(), t["svh"].numpy())
    assert np.abs(w.numpy() - exact).max() < 2e-6 * np.abs(exact).max()
    # fp16 operands on the GPU; its product of one row and mul1 weights has 8-bit activations
    assert (t["x16"].float() @ w - t["y16"]).norm() < 5e-4 * t["y16"].norm()
    assert (t["x1"].float() @ w - t["y1"]).norm() < (1.2e-2 if codebook == "mul1" else 5e-4) * t["y1"].norm()
    if t["inner"] is not None:
        assert torch.equal(inner, t["inner"])
        # its fused kernel rounds to fp16 after each of four steps
        assert (w - t["weight"].float()).abs().max() < 1.5e-3 * w.abs().max()
    K = float(rate[1:])
    assert torch.equal(codec.pack(codec.unpack(t["trellis"]), K), t["trellis"])


def test_decode_in_pieces_equals_one_by_one():
    """Wide enough that the work is split: 300 tile columns, more than one chunk of rows."""
    trellis = random_trellis(32, 300, 1, 5)
    whole = codec.decode(trellis, "mcg")
    for row in (0, 12, 13, 31):
        assert torch.equal(whole[16 * row : 16 * row + 16], codec.decode(trellis[row : row + 1], "mcg"))
    words = trellis[31, 299].numpy().view(np.uint16)
    for i, state in enumerate(oracle.ring_states(words, 1)):
        r, c = oracle.place(i)
        assert whole[16 * 31 + r, 16 * 299 + c].item() == oracle.value(state, "mcg")


def test_slices_at_multiples_of_128():
    trellis, suh, svh = random_trellis(24, 16, 3), torch.randn(384).half(), torch.randn(256).half()
    whole = codec.dequantize(trellis, suh, svh, "mul1")
    part = codec.dequantize(trellis[8:16, 8:], suh[128:256], svh[128:], "mul1")
    assert torch.equal(part, whole[128:256, 128:])


def test_dequantize_in_pieces_equals_one_by_one():
    """Large enough that the work is split in rows of blocks."""
    trellis, suh, svh = random_trellis(40, 320, 2), torch.randn(640).half(), torch.randn(5120).half()
    whole = codec.dequantize(trellis, suh, svh, "mul1")
    for row in (0, 24, 32):
        part = codec.dequantize(trellis[row : row + 8], suh[16 * row : 16 * row + 128], svh, "mul1")
        assert torch.equal(part, whole[16 * row : 16 * row + 128])


@pytest.mark.parametrize("rows, cols", [(0, 8), (8, 0), (0, 0)])
def test_empty_matrices(rows, cols):
    trellis = torch.zeros(rows, cols, 32, dtype=torch.int16)
    assert codec.decode(trellis, "mcg").shape == (16 * rows, 16 * cols)
    w = codec.dequantize(trellis, torch.ones(16 * rows).half(), torch.ones(16 * cols).half(), "mcg")
    assert w.shape == (16 * rows, 16 * cols)


def test_surroundings_do_not_matter():
    """Default device and dtype, inference mode and lower matrix precision are the caller's business."""
    trellis, suh, svh = random_trellis(8, 8, 3), torch.randn(128).half(), torch.randn(128).half()
    expected = codec.dequantize(trellis, suh, svh, "mcg", 77)
    codec.codebooks._table.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        codec.decode(trellis, "mcg", 77)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(codec.dequantize(trellis, suh, svh, "mcg", 77), expected)
        states, _ = codec.encode_reference(torch.ones(1, 256, dtype=torch.float32), 8, "mcg")
        assert codec.is_tail_biting(states, 8)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert not codec.codebook_table("mcg", 77).is_inference()


def test_numbers_of_other_libraries():
    trellis = numbered(4)
    expected = codec.decode(trellis, "mcg", 0xFF7A83E5)
    for multiplier in (np.uint32(0xFF7A83E5), np.int64(0xFF7A83E5), torch.tensor(0xFF7A83E5 - 2**32, dtype=torch.int32)):
        assert torch.equal(codec.decode(trellis, "mcg", multiplier), expected)
    assert torch.equal(codec.pack(codec.unpack(trellis), np.int64(4)), trellis)
    assert codec.check_rate(np.float32(2.5)) == 2.5


def test_dead_outputs_are_exactly_zero():
    svh = torch.randn(128).half()
    svh[5:9] = 0
    w = codec.dequantize(random_trellis(8, 8, 2), torch.randn(128).half(), svh, "3inst")
    assert (w[:, 5:9] == 0).all() and (w[:, 9:] != 0).any()


@pytest.mark.parametrize("n", [1, 2, 32, 128, 256])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rotation(n, dim):
    x = torch.randn(2 * n, 2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    kept = x.clone()
    h = torch.from_numpy(np.kron(np.eye(2), oracle.hadamard(n)))
    expected = h @ x if dim == 0 else x @ h
    torch.testing.assert_close(codec.rotate(x, n, dim), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(codec.rotate(codec.rotate(x, n, dim), n, dim), x, rtol=0, atol=1e-12)
    assert torch.equal(x, kept)
    single = codec.rotate(x.half(), n, dim)
    assert single.dtype == torch.float32
    assert torch.equal(codec.hadamard(n, torch.float64), torch.from_numpy(oracle.hadamard(n)))


def test_legacy_signs():
    packed = torch.tensor([0x0005, -32768, 0, -1], dtype=torch.int16)
    signs = codec.unpack_signs(packed)
    assert signs.dtype == torch.float16 and signs.shape == (64,)
    assert [i for i in range(64) if signs[i] == -1] == [0, 2, 31, *range(48, 64)]
    assert torch.equal(codec.pack_signs(signs * 3), packed)
    assert codec.unpack_signs(codec.pack_signs(torch.tensor([-0.0] + [0.0] * 15)))[0] == -1


T = torch.zeros(8, 8, 64, dtype=torch.int16)
S = torch.ones(128, dtype=torch.float16)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: codec.unpack(T.float()), FormatError, "int16"),
        (lambda: codec.unpack(T[0]), FormatError, "2-D trellis is an embedding"),
        (lambda: codec.unpack(T[:, :, :63]), FormatError, "width 63"),
        (lambda: codec.unpack(T[:, :, :0]), FormatError, "width 0"),
        (lambda: codec.unpack(torch.zeros(1, 1, 72, dtype=torch.int16)), FormatError, "width 72"),
        (lambda: codec.unpack(torch.zeros(1, 1, 144, dtype=torch.int16)), FormatError, "width 144"),
        (lambda: codec.unpack([1]), ArgumentError, "torch.Tensor"),
        (lambda: codec.pack(torch.zeros(1, 1, 255, dtype=torch.int32), 4), ArgumentError, "256"),
        (lambda: codec.pack(torch.zeros(1, 1, 256), 4), ArgumentError, "integers"),
        (lambda: codec.pack(torch.full((1, 1, 256), 65536), 4), ArgumentError, "65535"),
        (lambda: codec.pack(torch.full((1, 1, 256), -1), 4), ArgumentError, "65535"),
        (lambda: codec.pack(torch.zeros(1, 1, 256, dtype=torch.int32), 4.5), ArgumentError, "4.5"),
        (lambda: codec.pack(torch.zeros(1, 1, 256, dtype=torch.int32), 0), ArgumentError, "not a rate"),
        (lambda: codec.pack(torch.zeros(1, 1, 256, dtype=torch.int32), True), ArgumentError, "not a rate"),
        (lambda: codec.decode(T, "4inst"), ArgumentError, "4inst"),
        (lambda: codec.decode(T, "mcg", 2**32), ArgumentError, "32-bit"),
        (lambda: codec.decode(T, "mcg", 1.5), ArgumentError, "32-bit"),
        (lambda: codec.decode(T, "mcg", True), ArgumentError, "32-bit"),
        (lambda: codec.decode(T, None), ArgumentError, "None"),
        (lambda: codec.decode(T, "3inst", 5), ArgumentError, "fixed multiplier"),
        (lambda: codec.decode(T[:, :, :40], "mcg"), FormatError, "mul1"),
        (lambda: codec.decode(T[:, :, :24], "3inst"), FormatError, "mul1"),
        (lambda: codec.dequantize(T, S[:127], S, "mcg"), FormatError, "suh"),
        (lambda: codec.dequantize(T, S, S[:, None], "mcg"), FormatError, "svh"),
        (lambda: codec.dequantize(T, S.short(), S, "mcg"), FormatError, "unpack_signs"),
        (lambda: codec.dequantize(T[:7], S[:112], S, "mcg"), FormatError, "multiple of 128"),
        (lambda: codec.unpack_signs(S), FormatError, "int16"),
        (lambda: codec.pack_signs(S[:100]), ArgumentError, "16"),
        (lambda: codec.rotate(torch.zeros(3, 100)), ArgumentError, "128"),
        (lambda: codec.hadamard(96), ArgumentError, "96"),
        (lambda: codec.tiles_to_matrix(torch.zeros(2, 256)), ArgumentError, "256"),
        (lambda: codec.matrix_to_tiles(torch.zeros(16, 17)), ArgumentError, "16"),
    ],
)
def test_typed_errors(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_uint16_trellis_is_the_same_bits():
    assert torch.equal(codec.unpack(numbered(3).view(torch.uint16)), codec.unpack(numbered(3)))
