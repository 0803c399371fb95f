"""config.json and its companions, both ways; C13 (end-of-sequence ids) and C01 (tied and untied heads), the parts that lie on disk."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from exl3.errors import ArgumentError, FormatError, MissingTensorError, UnsupportedError
from exl3.files import Checkpoint, read_header
from exl3.files import config as cfg

from .conftest import exl3_tensors, write_odd

# ------------------------------------------------------------------------------------------------------------ C13: eos ids


def test_eos_union_of_all_sources():
    assert cfg.eos_ids({"eos_token_id": [2, 20], "vocab_size": 64}, {"eos_token_id": [30]}, 40) == [2, 20, 30, 40]
    assert cfg.eos_ids({"eos_token_id": 2, "text_config": {"eos_token_id": [5, 2], "vocab_size": 64}}, {"eos_token_id": 7}, 2) == [2, 5, 7]


@pytest.mark.parametrize(
    "config,generation,tokenizer,right", [(None, None, None, []), (None, [3, None], 4, [3, 4]), ([], 2, None, [2]), (0, 0, 0, [0])]
)
def test_eos_null_is_dropped_quietly(config, generation, tokenizer, right):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cfg.eos_ids({"eos_token_id": config, "vocab_size": 64}, {"eos_token_id": generation}, tokenizer) == right
        assert cfg.eos_ids({"vocab_size": 64}, None, tokenizer) == ([] if tokenizer is None else [tokenizer])


@pytest.mark.parametrize("bad", [64, 10**9, -1, "2", 2.0, True])
def test_eos_bad_id_warns(bad):
    with pytest.warns(UserWarning, match=rf"{bad!r} is not in the vocabulary of 64"):
        assert cfg.eos_ids({"eos_token_id": [7, bad], "vocab_size": 64}) == [7]


def test_eos_of_a_directory(model_dir):
    class Fake:
        eos_id = 40

    d = model_dir({"a.weight": torch.zeros(1)}, {"eos_token_id": [2, 20], "vocab_size": 64}, generation_config={"eos_token_id": [30]})
    assert Checkpoint.open(d).eos_ids(Fake()) == [2, 20, 30, 40] and Checkpoint.open(d).eos_ids() == [2, 20, 30]
    (d / "generation_config.json").unlink()
    assert Checkpoint.open(d).eos_ids() == [2, 20]


# --------------------------------------------------------------------------------------------------- C01: tied, untied heads

E = torch.randn(12, 8).half()
OTHER = torch.randn(12, 8).half()
BODY = {"model.embed_tokens.weight": E}


def head(model_dir, config, tensors, **options):
    return Checkpoint.open(model_dir({**BODY, **tensors}, config)).head("lm_head", "model.embed_tokens", shape=(12, 8), **options)


@pytest.mark.parametrize("nested", [False, True])
def test_tied_by_flag(model_dir, nested):
    flag = {"tie_word_embeddings": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = head(model_dir, {"text_config": flag} if nested else flag, {})
    assert x.tied and x.key == "model.embed_tokens"


@pytest.mark.parametrize("nested", [False, True])
def test_flag_says_tied_but_there_is_a_head(model_dir, nested):
    """The documented rule: the head on disk wins; a warning when it differs; held once when it does not."""
    flag = {"text_config": {"tie_word_embeddings": True}} if nested else {"tie_word_embeddings": True}
    with pytest.warns(UserWarning, match="tie_word_embeddings is true but lm_head differs"):
        x = head(model_dir, flag, {"lm_head.weight": OTHER})
    assert (x.key, x.tied) == ("lm_head", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = head(model_dir, flag, {"lm_head.weight": E.clone()})
        assert (x.key, x.tied) == ("model.embed_tokens", True) and {"lm_head.weight", "model.embed_tokens.weight"} == set(x.covers)


def test_quantized_head_wins_quietly_over_the_flag(model_dir):
    """Converters of before leave the flag at true beside a quantized head of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c = Checkpoint.open(model_dir({**BODY, **exl3_tensors("lm_head", 128, 128, 6)}, {"tie_word_embeddings": True}))
        x = c.head("lm_head", "model.embed_tokens", shape=(100, 8))
    assert (x.kind, x.key, x.tied, x.K) == ("exl3", "lm_head", False, 6)


