"""GGUF: blocks against the `gguf` package, whole imports against transformers, lies against a hand-written writer."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch

from exl3.errors import ArgumentError, FormatError, MissingTensorError, NumericalError, UnsupportedError
from exl3.files import GGUF, Checkpoint, Tokenizer, import_gguf
from exl3.files.gguf_dequant import BLOCKS, TYPES, dequantize

from .test_tokenizer import CORPUS, TEXTS, _spm_vocab, byte_level

gguf = pytest.importorskip("gguf")

# ------------------------------------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_equal_the_gguf_package(kind):
    """Random bytes are valid blocks of every type; equal to the last bit, NaN and Inf factors included."""
    number = gguf.GGMLQuantizationType[kind]
    assert TYPES[number.value] == kind and gguf.GGML_QUANT_SIZES[number] == BLOCKS[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (300, BLOCKS[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours, right = dequantize(blocks, kind), gguf.quants.dequantize(blocks, number).astype(np.float32)
    assert ours.dtype == np.float32 and ours.shape == (300, BLOCKS[kind][0])
    assert np.array_equal(ours.ravel(), right.ravel(), equal_nan=True)


def test_type_numbers_are_the_gguf_packages():
    for number, name in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name


# ----------------------------------------------------------------------------------------------------------------- reader


def string(s):
    b = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(b)) + b


def kv(key, code, payload):
    return string(key) + struct.pack("<I", code) + payload


def tensor(name, dims, kind, offset):
    return string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def raw(path, pairs=(), tensors=(), data=b"", *, version=3, counts=None, magic=b"GGUF"):
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def test_metadata_of_every_type(tmp_path):
    pairs = [
        kv("u8", 0, b"\xff"),
        kv("i8", 1, b"\xff"),
        kv("u16", 2, b"\xff\xff"),
        kv("i16", 3, b"\xff\xff"),
        kv("u32", 4, b"\xff" * 4),
        kv("i32", 5, b"\xff" * 4),
        kv("f32", 6, struct.pack("<f", 0.5)),
        kv("bool", 7, b"\1"),
        kv("str", 8, string("ü")),
        kv("ints", 9, struct.pack("<IQ3i", 5, 3, -1, 2, 3)),
        kv("strs", 9, struct.pack("<IQ", 8, 2) + string("a") + string("bc")),
        kv("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 7, 8)),
        kv("bools", 9, struct.pack("<IQ", 7, 2) + b"\0\1"),
        kv("u64", 10, b"\xff" * 8),
        kv("i64", 11, b"\xff" * 8),
        kv("f64", 12, struct.pack("<d", 0.25)),
    ]
    m = GGUF(raw(tmp_path / "x.gguf", pairs)).metadata
    got = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in m.items() if k != "nested"}
    assert got == {
        **{"u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 0.5, "bool": True, "str": "ü"},
        **{"ints": [-1, 2, 3], "strs": ["a", "bc"], "bools": [False, True], "u64": 2**64 - 1, "i64": -1, "f64": 0.25},
    }
    assert m["nested"][0].tolist() == [7, 8] and got["bool"] is True


def test_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr("exl3.files.gguf._CHUNK", 64)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((6, 32)).astype(np.float32), rng.integers(0, 256, (3, 2 * 18), dtype=np.uint8)
    b[:, 1::18] = 0x20  # finite factors
    tensors = [tensor("a", [32, 6], 0, 0), tensor("b", [64, 3], 2, 768)]
    g = GGUF(raw(tmp_path / "x.gguf", [], tensors, a.tobytes() + b.tobytes()))
    assert torch.equal(g.read("a"), torch.from_numpy(a)) and g.tensors["b"].shape == (3, 64)
    assert torch.equal(g.read("b"), torch.from_numpy(gguf.quants.dequantize(b, gguf.GGMLQuantizationType.Q4_0)))
    assert g.read("a", torch.float16).dtype == torch.float16


F32 = b"\0" * 128
LIES = {
    "empty": (b"", FormatError, "cut off"),
    "magic": ({"magic": b"GGML"}, FormatError, "not a GGUF"),
    "version 1": ({"version": 1}, UnsupportedError, "version 1"),
    "big-endian": ({"version": 3 << 24}, UnsupportedError, "big-endian"),
    "many pairs": ({"counts": (0, 2**60)}, FormatError, "1152921504606846976 metadata entries are announced"),
    "many tensors": ({"counts": (2**60, 0)}, FormatError, "tensors are announced"),
    "long key": (
        {"pairs": [struct.pack("<Q", 2**62)], "counts": (0, 1), "data": b"\0" * 64},
        FormatError,
        "4611686018427387904 bytes are announced",
    ),
    "long string": ({"pairs": [kv("a", 8, struct.pack("<Q", 2**40))]}, FormatError, "bytes are announced"),
    "long array": ({"pairs": [kv("a", 9, struct.pack("<IQ", 0, 2**40))]}, FormatError, "array elements are announced"),
    "long string array": ({"pairs": [kv("a", 9, struct.pack("<IQ", 8, 2**40))]}, FormatError, "array elements are announced"),
    "array of arrays of": ({"pairs": [kv("a", 9, struct.pack("<IQ", 9, 1) * 50)]}, FormatError, "unknown type"),
    "unknown value": ({"pairs": [kv("a", 77, b"\0" * 8)]}, FormatError, "unknown type 77"),
    "key twice": ({"pairs": [kv("a", 0, b"\1"), kv("a", 0, b"\1")]}, FormatError, "'a' twice"),
    "tensor twice": ({"tensors": [tensor("a", [32], 0, 0), tensor("a", [32], 0, 128)], "data": F32 * 2}, FormatError, "described twice"),
    "five dims": ({"tensors": [tensor("a", [1] * 5, 0, 0)], "data": F32}, FormatError, "5 dimensions"),
    "huge": ({"tensors": [tensor("a", [2**40, 2**40], 0, 0)], "data": F32}, FormatError, "impossible shape"),
    "half a block": ({"tensors": [tensor("a", [33], 2, 0)], "data": F32}, FormatError, "impossible shape"),
    "unknown type": ({"tensors": [tensor("a", [32], 99, 0)], "data": F32}, FormatError, "unknown type 99"),
    "other type": ({"tensors": [tensor("a", [256], 16, 0)], "data": F32}, UnsupportedError, "IQ2_XXS; read are F32"),
    "past the end": ({"tensors": [tensor("a", [33], 0, 0)], "data": F32}, FormatError, "cut off or lies"),
    "offset": ({"tensors": [tensor("a", [1], 0, 2**63)], "data": F32}, FormatError, "cut off or lies"),
    "unaligned": ({"tensors": [tensor("a", [1], 0, 4)], "data": F32}, FormatError, "cut off or lies"),
    "overlap": ({"tensors": [tensor("a", [32], 0, 0), tensor("b", [32], 0, 96)], "data": F32 * 2}, FormatError, "share bytes"),
    "alignment": ({"pairs": [kv("general.alignment", 4, struct.pack("<I", 3))]}, FormatError, "power of two"),
    "alignment zero": ({"pairs": [kv("general.alignment", 4, struct.pack("<I", 0))]}, FormatError, "power of two"),
    "alignment text": ({"pairs": [kv("general.alignment", 8, string("x"))]}, FormatError, "power of two"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies_are_refused(tmp_path, case):
    content, error, message = LIES[case]
    path = tmp_path / "bad.gguf"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        raw(path, **content)
    with pytest.raises(error, match=message) as e:
        GGUF(path)
    assert "bad.gguf" in str(e.value)


def test_every_truncation_is_noticed(tmp_path):
    pairs = [kv("general.architecture", 8, string("llama")), kv("a", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3))]
    whole = raw(tmp_path / "x.gguf", pairs, [tensor("a", [32], 0, 0), tensor("b", [32], 0, 128)], F32 * 2).read_bytes()
    for size in [*range(0, len(whole), 5), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(FormatError):
            GGUF(tmp_path / "cut.gguf")


# ------------------------------------------------------------------------------------------------------------ whole models


def permute(w, heads):
    """What converters to GGUF do to a Llama's q and k: each head's two rotary halves interleaved."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name, arch):
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + "." + suffix
    _, _, i, part = stem.split(".", 3)
    if part == "post_attention_layernorm":
        return f"blk.{i}.{'post_attention_norm' if arch == 'gemma3' else 'ffn_norm'}.{suffix}"
    return f"blk.{i}.{PARTS[part]}.{suffix}"


