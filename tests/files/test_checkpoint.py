"""How a module's tensors are found and what becomes of them: EXL3, dense, fused, fp8, padded (spec 1.4, 1.5, 4.5, 4.6, 4.8)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from exl3.errors import FormatError, MissingTensorError, NumericalError, UnsupportedError
from exl3.files import Checkpoint

from .conftest import exl3_tensors

P = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("K,marker", [(1, None), (3, "mcg"), (8, "mul1"), (1.5, "mul1"), (2.5, "mul1"), (3.5, "mul1")])
def test_rate_and_codebook_come_from_the_tensors(model_dir, K, marker):
    tensors = exl3_tensors(P, 256, 384, K, marker, bias=True)
    c = Checkpoint.open(model_dir(tensors, {"quantization_config": {"quant_method": "exl3", "bits": 5, "codebook": "lies"}}))
    x = c.linear(P, shape=(300, 200))
    assert (x.kind, x.K, x.bits, x.codebook) == ("exl3", K, K, marker or "3inst")
    assert x.multiplier == {None: None, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[marker]
    assert (x.in_features, x.out_features, x.in_padded, x.out_padded) == (200, 300, 256, 384)
    assert set(x.covers) == set(tensors) and c.unused(x.covers) == [] and c.linear_keys() == [P] and c.is_exl3
    got = c.load_linears({"q": x})["q"]
    assert all(torch.equal(got[role], tensors[f"{P}.{role}"]) for role in ("trellis", "suh", "svh"))
    assert torch.equal(got["bias"], tensors[f"{P}.bias"][:300].float())
    assert x.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_layers_written_by_exllamav3(tmp_path):
    """Rates and codebooks are recognised from the tensors alone; the names say what is right."""
    shutil.copy(Path(__file__).parents[1] / "data" / "exllamav3_linear.safetensors", tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text("{}")
    c = Checkpoint.open(tmp_path)
    keys = sorted(c.exl3_keys())
    assert len(keys) == 14
    for key in keys:
        x, (codebook, rate) = c.linear(key, shape=(128, 256)), key.split(".K")
        assert (x.codebook, x.K) == (codebook, float(rate)), key
        assert x.multiplier == {"3inst": None, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[codebook]
    loaded = c.load_linears({key: c.linear(key) for key in keys})
    assert all(t["svh"].shape == (128,) and t["suh"].shape == (256,) and t["trellis"].shape[:2] == (16, 8) for t in loaded.values())


def test_stored_multiplier_is_used(model_dir):
    """Releases 0.0.3 to 0.0.8 let users choose it, per tensor."""
    a, b = exl3_tensors("a", 128, 128, 4, "mcg"), exl3_tensors("b", 128, 128, 4, "mcg")
    a["a.mcg"] = torch.tensor(0xFF7A83E5 - 2**32, dtype=torch.int32)
    b["b.mcg"] = torch.tensor([12345], dtype=torch.int32)
    c = Checkpoint.open(model_dir({**a, **b}))
    assert (c.linear("a").multiplier, c.linear("b").multiplier) == (0xFF7A83E5, 12345)


def test_packed_signs(model_dir):
    """Bit i of word j is channel 16 j + i; 1 means -1."""
    tensors = exl3_tensors(P, 128, 256)
    del tensors[f"{P}.suh"], tensors[f"{P}.svh"]
    tensors[f"{P}.su"] = torch.tensor([1, -32768, 0, -1, 2, 5, 6, 7], dtype=torch.int16)
    tensors[f"{P}.sv"] = torch.randint(-(2**15), 2**15, (16,), dtype=torch.int16)
    got = Checkpoint.open(model_dir(tensors))
    got = got.load_linears({"q": got.linear(P)})["q"]
    for role, words in (("suh", tensors[f"{P}.su"]), ("svh", tensors[f"{P}.sv"])):
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little").astype(np.float16)
        assert got[role].dtype == torch.float16 and np.array_equal(got[role].numpy(), 1 - 2 * bits)


def test_full_scales_win_over_packed_ones(model_dir):
    tensors = exl3_tensors(P, 128, 128)
    tensors[f"{P}.su"] = torch.zeros(8, dtype=torch.int16)
    c = Checkpoint.open(model_dir(tensors))
    x = c.linear(P)
    assert torch.equal(c.load_linears({"q": x})["q"]["suh"], tensors[f"{P}.suh"])
    assert c.unused(x.covers) == []


def test_order_of_lookup(model_dir):
    """EXL3 under P, EXL3 under A, dense P, dense A: an EXL3 tensor always wins over a leftover weight."""
    w = {"P.weight": torch.ones(128, 128).half(), "A.weight": torch.zeros(128, 128).half()}
    cases = [
        ({**exl3_tensors("P", 128, 128), **exl3_tensors("A", 128, 128), **w}, ("exl3", "P")),
        ({**exl3_tensors("A", 128, 128), **w}, ("exl3", "A")),
        (w, ("dense", "P")),
        ({"A.weight": w["A.weight"]}, ("dense", "A")),
    ]
    for i, (tensors, right) in enumerate(cases):
        x = Checkpoint.open(model_dir(tensors, name=str(i))).linear("P", "A")
        assert (x.kind, x.key) == right
    c = Checkpoint.open(model_dir(cases[0][0], name="0"))
    assert c.unused(c.linear("P").covers) == ["A.mul1", "A.suh", "A.svh", "A.trellis", "A.weight"]
    with pytest.raises(MissingTensorError, match="'X' or 'Y'"):
        c.linear("X", "Y")


def test_two_dimensional_trellis_is_no_linear(model_dir):
    c = Checkpoint.open(
        model_dir({"P.trellis": torch.zeros(8, 130, dtype=torch.int16), "P.suh": torch.zeros(8).half(), "P.weight": torch.ones(8, 8)})
    )
    assert c.linear("P").kind == "dense"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"trellis": torch.zeros(8, 8, 64).half()}, "dtype torch.float16, the format has int16"),
        ({"trellis": torch.zeros(7, 8, 64, dtype=torch.int16)}, "112 x 128 is not in blocks of 128"),
        ({"trellis": torch.zeros(0, 8, 64, dtype=torch.int16)}, "not in blocks"),
        ({"trellis": torch.zeros(8, 8, 144, dtype=torch.int16)}, "K = 9 .*rates are 1 to 8"),
        ({"trellis": torch.zeros(8, 8, 8, dtype=torch.int16)}, "K = 0.5"),
        ({"trellis": torch.zeros(8, 8, 72, dtype=torch.int16)}, "K = 4.5"),
        ({"trellis": torch.zeros(8, 8, 65, dtype=torch.int16)}, "65 words wide"),
        ({"suh": torch.ones(256).half()}, r"suh is torch.float16 of shape \[256\], its trellis needs torch.float16 of shape \[128\]"),
        ({"suh": torch.ones(128)}, "suh is torch.float32"),
        ({"svh": torch.ones(128, 1).half()}, r"svh is torch.float16 of shape \[128, 1\]"),
        ({"mul1": torch.zeros(2, dtype=torch.int32)}, "one int32"),
        ({"mul1": torch.zeros(())}, "one int32"),
        ({"mcg": torch.zeros((), dtype=torch.int32)}, "both codebook markers"),
        ({"bias": torch.zeros(129).half()}, r"bias is torch.float16 of shape \[129\]"),
        ({"bias": torch.zeros(128, dtype=torch.int32)}, "bias is torch.int32"),
    ],
)
def test_broken_exl3_tensors_are_refused_at_open(model_dir, change, message):
    tensors = {**exl3_tensors(P, 128, 128), **{f"{P}.{k}": v for k, v in change.items()}}
    with pytest.raises(FormatError, match=message) as e:
        Checkpoint.open(model_dir(tensors))
    assert P in str(e.value) and "model.safetensors" in str(e.value)


def test_half_rates_need_mul1(model_dir):
    with pytest.raises(FormatError, match="need the mul1 codebook"):
        Checkpoint.open(model_dir(exl3_tensors(P, 128, 128, 2.5, "mcg")))


def test_trellis_without_scales(model_dir):
    tensors = exl3_tensors(P, 128, 128)
    del tensors[f"{P}.svh"]
    with pytest.raises(MissingTensorError, match=f"{P}.svh is in none"):
        Checkpoint.open(model_dir(tensors))


def test_sizes_must_fit_the_config(model_dir):
    c = Checkpoint.open(model_dir({**exl3_tensors("q", 256, 128), "d.weight": torch.randn(96, 200), "p.weight": torch.randn(128, 256)}))
    for key, shape in (("q", (128, 256)), ("q", (100, 129)), ("d", (96, 200)), ("p", (100, 200)), ("p", (128, 200))):
        x = c.linear(key, shape=shape)
        assert (x.out_features, x.in_features) == shape
    for key, shape in (("q", (129, 256)), ("q", (128, 128)), ("q", (100, 128)), ("d", (95, 200)), ("d", (96, 199)), ("p", (100, 128))):
        with pytest.raises(FormatError, match=rf"{key} is stored as .*config\.json says {shape[0]} x {shape[1]}"):
            c.linear(key, shape=shape)


def test_padded_dense_matrix_is_cropped(model_dir):
    """The incumbent stores unquantized linears in padded shape too."""
    w, b = torch.zeros(256, 128).half(), torch.zeros(256).half()
    w[:200, :100], b[:200] = torch.randn(200, 100).half(), torch.randn(200).half()
    c = Checkpoint.open(model_dir({"P.weight": w, "P.bias": b}))
    got = c.load_linears({"p": c.linear("P", shape=(200, 100))})["p"]
    assert torch.equal(got["weight"], w[:200, :100]) and got["weight"].is_contiguous()
    assert torch.equal(got["bias"], b[:200].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fused_rows(model_dir, dtype):
    """Phi-3: q, k and v are rows of one matrix; and the other way round: one matrix made of three."""
    w, b = torch.randn(320, 64).to(dtype), torch.randn(320).to(dtype)
    c = Checkpoint.open(model_dir({"a.qkv_proj.weight": w, "a.qkv_proj.bias": b}))
    q, k, v = (
        c.linear(f"a.{n}", fused=[("a.qkv_proj", s, r)], shape=(r, 64)) for n, s, r in (("q", 0, 192), ("k", 192, 64), ("v", 256, 64))
    )
    got = c.load_linears({"q": q, "k": k, "v": v, "qk": c.linear("a.qk", fused=[("a.qkv_proj", 256, 64), ("a.qkv_proj", 0, 10)])})
    assert torch.equal(torch.cat([got[n]["weight"] for n in "qkv"]), w) and torch.equal(
        torch.cat([got[n]["bias"] for n in "qkv"]), b.float()
    )
    assert torch.equal(got["qk"]["weight"], torch.cat([w[256:], w[:10]])) and torch.equal(
        got["qk"]["bias"], torch.cat([b[256:], b[:10]]).float()
    )
    assert c.unused(q.covers) == []
    assert k.nbytes == 64 * 64 * dtype.itemsize
    with pytest.raises(FormatError, match="has 320 rows, 300 to 364 are asked for"):
        c.linear("a.v", fused=[("a.qkv_proj", 300, 64)])
    with pytest.raises(MissingTensorError):
        c.linear("a.v", fused=[("a.other", 0, 64)])


def test_exl3_of_its_own_wins_over_a_fused_source(model_dir):
    c = Checkpoint.open(model_dir({**exl3_tensors("a.q_proj", 128, 128), "a.qkv_proj.weight": torch.ones(384, 128).half()}))
    assert c.linear("a.q_proj", fused=[("a.qkv_proj", 0, 128)]).kind == "exl3"


def test_fp8_blocks(model_dir):
    """DeepSeek's layout: one scale per 128 x 128 block, edges cut short; a fused cut may fall inside a block."""
    w = (torch.randn(300, 200) * 50).to(torch.float8_e4m3fn)
    s = torch.rand(3, 2) + 0.1
    right = w.double() * s.double().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    c = Checkpoint.open(model_dir({"P.weight": w, "P.weight_scale_inv": s, "P.input_scale": torch.ones(())}))
    x = c.linear("P", shape=(300, 200))
    assert x.bits == 8 and c.unused(x.covers) == []
    got = c.load_linears({"p": x, "k": c.linear("k", fused=[("P", 100, 57)])}, dtype=torch.float32)
    assert torch.equal(got["p"]["weight"], right.float())
    assert torch.equal(got["k"]["weight"], right.float()[100:157])
    assert c.load_linears({"p": x})["p"]["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (1,), (96,), (96, 1), (1, 1)])
def test_fp8_scales_per_tensor_or_row(model_dir, shape):
    w = torch.randn(96, 40).to(torch.float8_e4m3fn)
    s = (torch.rand(shape) + 0.5).bfloat16()
    c = Checkpoint.open(model_dir({"P.weight": w, "P.weight_scale": s}))
    right = w.double() * (s.double().reshape(-1, 1) if s.numel() > 1 else s.double().item())
    assert torch.equal(c.load_linears({"p": c.linear("P")}, dtype=torch.float32)["p"]["weight"], right.float())


def test_fp8_that_cannot_be_read(model_dir):
    w = torch.randn(96, 40).to(torch.float8_e4m3fn)
    with pytest.raises(MissingTensorError, match="fp8 but has no weight_scale_inv"):
        Checkpoint.open(model_dir({"P.weight": w}, name="a")).linear("P")
    c = Checkpoint.open(model_dir({"P.weight": w, "P.weight_scale": torch.ones(5, 1)}, name="b"))
    with pytest.raises(FormatError, match="5 scales do not cover 96 rows"):
        c.load_linears({"p": c.linear("P")})


@pytest.mark.parametrize("suffix,scheme", [("qweight", "GPTQ"), ("weight_packed", "compressed-tensors"), ("weight.absmax", "bitsandbytes")])
def test_foreign_quantization_is_refused_by_name(model_dir, suffix, scheme):
    tensors = {f"P.{suffix}": torch.zeros(8, 8, dtype=torch.int32)}
    if scheme == "bitsandbytes":
        tensors["P.weight"] = torch.zeros(32, 1, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match=scheme):
        Checkpoint.open(model_dir(tensors)).linear("P")


def test_wrong_dense_tensors(model_dir):
    c = Checkpoint.open(
        model_dir(
            {
                "a.weight": torch.zeros(4),
                "b.weight": torch.zeros(4, 4, dtype=torch.int16),
                "c.weight": torch.zeros(4, 4),
                "c.bias": torch.zeros(3),
            }
        )
    )
    for key, error, message in (
        ("a", FormatError, "two dimensions"),
        ("b", UnsupportedError, "dtype torch.int16"),
        ("c", FormatError, "4 rows"),
    ):
        with pytest.raises(error, match=message):
            c.linear(key)


def test_values_that_are_no_numbers(model_dir):
    exl3, dense = exl3_tensors("e", 128, 128), torch.randn(6, 8)
    exl3["e.svh"][77] = float("inf")
    dense[4, 1] = float("nan")
    c = Checkpoint.open(model_dir({**exl3, "d.weight": dense, "big.weight": torch.full((3, 3), 1e6), "ok.weight": torch.ones(3, 3)}))
    with pytest.raises(NumericalError, match=r"e\.svh: row 77 holds inf"):
        c.load_linears({"e": c.linear("e")})
    c.load_linears({"d": c.linear("d")})
    with pytest.raises(NumericalError, match=r"d\.weight: row 4 holds nan"):
        c.load_linears({"d": c.linear("d")}, check=True)
    with pytest.raises(NumericalError, match=r"big\.weight: row 0 .*65504"):
        c.load_linears({"d": c.linear("big")}, dtype=torch.float16)
    assert c.load_linears({"o": c.linear("ok")}, dtype=torch.float16)["o"]["weight"].dtype == torch.float16


def test_embedding_kinds(model_dir):
    """Dense, one ring tensor, ring shards; Ke = (words / groups - 1) / 16 with groups = ceil(hidden / 256)."""
    ring = {
        "e.signs": torch.ones(3, 256).half(),
        "e.shard_0.trellis": torch.zeros(10, 3 * 81, dtype=torch.int16),
        "e.shard_1.trellis": torch.zeros(4, 3 * 81, dtype=torch.int16),
    }
    e = Checkpoint.open(model_dir(ring, name="a")).embedding("e")
    assert (e.kind, e.K, e.rows, e.hidden, e.names) == ("ring", 5, 14, 768, ("e.shard_0.trellis", "e.shard_1.trellis", "e.signs"))
    single = {"e.signs": torch.ones(1, 256).half(), "e.trellis": torch.zeros(10, 33, dtype=torch.int16)}
    assert Checkpoint.open(model_dir(single, name="b")).embedding("e").K == 2
    dense = Checkpoint.open(model_dir({"e.weight": torch.zeros(10, 48).bfloat16()}, name="c")).embedding("e")
    assert (dense.kind, dense.rows, dense.hidden, dense.bits) == ("dense", 10, 48, 16)
    for i, bad in enumerate(
        (
            {**single, "e.signs": torch.ones(2, 256).half()},
            {**single, "e.trellis": torch.zeros(10, 34, dtype=torch.int16)},
            {**single, "e.signs": torch.ones(1, 128).half()},
        )
    ):
        with pytest.raises(FormatError, match="no ring-quantized table"):
            Checkpoint.open(model_dir(bad, name=f"bad{i}")).embedding("e")
    with pytest.raises(MissingTensorError, match="no embedding 'x'"):
        Checkpoint.open(model_dir(single, name="b")).embedding("x")


def test_linear_keys_leave_out_embeddings_routers_and_norms(model_dir):
    w = torch.zeros(128, 128).half()
    tensors = {
        **exl3_tensors("l.q_proj", 128, 128),
        "l.q_proj.weight": w,
        "l.k_proj.weight": w,
        "embed_tokens.weight": w,
        "l.mlp.gate.weight": w,
    }
    tensors |= {"lm_head.weight": w, "l.mlp.gate_proj.weight": w, "norm.weight": torch.ones(128)}
    assert Checkpoint.open(model_dir(tensors)).linear_keys() == ["l.q_proj", "l.k_proj", "lm_head", "l.mlp.gate_proj"]