def test_untied(model_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = head(model_dir, {"tie_word_embeddings": False}, {"lm_head.weight": OTHER})
    assert (x.key, x.tied) == ("lm_head", False)


@pytest.mark.parametrize(
    "config,says",
    [({}, "does not say"), ({"tie_word_embeddings": False}, "is false"), ({"text_config": {"tie_word_embeddings": False}}, "is false")],
)
def test_no_head_and_no_flag(model_dir, config, says):
    with pytest.warns(UserWarning, match=rf"{says}.*no tensor 'lm_head'"):
        assert head(model_dir, config, {}).tied
    if not config:  # a family that ties by default says so
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert head(model_dir, config, {}, tied=True).tied


def test_nested_flag_beats_the_outer_one():
    assert cfg.tie_flag({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}) is False
    assert cfg.tie_flag({"tie_word_embeddings": True, "text_config": {}}) is True
    assert cfg.tie_flag({"text_config": None}) is None


def test_ring_table_is_no_head(model_dir):
    ring = {"e.signs": torch.ones(1, 256).half(), "e.trellis": torch.zeros(10, 33, dtype=torch.int16)}
    with pytest.raises(MissingTensorError, match="cannot serve as one"):
        Checkpoint.open(model_dir(ring, {"tie_word_embeddings": True})).head("lm_head", "e")


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 5000])
def test_broken_json(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"config\.json"):
        cfg.read_config(tmp_path)


def test_text_config_is_laid_over_the_outer_one():
    config = {"vocab_size": 5, "eos_token_id": 1, "text_config": {"vocab_size": 7, "hidden_size": 8}}
    assert cfg.text_config(config) == {"vocab_size": 7, "eos_token_id": 1, "hidden_size": 8}
    assert cfg.text_config({"hidden_size": 3}) == {"hidden_size": 3}


@pytest.mark.parametrize("names", [None, [], ["A", "B"], "A", [3]])
def test_one_architecture(names):
    assert cfg.architecture({"architectures": ["LlamaForCausalLM"]}) == "LlamaForCausalLM"
    with pytest.raises(UnsupportedError, match="one architecture"):
        cfg.architecture({"architectures": names})


# -------------------------------------------------------------------------------------------------------------- writing


def test_quantization_config_has_the_fields_of_the_format():
    block = cfg.quantization_config(bits=4.0249, head_bits=6, codebook="mul1", calibration={"rows": 250, "cols": 2048}, out_scales="always")
    assert list(block) == ["quant_method", "version", "bits", "head_bits", "calibration", "out_scales", "codebook"]
    assert (block["quant_method"], block["bits"], block["head_bits"]) == ("exl3", 4.02, 6) and isinstance(block["version"], str)
    assert json.dumps(cfg.quantization_config(bits=4.0, head_bits=2.5, codebook="mcg")["bits"]) == "4"
    assert block["calibration"] == {"rows": 250, "cols": 2048}
    calibration = {"rows": 3, "cols": 8, "sources": {"prose": 3, "random": 0}}
    assert cfg.quantization_config(bits=4, head_bits=6, codebook="mcg", calibration=calibration)["calibration"] == {
        "rows": 3, "cols": 8, "sources": {"prose": 3},
    }  # fmt: skip


