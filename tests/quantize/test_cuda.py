"""Conversion on a card: repeatable, resumable, within the memory it may take, the same bytes on two cards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import VOCAB, write_model

from exl3 import ops
from exl3.codec import dequantize
from exl3.errors import BackendError, JobError
from exl3.quantize.convert import convert
from exl3.quantize.hessian import Hessian


def _usable() -> bool:
    try:
        return torch.cuda.is_available() and "encode" in ops.backend("cuda").ops
    except BackendError:
        return False


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _usable(), reason="needs an NVIDIA GPU and libexl3_cuda.so")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    ids = torch.randint(0, VOCAB, (40, 64), generator=torch.Generator().manual_seed(9))
    save_file({"input_ids": ids}, tmp_path / "cal.safetensors")
    return write_model(tmp_path / "source", layers=3)


def run(source: Path, name: str, **options):
    out = source.parent / name
    report = convert(source, out, 2.5, cal_data=str(source.parent / "cal.safetensors"), **({"devices": "0"} | options))
    return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if p.is_file()}, report


@pytest.mark.parametrize("options", [{"two_sided": False}, {"preset": "incumbent"}], ids=["one-sided", "incumbent"])  # as on a CPU
def test_as_good_as_on_the_cpu_and_repeatable(source: Path, options):
    first, report = run(source, "a", **options)
    assert run(source, "b", **options)[0] == first
    tensors, original = load_file(source.parent / "a" / "model.safetensors"), load_file(source / "model.safetensors")
    key = "model.layers.1.mlp.down_proj"
    w = dequantize(*(tensors[f"{key}.{part}"] for part in ("trellis", "suh", "svh")), "mul1")
    want = original[f"{key}.weight"].float().T
    assert (w[: want.shape[0], : want.shape[1]] - want).norm() < 0.4 * want.norm()
    _, cpu = run(source, "c", devices="cpu", **options)
    assert report.proxy_error == pytest.approx(cpu.proxy_error, rel=0.05)  # other roundings, other searches


def test_small_models_are_fed_back_over_the_outputs_by_default(source: Path):
    default, _ = run(source, "a")
    assert run(source, "b", two_sided=True)[0] == default == run(source, "c")[0]
    assert run(source, "d", two_sided=False)[0]["model.safetensors"] != default["model.safetensors"]


def test_a_stopped_job_goes_on_to_the_same_bytes(source: Path):
    whole, _ = run(source, "whole")
    with pytest.raises(JobError, match="max-module"):
        run(source, "out", max_module=1)
    convert(work_dir=source.parent / "out.work", resume=True)
    assert {p.name: p.read_bytes() for p in sorted((source.parent / "out").iterdir()) if p.is_file()} == whole


def test_statistics_are_those_of_float64():
    x = torch.randn(5000, 384, device="cuda").half()
    h = Hessian("x", 384, "cuda")
    h.add(x)
    want = x.double().T @ x.double() / 5000
    assert float((h.matrix().double() - want).norm() / want.norm()) < 5e-6


def test_little_memory_is_no_reason_to_stop(source: Path, monkeypatch):
    """Batches shrink when a forward pass finds no memory; matrices go into host memory when nothing else helps."""
    from exl3.quantize import block, fitting

    real, failures = block._watch, [0]

    def crowded(run_, linears, x, batch, sink):
        if batch.rows > 3:
            failures[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory (test)")
        return real(run_, linears, x, batch, sink)

    monkeypatch.setattr(block, "_watch", crowded)
    monkeypatch.setattr("exl3.quantize.convert.stream_room", lambda *_: 0)  # streams in pinned host memory
    _, report = run(source, "small")
    assert failures[0] > 0 and not report.on_host
    quantize, alone = fitting.quantize_groups, []

    def full(groups, *args):
        if groups[0].members[0].weight.is_cuda:
            raise torch.OutOfMemoryError("CUDA out of memory (test)")
        alone.append(len(groups[0].members))
        return quantize(groups, *args)

    monkeypatch.setattr(fitting, "quantize_groups", full)
    _, report = run(source, "host")
    assert set(alone) == {1} and len(report.on_host) == 3 * 7 + 1
    assert any(name == "in host memory" for name, _ in report.summary())


def test_where_half_precision_overflows_a_block_is_computed_in_fp32(source: Path):
    """Values of act(gate) * up beyond 65504 in block 1: the product's input is infinite in half precision, fine in fp32."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 4000
    tensors["model.layers.1.mlp.gate_proj.weight"] *= 20
    tensors["model.layers.1.mlp.down_proj.weight"] /= 4000
    save_file(tensors, path, metadata={"format": "pt"})
    _, report = run(source, "wide", two_sided=False)
    assert report.wide == ["model.layers.1"] and not report.fallbacks
    _, cpu = run(source, "cpu", devices="cpu")
    assert cpu.wide == [] and report.proxy_error == pytest.approx(cpu.proxy_error, rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{}, {"preset": "incumbent", "device_ratios": "1,2"}], ids=["default", "incumbent"])
def test_two_cards_give_the_bytes_of_one(source: Path, monkeypatch, options):
    monkeypatch.setattr("exl3.quantize.convert.BATCH_TOKENS", {"cuda": 256})
    one, _ = run(source, "one", **{k: v for k, v in options.items() if k != "device_ratios"})
    assert run(source, "two", devices="0,1", **options)[0] == one
