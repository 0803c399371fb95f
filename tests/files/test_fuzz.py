"""A short run of benchmarks/fuzz_files.py: damaged files give a result or a typed error, in bounded time and memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_files.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_files", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["safetensors", "config", "tokenizer", "gguf"])
def test_random_damage(fuzz, target):
    outcomes = {fuzz.run_case(target, 1_000_000 + seed) for seed in range(40)}
    assert "ok" in outcomes and "FormatError" in outcomes, "the damage should neither be too small nor too large to test anything"


# once: text that cannot be encoded again in a config and a tokenizer, a vocabulary with ids near 2^64, merges of no token
@pytest.mark.parametrize("target,seed", [("config", 32), ("tokenizer", 76), ("tokenizer", 114), ("tokenizer", 178)])
def test_findings_of_before(fuzz, target, seed):
    fuzz.run_case(target, seed)


def test_the_seeds_are_sound(fuzz, tmp_path, monkeypatch):
    """Without damage everything loads: the fuzzer starts from valid files."""
    monkeypatch.setattr(fuzz, "mutate_bytes", lambda rng, data: data)
    monkeypatch.setattr(fuzz, "mutate_json", lambda rng, value: value)
    assert [fuzz.run_case(target, 1) for target in fuzz.TARGETS] == ["ok"] * 4


def test_the_judge_sees_findings(fuzz, monkeypatch):
    def untyped(rng, directory):
        raise KeyError("x")

    def greedy(rng, directory):
        return len([0] * 10_000_000)

    monkeypatch.setitem(fuzz.TARGETS, "config", untyped)
    with pytest.raises(KeyError):
        fuzz.run_case("config", 1)
    monkeypatch.setitem(fuzz.TARGETS, "config", greedy)
    with pytest.raises(AssertionError, match="allocated"):
        fuzz.run_case("config", 1)
