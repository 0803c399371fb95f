"""Which device gets which layers, what a plan says of it, and memory that comes back."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_llama import CONFIG, random_weights, write

import exl3
from exl3 import ops
from exl3.cache import Batch, Cache
from exl3.errors import ArgumentError, BackendError, ResourceError
from exl3.files import Checkpoint, slabs
from exl3.models import build, locate, memory
from exl3.models.placement import parse_devices, place, shares
from exl3.parallel import plan

CONFIG8 = {**CONFIG, "num_hidden_layers": 8}
MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path, CONFIG8, random_weights(CONFIG8))


def placed(directory: Path, device: Any, tokens: int | None = None, split: Any = None) -> tuple[Any, list[Any]]:
    checkpoint = Checkpoint.open(directory)
    model = build(checkpoint.config)
    found = locate(model, checkpoint)
    place(model, checkpoint, device, tokens, split)
    return model, shares(model, checkpoint, found)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes by device, beside a workspace that is taken as nothing."""
    free = {"cuda:0": 1 << 40, "cuda:1": 1 << 40, "cuda:2": 1 << 40, "cpu": 1 << 40}
    monkeypatch.setattr(memory, "available_bytes", lambda device: free[str(device)])
    monkeypatch.setattr(memory, "reserve_bytes", lambda device: 0)
    monkeypatch.setattr(memory, "workspace_bytes", lambda model: 0)
    monkeypatch.setattr(memory, "card_workspace_bytes", lambda model, dense, device: 0)
    monkeypatch.setattr("exl3.models.placement.PIECE", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    return free


def counts(model: Any) -> list[tuple[str, int]]:
    return [(str(stage.device), len(stage.blocks)) for stage in model.stages]


def test_names_of_devices() -> None:
    assert parse_devices("cuda:0, cpu") == [torch.device("cuda", 0), torch.device("cpu")]
    assert parse_devices(["cuda:1", torch.device("cpu")]) == [torch.device("cuda", 1), torch.device("cpu")]
    assert parse_devices("cpu:1") == [torch.device("cpu")]
    for wrong in ("cuda:0,gpu", "", ",", 1.5, [None], "meta", "xpu:0"):
        with pytest.raises(ArgumentError, match="device is"):
            parse_devices(wrong)


def test_cards_share_by_free_memory(directory: Path, room: dict[str, int]) -> None:
    assert counts(placed(directory, "cuda:0,cuda:1")[0]) == [("cuda:0", 4), ("cuda:1", 4)]
    room["cuda:1"] *= 3
    assert counts(placed(directory, "cuda:0,cuda:1")[0]) == [("cuda:0", 2), ("cuda:1", 6)]
    assert counts(placed(directory, ["cuda:1", "cuda:0"])[0]) == [("cuda:1", 6), ("cuda:0", 2)]
    assert counts(placed(directory, "cuda:0,cuda:1", split=[7, 1])[0]) == [("cuda:0", 7), ("cuda:1", 1)]


def test_a_card_is_filled_before_the_cpu_and_auto_takes_few(directory: Path, room: dict[str, int]) -> None:
    model, whole = placed(directory, "cuda:0")
    need = whole[0].weights_bytes + 256 * whole[0].cache_bytes_per_token()
    assert counts(placed(directory, "cuda:0,cpu")[0]) == [("cuda:0", 8)]
    assert counts(placed(directory, "auto")[0]) == [("cuda:0", 8)]
    room["cuda:0"] = need // 2
    model, parts = placed(directory, "cuda:0,cpu", 256)
    assert counts(model)[1][0] == "cpu" and 3 <= counts(model)[0][1] <= 4
    assert parts[0].weights_bytes + 256 * parts[0].cache_bytes_per_token() <= room["cuda:0"]
    assert sum(p.found.nbytes for p in parts) == whole[0].found.nbytes
    assert [len(p.cache_shapes) for p in parts] == [n for _, n in counts(model)]
    assert [str(d) for d in model.cache_devices] == ["cuda:0"] * counts(model)[0][1] + ["cpu"] * counts(model)[1][1]
    room["cuda:1"] = need // 2
    found = counts(placed(directory, "auto", 256)[0])
    assert [name for name, _ in found] == ["cuda:0", "cuda:1", "cuda:2"][: len(found)] and len(found) >= 2


def test_values_between_operations_have_each_device_s_type(directory: Path, room: dict[str, int]) -> None:
    model, _ = placed(directory, "cuda:0,cpu", split=[3, 5])
    assert [block.self_attn.dtype for block in model.blocks] == [torch.float16] * 3 + [torch.float32] * 5
    assert model.dtype == torch.float32 and model.device == torch.device("cuda", 0)


def test_a_plan_has_each_device_s_part(directory: Path, room: dict[str, int]) -> None:
    p = plan(directory, "cuda:0,cuda:1,cpu", 512, split=[2, 5, 1])
    assert [(part.device, part.layers) for part in p.parts] == [("cuda:0", 2), ("cuda:1", 5), ("cpu", 1)]
    assert p.device == "cuda:0,cuda:1,cpu" and p.fits
    assert p.cache_bytes == sum(part.cache_bytes for part in p.parts) and p.parts[1].cache_bytes == 5 * p.parts[2].cache_bytes
    twice = plan(directory, "cuda:0,cuda:1,cuda:0", 512, split=[2, 5, 1])  # one device's memory counts once
    assert len(twice.parts) == 3 and twice.available_bytes == 2 << 40 and twice.cache_bytes == p.cache_bytes
    room["cuda:0"] = twice.parts[0].total_bytes + twice.parts[2].total_bytes - 1
    assert not plan(directory, "cuda:0,cuda:1,cuda:0", 512, split=[2, 5, 1]).fits
    staged = plan(directory, "cuda:0,cpu", 512, 8, 4, split=[4, 4])
    assert [part.workspace_bytes for part in staged.parts] == [4 * 2 * 16 * 256 * 256, 0]  # the default window: 256 pages
    room["cuda:1"] = p.parts[1].total_bytes - 1
    assert not plan(directory, "cuda:0,cuda:1,cpu", 512, split=[2, 5, 1]).fits
    with pytest.raises(ResourceError, match=r"cache: 512 tokens at 16 bits need .* GiB on cpu, 0\.00 GiB are free"):
        with pytest.MonkeyPatch.context() as m:
            m.setattr("exl3.cache.cache.available_bytes", lambda device: 1000)
            Cache(build(CONFIG8), 512)


def load(directory: Path, device: str = "cpu") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exl3.load(directory, device=device)


def test_memory_that_runs_out_gives_everything_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = slabs._aligned_empty

    def short(size: int, device: torch.device) -> torch.Tensor:
        if len(made) == 1:
            raise ResourceError(f"{size} bytes for weights on {device} are not to be had: out of memory")
        made.append(size)
        return real(size, device)

    monkeypatch.setattr(slabs, "_aligned_empty", short)
    seen = []
    monkeypatch.setattr(exl3.Model, "unload", lambda self, unload=exl3.Model.unload: seen.append(self) or unload(self))
    with pytest.raises(ResourceError, match=r"ran out .* given back: \d+ bytes .* need 1 MiB on cpu; the largest are .* MiB"):
        load(directory)
    assert made and all(t.is_meta for t in seen[0].parameters()) and not list(seen[0].buffers())


def test_load_generate_unload_twenty_times(directory: Path) -> None:
    try:
        ops.backend("cpu")
    except ops.native.BackendError as error:
        pytest.skip(str(error))
    resident = []
    for _ in range(20):
        model = load(directory)
        result = model.generate([5, 6, 7], max_new_tokens=4, stop_ids=[])
        assert len(result.ids) == 4
        model.unload()
        del model, result
        gc.collect()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[-1] - resident[3] < 4 * MIB, resident


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": "9"}, {"max_tokens": 1.5}, {"k_bits": "8"}, {"v_bits": 3.5}, {"split": 3}, {"split": "11"}, {"path": 5}]
)
def test_plan_names_arguments_that_cannot_work(directory, wrong) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        plan(**{"path": directory, "device": "cpu,cpu", **wrong})


def test_a_card_that_is_not_there(directory, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendError, match="there is no cuda:7: torch sees 1 GPU;"):
        plan(directory, "cuda:7")


def test_a_step_reaches_other_devices_as_the_stream_does(monkeypatch) -> None:
    """Through host memory where the direct way between two cards is broken."""
    moved = []
    monkeypatch.setattr(ops, "move", lambda x, device: moved.append(device) or x)
    batch = Batch.whole(torch.tensor([[1, 2]]))
    batch.on(torch.device("cuda", 1))
    assert moved == [torch.device("cuda", 1)] * 5
