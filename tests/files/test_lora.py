"""PEFT adapters: names, ranks and scales as PEFT defines them (alpha / r; alpha / sqrt(r) with rsLoRA)."""

from __future__ import annotations

import json
import math

import pytest
import torch

from exl3.errors import FormatError, MissingTensorError, NumericalError, UnsupportedError
from exl3.files import LoraAdapter

from .conftest import write_odd

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.3.mlp.up_proj"


def pair(key, r=4, n_in=16, n_out=24, style="base_model.model.{}.lora_{}.weight"):
    return {style.format(key, "A"): torch.randn(r, n_in).bfloat16(), style.format(key, "B"): torch.randn(n_out, r).bfloat16()}


def write(directory, tensors, **config):
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    write_odd(directory / "adapter_model.safetensors", tensors)
    return directory


@pytest.mark.parametrize("style", ["base_model.model.{}.lora_{}.weight", "{}.lora_{}.weight", "base_model.model.{}.lora_{}.default.weight"])
def test_pairs_and_product(tmp_path, style):
    tensors = {**pair(Q, style=style), **pair(UP, style=style)}
    adapter = LoraAdapter.open(write(tmp_path, tensors))
    assert list(adapter.pairs) == [Q, UP]
    p = adapter.pairs[Q]
    assert (p.rank, p.scaling, p.in_features, p.out_features) == (4, 2.0, 16, 24)
    a, b = adapter.read(dtype=torch.float32)[Q]
    stored = [tensors[style.format(Q, side)].float() for side in "AB"]
    x = torch.randn(3, 16)
    assert torch.allclose(x @ a.T @ b.T, 8 / 4 * (x @ stored[0].T @ stored[1].T), rtol=1e-5, atol=1e-5)
    assert adapter.read()[Q][1].dtype == torch.bfloat16


def test_scaling_rules(tmp_path):
    """rank_pattern and alpha_pattern name modules by their end or by a regular expression."""
    tensors = {**pair(Q), **pair(UP, r=16)}
    rules = {"rank_pattern": {"up_proj": 16}, "alpha_pattern": {r"model\.layers\.\d+\.mlp\.up_proj": 32, "(": 1}}
    p = LoraAdapter.open(write(tmp_path, tensors, use_rslora=True, **rules)).pairs
    assert math.isclose(p[Q].scaling, 8 / math.sqrt(4)) and math.isclose(p[UP].scaling, 32 / math.sqrt(16))
    assert LoraAdapter.open(write(tmp_path, tensors, **rules)).pairs[UP].scaling == 2


NAMED = "base_model.model." + Q
BAD = {
    "half": ({f"{NAMED}.lora_A.weight": torch.zeros(4, 16)}, {}, MissingTensorError, "has no lora_B"),
    "ranks differ": ({**pair(Q), f"{NAMED}.lora_B.weight": torch.zeros(24, 5)}, {}, FormatError, "do not fit"),
    "rank of config": (pair(Q, r=5), {}, FormatError, "has rank 5, adapter_config.json says 4"),
    "three dims": ({**pair(Q), f"{NAMED}.lora_A.weight": torch.zeros(4, 4, 4)}, {}, FormatError, "do not fit"),
    "rank zero": (pair(Q, r=0), {}, FormatError, "do not fit"),
    "integers": ({**pair(Q), f"{NAMED}.lora_A.weight": torch.zeros(4, 16, dtype=torch.int32)}, {}, UnsupportedError, "dtypes torch.int32"),
    "twice": ({**pair(Q), **pair(Q, style="{}.lora_{}.weight")}, {}, FormatError, "more than one lora_A"),
    "whole module": (
        {**pair(Q), "base_model.model.lm_head.weight": torch.zeros(3, 3)},
        {},
        UnsupportedError,
        "'base_model.model.lm_head.weight'",
    ),
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 3)}, {}, UnsupportedError, "no half"),
    "nothing": ({}, {}, MissingTensorError, "holds no LoRA"),
    "method": (pair(Q), {"peft_type": "IA3"}, UnsupportedError, "'IA3'"),
    "dora": (pair(Q), {"use_dora": True}, UnsupportedError, "DoRA"),
    "transposed": (pair(Q), {"fan_in_fan_out": True}, UnsupportedError, "fan_in_fan_out"),
    "saved modules": (pair(Q), {"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
    "bias": (pair(Q), {"bias": "all"}, UnsupportedError, "bias is 'all'"),
    "no rank": (pair(Q), {"r": None}, FormatError, "r = None"),
    "bool rank": (pair(Q), {"r": True}, FormatError, "r = True"),
    "alpha": (pair(Q), {"lora_alpha": "8"}, FormatError, "lora_alpha = 8"),
    "alpha zero": (pair(Q), {"lora_alpha": 0}, FormatError, "lora_alpha = 0"),
    "pattern": (pair(Q), {"alpha_pattern": {"q_proj": -1}}, FormatError, "alpha = -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(tmp_path, case):
    tensors, config, error, message = BAD[case]
    with pytest.raises(error, match=message):
        LoraAdapter.open(write(tmp_path, tensors, **config))


def test_absent_files_and_nan(tmp_path):
    with pytest.raises(MissingTensorError, match=r"no adapter_config\.json"):
        LoraAdapter.open(tmp_path)
    write(tmp_path, {**pair(Q), f"{NAMED}.lora_B.weight": torch.full((24, 4), float("nan"))})
    with pytest.raises(NumericalError, match=rf"{Q}\.lora_B: row 0"):
        LoraAdapter.open(tmp_path).read()
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(MissingTensorError, match=r"no adapter_model\.safetensors"):
        LoraAdapter.open(tmp_path)
