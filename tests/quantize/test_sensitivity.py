"""Predicted losses against losses: noise of LDLQ's shape put into a matrix, the divergence measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_llama import HIDDEN, VOCAB, write_model

from exl3.errors import ArgumentError, ResourceError
from exl3.files import Checkpoint
from exl3.models import build, load, locate
from exl3.quantize import sensitivity
from exl3.quantize.allocate import RATES, Spec, allocate_costs, solve
from exl3.quantize.hessian import Hessian
from exl3.quantize.ldl import block_ldl
from exl3.quantize.regularize import channel_scale, random_signs, regularize, rotate_columns, rotate_rows

KEYS = ("model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory):
    path = write_model(tmp_path_factory.mktemp("sensitivity") / "source", seed=3)
    ids = torch.randint(0, VOCAB, (96, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    source = Checkpoint.open(path)
    model = build(source.config)
    locate(model, source)
    model.place("cpu")
    return path, ids, sensitivity.measure(model, source, ids, torch.device("cpu"), batch_tokens=500)


def shaped_noise(weight: torch.Tensor, hessian: Hessian, channels: torch.Tensor, key: str, draw: int) -> torch.Tensor:
    """An error as LDLQ leaves it at distortion 1, (out, in)."""
    w = torch.nn.functional.pad(weight.float().T, (0, -weight.shape[0] % 128, 0, -weight.shape[1] % 128))
    signs = [random_signs(f"{key}:{side}", n) for side, n in (("in", w.shape[0]), ("out", w.shape[1]))]
    reg = regularize(w, *signs, scale=channel_scale(w, channels))
    lower = block_ldl(hessian.matrix(), 0.025, reg.suh).lower + torch.eye(len(w))
    white = torch.randn(w.shape, generator=torch.Generator().manual_seed(draw))
    if weight.shape[0] <= 64:  # a Sylvester matrix repeats its columns over a block that is mostly padding: they are rounded alike
        white = white[:, torch.arange(128) % weight.shape[0]]
    rotated = torch.linalg.solve_triangular(lower.T, white, upper=True)
    error = rotate_columns(rotate_rows(rotated)) * reg.suh.unsqueeze(1) * reg.svh
    return error[: weight.shape[1], : weight.shape[0]].T


def test_predicted_loss_is_what_small_noise_costs(case):
    path, ids, found = case
    model = load(path, "cpu")
    p = model.logits(ids).double().log_softmax(-1)
    linears = {key: linear for block in model.blocks for group in block.quant_groups() for key, linear in group}
    for key in KEYS:
        linear = linears[key]
        hessian = Hessian(key, linear.in_features, "cpu")
        handle = linear.register_forward_pre_hook(lambda _, args, h=hessian: h.add(args[0]))
        model.logits(ids)
        handle.remove()
        original = linear.weight.data.clone()
        size = 1e-4
        costs = []
        for draw in range(8):
            linear.weight.data = original.float() + size**0.5 * shaped_noise(original, hessian, found[key].channels, key, draw)
            q = model.logits(ids).double().log_softmax(-1)
            costs.append(float((p.exp() * (p - q)).sum(-1).mean()) / size)
        linear.weight.data = original
        assert np.mean(costs) == pytest.approx(found[key].cost, rel=0.25), key


def test_channels_are_ranked_by_what_noise_in_them_costs(case):
    path, ids, found = case
    model = load(path, "cpu")
    p = model.logits(ids).double().log_softmax(-1)
    key = "model.layers.1.mlp.down_proj"
    linear = next(m for group in model.blocks[1].quant_groups() for k, m in group if k == key)
    original = linear.weight.data.clone()
    real = []
    for j in range(0, HIDDEN, 6):
        cost = 0.0
        for draw in range(3):
            noise = torch.randn(original.shape[1], generator=torch.Generator().manual_seed(draw)) * 3e-3
            linear.weight.data = original.float()
            linear.weight.data[j] += noise
            q = model.logits(ids).double().log_softmax(-1)
            cost += float((p.exp() * (p - q)).sum(-1).mean())
        real.append(cost)
    linear.weight.data = original
    predicted = found[key].channels[::6].numpy()
    assert np.corrcoef(np.log(real), np.log(predicted))[0, 1] > 0.7


def test_channel_scale_is_the_best_of_all_powers():
    g = torch.Generator().manual_seed(0)
    w = torch.randn(256, 128, generator=g) * torch.rand(128, generator=g).mul(3).exp()
    importance = torch.rand(128, generator=g).mul(4).exp()
    importance /= importance.mean()

    def loss(scale: torch.Tensor) -> float:  # noise in column j: square of its scale times the block's mean energy
        return float((importance * scale.square()).mean() * (w.square().mean(0) / scale.square()).mean())

    best = loss(channel_scale(w, importance - 0.02))
    energy = w.square().mean(0)
    for a, b in itertools.product((0, 0.1, 0.25, 0.5), (0, 0.1, 0.25, 0.5)):
        assert best <= loss(energy.pow(a) / importance.pow(b)) * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_solve_against_all_combinations(seed: int):
    rng = np.random.default_rng(seed)
    cost = np.sort(rng.integers(1, 40, (5, 4)), 1).astype(float)
    loss = -np.sort(-rng.random((5, 4)), 1)
    budget = float(cost.min(1).sum() + rng.integers(0, 60))
    got = solve(cost.tolist(), loss.tolist(), budget)
    rows = np.arange(5)
    assert cost[rows, got].sum() <= budget
    best = min(loss[rows, list(c)].sum() for c in itertools.product(range(4), repeat=5) if cost[rows, list(c)].sum() <= budget)
    assert loss[rows, got].sum() == pytest.approx(best)


def specs(layers: int = 3) -> list[Spec]:
    made = []
    for i in range(layers):
        for group, (name, k, n) in enumerate([("q", 256, 256), ("k", 256, 128), ("o", 256, 256), ("up", 256, 512), ("down", 512, 256)]):
            made.append(Spec(f"{i}.{name}", k, n, k, n, i, 10 * i + max(group - 1, 0)))
    return made


def test_rates_follow_costs_and_fused_matrices_agree():
    all_specs = specs()
    costs = {s.key: s.weights * (8.0 if s.key.endswith("down") else 1.0) for s in all_specs}
    budget = int(2.5 * sum(s.weights for s in all_specs))
    rates = allocate_costs(all_specs, budget, costs, lambda r: sensitivity.distortion("mul1", r))
    assert all(rates[f"{i}.q"] == rates[f"{i}.k"] for i in range(3))
    assert all(rates[f"{i}.down"] > rates[f"{i}.up"] for i in range(3))
    spent = sum(rates[s.key] * s.weights for s in all_specs)
    assert budget - 0.5 * 512 * 256 < spent <= budget
    whole = allocate_costs(all_specs, budget, costs, lambda r: sensitivity.distortion("mcg", r), codebook="mcg")
    assert all(r == int(r) for r in whole.values())
    with pytest.raises(ArgumentError, match="smallest rate"):
        allocate_costs(all_specs, 1000, costs, lambda r: sensitivity.distortion("mul1", r))


def test_distortion_falls_with_the_rate_for_every_codebook():
    for codebook in ("mul1", "mcg", "3inst"):
        values = [sensitivity.distortion(codebook, r) for r in RATES if codebook == "mul1" or r == int(r)]
        assert values == sorted(values, reverse=True) and sensitivity.distortion(codebook, 16) == 0


def test_rows_are_spread_over_the_calibration():
    ids = torch.arange(10 * 64).view(10, 64)
    rows = sensitivity.rows_for(ids, 5 * 32, 32)
    assert rows.shape == (5, 32) and rows[:, 0].tolist() == [0, 128, 256, 384, 512]
    assert sensitivity.rows_for(ids, 10**9, 512).shape == (10, 64)


def test_little_memory_means_smaller_batches(case, monkeypatch: pytest.MonkeyPatch):
    path, ids, found = case
    source = Checkpoint.open(path)
    model = build(source.config)
    locate(model, source)
    model.place("cpu")
    whole, tried, most = sensitivity._measure, [], 3

    def measure(model, source, batches, *rest):
        tried.append(batches[0].rows)
        if batches[0].rows > most:
            sensitivity._forward(model, source, batches[:1], torch.device("cpu"), torch.device("cpu"))
            raise torch.OutOfMemoryError("tried to allocate")
        return whole(model, source, batches, *rest)

    monkeypatch.setattr(sensitivity, "_measure", measure)
    again = sensitivity.measure(model, source, ids, torch.device("cpu"), batch_tokens=500)
    assert tried == [20, 10, 5, 3] and again.keys() == found.keys()
    for key, s in again.items():  # labels are drawn in another order of shapes: the same within their noise
        assert s.cost == pytest.approx(found[key].cost, rel=0.5)
    most = 0
    with pytest.raises(ResourceError, match="--allocation place"):
        sensitivity.measure(model, source, ids, torch.device("cpu"), batch_tokens=500)
