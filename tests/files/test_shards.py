"""Writing: shards, index, atomicity, disk space. What is written is read back by the safetensors library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from exl3.errors import ArgumentError, FormatError, ResourceError
from exl3.files import Checkpoint, ShardWriter, check_disk, read_header, write_shards, write_tensors
from exl3.files.shards import write_json

MIB = 1 << 20
T = {f"t{i}": torch.randn(MIB // 8, dtype=torch.float32) for i in range(5)}  # half a MiB each


def listing(directory):
    return sorted(p.name for p in directory.iterdir())


def union(files):
    return {name: t for f in files for name, t in load_file(f).items()}


@pytest.mark.parametrize("size,shards", [(0, 1), (8192, 1), (1, 3), (0.5, 5), (0.1, 5), (2, 2)])
def test_sharding(tmp_path, size, shards):
    files = write_shards(tmp_path, T, size)
    names = ["model.safetensors"] if shards == 1 else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    assert [f.name for f in files] == names
    got = union(files)
    assert got.keys() == T.keys() and all(torch.equal(got[n], t) for n, t in T.items())
    index = tmp_path / "model.safetensors.index.json"
    assert listing(tmp_path) == sorted([*names, *([index.name] if shards > 1 else [])])
    if shards > 1:
        written = json.loads(index.read_text())
        assert written["metadata"] == {"total_size": 5 * MIB // 2}
        assert (
            all(name in load_file(tmp_path / shard) for name, shard in written["weight_map"].items())
            and written["weight_map"].keys() == T.keys()
        )
    assert all(os.stat(f).st_mode & 0o777 == 0o644 for f in files)
    assert read_header(files[0]).metadata == {"format": "pt"}


def test_a_group_is_never_split(tmp_path):
    groups = [{"a": T["t0"], "b": T["t1"], "c": T["t2"]}, {"d": T["t3"]}, {"e": T["t4"]}]
    files = write_shards(tmp_path, iter(groups), 1)
    assert [sorted(load_file(f)) for f in files] == [["a", "b", "c"], ["d", "e"]]


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path):
    script = (
        "import os, sys, torch; from exl3.files import ShardWriter\n"
        "out = ShardWriter(sys.argv[1], 1); out.add({'a': torch.zeros(1 << 18)}); out.add({'b': torch.zeros(1 << 18)}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == 9
    (left,) = listing(tmp_path)
    assert left.startswith(".shard-00001.")
    with ShardWriter(tmp_path, 1) as beside:  # one that still writes keeps its shards
        beside.add({"a": T["t0"], "b": T["t1"]})
        beside.add({"c": T["t2"]})
        assert left not in listing(tmp_path) and any(n.startswith(f".shard-00001.{os.getpid()}.") for n in listing(tmp_path))
        ShardWriter(tmp_path, 1)
        assert any(n.startswith(f".shard-00001.{os.getpid()}.") for n in listing(tmp_path))
    assert [n for n in listing(tmp_path) if n.endswith(".tmp")] == []


def test_a_second_run_replaces_the_first(tmp_path):
    write_shards(tmp_path, T, 0.5)
    (tmp_path / "model-mtp.safetensors").write_bytes(b"the user's own")
    write_shards(tmp_path, {"x": T["t0"]}, 0)
    assert listing(tmp_path) == ["model-mtp.safetensors", "model.safetensors"]


@pytest.mark.parametrize("step", range(4))
def test_crash_while_naming_the_shards_loses_nothing(tmp_path, monkeypatch, step):
    """Whatever has been renamed when the process dies, every tensor of the new model is on the disk, and no mixture of two loads."""
    write_shards(tmp_path, {**T, "old": T["t0"]}, 1)
    (tmp_path / "config.json").write_text("{}")
    real, done = os.replace, []

    def dies(source, target):
        if len(done) == step:
            raise KeyboardInterrupt
        done.append(target)
        real(source, target)

    out = ShardWriter(tmp_path, 0.5)
    for name, t in T.items():
        out.add({name: t + 1})
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(os, "replace", dies)
        out.close()
    files = [f for f in tmp_path.iterdir() if f.name.endswith((".safetensors", ".tmp"))]
    found = [(name, t) for f in files for name, t in load_file(f).items()]
    assert all(any(name == n and torch.equal(t, T[n] + 1) for name, t in found) for n in T)
    if step:
        with pytest.raises(FormatError, match="remove the file that does not belong"):
            Checkpoint.open(tmp_path)
    else:
        assert torch.equal(Checkpoint.open(tmp_path).read(["t0"])["t0"], T["t0"])


def test_failure_leaves_the_old_files(tmp_path):
    write_shards(tmp_path, {"old": T["t0"]})

    def broken():
        yield {"a": T["t0"]}
        yield {"b": T["t1"]}
        raise RuntimeError("conversion failed")

    with pytest.raises(RuntimeError, match="conversion failed"):
        write_shards(tmp_path, broken(), 0.5)
    assert listing(tmp_path) == ["model.safetensors"] and list(load_file(tmp_path / "model.safetensors")) == ["old"]
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path, 0.5) as out:
        out.add({"a": T["t0"]})
        out.add({"b": T["t1"]})
        assert listing(tmp_path) != ["model.safetensors"], "a shard should be under way"
        raise ZeroDivisionError
    assert listing(tmp_path) == ["model.safetensors"]


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    """The configuration is taken away when nothing is left to be written, and the new one is yet to come."""
    for settled in (False, True):
        write_shards(tmp_path, {"old": T["t0"]})
        for name in ("config.json", "quantization_config.json"):
            (tmp_path / name).write_text("{}")
        with monkeypatch.context() as m, pytest.raises(ResourceError), ShardWriter(tmp_path) as out:
            out.add({"a": T["t0"]})
            if settled:
                out.settle()
                out.add({"b": T["t0"]})
            m.setattr(shutil, "disk_usage", lambda _: namedtuple("U", "free")(1))
            out.settle()
        assert listing(tmp_path) == (["model.safetensors"] if settled else ["config.json", "model.safetensors", "quantization_config.json"])
        assert list(load_file(tmp_path / "model.safetensors")) == ["old"]


def test_half_written_shards_are_no_model(tmp_path):
    """A process that dies leaves hidden files that no loader takes for weights."""
    out = ShardWriter(tmp_path, 0.5)
    out.add({"a": T["t0"]})
    out.add({"b": T["t1"]})
    assert not list(tmp_path.glob("*.safetensors"))
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path / "other.safetensors", {"c": T["t2"]})
    assert list(Checkpoint.open(tmp_path).tensors) == ["c"]


def test_views_transposes_and_shared_storage(tmp_path):
    base = torch.arange(64, dtype=torch.int16)
    tensors = {
        "head": base[:16],
        "tail": base[8:],
        "t": base.view(8, 8).T,
        "scalar": torch.tensor(7, dtype=torch.int32),
        "empty": torch.empty(0, 3),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    got = load_file(tmp_path / "x.safetensors")
    assert all(got[n].shape == t.shape and torch.equal(got[n], t) for n, t in tensors.items())


def test_same_tensors_same_bytes(tmp_path):
    for name in "ab":
        write_shards(tmp_path / name, T, 1)
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in listing(tmp_path / "a"))


def test_names_twice_and_bad_sizes(tmp_path):
    with pytest.raises(ArgumentError, match="'a' is written twice"):
        write_shards(tmp_path, [{"a": T["t0"]}, {"a": T["t1"]}])
    with pytest.raises(ArgumentError, match="shard_size is -1"):
        write_shards(tmp_path, T, -1)
    assert listing(tmp_path) == []


def test_disk_is_checked_before_the_first_byte(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(100 * MIB, 82 * MIB, 18 * MIB))
    check_disk(tmp_path / "not" / "yet" / "there", 2 * MIB)
    with pytest.raises(ResourceError, match=r"the output needs 2 MiB.*18 MiB free"):
        write_shards(tmp_path / "out", T)
    assert listing(tmp_path) == []
    with pytest.raises(ResourceError, match=r"x\.safetensors needs"):
        write_tensors(tmp_path / "x.safetensors", T)
    assert listing(tmp_path) == []


def test_json_is_atomic(tmp_path):
    write_json(tmp_path / "x.json", {"a": "ü", "b": [1]})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": "ü", "b": [1]} and listing(tmp_path) == ["x.json"]


def test_round_trip_through_a_checkpoint(tmp_path):
    write_shards(tmp_path, T, 1)
    (tmp_path / "config.json").write_text("{}")
    c = Checkpoint.open(tmp_path)
    assert c.file_count == 3 and all(torch.equal(t, T[n]) for n, t in c.read(T).items())


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
def test_what_the_disk_refuses_half_way_is_told_and_the_old_file_stays(tmp_path):
    """A limit of the process stands for a disk that fills up behind the check."""
    import resource

    tensors = {"a": torch.zeros(5000)}
    write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(2)})
    write_json(tmp_path / "j.json", {"a": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ResourceError, match=r"t\.safetensors.*cannot be written .*large"):
            write_tensors(tmp_path / "t.safetensors", tensors)
        with pytest.raises(ResourceError, match=r"j\.json: cannot be written .*large"):
            write_json(tmp_path / "j.json", list(range(1000)))
        with pytest.raises(ResourceError, match="cannot be written"):
            write_shards(tmp_path / "model", [tensors])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["j.json", "model", "t.safetensors"]
    assert load_file(tmp_path / "t.safetensors")["a"].tolist() == [1, 1] and json.loads((tmp_path / "j.json").read_text()) == {"a": 1}