def add_vocabulary(w, backend, pre, n):
    """The byte-level vocabulary of `backend`, padded to n rows."""
    stored = json.loads(backend.to_str())
    added = {t["id"]: t for t in stored["added_tokens"]}
    spelled = {**{v: k for k, v in stored["model"]["vocab"].items()}, **{i: t["content"] for i, t in added.items()}}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([spelled.get(i, f"[PAD{i}]") for i in range(n)])
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 if i in spelled else 5 for i in range(n)]
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(m) for m in stored["model"]["merges"]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(0)
    w.add_chat_template("{{ messages[0].content }}")


H, INNER, L, NH, NKV, HD, V = 64, 96, 2, 4, 2, 32, 512


def make_gguf(path, arch, *, tied=False, bias=False, rope=None, skip=(), change=None, dtype="F32", pre="smollm", layers=L, meta=None):
    """A random model of transformers' and the GGUF file of it; returns the model."""
    import transformers as T

    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
    common = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": NH,
        "num_key_value_heads": NKV,
    }
    common |= {"head_dim": HD, "max_position_embeddings": 128, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6}
    if arch == "gemma3":
        full = {"rope_type": "default", "rope_theta": 1e6}
        common |= {
            "query_pre_attn_scalar": HD,
            "sliding_window": 16,
            "rope_parameters": {"full_attention": full, "sliding_attention": {**full, "rope_theta": 1e4}},
        }
        config = T.Gemma3TextConfig(**common)
    else:
        common |= {"rope_parameters": rope or {"rope_type": "default", "rope_theta": 5e5}}
        common |= {"attention_bias": bias, "mlp_bias": bias} if arch == "llama" else {}
        config = getattr(T, f"{classes[arch]}Config")(**common)
    torch.manual_seed(0)
    model = getattr(T, f"{classes[arch]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(layers)
    w.add_context_length(128)
    w.add_embedding_length(H)
    w.add_feed_forward_length(INNER)
    w.add_head_count(NH)
    w.add_head_count_kv(NKV)
    w.add_key_length(HD)
    w.add_value_length(HD)
    w.add_rope_freq_base(1e6 if arch == "gemma3" else 5e5)
    w.add_layer_norm_rms_eps(1e-6)
    if arch == "gemma3":
        w.add_sliding_window(16)
    for key, value in (meta or {}).items():
        w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    add_vocabulary(w, byte_level(), pre, V)
    for name, t in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        a = t.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            a = permute(a, NH if "q_proj" in name else NKV)
        if arch == "gemma3" and "norm" in name:
            a = a + 1
        new = gguf_name(name, arch)
        a = (change or {}).get(new, a)
        if new not in skip:
            kind = gguf.GGMLQuantizationType[dtype if a.ndim == 2 else "F32"]
            w.add_tensor(new, gguf.quants.quantize(np.ascontiguousarray(a), kind), raw_dtype=kind)
    if rope and rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
        plain = 5e5 ** -(torch.arange(0, HD, 2).float() / HD)
        w.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return model


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "arch,options",
    [
        ("llama", {}),
        ("llama", {"tied": True, "bias": True}),
        ("llama", {"rope": LLAMA3}),
        ("qwen2", {"pre": "qwen2"}),
        ("qwen3", {"tied": True, "pre": "qwen2"}),
        ("gemma3", {"tied": True, "layers": 6}),
    ],
)
def test_import_gives_the_models_logits(tmp_path, arch, options):
    """transformers loads the imported directory and computes what it computes with the model that the GGUF was made of."""
    from transformers import AutoModelForCausalLM

    model = make_gguf(tmp_path / "m.gguf", arch, **options)
    seen = []
    import_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype=torch.float32, progress=lambda i, n: seen.append((i, n)))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    ours, right = again.state_dict(), model.state_dict()
    assert ours.keys() == right.keys() and all(torch.allclose(ours[n], right[n], rtol=0, atol=3e-7) for n in right)
    ids = torch.randint(0, V, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)
    assert seen[-1][0] == seen[-1][1] == len(seen)
    c = Checkpoint.open(tmp_path / "out")
    assert c.eos_ids() == [2, 0], "the control token <|endoftext|> ends a text too"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    if "rope" in options:
        assert c.config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen"])
