"""Every family converted at 8 bits per weight stays close to its source, and its EXL3 form loads, runs whole and through the cache."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_models import FAMILIES, ids, kl, make

import exl3
from exl3 import ops
from exl3.cache import Batch, Cache
from exl3.nn import Linear

transformers = pytest.importorskip("transformers")
ONE_EACH = [name for name in FAMILIES if "_" not in name or name in ("seed_oss", "ernie4_5", "llama_bias")]


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    """The trellis search needs kernels; in torch it takes minutes."""
    try:
        ops.backend("cpu")
    except ops.native.BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ONE_EACH)
def test_eight_bits(name: str, tmp_path: Path) -> None:
    if not hasattr(transformers, FAMILIES[name][0]):
        pytest.skip(f"this transformers has no {FAMILIES[name][0]}")
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if "layer_types" in FAMILIES[name][2]:
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make(name, tmp_path / "source", **changes)
        exl3.convert(tmp_path / "source", tmp_path / "out", 8, head_bits=8, cal_rows=4, cal_cols=64, quality="fast", devices="cpu")
        model = exl3.load(tmp_path / "out", device="cpu")
    assert all(m.exl3 is not None and m.exl3.K == 8 for m in model.modules() if isinstance(m, Linear))
    tokens = ids(1, 80)
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
    logits = model.logits(tokens)
    assert 0 < kl(expected, logits) < 5e-3
    cache = Cache(model, 256, "cpu")
    with torch.no_grad():
        parts = [model(Batch.packed([tokens[0, a:b].tolist()], [a], [[0]], cache, logits="all")) for a, b in ((0, 50), (50, 79), (79, 80))]
    assert kl(logits[0], torch.cat(parts)) < 1e-4
