"""Models and logits stored in tests/data/models (see make_vectors.py): what a clone without transformers can hold the families to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from synthetic_models import kl

from exl3.cache import Batch, Cache
from exl3.errors import Exl3Error
from exl3.models import build, load

DATA = Path(__file__).parents[1] / "data" / "models"
NAMES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def open_model(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(token|runs slowly).*")
        warnings.filterwarnings("error", message=".*not used.*")
        return load(DATA / name, device="cpu", max_tokens=48)


def test_all_are_there() -> None:
    assert NAMES == ["cohere2", "gemma3", "llama_llama3", "olmo3", "phi3_longrope"]


@pytest.mark.parametrize("name", NAMES)
def test_whole(name: str) -> None:
    stored = load_file(DATA / f"{name}.logits.safetensors")
    assert stored["logits"].std() > 0.2
    logits = open_model(name).logits(stored["ids"])
    assert abs(kl(stored["logits"], logits)) < 1e-7
    assert (stored["logits"] - logits).abs().max() < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_cached(name: str) -> None:
    stored = load_file(DATA / f"{name}.logits.safetensors")
    model = open_model(name)
    cache = Cache(model, 512, "cpu")
    tokens = stored["ids"][0].tolist()
    got = []
    with torch.no_grad():
        for start, stop in ((0, 20), (20, 40), *((i, i + 1) for i in range(40, 48))):
            got.append(model(Batch.packed([tokens[start:stop]], [start], [[1]], cache, logits="all")))
    assert abs(kl(stored["logits"][0], torch.cat(got))) < 1e-5


WEIRD = [None, 0, -1, 3, "x", [], [1], {}, {"rope_type": ["x"]}, True, float("nan"), 1e30, 2**70]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_configs_give_typed_errors(name: str) -> None:
    """Any key with any wrong value: the model is built or an Exl3Error says why not, nothing else."""
    config = json.loads((DATA / name / "config.json").read_text())
    refused = 0
    for key in config:
        for value in WEIRD:
            try:
                build({**config, key: value})
            except Exl3Error:
                refused += 1
    for key, value in ((k, v) for k in ("factor", "mscale", "rope_theta", "partial_rotary_factor", "long_factor") for v in WEIRD):
        settings = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, key: value}
        try:
            build({**config, "rope_parameters": settings})
        except Exl3Error:
            refused += 1
    assert refused > 80
