"""The whole conversion on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import HIDDEN, INTERMEDIATE, LAYERS, VOCAB, write_model

import exl3
from exl3 import ops
from exl3.codec import dequantize
from exl3.errors import (
    ArgumentError,
    BackendError,
    Exl3Error,
    JobError,
    MissingTensorError,
    NumericalError,
    ResourceError,
    UnsupportedError,
)
from exl3.files import Checkpoint
from exl3.nn import MLP
from exl3.quantize.convert import convert
from exl3.quantize.job import Job, stream_tensors
from exl3.quantize.streams import Shard


def _native_encoder() -> bool:
    try:
        return "encode" in ops.backend("cpu").ops
    except BackendError:
        return False


pytestmark = pytest.mark.skipif(not _native_encoder(), reason="the reference search is too slow for whole conversions: build libexl3_cpu")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """12 rows of 48 token ids."""
    ids = torch.randint(0, VOCAB, (12, 48), generator=torch.Generator().manual_seed(9), dtype=torch.int64)
    save_file({"input_ids": ids}, tmp_path / "cal.safetensors")
    return tmp_path / "cal.safetensors"


def run(source: Path, out: Path, calibration: Path, bits: float | None = 4, **options):
    options = {"cal_data": str(calibration), "devices": "cpu", "checkpoint_interval": 0, "seam_window": 16} | options
    return convert(source, out, bits, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


@pytest.mark.parametrize(("tied", "bias"), [(False, False), (True, True)])
def test_writes_a_model_that_loads_and_is_close(tmp_path: Path, calibration: Path, tied: bool, bias: bool):
    source = write_model(tmp_path / "source", tied=tied, bias=bias)
    out = tmp_path / "out"
    report = run(source, out, calibration, 8, head_bits=8)
    assert report.bits == 8 and report.head_bits == 8 and not report.fallbacks
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["bits"] == 8 and config["quantization_config"]["codebook"] == "mul1"
    assert config["quantization_config"]["calibration"] == {"rows": 12, "cols": 48, "sources": {"cal.safetensors": 12}}
    storage = json.loads((out / "quantization_config.json").read_text())["tensor_storage"]
    assert storage["model.layers.0.mlp.down_proj"]["bits_per_weight"] == 8
    ids = torch.arange(40) % VOCAB
    reference = exl3.load(source, "cpu").logits(ids).log_softmax(-1)
    quantized = exl3.load(out, "cpu").logits(ids).log_softmax(-1)
    assert (reference.exp() * (reference - quantized)).sum(-1).mean() < 0.02
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.self_attn.k_proj.trellis"].shape == (8, 8, 128)
    assert bool((tensors["model.layers.0.self_attn.k_proj.svh"][32:] == 0).all())  # padded outputs are exactly zero
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) == bias
    assert torch.equal(tensors["model.norm.weight"], load_file(source / "model.safetensors")["model.norm.weight"])


def test_what_is_in_the_file_is_what_was_judged(tmp_path: Path, model_dir: Path, calibration: Path):
    """The proxy error of the report, recomputed from the written tensors and inputs captured independently."""
    report = run(model_dir, tmp_path / "out", calibration, 3, recapture=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(model_dir / "model.safetensors")
    key = "model.layers.0.mlp.gate_proj"
    w = dequantize(tensors[f"{key}.trellis"], tensors[f"{key}.suh"], tensors[f"{key}.svh"], "mul1")[:HIDDEN, :INTERMEDIATE]
    model = exl3.load(model_dir, "cpu")
    seen = []
    model.blocks[0].mlp.gate_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    model.forward_whole(load_file(calibration)["input_ids"].int())
    x = seen[0].double()
    target = source[f"{key}.weight"].double().T
    error = (x @ (w.double() - target)).square().sum() / (x @ target).square().sum()
    assert next(t.proxy_error for t in report.tensors if t.key == key) == pytest.approx(float(error), rel=1e-3)


def test_same_input_same_bytes(tmp_path: Path, model_dir: Path, calibration: Path):
    run(model_dir, tmp_path / "a", calibration, 2)
    run(model_dir, tmp_path / "b", calibration, 2)
    run(model_dir, tmp_path / "c", calibration, 2, seed=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["model.safetensors"] != contents(tmp_path / "c")["model.safetensors"]


@pytest.mark.parametrize("stop_at", [3, 33, 70])
def test_an_interrupted_job_resumes_to_the_same_bytes(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch, stop_at: int):
    run(model_dir, tmp_path / "whole", calibration, 2.5, hq=1, codebook="mul1", shard_size=0)
    calls, encode = 0, ops.encode

    def dies(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return encode(*args, **kwargs)

    monkeypatch.setattr(ops, "encode", dies)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(model_dir, out, calibration, 2.5, hq=1, codebook="mul1", shard_size=0)
    assert not (out / "config.json").exists()
    monkeypatch.setattr(ops, "encode", encode)
    with pytest.raises(JobError, match="--resume"):
        run(model_dir, out, calibration, 2.5)
    convert(work_dir=tmp_path / "out.work", resume=True)  # all settings come from the work folder
    assert contents(out) == contents(tmp_path / "whole")


def test_a_disk_that_fills_up_stops_the_job_and_loses_nothing(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch):
    """Files are written behind the work; the first that fails must end it, and nothing behind it may count as done."""
    run(model_dir, tmp_path / "whole", calibration, 2)
    save = Job.save_module

    def fail(job: Job, index: int, *rest) -> None:
        if index == 1:
            raise ResourceError("00001.safetensors: cannot be written")
        save(job, index, *rest)

    monkeypatch.setattr(Job, "save_module", fail)
    lines: list[str] = []
    with pytest.raises(ResourceError, match="cannot be written"):
        run(model_dir, tmp_path / "out", calibration, 2, log=lines.append)
    assert "--resume" in lines[-1] and not list((tmp_path / "out").iterdir())
    monkeypatch.undo()
    convert(work_dir=tmp_path / "out.work", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_resume_refuses_other_settings_and_sources(tmp_path: Path, model_dir: Path, calibration: Path):
    out = tmp_path / "out"
    with pytest.raises(JobError, match="max-module"):
        run(model_dir, out, calibration, 3, codebook="mcg", max_module=0)
    work = tmp_path / "out.work"
    for option, value in {"bits": 4, "codebook": "mul1", "head_bits": 8, "cal_rows": 3, "seed": 5}.items():
        with pytest.raises(JobError, match=option):
            convert(work_dir=work, resume=True, **{option: value})
    tensors = load_file(model_dir / "model.safetensors")
    original = (model_dir / "model.safetensors").read_bytes()
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(JobError, match="is not the model"):
        convert(work_dir=work, resume=True)
    (model_dir / "model.safetensors").write_bytes(original)
    report = convert(work_dir=work, resume=True, max_module=99, verbose=True)
    assert report.bits == 3 and json.loads((out / "config.json").read_text())["quantization_config"]["codebook"] == "mcg"
    assert not (work / "modules").exists() and (work / "report.json").exists() and "tensors:" in (work / "recipe.yaml").read_text()


def test_a_job_goes_on_from_another_folder(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch):
    """Every path is stored whole, and one that is given again may be written in any way."""
    (tmp_path / "r.yaml").write_text('tensors:\n  "*": 2\n')
    monkeypatch.chdir(tmp_path)
    paths = {"cal_data": calibration.name, "recipe": "r.yaml"}
    with pytest.raises(JobError, match="max-module"):
        convert(model_dir.name, "out", devices="cpu", checkpoint_interval=0, max_module=0, **paths)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(JobError, match="max-module"):
        convert(work_dir="../out.work", resume=True, max_module=1, cal_data="../cal.safetensors", recipe=tmp_path / "r.yaml")
    assert convert(work_dir="../out.work", resume=True).bits == 2 and (tmp_path / "out" / "config.json").exists()


def test_a_damaged_work_folder_is_told_before_the_next_layer(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch):
    work, embed = tmp_path / "out.work", LAYERS + 1
    with pytest.raises(JobError, match="max-module"):
        run(model_dir, tmp_path / "out", calibration, 2, max_module=0, embed_bits=4)
    monkeypatch.setattr("exl3.quantize.convert.quantize_block", None)  # is not reached
    for index in (0, embed):
        path = work / "modules" / f"{index:05d}.safetensors"
        whole = path.read_bytes()
        for content in (None, whole[:-1]):
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(JobError, match=rf"{path.name}: not readable.*remove the work folder"):
                convert(work_dir=work, resume=True)
        path.write_bytes(whole)
    plan = json.loads((work / "job.json").read_text())
    for damaged in ([], {}, {"version": plan["version"]}, plan | {"rates": None}, plan | {"options": []}):
        (work / "job.json").write_text(json.dumps(damaged))
        with pytest.raises(JobError, match=r"job\.json: is not the plan"):
            convert(work_dir=work, resume=True)
    (work / "job.json").write_text(json.dumps({"version": "0.0.1"}))
    with pytest.raises(JobError, match=r"begun by exl3 0\.0\.1"):
        convert(work_dir=work, resume=True)


def test_another_model_is_not_written_over(tmp_path: Path, model_dir: Path, calibration: Path):
    """A conversion replaces a conversion, never an unquantized model; what would be read as part of the result is told first."""
    other = write_model(tmp_path / "other", seed=5)
    before = contents(other)
    with pytest.raises(ArgumentError, match="other: holds a model that is not EXL3"):
        run(model_dir, other, calibration, 2)
    assert contents(other) == before and not (tmp_path / "other.work").exists()
    (tmp_path / "out").mkdir()
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "out" / "part.safetensors")
    with pytest.raises(ArgumentError, match=r"holds part\.safetensors"):
        run(model_dir, tmp_path / "out", calibration, 2)
    assert not (tmp_path / "out.work").exists()


def test_a_second_run_in_the_same_folder_is_locked_out(tmp_path: Path, model_dir: Path, calibration: Path):
    from exl3.quantize.job import Job

    with Job(tmp_path / "out.work"), pytest.raises(JobError, match=f"another conversion.*{os.getpid()}"):
        run(model_dir, tmp_path / "out", calibration)
    run(model_dir, tmp_path / "out", calibration, 2)


def test_recipes_and_unquantized_tensors(tmp_path: Path, model_dir: Path, calibration: Path):
    (tmp_path / "r.yaml").write_text('head_bits: 5\ntensors:\n  "*": 3\n  "*.down_proj": 2.5\n  model.layers.1.self_attn.v_proj: 16\n')
    report = run(model_dir, tmp_path / "out", calibration, None, recipe=str(tmp_path / "r.yaml"))
    source = Checkpoint.open(tmp_path / "out")
    assert source.linear("model.layers.0.mlp.down_proj").K == 2.5 and source.linear("lm_head").K == 5 and report.head_bits == 5
    assert source.linear("model.layers.1.self_attn.v_proj").kind == "dense"
    assert source.linear("model.layers.1.self_attn.q_proj").K == 3


def test_codebooks_and_head_left_alone(tmp_path: Path, model_dir: Path, calibration: Path):
    for codebook in ("3inst", "mcg"):
        run(model_dir, tmp_path / codebook, calibration, 3.3, codebook=codebook, head_bits=16)
        tensors = load_file(tmp_path / codebook / "model.safetensors")
        assert ("model.layers.0.mlp.up_proj.mcg" in tensors) == (codebook == "mcg") and "lm_head.weight" in tensors
        widths = {t.shape[2] for name, t in tensors.items() if name.endswith(".trellis")}
        assert widths <= {16 * k for k in range(1, 9)} and len(widths) > 1  # whole rates alone
        exl3.load(tmp_path / codebook, "cpu")


def test_total_bits_counts_everything_stored(tmp_path: Path, model_dir: Path, calibration: Path):
    report = run(model_dir, tmp_path / "out", calibration, None, total_bits=9.0, head_bits=4)
    assert report.total_bits <= 9.0
    assert report.total_bits == pytest.approx(8 * (tmp_path / "out" / "model.safetensors").stat().st_size / weights_of(model_dir), rel=0.1)
    with pytest.raises(ArgumentError, match="cannot be met"):
        run(model_dir, tmp_path / "none", calibration, None, total_bits=1.0)


def test_the_recipe_of_a_conversion_gives_its_bytes_again(tmp_path: Path, model_dir: Path, calibration: Path):
    """The ring-quantized embedding that total_bits asked for included."""
    run(model_dir, tmp_path / "a", calibration, None, total_bits=5.0)
    recipe = (tmp_path / "a.work" / "recipe.yaml").read_text()
    assert "model.embed_tokens.trellis" in load_file(tmp_path / "a" / "model.safetensors") and "embed_bits" in recipe
    run(model_dir, tmp_path / "b", calibration, None, recipe=str(tmp_path / "a.work" / "recipe.yaml"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    (tmp_path / "r.yaml").write_text("embed_bits: 9\ntensors:\n  '*': 3\n")
    with pytest.raises(ArgumentError, match="embed_bits is 9"):
        run(model_dir, tmp_path / "c", calibration, None, recipe=str(tmp_path / "r.yaml"))
    (tmp_path / "r.yaml").write_text("embed_bits: 4\ntensors:\n  '*': 3\n")
    run(model_dir, tmp_path / "d", calibration, None, recipe=str(tmp_path / "r.yaml"), embed_bits=16)
    assert "model.embed_tokens.weight" in load_file(tmp_path / "d" / "model.safetensors")  # what is given wins


def weights_of(path: Path) -> int:
    return sum(t.numel() for t in load_file(path / "model.safetensors").values())


def test_ring_quantized_embedding(tmp_path: Path, model_dir: Path, calibration: Path):
    run(model_dir, tmp_path / "out", calibration, 8, embed_bits=6)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.trellis"].shape == (VOCAB, 97) and tensors["model.embed_tokens.signs"].shape == (1, 256)
    model = exl3.load(tmp_path / "out", "cpu")
    from exl3.cache import Batch

    table = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"].float()
    got = model.embed(Batch.whole(torch.arange(VOCAB, dtype=torch.int32)[None]))
    assert ((got - table).square().sum() / table.square().sum()) < 0.1


def test_shards(tmp_path: Path, calibration: Path):
    source = write_model(tmp_path / "source", layers=3)
    run(source, tmp_path / "one", calibration, 8, shard_size=0)
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    from exl3.quantize import compile

    original = compile.ShardWriter
    compile.ShardWriter = lambda folder, size: original(folder, 0.12)
    try:
        run(source, tmp_path / "many", calibration, 8)
    finally:
        compile.ShardWriter = original
    shards = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 1 and (tmp_path / "many" / "model.safetensors.index.json").exists()
    one = load_file(tmp_path / "one" / "model.safetensors")
    many = {k: v for s in shards for k, v in load_file(tmp_path / "many" / s).items()}
    assert one.keys() == many.keys() and all(torch.equal(one[k], many[k]) for k in one)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_nan_weights_are_named(tmp_path: Path, model_dir: Path, calibration: Path, name: str):
    tensors = load_file(model_dir / "model.safetensors")
    tensors[name][3, 5] = float("nan")
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(NumericalError, match=name.removesuffix(".weight").replace(".", r"\.") + ".*row 3, column 5"):
        run(model_dir, tmp_path / "out", calibration)
    assert not (tmp_path / "out" / "config.json").exists()


def test_infinite_activations_are_named(tmp_path: Path, model_dir: Path, calibration: Path):
    original = load_file(model_dir / "model.safetensors")
    tensors = dict(original)
    norm = original["model.layers.1.input_layernorm.weight"].float()
    norm[3] = 3e38  # finite; its product with what comes in is not, where that is above 1.13
    tensors["model.layers.1.input_layernorm.weight"] = norm
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(NumericalError, match=r"layers\.1, input of \S*q_proj: -?inf at calibration row \d+, token \d+, channel 3"):
        run(model_dir, tmp_path / "out", calibration)
    tensors = {k: v.float() for k, v in original.items()}
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e12
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(NumericalError, match=r"layers\.0\.mlp\.up_proj.*fp16"):
        run(model_dir, tmp_path / "out2", calibration)


def test_dead_channels_and_rank_one_calibration_are_reported(tmp_path: Path, model_dir: Path):
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][7] = 0
    save_file(tensors, model_dir / "model.safetensors")
    save_file({"input_ids": torch.full((2, 4), 5)}, tmp_path / "one.safetensors")  # the same token everywhere
    report = run(model_dir, tmp_path / "out", tmp_path / "one.safetensors", 4)
    assert report.dead_channels["model.layers.0.self_attn.q_proj"] == [7]
    assert exl3.load(tmp_path / "out", "cpu").logits([1, 2, 3]).isfinite().all()


def test_too_little_disk_or_memory_is_told_first(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch):
    monkeypatch.setattr("exl3.files.shards.shutil.disk_usage", lambda p: type("u", (), {"free": 20_000_000})())
    with pytest.raises(ResourceError, match="MiB"):
        run(model_dir, tmp_path / "out", calibration)
    monkeypatch.undo()
    monkeypatch.setenv("EXL3_HOST_MEM_RESERVE_MB", str(1 << 30))
    with pytest.raises(ResourceError, match="EXL3_HOST_MEM_RESERVE_MB"):
        run(model_dir, tmp_path / "out", calibration)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()


def test_tuning_asks_for_its_memory_first_and_holds_nothing_back(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch):
    monkeypatch.setattr("exl3.quantize.plan.tuning_bytes", lambda *_: 1 << 60)
    with pytest.raises(ResourceError, match="Leave --tune out"):
        run(model_dir, tmp_path / "out", calibration, tune=True)
    assert not (tmp_path / "out.work").exists()
    monkeypatch.undo()
    plain = run(model_dir, tmp_path / "plain", calibration, 2)

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    monkeypatch.setattr("exl3.quantize.convert.tune", out_of_memory)
    report = run(model_dir, tmp_path / "out", calibration, 2, tune=True)
    assert [w for w in report.warnings if w not in plain.warnings and "tuning: not enough memory" in w]
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


def test_a_checkpoint_holds_the_streams_themselves(tmp_path: Path):
    """Host memory need not hold them twice; what is read is one tensor again, and damage is told."""
    whole = torch.randn(5, 4, 6)
    shards = [Shard(a, whole[a : a + 2], whole[a : a + 2] + 1) for a in (0, 2, 4)]
    stored = stream_tensors(shards)
    assert {t.data_ptr() for t in stored.values()} == {t.data_ptr() for s in shards for t in (s.quantized, s.original)}
    with Job(tmp_path / "w") as job:
        job.save_state(3, stored)
        done, streams = job.state()
        assert done == 3 and torch.equal(streams["quantized"], whole) and torch.equal(streams["original"], whole + 1)
        path = tmp_path / "w" / "state.safetensors"
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(JobError, match="remove the work folder"):
            job.state()


def test_bad_sources_and_calibration(tmp_path: Path, model_dir: Path, calibration: Path):
    other = write_model(tmp_path / "other", architectures=["MysteryForCausalLM"])
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        run(other, tmp_path / "out", calibration)
    run(model_dir, tmp_path / "exl3", calibration, 2)
    with pytest.raises(UnsupportedError, match="already"):
        run(tmp_path / "exl3", tmp_path / "out", calibration)
    with pytest.raises(ArgumentError, match="no such directory"):
        run(tmp_path / "nowhere", tmp_path / "out", calibration)
    with pytest.raises(ArgumentError, match="choose another"):
        run(model_dir, model_dir, calibration)
    save_file({"input_ids": torch.full((2, 8), VOCAB)}, tmp_path / "bad.safetensors")
    with pytest.raises(ArgumentError, match=f"id {VOCAB} in row 0"):
        run(model_dir, tmp_path / "out", tmp_path / "bad.safetensors")
    with pytest.raises(ArgumentError, match="no option 'colour'"):
        run(model_dir, tmp_path / "out", calibration, colour=1)
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(MissingTensorError, match=r"layers\.1\.mlp\.up_proj"):
        run(model_dir, tmp_path / "out", calibration)
    for leftover in ("out", "out.work"):
        assert not (tmp_path / leftover).exists()


def test_nothing_is_left_of_a_model_found_damaged_on_the_way(tmp_path: Path, model_dir: Path, calibration: Path):
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(NumericalError, match=r"layers\.1\.mlp\.up_proj.*row 3"):
        run(model_dir, tmp_path / "out", calibration, 2)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.work").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(NumericalError, match="row 3"):
        run(model_dir, tmp_path / "out", calibration, 2)
    assert (tmp_path / "out").exists()  # it was there


def test_fewer_rows_than_were_asked_for(tmp_path: Path, model_dir: Path, calibration: Path):
    with pytest.raises(ArgumentError, match="12 rows, cal_rows asks for 13"):
        run(model_dir, tmp_path / "out", calibration, 2, cal_rows=13)
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, float("nan")) for n in ("bits", "head_bits", "total_bits", "damping", "correction", "checkpoint_interval")]
    + [("bits", "4"), ("head_bits", float("inf")), ("seed", 1 << 70), ("cal_rows", 2.5), ("seam_window", True), ("codebook", 3)],
)
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, model_dir: Path, name: str, value):
    with pytest.raises(ArgumentError, match=name):
        convert(model_dir, tmp_path / "out", **({"bits": 4} | {name: value}))
    assert not (tmp_path / "out.work").exists()


def test_places_that_cannot_be_written_to_are_told_first(tmp_path: Path, model_dir: Path, calibration: Path):
    (tmp_path / "file").touch()
    for output, work in (("file", "w"), ("out", "file"), ("source", "w"), ("out", "source"), ("out", "out")):
        with pytest.raises(ArgumentError, match=r"file; give a directory|three folders"):
            run(model_dir, tmp_path / output, calibration, work_dir=tmp_path / work)
    assert sorted(p.name for p in model_dir.iterdir()) == ["config.json", "model.safetensors"]
    for output, work in (("file/out", "w"), ("out", "file/w")):
        with pytest.raises(ResourceError, match="choose another with"):
            run(model_dir, tmp_path / output, calibration, work_dir=tmp_path / work)
    assert not (tmp_path / "w").exists()


def test_nothing_to_resume(tmp_path: Path, model_dir: Path, calibration: Path):
    lines: list[str] = []
    with pytest.raises(JobError, match="nothing to resume"):
        convert(work_dir=tmp_path / "w", resume=True, log=lines.append)
    run(model_dir, tmp_path / "out", calibration, 2)
    with pytest.raises(JobError, match="nothing to resume"):  # it is finished
        convert(work_dir=tmp_path / "out.work", resume=True, log=lines.append)
    assert lines == []


def test_paths_and_devices_may_be_objects(tmp_path: Path, model_dir: Path, calibration: Path):
    options = {"cal_data": calibration, "seam_window": 16}
    report = convert(model_dir, tmp_path / "out", 2, devices=torch.device("cpu"), **options)
    assert report.calibration["rows"] == 12
    again = convert(model_dir, tmp_path / "out", 2, devices="cpu", **options)  # over a finished one
    assert again.bytes == report.bytes


def test_no_tokenizer_means_random_tokens_and_a_warning(tmp_path: Path, model_dir: Path):
    report = convert(model_dir, tmp_path / "out", 2, devices="cpu", cal_rows=2, cal_cols=16)
    assert any("no tokenizer" in w for w in report.warnings) and report.calibration["sources"] == {"random": 2}
    report = convert(model_dir, tmp_path / "out", 2, devices="cpu", cal_rows=2, cal_cols=16, self_text=0.5)
    assert any("self_text needs a tokenizer" in w for w in report.warnings)
    config = json.loads((model_dir / "config.json").read_text())
    assert not any("go beyond" in w for w in report.warnings)
    (model_dir / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 15}))
    report = convert(model_dir, tmp_path / "short", 2, devices="cpu", cal_rows=2, cal_cols=16)
    assert any("rows of 16 tokens go beyond the 15 positions" in w and "give --cal-cols 15" in w for w in report.warnings)


def test_policies_run(tmp_path: Path, model_dir: Path, calibration: Path):
    errors = {}
    for name, options in {
        "plain": {"scaled_hessian": False, "recapture": False},
        "corrected": {"correction": 1.0, "token_weighting": True},
        "incumbent": {"preset": "incumbent", "cal_rows": 4, "cal_cols": 32},
        "fast": {"quality": "fast"},
    }.items():
        report = run(model_dir, tmp_path / name, calibration, 3, **options)
        errors[name] = report.blocks[-2].rfn
        assert len(report.tensors) == 7 * LAYERS + 1
    assert all(0 < e < 1 for e in errors.values())


def test_command_line(tmp_path: Path, model_dir: Path, calibration: Path):
    """Errors of options are one line and exit status 1."""
    base = [sys.executable, "-m", "exl3", "convert", "-i", str(model_dir), "-o", str(tmp_path / "out"), "-d", "cpu"]
    for words, message in (
        (["-b", "4", "--cal_data", "nowhere.safetensors"], "no such file"),
        (["-b", "4", "--vision_bits", "6"], "vision_bits"),
    ):
        done = subprocess.run(base + words, capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") <= 3, done.stderr


def test_every_option_has_both_spellings():
    from exl3.cli.convert import command

    names = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    for name in list(names):
        if name.startswith("--") and "-" in name[2:] and not name.startswith("--no-"):
            assert "--" + name[2:].replace("-", "_") in names
    incumbent = "-i -o -w -ss -b -rcp -hb -mb -vb -hq -ngb -ngf -eb -r -cd -cr -cc -cpi -lcpi -v -d -dr -img -cb".split()
    incumbent += "-hess -h1 -hreg -sh -pm".split()
    assert set(incumbent) <= names and {"--in_dir", "--out_scales", "--max_module", "--override_anyway"} <= names


def test_errors_are_exl3_errors():
    assert issubclass(JobError, Exl3Error)


def test_an_unquantized_tied_head_is_not_written_twice(tmp_path: Path, calibration: Path):
    source = write_model(tmp_path / "source", tied=True)
    run(source, tmp_path / "out", calibration, 2, head_bits=16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(name.startswith("lm_head") for name in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert exl3.load(tmp_path / "out", "cpu").logits([1, 2]).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"preset": "incumbent", "cal_rows": 12, "cal_cols": 48}], ids=["default", "incumbent"])
def test_matrices_that_no_token_reaches_are_listed(tmp_path: Path, model_dir: Path, calibration: Path, monkeypatch, options):
    """As experts that the router never chooses: quantized without statistics, named in the report."""
    monkeypatch.setattr(MLP, "forward", lambda self, x, *, norm=None, residual=None: residual)
    report = run(model_dir, tmp_path / "out", calibration, **options)
    keys = [f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up", "down")]
    assert sorted(report.unreached) == sorted(report.fallbacks) == sorted(keys)
    assert not any(".mlp." in key for key in report.dead_channels)
    assert report.as_dict()["unreached"] == report.unreached
    assert ("unreached", f"6 tensors saw no calibration token, first {report.unreached[0]}") in report.summary()
