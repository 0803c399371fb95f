"""The slab reader against plain slices of the file's bytes, for layouts that cross pieces, slabs, gaps and files."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3.files import slabs
from exl3.files.safetensors import TensorInfo

LAYOUT = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([0, 0, 0, 1, 40, 700]), st.integers(0, 1)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(LAYOUT, st.integers(0, 9), st.booleans(), st.sampled_from([64, 1000]), st.integers(0, 2**32))
def test_any_layout(tmp_path_factory, layout, start, staged, gap_read, seed):
    """Random sizes, gaps and files, with pieces of 1 KiB and slabs of 4 KiB, asked for in random order."""
    random = Random(seed)
    directory = tmp_path_factory.mktemp("slabs")
    data = [random.randbytes(120_000), random.randbytes(120_000)]
    paths = [directory / "a", directory / "b"]
    for path, content in zip(paths, data):
        path.write_bytes(content)
    infos, at, expected = {}, [start, start], {}
    for i, (size, gap, file) in enumerate(layout):
        at[file] += gap
        infos[str(i)] = TensorInfo(torch.uint8, (size,), paths[file], at[file], size)
        expected[str(i)] = data[file][at[file] : at[file] + size]
        at[file] += size
    order = list(infos)
    random.shuffle(order)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(slabs, "PIECE", 1024)
        m.setattr(slabs, "SLAB", 4096)
        m.setattr(slabs, "_GAP", gap_read)
        m.setattr(slabs, "_PARTS", 5)
        got = slabs.read_tensors({name: infos[name] for name in order}, staged=staged)
    assert list(got) == order
    for name, t in got.items():
        assert t.numpy().tobytes() == expected[name]
        assert t.numel() == 0 or t.data_ptr() % 256 == 0


def test_neighbours_share_reads_and_slabs(tmp_path):
    """Many small tensors take few reads: what makes loading 70,000 of them a matter of seconds."""
    path = tmp_path / "f"
    path.write_bytes(bytes(100_000))
    infos = {str(i): TensorInfo(torch.float16, (50,), path, 100 * i + 1, 100) for i in range(900)}
    places, sizes, reads = slabs._plan(infos)
    assert len(sizes) == 1 and len(reads) == 1 and len(places) == 900


def test_without_the_arena_each_tensor_has_its_own_memory(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(bytes(range(200)))
    infos = {str(i): TensorInfo(torch.uint8, (50,), path, 50 * i, 50) for i in range(4)}
    together = slabs.read_tensors(infos)
    monkeypatch.setenv("EXL3_LOAD_ARENA", "0")
    apart = slabs.read_tensors(infos)
    assert all(torch.equal(apart[name], together[name]) for name in infos)
    assert len({t.untyped_storage().data_ptr() for t in together.values()}) == 1
    assert len({t.untyped_storage().data_ptr() for t in apart.values()}) == 4


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """preadv may return less than asked for: at 2 GiB on Linux, anywhere on network file systems."""
    path = tmp_path / "f"
    content = bytes(range(256)) * 8
    path.write_bytes(content)
    real = slabs._preadv
    monkeypatch.setattr(slabs, "_preadv", lambda fd, buffers, offset: real(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset))
    infos = {"a": TensorInfo(torch.uint8, (700,), path, 3, 700), "b": TensorInfo(torch.int32, (5,), path, 703, 20)}
    got = slabs.read_tensors(infos)
    assert got["a"].numpy().tobytes() == content[3:703] and got["b"].numpy().tobytes() == content[703:723]


def test_meta_device_reads_nothing(tmp_path):
    got = slabs.read_tensors({"a": TensorInfo(torch.float16, (3, 4), tmp_path / "absent", 0, 24)}, "meta")
    assert got["a"].is_meta and got["a"].shape == (3, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(slabs, "PIECE", 1 << 16)
    path = tmp_path / "f"
    content = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    infos = {str(i): TensorInfo(torch.uint8, (29_999,), path, 30_000 * i + 1, 29_999) for i in range(100)}
    got = slabs.read_tensors(infos, "cuda")
    for i in range(100):
        t = got[str(i)]
        assert t.data_ptr() % 256 == 0 and torch.equal(t.cpu(), content[30_000 * i + 1 : 30_000 * (i + 1)])