def test_imported_byte_level_tokenizer(tmp_path, pre):
    """Ids and text survive; the vocabulary's padding does not become tokens; digits are cut as the pre-tokenizer says."""
    make_gguf(tmp_path / "m.gguf", "qwen2", pre=pre)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    t, backend = Tokenizer.from_directory(tmp_path / "out"), byte_level()
    assert t.vocab == backend.get_vocab() and t.special_ids == {0, 1, 2}
    for text in [*TEXTS, *CORPUS, "12345 1234567"]:
        ids = t.encode(text)
        assert t.decode(ids, special=True) == text or pre == "qwen2"  # NFC may change the spelling
        if pre == "gpt-2":
            assert ids == backend.encode(text).ids
    digits = [t.backend.id_to_token(i).lstrip("\u0120") for i in t.encode("0123456789 0123456789")]
    longest = {"smollm": 1, "qwen2": 1, "deepseek-r1-qwen": 1, "llama-bpe": 3, "gpt-2": 10}[pre]
    assert max(map(len, digits)) <= longest
    assert t.render_chat([{"role": "user", "content": "x"}]) == "x" and t.eos_id == 2 and t.bos_id == 1
    assert t.demands_bos == (pre == "llama-bpe")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_imported_sentencepiece_tokenizer(tmp_path, prefix):
    """Merges rebuilt from scores encode as the merges the scores were made of."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    from exl3.files.gguf_tokenizer import Vocabulary, build_tokenizer, tokenizer_config

    vocab, merges = _spm_vocab()
    rank = {a + b: -1.0 - i for i, (a, b) in reversed(list(enumerate(merges)))}
    tokens = sorted(vocab, key=vocab.get)
    types = [2 if t == "<unk>" else 3 if t.startswith("<|") else 6 if t.startswith("<0x") else 1 for t in tokens]
    scores = np.array([rank.get(t, -1e6) for t in tokens], np.float32)
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(types),
        "scores": scores,
        "unknown_token_id": 0,
        "bos_token_id": 2,
    }
    metadata = {f"tokenizer.ggml.{k}": v for k, v in {**metadata, "eos_token_id": 3, "add_space_prefix": prefix}.items()}
    vocabulary = Vocabulary(metadata)
    t = Tokenizer(build_tokenizer(vocabulary), tokenizer_config(vocabulary, 128))
    right = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    right.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prefix + [normalizers.Replace(" ", "\u2581")])
    right.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * prefix]
    )
    right.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    for text in [*TEXTS, *CORPUS]:
        ids = t.encode(text)
        assert ids == right.encode(text).ids
        assert t.decode(ids, special=True) == right.decode(ids, skip_special_tokens=False)
    assert t.demands_bos and t.encode("x", None)[0] == 2 and t.drops_first_blank == prefix


def test_default_dtypes(tmp_path):
    """fp16; bf16 for Gemma and for bf16 files; vectors that the type cannot hold stay fp32."""
    for arch, kind, right in (("llama", "F16", torch.float16), ("llama", "BF16", torch.bfloat16), ("gemma3", "F32", torch.bfloat16)):
        make_gguf(tmp_path / "m.gguf", arch, dtype=kind)
        c = Checkpoint.open(import_gguf(tmp_path / "m.gguf", tmp_path / f"{arch}{kind}"))
        assert {t.dtype for t in c.tensors.values() if len(t.shape) == 2} == {right}
        assert {t.dtype for t in c.tensors.values() if len(t.shape) == 1} == {torch.float32}
        assert c.config["torch_dtype"] == str(right)[6:]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_import_of_quantized_weights(tmp_path, kind):
    model = make_gguf(tmp_path / "m.gguf", "qwen2", dtype=kind)
    c = Checkpoint.open(import_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype=torch.float32))
    name = "model.layers.1.mlp.up_proj.weight"
    number = gguf.GGMLQuantizationType[kind]
    right = gguf.quants.dequantize(gguf.quants.quantize(model.state_dict()[name].numpy(), number), number)
    assert torch.equal(c.read([name])[name], torch.from_numpy(right))


BAD_MODELS = {
    "missing": ({"skip": ("blk.1.attn_k.weight",)}, MissingTensorError, r"1 tensors are missing: blk\.1\.attn_k\.weight"),
    "no embedding": ({"skip": ("token_embd.weight",)}, MissingTensorError, "no token_embd"),
    "shape": (
        {"change": {"blk.1.attn_k.weight": np.zeros((32, H), np.float32)}},
        FormatError,
        r"attn_k\.weight' has shape \[32, 64\].*\[64, 64\]",
    ),
    "nan": ({"change": {"blk.1.attn_norm.weight": np.full(H, np.nan, np.float32)}}, NumericalError, "NaN or Inf"),
    "too large": (
        {"change": {"blk.1.attn_k.weight": np.full((64, H), 1e5, np.float32)}},
        NumericalError,
        "do not fit torch.float16.*bfloat16",
    ),
    "experts": ({"meta": {"qwen2.expert_count": 8}}, UnsupportedError, "mixture of experts"),
    "split": ({"meta": {"split.count": 3}}, UnsupportedError, "gguf-split"),
    "rope": ({"meta": {"qwen2.rope.scaling.type": "longrope"}}, UnsupportedError, "rope scaling 'longrope'"),
    "pre": ({"pre": "viking"}, UnsupportedError, "pre-tokenizer 'viking'; served are smollm"),
    "left over": (
        {"change": {"blk.1.attn_k.weight": np.zeros((64, H), np.float32)}, "layers": 2, "meta": {}, "rename": True},
        UnsupportedError,
        "no part of",
    ),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_models_that_cannot_be_imported(tmp_path, case):
    options, error, message = BAD_MODELS[case]
    options = dict(options)
    rename = options.pop("rename", False)
    make_gguf(tmp_path / "m.gguf", "qwen2", **options)
    if rename:
        path = tmp_path / "m.gguf"
        path.write_bytes(path.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.7.attn_k.weight"))
    with pytest.raises(error, match=message):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir()), "nothing half-done is left"


def test_a_model_that_is_there_stays(tmp_path):
    make_gguf(tmp_path / "m.gguf", "qwen2")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ArgumentError, match="holds a model, which would be lost; choose another directory"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_unknown_architecture(tmp_path):
    with pytest.raises(UnsupportedError, match="'mamba'; imported are llama, qwen2, qwen3, gemma3"):
        import_gguf(raw(tmp_path / "x.gguf", [kv("general.architecture", 8, string("mamba"))]), tmp_path / "out")
