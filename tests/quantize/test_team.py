"""Several devices: the work is shared, the bytes stay the same. Here all devices are the CPU."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import contents, pytestmark, run
from tiny_llama import VOCAB, write_model

from exl3 import ops
from exl3.errors import ArgumentError, BackendError, ResourceError
from exl3.models import Model
from exl3.nn import Attention
from exl3.ops import transfer
from exl3.quantize import block, ldlq
from exl3.quantize.background import Reader, Writer
from exl3.quantize.convert import _encoder, convert
from exl3.quantize.devices import choose_devices, read_ratios
from exl3.quantize.fitting import _on_host
from exl3.quantize.hessian import Hessian
from exl3.quantize.linear import Group, Member, Settings, quantize_groups
from exl3.quantize.streams import SHARDS, Shard, Streams, shard_rows
from exl3.quantize.team import Speed, Team, Worker, deal, share_columns

__all__ = ["pytestmark"]


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    ids = torch.randint(0, VOCAB, (12, 48), generator=torch.Generator().manual_seed(9), dtype=torch.int64)
    save_file({"input_ids": ids}, tmp_path / "cal.safetensors")
    return tmp_path / "cal.safetensors"


@pytest.mark.parametrize(
    "options",
    [{"recapture": False, "correction": 0.5}, {"correction": 0.5, "token_weighting": True}, {"two_sided": True, "choose_damping": True}],
    ids=["one capture", "recapture", "two-sided"],
)
def test_any_number_of_devices_gives_the_same_bytes(tmp_path: Path, calibration: Path, monkeypatch, options):
    monkeypatch.setattr(ldlq, "PIECE", 64)
    monkeypatch.setattr("exl3.quantize.team.PIECE", 64)
    monkeypatch.setattr("exl3.quantize.convert.BATCH_TOKENS", {"cpu": 48})  # twelve batches in twelve shards
    source = write_model(tmp_path / "source")
    run(source, tmp_path / "one", calibration, 2.5, **options)
    report = run(source, tmp_path / "three", calibration, 2.5, devices="cpu,cpu,cpu", device_ratios="1,1,3", **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert not report.fallbacks and report.proxy_error > 0


def test_shards_depend_on_rows_alone_and_cover_them():
    for rows, per_batch in [(1, 8), (12, 1), (250, 8), (128, 8), (1000, 8)]:
        cuts = shard_rows(rows, per_batch)
        assert cuts[0][0] == 0 and cuts[-1][1] == rows and len(cuts) <= SHARDS
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts)) and all(a % per_batch == 0 for a, _ in cuts)


class _Reader:
    def close(self) -> None: ...


def _team(speeds: list[float]) -> Team:
    workers = [Worker(torch.device("cpu"), None, Streams(None, torch.device("cpu"), 1), _Reader()) for _ in speeds]
    for w, speed in zip(workers, speeds):
        w.speed = Speed(speed, speed)
    return Team(workers)


def test_shards_are_spread_by_speed_and_come_back_in_order():
    with _team([1, 1, 3]) as team:
        team.spread([Shard(i, torch.full((1, 2, 2), float(i)), None) for i in range(10)])
        assert [len(w.streams.shards) for w in team.workers] == [2, 2, 6]
        assert 0 in team.lead.streams.shards
        assert [s.first_row for s in team.shards()] == list(range(10))
        assert list(team.over_shards(lambda w, n: float(w.streams.shards[n].quantized[0, 0, 0]))) == list(range(10))


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_failing_device_is_named_and_the_job_can_be_resumed(tmp_path: Path, calibration: Path, monkeypatch, devices: str):
    source = write_model(tmp_path / "source")
    run(source, tmp_path / "whole", calibration, 3)
    calls, encode = 0, ops.encode

    def vanishes(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 60:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return encode(*args, **kwargs)

    monkeypatch.setattr(ops, "encode", vanishes)
    with pytest.raises(BackendError, match=r"cpu failed .*launch failure.*resumed"):
        run(source, tmp_path / "out", calibration, 3, devices=devices)
    monkeypatch.setattr(ops, "encode", encode)
    convert(work_dir=tmp_path / "out.work", resume=True, devices="cpu")  # with what is left
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_matrices_and_columns_are_dealt_by_speed():
    assert deal([9, 5, 4], [1, 1]) == [0, 1, 1]
    assert deal([4, 4, 4, 4], [1, 3]).count(1) == 3
    n = 8 * ldlq.PIECE
    parts = share_columns([(128, n), (128, 2 * ldlq.PIECE)], [0, 1], [1, 1])
    assert [(p.worker, p.start, p.stop) for p in parts[1]] == [(1, 0, 2 * ldlq.PIECE)]
    assert parts[0][0] == type(parts[0][0])(0, 0, 5 * ldlq.PIECE) and parts[0][1].stop == n
    assert share_columns([(128, 128)], [0], [1, 1]) == [[type(parts[0][0])(0, 0, 128)]]
    whole = share_columns([(256, 3 * ldlq.PIECE + 128)], [1], [1, 1, 1])[0]
    assert [p.start for p in whole[1:]] == [p.stop for p in whole[:-1]] and whole[-1].stop == 3 * ldlq.PIECE + 128


def test_devices_and_ratios_are_checked():
    assert choose_devices("cpu,cpu") == [torch.device("cpu")] * 2
    assert read_ratios("", 2) is None and read_ratios("1,3", 2) == [1.0, 3.0]
    for text in ("1", "1,0", "1,x", "1,nan"):
        with pytest.raises(ArgumentError, match="device_ratios"):
            read_ratios(text, 2)
    with pytest.raises(ArgumentError):
        choose_devices("cuda:77")


def test_copies_go_through_the_host_where_asked_or_where_the_probe_fails(monkeypatch):
    a, b = torch.device("cuda", 0), torch.device("cuda", 1)
    probes = []
    monkeypatch.setattr(transfer, "_arrives", lambda s, t: probes.append((s, t)) or False)
    monkeypatch.delenv("EXLLAMA_NO_P2P_COPY", raising=False)
    assert not transfer.direct(a, b) and probes == [(a, b)]
    monkeypatch.setenv("EXLLAMA_NO_P2P_COPY", "0")
    assert transfer.direct(a, b)
    monkeypatch.setenv("EXLLAMA_NO_P2P_COPY", "1")
    assert not transfer.direct(a, b) and len(probes) == 1


def test_a_lying_copy_is_found(monkeypatch):
    meta = torch.device("cpu")
    assert transfer._arrives.__wrapped__(meta, meta)
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    with pytest.warns(UserWarning, match="arrive damaged"):
        assert not transfer._arrives.__wrapped__(meta, meta)


def test_out_of_memory_in_a_forward_pass_means_smaller_batches():
    streams = Streams(None, torch.device("cpu"), 8)
    seen = []

    def work() -> int:
        seen.append(streams.rows_per_batch)
        if streams.rows_per_batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (test)")
        return 7

    assert streams.within_memory(work) == 7 and seen == [8, 4, 2]

    def never() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (test)")

    with pytest.raises(torch.OutOfMemoryError):
        streams.within_memory(never)


def test_a_matrix_too_large_for_the_device_is_worked_on_in_host_memory():
    cpu = torch.device("cpu")
    g = torch.Generator().manual_seed(1)
    hessian = Hessian("x", 128, cpu)
    hessian.add(torch.randn(500, 128, generator=g))
    group = Group("x", [Member("x", torch.randn(64, 128, generator=g), 3)], hessian)
    encode, settings = _encoder("mul1"), Settings(seam_window=16)
    [want], [got] = quantize_groups([group], encode, settings), _on_host(group, cpu, encode, settings, None)
    assert got.report.on_host and not want.report.on_host
    assert all(torch.equal(want.tensors[name], t) for name, t in got.tensors.items())


def test_no_two_matrices_fit_together(tmp_path: Path, calibration: Path, monkeypatch):
    """No two matrices fit together: they are worked on one by one, and nothing else changes."""
    source = write_model(tmp_path / "source")
    run(source, tmp_path / "whole", calibration, 3, recapture=False)
    from exl3.quantize import fitting

    real, calls = fitting.quantize_groups, []

    def full(groups, *args, **kwargs):
        calls.append(sum(len(g.members) for g in groups))
        if calls[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory (test)")
        return real(groups, *args, **kwargs)

    monkeypatch.setattr(fitting, "quantize_groups", full)
    monkeypatch.setattr(fitting, "_that_fit", lambda groups, device: [groups])
    monkeypatch.setattr(fitting, "can_shrink", lambda device: True)
    run(source, tmp_path / "out", calibration, 3, recapture=False)
    assert max(calls) == 7 and calls.count(1) > 7
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_writer_keeps_the_order_and_raises_what_went_wrong():
    done: list[int] = []

    def slow(i: int) -> None:
        time.sleep(0.02)
        done.append(i)

    with Writer() as writer:
        for i in range(5):
            writer.submit(slow, i)
        writer.flush()
        assert done == [0, 1, 2, 3, 4]
        writer.submit(slow, 5)
    assert done[-1] == 5

    def full() -> None:
        raise ResourceError("disk full")

    with pytest.raises(ResourceError, match="disk full"), Writer() as writer:
        writer.submit(full)
        for i in range(5):
            writer.submit(slow, i)


def test_reader_reads_ahead_and_again_where_memory_was_short():
    calls = []

    def load(i: int) -> torch.nn.Module:
        calls.append((i, threading.current_thread() is threading.main_thread()))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (test)")
        return torch.nn.Linear(2, 2)

    reader = Reader(load, torch.device("cpu"))
    reader.take(0)
    reader.ahead(1)
    assert isinstance(reader.take(1), torch.nn.Module)
    reader.close()
    assert calls == [(0, True), (1, False), (1, True)]


def test_what_the_original_block_shows_may_be_kept(tmp_path: Path, calibration: Path, monkeypatch):
    """One pass of the original block for all its groups, or one for each where memory is short, and no attention over what it has seen
    already: the same bytes."""
    source, passes, attended = write_model(tmp_path / "source"), [0], {}
    for name, room in (("kept", True), ("again", False)):
        monkeypatch.setattr(block._Copy, "_has_room_to_keep", lambda self, room=room: room)
        real = block._shown
        monkeypatch.setattr(block, "_shown", lambda *a, real=real: [passes.__setitem__(0, passes[0] + 1), real(*a)][1])
        attend, calls = Attention.attend, []
        monkeypatch.setattr(Attention, "attend", lambda *a, attend=attend, calls=calls: [calls.append(0), attend(*a)][1])
        run(source, tmp_path / name, calibration, 3)
        monkeypatch.undo()
        assert (passes[0] > 0) is room
        passes[0], attended[name] = 0, len(calls)
    assert attended["kept"] < 0.6 * attended["again"]
    for p in (tmp_path / "kept").iterdir():
        assert p.read_bytes() == (tmp_path / "again" / p.name).read_bytes()


@pytest.mark.parametrize("recapture", [True, False])
def test_where_half_precision_overflows_a_block_is_computed_in_fp32(tmp_path: Path, calibration: Path, monkeypatch, recapture: bool):
    source = write_model(tmp_path / "source")
    tensors = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"] *= 4e4  # times the gate beyond 65504
    tensors["model.layers.1.mlp.down_proj.weight"] /= 4e4
    save_file(tensors, source / "model.safetensors")
    wide = run(source, tmp_path / "wide", calibration, 4, recapture=recapture)
    place = Model.place
    monkeypatch.setattr(Model, "place", lambda self, device: place(self, device, torch.float16))
    report = run(source, tmp_path / "out", calibration, 4, recapture=recapture)
    assert wide.wide == [] and report.wide == ["model.layers.1"]
    assert ("in fp32", "1 blocks in which half precision overflows, first model.layers.1") in report.summary()
    assert report.proxy_error == pytest.approx(wide.proxy_error, rel=0.1)
    assert max(b.rfn for b in report.blocks) < 0.2
