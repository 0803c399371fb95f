"""Options that buy quality, through whole conversions of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import _native_encoder, contents, run
from tiny_llama import LAYERS, VOCAB, write_model

import exl3
from exl3 import ops
from exl3.errors import ArgumentError, JobError, NumericalError, ResourceError
from exl3.files import Checkpoint
from exl3.quantize.convert import convert
from exl3.quantize.damping import MULTIPLES
from exl3.quantize.retune import tune_directory
from exl3.quantize.tune import HELD_OUT, TuneSettings, tune

pytestmark = pytest.mark.skipif(not _native_encoder(), reason="the reference search is too slow for whole conversions: build libexl3_cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quality") / "source", bias=True)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "cal.safetensors"
    save_file({"input_ids": torch.randint(0, VOCAB, (64, 48), generator=torch.Generator().manual_seed(9))}, path)
    return path


def divergence(source: Path, out: Path, ids: torch.Tensor) -> float:
    p, q = (exl3.load(d, "cpu").logits(ids).double().log_softmax(-1) for d in (source, out))
    return float((p.exp() * (p - q)).sum(-1).mean())


IDS = torch.randint(0, VOCAB, (24, 48), generator=torch.Generator().manual_seed(77))


def test_each_step_lowers_the_divergence(tmp_path: Path, source: Path, calibration: Path):
    steps = {
        "place": {"allocation": "place", "channel_weighting": False},
        "sensitivity": {"channel_weighting": False},
        "default": {},
        "two-sided": {"two_sided": True},
    }
    kl = {}
    for name, options in steps.items():
        report = run(source, tmp_path / name, calibration, 3, **options)
        assert report.bits <= 3 and report.bits == pytest.approx(3, abs=0.05)
        kl[name] = divergence(source, tmp_path / name, IDS)
    assert kl["two-sided"] < kl["default"] < kl["place"] and kl["sensitivity"] < kl["place"], kl


def test_rates_come_back_as_a_recipe(tmp_path: Path, source: Path, calibration: Path):
    run(source, tmp_path / "a", calibration, 2.7)
    recipe = tmp_path / "a.work" / "recipe.yaml"
    report = run(source, tmp_path / "b", calibration, None, recipe=str(recipe))
    assert contents(tmp_path / "a")["model.safetensors"] == contents(tmp_path / "b")["model.safetensors"]
    assert len({t.bits for t in report.tensors if "lm_head" not in t.key}) > 1


def test_total_bits_by_sensitivity(tmp_path: Path, source: Path, calibration: Path):
    report = run(source, tmp_path / "out", calibration, None, total_bits=9.0, head_bits=4)
    assert 8.5 < report.total_bits <= 9.0
    rates = {t.key: t.bits for t in report.tensors}
    for i in range(LAYERS):  # what shares an input keeps one rate
        assert len({rates[f"model.layers.{i}.self_attn.{n}_proj"] for n in "qkv"}) == 1


def test_damping_is_chosen_for_each_group(tmp_path: Path, source: Path):
    save_file({"input_ids": torch.randint(0, VOCAB, (128, 48), generator=torch.Generator().manual_seed(9))}, tmp_path / "cal.safetensors")
    report = run(source, tmp_path / "chosen", tmp_path / "cal.safetensors", 3, cal_rows=128, choose_damping=True)
    used = {t.key: t.damping / 0.025 for t in report.tensors}
    assert all(min(abs(d - m) for m in MULTIPLES) < 1e-9 for d in used.values()) and set(used.values()) != {1.0}
    for i in range(LAYERS):  # one Hessian, one damping
        assert len({used[f"model.layers.{i}.self_attn.{n}_proj"] for n in "qkv"}) == 1


@pytest.mark.parametrize("stop_at", [3, 60])
def test_an_interrupted_two_sided_job_resumes_to_the_same_bytes(
    tmp_path: Path, source: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
):
    options = {"two_sided": True, "tune": True, "tune_steps": 2}
    run(source, tmp_path / "whole", calibration, 2.5, **options)
    calls, encode = 0, ops.encode

    def dies(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return encode(*args, **kwargs)

    monkeypatch.setattr(ops, "encode", dies)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", calibration, 2.5, **options)
    monkeypatch.setattr(ops, "encode", encode)
    with pytest.raises(JobError, match="two_sided"):
        convert(work_dir=tmp_path / "out.work", resume=True, two_sided=False)
    convert(work_dir=tmp_path / "out.work", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.work" / "importance").exists()


def test_tuning_lowers_the_divergence_and_moves_scales_alone(tmp_path: Path, source: Path):
    ids = torch.randint(0, VOCAB, (512, 48), generator=torch.Generator().manual_seed(9))  # fewer would be learnt by heart
    save_file({"input_ids": ids}, tmp_path / "cal.safetensors")
    lines: list[str] = []
    for name, options in (("plain", {}), ("tuned", {"tune": True, "tune_steps": 60, "log": lines.append})):
        run(source, tmp_path / name, tmp_path / "cal.safetensors", 2, cal_rows=512, **options)
    plain, tuned = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "tuned"))
    assert plain.keys() == tuned.keys()
    changed = {name.rsplit(".", 1)[1] for name in plain if not torch.equal(plain[name], tuned[name])}
    assert changed == {"suh", "svh", "bias", "weight"}  # weight: the norms'
    assert all(torch.equal(plain[n], tuned[n]) for n in plain if n.endswith("trellis") or "embed" in n)
    assert all(plain[n].dtype == tuned[n].dtype and plain[n].shape == tuned[n].shape for n in plain)
    before, after = divergence(source, tmp_path / "plain", IDS), divergence(source, tmp_path / "tuned", IDS)
    assert after < 0.99 * before
    held = ids[::HELD_OUT]
    line = next(t for t in lines if t.startswith("tuning: mean KL"))
    told = [float(w) for w in line.replace(",", "").split() if w[0].isdigit() and "." in w]
    assert told[0] == pytest.approx(divergence(source, tmp_path / "plain", held), rel=1e-3)
    assert told[1] == pytest.approx(divergence(source, tmp_path / "tuned", held), rel=1e-2)  # fp16 rounding of the scales in between


def test_few_tokens_are_scaled_in_place_of_the_matrix(tmp_path: Path, source: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch):
    run(source, tmp_path / "plain", calibration, 2)
    results = {}
    for logits in (1 << 26, 4 * VOCAB):  # all tokens of a step at once, or four by four through the head
        monkeypatch.setattr("exl3.quantize.tune.HEAD_LOGITS", logits)
        settings = TuneSettings(steps=3, tokens=480)
        out = tmp_path / str(logits)
        results[logits] = tune_directory(
            tmp_path / "plain", source, out, settings=settings, cal_data=str(calibration), cal_rows=64, device="cpu"
        )
    whole, parts = results.values()
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    for name, t in whole.tensors.items():
        assert torch.allclose(t.float(), parts.tensors[name].float(), rtol=2e-3, atol=1e-3), name


def test_a_finished_directory_is_tuned_like_a_conversion(tmp_path: Path, source: Path):
    ids = torch.randint(0, VOCAB, (128, 48), generator=torch.Generator().manual_seed(9))
    save_file({"input_ids": ids}, tmp_path / "cal.safetensors")
    for name, options in (("plain", {}), ("tuned", {"tune": True, "tune_steps": 8})):
        run(source, tmp_path / name, tmp_path / "cal.safetensors", 2, cal_rows=128, **options)
    again = {"cal_data": str(tmp_path / "cal.safetensors"), "cal_rows": 128, "device": "cpu"}
    tuned = tune_directory(tmp_path / "plain", source, tmp_path / "again", settings=TuneSettings(steps=8), **again)
    assert tuned.after < tuned.before and len(tuned.losses) == 8
    assert contents(tmp_path / "again") == contents(tmp_path / "tuned")
    # once more starts from the trained norms, not from the original's
    twice = tune_directory(tmp_path / "again", source, tmp_path / "twice", settings=TuneSettings(steps=1), **again)
    assert twice.before == pytest.approx(tuned.after, rel=1e-2)  # fp16 rounding of the scales in between
    for quantized, original, out in ((source, source, "x"), ("plain", tmp_path / "plain", "x"), ("plain", source, "plain")):
        with pytest.raises(ArgumentError):
            tune_directory(tmp_path / quantized, original, tmp_path / out, **again)
    other = write_model(tmp_path / "other", layers=1)
    with pytest.raises(ArgumentError, match="another model"):
        tune_directory(tmp_path / "plain", other, tmp_path / "x", **again)
    assert not (tmp_path / "x").exists()


def test_tuning_is_for_the_embedding_that_is_written(tmp_path: Path, source: Path):
    ids = torch.randint(0, VOCAB, (128, 48), generator=torch.Generator().manual_seed(9))
    save_file({"input_ids": ids}, tmp_path / "cal.safetensors")
    for name, options in (("plain", {}), ("tuned", {"tune": True, "tune_steps": 8})):
        run(source, tmp_path / name, tmp_path / "cal.safetensors", 2, cal_rows=128, embed_bits=2, **options)
    again = {"cal_data": str(tmp_path / "cal.safetensors"), "cal_rows": 128, "device": "cpu"}
    tuned = tune_directory(tmp_path / "plain", source, tmp_path / "again", settings=TuneSettings(steps=8), **again)
    assert tuned.after < tuned.before and contents(tmp_path / "again") == contents(tmp_path / "tuned")


def test_what_stands_against_tuning_is_told_first(tmp_path: Path, source: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch):
    run(source, tmp_path / "plain", calibration, 2)
    ids = {"cal_data": str(calibration), "device": "cpu"}
    loud = write_model(tmp_path / "loud", bias=True)
    tensors = load_file(loud / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38, dtype=torch.float32)
    save_file(tensors, loud / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError, match="NaN or Inf"):
        tune_directory(tmp_path / "plain", loud, tmp_path / "x", settings=TuneSettings(steps=2), **ids)
    monkeypatch.setattr("exl3.quantize.retune.tune", None)  # is not reached
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be made"):
        tune_directory(tmp_path / "plain", source, tmp_path / "file" / "x", **ids)
    with pytest.raises(ArgumentError, match="64 rows, cal_rows asks for 65"):
        tune_directory(tmp_path / "plain", source, tmp_path / "x", cal_rows=65, **ids)
    with pytest.raises(ResourceError, match=r"tuning needs .* MiB"):
        tune_directory(tmp_path / "plain", source, tmp_path / "x", cal_rows=1 << 40, device="cpu")
    with pytest.raises(ArgumentError, match="not EXL3"):
        tune_directory(tmp_path / "plain", source, write_model(tmp_path / "other", seed=5), **ids)
    assert not (tmp_path / "x").exists()


def test_tuning_needs_a_row_to_judge_by(tmp_path: Path, source: Path, calibration: Path):
    with pytest.raises(ArgumentError, match="at least 2 calibration rows"):  # before the first layer
        run(source, tmp_path / "out", calibration, 2, tune=True, cal_rows=1)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()
    with pytest.raises(ArgumentError, match="at least 2"):
        tune(Checkpoint.open(source), lambda i: {}, torch.zeros(1, 8, dtype=torch.int32), torch.device("cpu"), TuneSettings())