def test_written_config(tmp_path):
    source = {
        "architectures": ["X"],
        "tie_word_embeddings": True,
        "text_config": {"tie_word_embeddings": True, "hidden_size": 8},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "time_step_limit": [0.0, float("inf")],
    }
    block = cfg.quantization_config(bits=3, head_bits=6, codebook="mul1")
    cfg.write_config(tmp_path, source, block, has_head=True)
    got = cfg.read_config(tmp_path)
    assert got["tie_word_embeddings"] is False and got["text_config"] == {"tie_word_embeddings": False, "hidden_size": 8}
    assert got["quantization_config"] == {**block, "original_quantization_config": source["quantization_config"]}
    assert got["time_step_limit"] == [0.0, float("inf")] and source["text_config"]["tie_word_embeddings"] is True
    cfg.write_config(tmp_path, got, block, has_head=False)
    assert "original_quantization_config" not in cfg.read_config(tmp_path)["quantization_config"], "an EXL3 source's block gives way"
    cfg.write_config(tmp_path, {"a": 1}, None, has_head=False)
    assert cfg.read_config(tmp_path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_tensor_storage(tmp_path):
    """The shape of the map as spec 1.3 gives it."""
    tensors = {
        **exl3_tensors("a.q", 128, 256, 2.5, "mul1"),
        **exl3_tensors("a.k", 128, 128, 4, "mcg"),
        "a.norm.weight": torch.ones(8).bfloat16(),
    }
    header = read_header(write_odd(tmp_path / "x.safetensors", tensors))
    storage = cfg.tensor_storage(header.tensors, {"a.q.mul1": 0x83DCD12D, "a.k.mcg": 0xCBAC1FED})
    assert list(storage) == ["a.k", "a.norm", "a.q"]
    assert storage["a.norm"] == {"stored_tensors": {"a.norm.weight": {"shape": [8], "n_bytes": 16, "dtype": "torch.bfloat16"}}}
    assert (
        storage["a.q"]["quant_format"] == "exl3"
        and storage["a.q"]["bits_per_weight"] == 2.5
        and storage["a.q"]["mul1_multiplier"] == 2212286765
    )
    assert storage["a.q"]["stored_tensors"]["a.q.trellis"] == {"shape": [8, 16, 40], "n_bytes": 8 * 16 * 80, "dtype": "torch.int16"}
    assert storage["a.q"]["stored_tensors"]["a.q.mul1"] == {"shape": [], "n_bytes": 4, "dtype": "torch.int32"}
    assert storage["a.k"]["bits_per_weight"] == 4 and storage["a.k"]["mcg_multiplier"] == 3417055213
    block = cfg.quantization_config(bits=4, head_bits=6, codebook="mul1")
    cfg.write_quantization_config(tmp_path, block, storage)
    assert cfg.read_json(tmp_path / "quantization_config.json") == {**block, "tensor_storage": storage}


def test_companions_are_copied_weights_are_not(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    keep = ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json", "LICENSE", "README.md", "vocab.json"]
    drop = [
        "model.safetensors",
        "pytorch_model.bin",
        "x.gguf",
        "model.safetensors.index.json",
        "config.json",
        "quantization_config.json",
        ".gitattributes",
    ]
    for name in keep + drop:
        (source / name).write_text(name)
    (source / "sub").mkdir()
    assert cfg.copy_companions(source, target) == sorted(keep) == sorted(p.name for p in target.iterdir())


def test_a_model_is_written_over_its_like_alone(tmp_path):
    cfg.check_target(tmp_path / "yet to be made")
    cfg.check_target(tmp_path)  # empty
    save_file({"base_model.x.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", ".shard-00001.7.tmp"):
        (tmp_path / name).touch()
    cfg.check_target(tmp_path)  # what an interrupted run leaves, and an adapter
    block = cfg.quantization_config(bits=3, head_bits=6, codebook="mul1")
    cfg.write_config(tmp_path, {"a": 1}, block, has_head=True)
    cfg.check_target(tmp_path)
    for config in ('{"a": 1}', '{"quantization_config": {"quant_method": "fp8"}}', '{"quantization_config": 3}', "{damaged"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ArgumentError, match=r"place .*holds a model that is not EXL3"):
            cfg.check_target(tmp_path, "place")
    (tmp_path / "config.json").unlink()
    (tmp_path / "consolidated.safetensors").touch()
    with pytest.raises(ArgumentError, match=r"holds consolidated\.safetensors"):
        cfg.check_target(tmp_path)
