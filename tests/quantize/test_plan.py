"""Rates, recipes and options: what is decided before the first layer."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import write_model

from exl3.errors import ArgumentError, UnsupportedError
from exl3.files import Checkpoint
from exl3.models import build, locate
from exl3.quantize.allocate import Spec, allocate, allocate_budget, mean_bits
from exl3.quantize.options import ConvertOptions
from exl3.quantize.plan import make_plan
from exl3.quantize.recipe import format_recipe, parse_recipe


def llama(layers: int = 4, hidden: int = 256, hq: int = 0) -> list[Spec]:
    specs = []
    for i in range(layers):
        p = f"model.layers.{i}"
        shapes = [("self_attn.q_proj", hidden, hidden, 0), ("self_attn.k_proj", hidden, 128, 0), ("self_attn.v_proj", hidden, 128, 0)]
        shapes += [
            ("self_attn.o_proj", hidden, hidden, 1),
            ("mlp.gate_proj", hidden, 512, 2),
            ("mlp.up_proj", hidden, 512, 2),
            ("mlp.down_proj", 512, hidden, 3),
        ]
        for name, k, n, g in shapes:
            specs.append(Spec(f"{p}.{name}", k, n, k, n, i, 4 * i + g, attention="attn" in name, hq_bits=hq if "attn" in name else 0))
    return specs


@settings(max_examples=40, deadline=None)
@given(st.floats(1, 8), st.booleans())
def test_budget_is_kept_and_nothing_fits_any_more(bits: float, half: bool):
    specs = llama()
    rates = allocate(specs, bits, half_rates=half)
    assert mean_bits(specs, rates) <= bits + 1e-9
    groups = {s.group: [t for t in specs if t.group == s.group] for s in specs}
    steps = [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8] if half else [1, 2, 3, 4, 5, 6, 7, 8]
    for members in groups.values():
        rate = {rates[s.key] for s in members}
        assert len(rate) == 1  # what the runtime fuses has one rate
        rate = rate.pop()
        if rate < 8:
            up = dict(rates) | {s.key: steps[steps.index(rate) + 1] for s in members}
            assert mean_bits(specs, up) > bits - 1e-6


def test_whole_targets_are_uniform_and_need_no_half_rates():
    for bits in (2, 3, 4, 6):
        assert set(allocate(llama(), bits).values()) == {bits}
    assert set(allocate(llama(), 2.5).values()) == {2.5}
    assert set(allocate(llama(), 2.5, codebook="mcg").values()) == {2, 3}


def test_attention_first_then_the_ends_of_the_stack():
    rates = allocate(llama(layers=6), 3.5, half_rates=False)
    attention = [r for k, r in rates.items() if "attn" in k]
    assert min(attention) == 4
    up = [rates[f"model.layers.{i}.mlp.up_proj"] for i in range(6)]
    down = [rates[f"model.layers.{i}.mlp.down_proj"] for i in range(6)]
    promoted = [i for i in range(6) if up[i] == 4 or down[i] == 4]
    assert all(i in (0, 5) for i in promoted)


def test_hq_raises_only_layers_that_declare_it():
    assert allocate(llama(), 3, hq=2) == allocate(llama(), 3)
    rates = allocate(llama(hq=1), 3, hq=2)
    assert {r for k, r in rates.items() if "attn" in k} == {5} and {r for k, r in rates.items() if "mlp" in k} == {3}


def test_budget_below_the_least_rate_is_refused():
    with pytest.raises(ArgumentError, match="smallest rate"):
        allocate_budget(llama(), 100)


def test_recipe_last_match_wins_and_gaps_are_errors():
    specs = llama(2)
    recipe = parse_recipe(
        'head_bits: 5\ntensors:\n  "model.layers.*": 3  # all\n  model.layers.1.self_attn.q_proj: 4.0\n  "*.mlp.*": 2.5\n'
    )
    rates = recipe.rates(specs, "mul1")
    assert recipe.head_bits == 5
    assert (
        rates["model.layers.1.self_attn.q_proj"] == 4
        and rates["model.layers.0.self_attn.q_proj"] == 3
        and rates["model.layers.1.mlp.up_proj"] == 2.5
    )
    assert parse_recipe(format_recipe(rates, {"head_bits": 5})).rates(specs, "mul1") == rates
    with pytest.raises(ArgumentError, match=r"2\.5 is not a rate of codebook mcg"):
        recipe.rates(specs, "mcg")
    with pytest.raises(ArgumentError, match="matches no tensor"):
        parse_recipe("tensors:\n  '*': 3\n  nothing.here: 2\n").rates(specs, "mul1")
    with pytest.raises(ArgumentError, match=r"have no rate, the first is model\.layers\.0\.self_attn"):
        parse_recipe("tensors:\n  '*.mlp.*': 3\n").rates(specs, "mul1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mapping 'tensors:'"),
        ("tensors:\n", "mapping 'tensors:'"),
        ("bits: 3\n", "unknown key 'bits'"),
        ("tensors:\n  a: b\n", "line 2: 'b' is not a number"),
        ("head_bits: nan\ntensors:\n  a: 3\n", "line 1: 'nan' is not a number"),
        ("tensors:\n  a: inf\n", "line 2: 'inf' is not a number"),
        ("tensors:\n  - a\n", "line 2: expected"),
        ("  a: 3\n", "outside 'tensors:'"),
    ],
)
def test_recipe_errors_name_the_line(text: str, message: str):
    with pytest.raises(ArgumentError, match=message):
        parse_recipe(text)


def test_what_a_recipe_gets_wrong_is_said_with_its_place():
    specs = llama(2)
    for text, message in (
        ("tensors:\n  '*': 9\n", r"recipe r\.yaml: \*: 9 is not a rate"),
        ("tensors:\n  '*.mlp.*': 3\n", r"recipe r\.yaml: .* have no rate"),
        ("tensors:\n  '*': 3\n  lm_head: 6\n", r"recipe r\.yaml: 'lm_head' matches no tensor .*the head's rate is head_bits"),
    ):
        with pytest.raises(ArgumentError, match=message):
            parse_recipe(text, "recipe r.yaml").rates(specs, "mul1")


def test_the_least_that_is_told_will_do(tmp_path: Path):
    source = Checkpoint.open(write_model(tmp_path / "source"))
    model = build(source.config)
    used = locate(model, source).used

    def planned(total_bits: float) -> float:
        plan = make_plan(model, source, ConvertOptions(total_bits=total_bits).checked(), used)
        return plan.stored_bits() / plan.total_weights

    with pytest.raises(ArgumentError, match="cannot be met") as caught:
        planned(1)
    least = float(re.search(r"the least is (\d+\.\d\d);", str(caught.value))[1])  # type: ignore[index]
    assert planned(least) <= least
    with pytest.raises(ArgumentError, match="cannot be met"):
        planned(least - 0.01)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ArgumentError, "no target size"),
        ({"bits": 9}, ArgumentError, "between 1 and 8"),
        ({"bits": 4, "total_bits": 5}, ArgumentError, "contradict"),
        ({"bits": 4, "codebook": "x"}, ArgumentError, "3inst, mcg, mul1"),
        ({"bits": 4, "head_bits": 9}, ArgumentError, "head_bits"),
        ({"bits": 4, "head_bits": 2.5, "codebook": "mcg"}, ArgumentError, "head_bits"),
        ({"bits": 4, "embed_bits": 12}, ArgumentError, "embed_bits"),
        ({"bits": 4, "cal_rows": 0}, ArgumentError, "cal_rows"),
        ({"bits": 4, "codebook": "mcg", "half_rates": "always"}, ArgumentError, "mcg has whole rates alone"),
        ({"bits": 4, "damping": 1e300}, ArgumentError, "damping is 1e.300; it must lie between 0 and 1000"),
        ({"bits": 4, "max_module": -1}, ArgumentError, "max_module"),
        ({"bits": 4, "last_checkpoint_index": -2}, ArgumentError, "last_checkpoint_index"),
        ({"bits": 4, "mtp_bits": 4}, UnsupportedError, "mtp_bits"),
        ({"bits": 4, "vision_bits": 6}, UnsupportedError, "vision_bits"),
        ({"bits": 4, "ngram_bits": 2}, UnsupportedError, "ngram_bits"),
        ({"bits": 4, "ngram_file": "x"}, UnsupportedError, "ngram_file"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        ConvertOptions(**options).checked()


def test_incumbent_preset():
    o = ConvertOptions(bits=4, preset="incumbent").checked()
    assert (o.cal_rows, o.cal_cols, o.scaled_hessian, o.recapture, o.damping, o.head_bits, o.seam_window) == (
        250,
        2048,
        False,
        False,
        0.025,
        6,
        0,
    )
    assert ConvertOptions(bits=4).checked().with_calibration("cpu").cal_cols == 512


def test_the_ablation_knows_the_variants_that_the_guide_names(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("ablation", root / "benchmarks" / "ablation.py")
    assert spec is not None and spec.loader is not None
    ablation = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ablation", ablation)  # dataclasses look for it there
    spec.loader.exec_module(ablation)
    for options in ablation.VARIANTS.values():
        ConvertOptions(**{"bits": 2} | options).checked()
    (line,) = [line for line in (root / "docs" / "quality.md").read_text(encoding="utf-8").splitlines() if "benchmarks/ablation.py" in line]
    named = shlex.split(line.partition("--variants")[2])
    assert named and set(named) <= ablation.VARIANTS.keys()
    plain = dataclasses.asdict(ConvertOptions(bits=2).checked())
    assert [n for n, o in ablation.VARIANTS.items() if dataclasses.asdict(ConvertOptions(**{"bits": 2} | o).checked()) == plain] == [
        "default"
    ]


def test_two_sided_by_default_on_a_gpu_for_small_models_alone():
    def chosen(device: str, widest: int, **options: object) -> object:
        return ConvertOptions(bits=2, **options).checked().with_sides(device, widest).two_sided

    assert chosen("cuda", 4096) is True
    assert not any(
        [chosen("cpu", 4096), chosen("cuda", 4224), chosen("cuda", 1024, quality="fast"), chosen("cuda", 1024, preset="incumbent")]
    )
    assert not chosen("cuda", 1024, allocation="place")  # no reverse pass
    assert chosen("cpu", 28672, two_sided=True) is True and chosen("cuda", 128, two_sided=False) is False
