"""Bad input through the command line: one line that says what and where, an exit status, no traceback."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from exl3.cli import main

HIDDEN, VOCAB = 32, 40


@pytest.fixture
def model(tmp_path):
    """A one-layer Llama of random weights, without tokenizer files."""
    generator = torch.Generator().manual_seed(1)
    square = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    tensors = {f"model.layers.0.{n}.weight": torch.randn(HIDDEN, HIDDEN, generator=generator) / 6 for n in square}
    tensors |= {f"model.layers.0.{n}_layernorm.weight": torch.ones(HIDDEN) for n in ("input", "post_attention")}
    tensors |= {n: torch.randn(VOCAB, HIDDEN, generator=generator) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": HIDDEN,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def call(capsys):
    def run(*words) -> tuple[int, str, str]:
        status = 0
        try:
            main([str(w) for w in words])
        except SystemExit as e:
            status = e.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def test_ids_work_without_a_tokenizer(model, call):
    status, out, err = call("generate", model, "1,2,3", "--ids", "-n", "4")
    assert status == 0 and len([int(i) for i in out.split(",")]) == 4
    assert err == f"exl3: warning: {model}: no tokenizer.json, so text is not available; token ids are\n"
    status, out, err = call("generate", model, "1,2,3", "--ids", "-n", "4", "--json")
    assert status == 0 and len(json.loads(out)["ids"]) == 4
    for words in (("hello",), ("hello", "--chat")):
        status, out, err = call("generate", model, *words)
        assert status == 1 and out == "" and "tokenizer" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("40", "40 is outside the vocabulary"),
        ("-1", "-1"),
        (str(10**20), "100000000000000000000 is outside any vocabulary"),
        ("1.5", "1.5"),
    ],
)
def test_ids_out_of_range(model, call, ids, message):
    status, _, err = call("generate", model, "--ids", "-n", "2", "--", ids)
    assert status == 1 and message in err.splitlines()[-1]


def test_prompt_longer_than_the_context(model, call):
    status, _, err = call("generate", model, " ".join(["3"] * 65), "--ids", "-n", "2")
    assert status == 1 and "65" in err and "64" in err


def test_config_types_are_said_in_words(model, call):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": "forty"}))
    status, _, err = call("generate", model, "1", "--ids")
    assert status == 1 and err == "exl3: config.json: vocab_size is 'forty', int is needed\n"


@pytest.mark.parametrize("place", ["nowhere/report.json", "folder"])
def test_json_that_could_not_be_written_is_told_before_the_work(model, call, tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("words " * 50)
    for words in (
        ("convert", "-i", model, "-o", tmp_path / "out", "-b", "2", "-d", "cpu"),
        ("eval", model, model, "--text", tmp_path / "text.txt"),
    ):
        status, out, err = call(*words, "--json", tmp_path / place)
        assert status == 1 and str(tmp_path / place) in err and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


def test_a_full_disk_names_the_file(model, call):
    status, _, err = call("convert", "-i", model, "-o", "/dev/full/out", "-b", "2", "-d", "cpu")
    assert status == 1 and "/dev/full" in err and err.count("\n") == 1


def _index_names_an_absent_shard(model):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    return "model-00002-of-00002.safetensors", "lm_head.weight"


def _last_byte_is_gone(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])
    return "model.safetensors", "model.norm.weight"


def _header_length_lies(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + data[8:])
    return "model.safetensors", str(1 << 40)


def _one_tensor_in_two_files(model):
    save_file({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, model / "other.safetensors")
    return "other.safetensors", "lm_head.weight"


@pytest.mark.parametrize(
    "damage", [_index_names_an_absent_shard, _last_byte_is_gone, _header_length_lies, _one_tensor_in_two_files], ids=lambda f: f.__name__
)
def test_damaged_shards_by_every_verb(model, call, tmp_path, damage):
    """Case C08 c, e, f, g: exit status 1, one line that names file and tensor, nothing written."""
    words = damage(model)
    (tmp_path / "text.txt").write_text("words " * 50)
    for verb in (
        ("inspect", model),
        ("plan", model),
        ("generate", model, "1", "--ids"),
        ("bench", model),
        ("convert", "-i", model, "-o", tmp_path / "out", "-b", "2", "-d", "cpu"),
    ):
        status, out, err = call(*verb)
        assert status == 1 and out == "" and err.count("\n") == 1 and all(w in err for w in words), (verb, err)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


def test_bench_within_the_context_and_beyond(model, call):
    status, out, err = call("bench", model, "--repeat", "1", "--json", "--device", "cpu")
    found = json.loads(out)
    assert status == 0 and (found["prompt_tokens"], found["new_tokens"]) == (63, 63), err
    for words in (("--context", "60", "--new-tokens", "5"), ("--prompt-tokens", "64"), ("--context", "64")):
        status, out, err = call("bench", model, *words)
        assert status == 1 and out == "" and "tokens; the model's context is 64: lower them" in err, err
