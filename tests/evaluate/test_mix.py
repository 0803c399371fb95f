"""Mixing finished quantizations: what is measured against models put together by hand, what is chosen against all choices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "quantize"))
from tiny_llama import VOCAB, write_model

import exl3
from exl3 import ops
from exl3.cli.measure import command
from exl3.errors import ArgumentError, BackendError, FormatError, NumericalError, ResourceError, UnsupportedError
from exl3.evaluate.mix import Measurement, MixGroup, choose, groups_of, measure, write_mix
from exl3.files import Checkpoint, Tokenizer
from exl3.quantize.convert import convert


def _native_encoder() -> bool:
    try:
        return "encode" in ops.backend("cpu").ops
    except BackendError:
        return False


pytestmark = pytest.mark.skipif(not _native_encoder(), reason="the reference search is too slow for whole conversions: build libexl3_cpu")
IDS = torch.randint(0, VOCAB, (4, 32), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
OPTIONS = {"devices": "cpu", "seam_window": 16, "allocation": "place", "channel_weighting": False, "correction": 0.0, "cal_rows": 6}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("mix")
    source = write_model(folder / "source")
    save_file({"input_ids": torch.randint(0, VOCAB, (6, 48), generator=torch.Generator().manual_seed(9))}, folder / "cal.safetensors")
    for bits in (2, 4):
        convert(source, folder / f"{bits}", bits, cal_data=str(folder / "cal.safetensors"), **OPTIONS)
    return folder, measure(source, [folder / "2", folder / "4"], IDS, device="cpu")


def divergence(reference: Path, other: Path) -> float:
    p, q = (exl3.load(d, "cpu").logits(IDS).double().log_softmax(-1) for d in (reference, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_each_figure_is_that_of_a_model_with_one_group_exchanged(case, tmp_path: Path):
    folder, found = case
    assert found.base_kl == pytest.approx(divergence(folder / "source", folder / "2"), rel=1e-5)
    assert len(found.groups) == 8 and found.tokens == IDS.numel()
    for g in (0, 3, 6):
        chosen = [int(i == g) for i in range(8)]
        write_mix(found, chosen, tmp_path / f"{g}")
        assert found.groups[g].kl[1] == pytest.approx(divergence(folder / "source", tmp_path / f"{g}"), rel=1e-5)
        assert found.groups[g].bits[1] == 2 * found.groups[g].bits[0]


def test_little_memory_gives_the_same_figures(case):
    folder, found = case
    again = measure(folder / "source", [folder / "2", folder / "4"], IDS, device="cpu", memory_gb=1e-9)
    assert [g.kl for g in again.groups] == [g.kl for g in found.groups]


def test_the_choice_is_the_best_within_the_budget(case):
    _, found = case
    total = sum(g.bits[0] for g in found.groups) / 2  # weights
    for bits in (2.0, 2.6, 3.3, 4.0):
        chosen = choose(found, bits)
        assert sum(g.bits[q] for g, q in zip(found.groups, chosen)) <= bits * total
        gain = sum(g.kl[q] for g, q in zip(found.groups, chosen))
        fits = [c for c in itertools.product((0, 1), repeat=8) if sum(g.bits[q] for g, q in zip(found.groups, c)) <= bits * total]
        assert gain == pytest.approx(min(sum(g.kl[q] for g, q in zip(found.groups, c)) for c in fits), rel=1e-9)
    with pytest.raises(ArgumentError, match="the cheapest mixture has 2"):
        choose(found, 1.5)


def test_the_mixture_is_made_of_the_very_tensors(case, tmp_path: Path):
    folder, found = case
    chosen = choose(found, 3.0)
    result = write_mix(found, chosen, tmp_path / "out")
    parts = [load_file(folder / n / "model.safetensors") for n in ("2", "4")]
    made = load_file(tmp_path / "out" / "model.safetensors")
    origin = {key: q for g, q in zip(found.groups, chosen) for key in g.keys}
    assert made.keys() == parts[0].keys() and 0 < sum(chosen) < 8
    assert all(torch.equal(t, parts[origin.get(name.rsplit(".", 1)[0], 0)][name]) for name, t in made.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert 2 < config["bits"] <= 3 and result.is_exl3 and "calibration" not in config
    assert divergence(folder / "source", tmp_path / "out") < found.base_kl


def test_levels_and_files(case, tmp_path: Path):
    folder, found = case
    block = exl3.load(folder / "2", "cpu").blocks[0]
    assert [len(groups_of(block, level)) for level in (0, 1, 2, 3)] == [1, 2, 4, 7]
    found.write(tmp_path / "m.json")
    assert Measurement.read(tmp_path / "m.json") == found
    good = json.loads((tmp_path / "m.json").read_text())
    first, rest = good["groups"][0], good["groups"][1:]
    wrong = [{"quants": ["a"]}, {"quants": "ab"}, {"quants": [1, 2]}, {"reference": 5}, {"base_kl": None}, {"base_kl": "x"}]
    wrong += [{"base_kl": float("nan")}, {"groups": [*good["groups"], first]}]
    wrong += [{"groups": [first | change, *rest]} for change in ({"keys": []}, {"keys": [5]}, {"bits": [float("inf")] * 2}, {"kl": [1]})]
    for text in ("{}", "nonsense", "[" * 100_000, *(json.dumps({**good, **change}) for change in wrong)):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(FormatError, match=r"bad\.json"):
            Measurement.read(tmp_path / "bad.json")


def test_what_cannot_be_mixed_is_refused(case, tmp_path: Path):
    folder, found = case
    with pytest.raises(ArgumentError, match="at least two"):
        measure(folder / "source", [folder / "2"], IDS, device="cpu")
    with pytest.raises(ArgumentError, match="level is 7"):
        measure(folder / "source", [folder / "2", folder / "4"], IDS, device="cpu", level=7)
    with pytest.raises(ArgumentError, match="not an EXL3 model"):
        measure(folder / "source", [folder / "2", folder / "source"], IDS, device="cpu")
    with pytest.raises(ArgumentError, match="named twice"):
        measure(folder / "source", [folder / "2", tmp_path / ".." / folder / "2"], IDS, device="cpu")
    with pytest.raises(ArgumentError, match="give the unquantized one"):
        measure(folder / "4", [folder / "2", folder / "4"], IDS, device="cpu")
    for ids in (IDS + 300, IDS - 1000):
        with pytest.raises(ArgumentError, match=f"outside the vocabulary of {VOCAB}"):
            measure(folder / "source", [folder / "2", folder / "4"], ids, device="cpu")
    other = write_model(tmp_path / "other", layers=1)
    with pytest.raises(ArgumentError, match=r"2: is another model than .*other"):
        measure(other, [folder / "2", folder / "4"], IDS, device="cpu")
    convert(other, tmp_path / "o", 2, cal_data=str(folder / "cal.safetensors"), **OPTIONS)
    with pytest.raises(ArgumentError, match="another model"):
        measure(folder / "source", [folder / "2", tmp_path / "o"], IDS, device="cpu")
    convert(folder / "source", tmp_path / "mcg", 3, cal_data=str(folder / "cal.safetensors"), codebook="mcg", **OPTIONS)
    with pytest.raises(UnsupportedError, match="codebooks"):
        measure(folder / "source", [folder / "2", tmp_path / "mcg"], IDS, device="cpu")
    mixed = Measurement("r", [str(folder / "2"), str(tmp_path / "mcg")], 2, 1, 0.0, [MixGroup(g.keys, g.bits, g.kl) for g in found.groups])
    with pytest.raises(UnsupportedError, match="codebooks"):
        write_mix(mixed, [1] * 8, tmp_path / "x")
    with pytest.raises(ArgumentError, match="choose another"):
        write_mix(found, [0] * 8, folder / "2")
    with pytest.raises(ArgumentError, match="not EXL3"):
        write_mix(found, [0] * 8, other)
    with pytest.raises(ArgumentError, match="was measured and is not there"):
        choose(dataclasses.replace(found, quants=[str(tmp_path / "gone"), found.quants[1]]), 3)
    assert Checkpoint.open(folder / "2").is_exl3


def test_a_measurement_that_does_not_fit_into_memory_is_refused(case):
    folder, _ = case
    many = torch.zeros(1, 1, dtype=torch.int32).expand(1 << 20, 1 << 20)
    with pytest.raises(ResourceError, match=r"the measurement needs .*Use fewer rows"):
        measure(folder / "source", [folder / "2", folder / "4"], many, device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sizes_that_are_no_numbers_are_refused(case, value: float):
    folder, found = case
    with pytest.raises(ArgumentError, match="bits is"):
        choose(found, value)
    with pytest.raises(ArgumentError, match="memory is"):
        measure(folder / "source", [folder / "2", folder / "4"], IDS, device="cpu", memory_gb=value)


def test_quants_that_changed_since_are_not_mixed(case, tmp_path: Path):
    folder, found = case
    shutil.copytree(folder / "4", tmp_path / "q")
    moved = dataclasses.replace(found, quants=[str(folder / "2"), str(tmp_path / "q")])
    write_mix(moved, [1] * 8, tmp_path / "good")
    shutil.rmtree(tmp_path / "q")
    shutil.copytree(folder / "2", tmp_path / "q")
    with pytest.raises(ArgumentError, match="other bits than when it was measured"):
        write_mix(moved, [1] * 8, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_overflow_and_several_devices_are_told(case, tmp_path: Path):
    folder, _ = case
    shutil.copytree(folder / "source", tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38, dtype=torch.float32)
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError, match="NaN or Inf"):
        measure(tmp_path / "q", [folder / "2", folder / "4"], IDS, device="cpu")
    with pytest.raises(UnsupportedError, match="one device"):
        measure(folder / "source", [folder / "2", folder / "4"], IDS, device="cpu,cpu")


def test_quants_that_agree_in_some_rates(case, tmp_path: Path):
    """The same rate may hide the same matrix, which is not measured again, or another one, which is."""
    folder, _ = case
    shutil.copytree(folder / "2", tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for name in ("model.layers.1.self_attn.o_proj.svh", "model.layers.0.mlp.down_proj.suh"):
        tensors[name] = tensors[name] * 1.25
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    told: list[int] = []
    got = measure(folder / "source", [folder / "2", tmp_path / "q"], IDS, device="cpu", progress=lambda done, total: told.append(total))
    changed = [g.keys for g in got.groups if g.kl[0] != g.kl[1]]
    assert changed == [["model.layers.0.mlp.down_proj"], ["model.layers.1.self_attn.o_proj"]] and told == [2]
    assert all(g.bits[0] == g.bits[1] for g in got.groups)


def test_the_verb_measures_on_a_text_of_ones_own(case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, _ = case

    class Bytes:
        bos_id = None

        def encode(self, text: str, **_: object) -> list[int]:
            return [b % VOCAB for b in text.encode()]

    monkeypatch.setattr(Tokenizer, "from_directory", lambda _: Bytes())
    text = "a text that the calibration never saw, and a bit more of it"
    (tmp_path / "t.txt").write_text(text)
    words = ["-i", folder / "2", "-i", folder / "4", "-r", folder / "source", "-o", tmp_path / "m.json", "-cc", 16, "-d", "cpu"]
    done = CliRunner().invoke(command, [str(w) for w in [*words, "--text", tmp_path / "t.txt", "-cr", 2]], catch_exceptions=False)
    ids = torch.tensor(Bytes().encode(text)[:32], dtype=torch.int32).view(2, 16)
    wanted = measure(folder / "source", [folder / "2", folder / "4"], ids, device="cpu")
    assert done.exit_code == 0 and [g.kl for g in Measurement.read(tmp_path / "m.json").groups] == [g.kl for g in wanted.groups]
