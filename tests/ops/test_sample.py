"""The sampler: Philox against its published vectors, draws against reference.py, statistics, seeds, penalties and bad rows."""

import math

import pytest
import torch

from exl3 import ops
from exl3.errors import ArgumentError
from exl3.ops.reference import distribution, philox
from exl3.ops.sampling import SampleParams, unpack_sample_params


def draw(logits, rows, history=None, history_len=None):
    return ops.sample(logits, ops.pack_sample_params(rows), history, history_len)


def test_philox_known_answers():
    # Random123's kat_vectors, philox4x32-10; the third has its counter's upper half set, which `sample` never does
    assert philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def test_parameters_survive_packing():
    p = SampleParams(0.7, 40, 0.9, 0.05, 1.1, 0.2, 0.3, True, 2**64 - 1, 2**63)
    (q,) = unpack_sample_params(ops.pack_sample_params([p]))
    assert q.seed == p.seed and q.counter == p.counter and q.top_k == 40 and q.temperature_last is True
    assert math.isclose(q.temperature, 0.7, rel_tol=1e-6) and math.isclose(q.frequency_penalty, 0.3, rel_tol=1e-6)
    out = torch.zeros(2, 48, dtype=torch.uint8)
    ops.pack_sample_params([p], out=out)
    assert torch.equal(out[0], ops.pack_sample_params([p])[0]) and not out[1].any()


@pytest.mark.parametrize("vocab", [1, 7, 1000, 40001])
def test_greedy(vocab):
    logits = torch.randn(4, vocab)
    if vocab > 3:
        logits[1, 3] = logits[1, vocab - 1] = 50.0  # equals: the lowest id
    ids, probs = draw(logits, [SampleParams(temperature=0, seed=i) for i in range(4)])
    assert ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert torch.allclose(probs, logits.softmax(-1).gather(1, ids.long()[:, None])[:, 0], rtol=1e-5)


SETTINGS = [
    SampleParams(),
    SampleParams(temperature=0.3),
    SampleParams(temperature=2.5, top_k=20),
    SampleParams(top_k=1),
    SampleParams(top_p=0.5),
    SampleParams(top_p=0.0),
    SampleParams(temperature=1.7, top_p=0.95, top_k=300),
    SampleParams(min_p=0.1),
    SampleParams(min_p=1.0),
    SampleParams(temperature=3.0, min_p=0.2, temperature_last=True),
    SampleParams(temperature=0.5, top_k=50, top_p=0.8, min_p=0.02, temperature_last=True),
    SampleParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, top_p=0.9),
    SampleParams(repetition_penalty=0.8, top_k=5),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize(("vocab", "spread"), [(500, 2.0), (5003, 0.3), (300, 12.0)])
def test_draws_equal_the_reference(settings, vocab, spread):
    rows = 24
    logits = torch.randn(rows, vocab) * spread
    logits[:, 11:20] = logits[:, 10:11]  # ties
    logits[0, 100:] = -math.inf
    history = torch.randint(0, vocab, (rows, 40), dtype=torch.int32)
    history_len = torch.randint(0, 41, (rows,), dtype=torch.int32)
    params = [SampleParams(**{**vars(settings), "seed": 99, "counter": i}) for i in range(rows)]
    ids, probs = draw(logits, params, history, history_len)
    want_ids, want_probs = ops.reference.sample(logits, ops.pack_sample_params(params), history, history_len)
    same = ids == want_ids  # a draw may fall on the other side of a boundary of fp32
    assert same.sum() >= rows - 1
    assert torch.allclose(probs[same], want_probs[same], rtol=2e-4)


def hf_distribution(logits, p):
    """The same with transformers' own warpers, in their order."""
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    return chain(None, logits[None])[0].softmax(-1)


@pytest.mark.parametrize(
    "settings", [SampleParams(0.8, 40), SampleParams(1.3, 0, 0.7), SampleParams(0.9, 0, 1.0, 0.07), SampleParams(1.1, 60, 0.85, 0.02)]
)
def test_reference_distribution_equals_transformers(settings):
    logits = torch.randn(2000, dtype=torch.float64) * 3
    assert torch.allclose(distribution(logits, settings), hf_distribution(logits, settings).double(), atol=1e-12)


