"""C08: shards, index, strays. Every refusal comes from headers alone, before a tensor is allocated."""

from __future__ import annotations

import json

import pytest
import torch

from exl3.errors import FormatError, MissingTensorError
from exl3.files import Checkpoint

from .conftest import entry, write_odd, write_raw

T = {f"model.layers.{i}.w.weight": torch.randn(4, 6) for i in range(4)}
FIRST, SECOND = dict(list(T.items())[:2]), dict(list(T.items())[2:])


@pytest.fixture
def two(tmp_path):
    """Two shards, no index."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    write_odd(tmp_path / "model-00001-of-00002.safetensors", FIRST)
    write_odd(tmp_path / "model-00002-of-00002.safetensors", SECOND)
    return tmp_path


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def no_reads(monkeypatch):
    """Any tensor allocation by the reader fails the test."""

    def refuse(*_, **__):
        raise AssertionError("a tensor was allocated")

    monkeypatch.setattr("exl3.files.slabs._aligned_empty", refuse)


def test_a_one_file_without_index(tmp_path, model_dir):
    c = Checkpoint.open(model_dir(T))
    assert all(torch.equal(t, T[n]) for n, t in c.read(T).items()) and c.file_count == 1


def test_b_two_shards_without_index(two):
    c = Checkpoint.open(two)
    assert c.file_count == 2 and c.nbytes == 4 * 96
    assert all(torch.equal(t, T[n]) for n, t in c.read(reversed(list(T))).items())


def test_c_index_names_an_absent_shard(two, no_reads):
    write_index(two, {**dict.fromkeys(T, "model-00001-of-00002.safetensors"), "model.norm.weight": "model-00003-of-00003.safetensors"})
    with pytest.raises(MissingTensorError, match=r"model-00003-of-00003\.safetensors.*'model\.norm\.weight'"):
        Checkpoint.open(two)


def test_d_stale_index_is_overruled_by_the_headers(two):
    write_index(two, dict.fromkeys([*T, "gone.weight"], "model-00001-of-00002.safetensors"))
    c = Checkpoint.open(two)
    assert c.tensors.keys() == T.keys()
    assert all(torch.equal(t, T[n]) for n, t in c.read(T).items())


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": null}}', b"\xff", b"[" * 100_000])
def test_broken_index(two, index):
    (two / "model.safetensors.index.json").write_bytes(index)
    if b"null" in index:
        with pytest.raises(MissingTensorError):
            Checkpoint.open(two)
    else:
        assert len(Checkpoint.open(two).tensors) == 4


def test_e_last_shard_short_by_one_byte(two, no_reads):
    path = two / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors.*'model\.layers\.3\.w\.weight'.*cut off"):
        Checkpoint.open(two)


def test_f_header_length_lies(two, no_reads):
    write_raw(two / "model-00002-of-00002.safetensors", {"a": entry("F16", [2], 0, 4)}, b"\0" * 4, claim=2**40)
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors.*claims 1099511627776 bytes"):
        Checkpoint.open(two)


def test_g_one_tensor_in_two_shards(two, no_reads):
    write_odd(two / "model-00003-of-00003.safetensors", {"model.layers.0.w.weight": torch.zeros(4, 6)})
    with pytest.raises(
        FormatError, match=r"'model\.layers\.0\.w\.weight'.*model-00001-of-00002\.safetensors.*model-00003-of-00003\.safetensors"
    ):
        Checkpoint.open(two)


def test_i_adapter_beside_the_model(two):
    prefix = "base_model.model.model.layers.0.w"
    adapter = {
        f"{prefix}.lora_A.weight": torch.zeros(2, 6),
        f"{prefix}.lora_B.weight": torch.zeros(4, 2),
        "base_model.model.lm_head.weight": T["model.layers.0.w.weight"],
    }
    write_odd(two / "adapter_model.safetensors", adapter)
    c = Checkpoint.open(two)
    assert c.tensors.keys() == T.keys() and [p.name for p in c.adapters] == ["adapter_model.safetensors"]
    assert c.unused(T) == []
    # one model tensor more and the file counts as part of the model
    write_odd(two / "adapter_model.safetensors", {**adapter, "model.extra.weight": torch.zeros(1)})
    assert "model.extra.weight" in Checkpoint.open(two).tensors


def test_broken_adapter_is_still_an_error(two, no_reads):
    (two / "adapter_model.safetensors").write_bytes(b"\1\2\3")
    with pytest.raises(FormatError, match="adapter_model"):
        Checkpoint.open(two)


def test_names_the_model_does_not_use(two):
    write_odd(
        two / "extra.safetensors", {"mtp.fc.weight": torch.zeros(2, 2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    )
    assert Checkpoint.open(two).unused(T) == ["mtp.fc.weight"]


def test_hidden_and_foreign_files_are_left_alone(two):
    (two / "._model-00001-of-00002.safetensors").write_bytes(b"resource fork")
    (two / ".model.safetensors.123.tmp").write_bytes(b"half written")
    (two / "pytorch_model.bin").write_bytes(b"pickle")
    assert len(Checkpoint.open(two).tensors) == 4


@pytest.mark.parametrize(
    "file,hint", [("m.gguf", "import-gguf"), ("pytorch_model.bin", "safetensors version"), ("readme.md", "no \\*.safetensors")]
)
def test_no_weights(tmp_path, file, hint):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(MissingTensorError, match=hint):
        Checkpoint.open(tmp_path)


def test_no_directory_no_config(tmp_path, two):
    with pytest.raises(MissingTensorError, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")
    (two / "config.json").unlink()
    with pytest.raises(MissingTensorError, match=r"no config\.json"):
        Checkpoint.open(two)


def test_file_that_shrinks_after_opening(two):
    c = Checkpoint.open(two)
    path = two / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match="changed since"):
        c.read(T)
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        c.read(T)


def test_missing_tensor_is_named(two):
    with pytest.raises(MissingTensorError, match=r"'model\.norm\.weight' is in none of the 2 files"):
        Checkpoint.open(two).read(["model.norm.weight"])