@pytest.mark.parametrize("settings", [SampleParams(), SampleParams(temperature=1.5, top_p=0.9), SampleParams(top_k=6, min_p=0.05)])
def test_frequencies_follow_the_distribution(settings):
    logits = torch.randn(30) * 1.5
    n = 20_000
    params = [SampleParams(**{**vars(settings), "seed": 7, "counter": i}) for i in range(n)]
    ids, _ = draw(logits.expand(n, 30), params)
    want = distribution(logits, settings) * n
    counts = torch.bincount(ids.long(), minlength=30).double()
    assert (counts[want == 0] == 0).all()
    used = want > 0
    chi2 = float(((counts - want)[used] ** 2 / want[used]).sum())
    freedom = int(used.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)  # five sigma: one failure in a few hundred thousand seeds


def test_the_draw_depends_on_seed_and_counter_alone():
    logits = torch.randn(1, 3000)
    alone, _ = draw(logits, [SampleParams(seed=5, counter=9)])
    others = [SampleParams(seed=i, counter=i * 3, top_k=i) for i in range(7)]
    batch, _ = draw(torch.cat([torch.randn(7, 3000), logits]), [*others, SampleParams(seed=5, counter=9)])
    assert batch[-1] == alone[0]
    many, _ = draw(logits.expand(64, -1), [SampleParams(seed=5, counter=i) for i in range(64)])
    assert len(set(many.tolist())) > 32
    seeds, _ = draw(logits.expand(64, -1), [SampleParams(seed=i << 32, counter=0) for i in range(64)])
    assert len(set(seeds.tolist())) > 32  # the upper half of the seed counts


def test_bad_rows_give_minus_one_and_spare_the_others():
    logits = torch.randn(6, 100)
    logits[1, 99] = float("nan")
    logits[2, 50] = float("inf")
    logits[3] = -math.inf
    logits[4, :99] = -math.inf
    for temperature in (0.0, 1.0):
        ids, probs = draw(logits, [SampleParams(temperature=temperature, top_p=0.9)] * 6)
        assert ids[1:4].tolist() == [-1, -1, -1] and probs[1:4].tolist() == [0, 0, 0]
        assert ids[4] == 99 and abs(float(probs[4]) - 1) < 1e-6
        assert ids[0] >= 0 and ids[5] >= 0


def test_masked_tokens_are_never_drawn():
    logits = torch.zeros(500, 64)
    logits[:, ::2] = -math.inf
    ids, _ = draw(logits, [SampleParams(temperature=5.0, counter=i) for i in range(500)])
    assert (ids % 2 == 1).all()


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    history = torch.tensor([[0, 1, 1, 7, -1]], dtype=torch.int32)  # ids outside the vocabulary are ignored
    params = [SampleParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)]
    want = torch.tensor([2.0 / 2 - 0.25 - 0.5, -1.0 * 2 - 0.25 - 1.0, 0.5, 0.0]).softmax(0)
    n = 4000
    seen = torch.zeros(4)
    for start in range(0, n, 1000):
        p = [SampleParams(**{**vars(params[0]), "counter": start + i}) for i in range(1000)]
        ids, probs = draw(logits.expand(1000, 4), p, history.expand(1000, 5).contiguous())
        seen += torch.bincount(ids.long(), minlength=4)
        assert torch.allclose(probs, want[ids.long()], rtol=1e-5)
    assert torch.allclose(seen / n, want, atol=0.04)


def test_logits_are_left_alone():
    logits = torch.randn(3, 1000)
    before = logits.clone()
    draw(logits, [SampleParams(top_p=0.5, repetition_penalty=1.5)] * 3, torch.zeros(3, 5, dtype=torch.int32))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2}, {"repetition_penalty": 0}]
)
def test_bad_parameters_are_named(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        ops.pack_sample_params([SampleParams(**bad)])


def test_bad_shapes_are_named():
    params = ops.pack_sample_params([SampleParams()] * 2)
    with pytest.raises(ArgumentError, match="params"):
        ops.sample(torch.randn(3, 10), params)
    with pytest.raises(ArgumentError, match="logits"):
        ops.sample(torch.randn(2, 10).half(), params)
    with pytest.raises(ArgumentError, match="history"):
        ops.sample(torch.randn(2, 10), params, torch.zeros(3, 4, dtype=torch.int32))
