"""Sampler steps against plain formulas, the fused call against the steps, and the statistics of the draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs import ToyTokenizer

from exl3 import ops
from exl3.errors import ArgumentError, NumericalError
from exl3.generate import presets
from exl3.generate import sampling as s
from exl3.generate.drawing import Drawer
from exl3.generate.job import Job


def state(logits, past=(), u=0.5):
    return s.State(torch.tensor(logits, dtype=torch.float32), np.array(past, np.int32), u)


def kept(st_):
    return [i for i, x in enumerate(st_.logits.tolist()) if x > -math.inf]


def after(step, logits, past=()):
    made = state(logits, past)
    (step.alt() or step).run(made)
    return made


LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])).tolist()


def test_truncations():
    assert kept(after(s.SS_TopK(2), LOGITS)) == [0, 1]
    assert kept(after(s.SS_TopK(4), LOGITS)) == [0, 1, 2, 3, 4]  # ties of the last stay
    assert kept(after(s.SS_TopP(0.6), LOGITS)) == [0, 1]  # the one that crosses stays
    assert kept(after(s.SS_TopP(0.75), LOGITS)) == [0, 1]
    assert kept(after(s.SS_TopP(0.0), LOGITS)) == [0]
    assert kept(after(s.SS_MinP(0.25), LOGITS)) == [0, 1, 2]
    assert kept(after(s.SS_BanTokens([1, 9]), LOGITS)) == [0, 2, 3, 4]
    for off in (
        s.SS_TopK(0),
        s.SS_TopP(1.0),
        s.SS_MinP(0.0),
        s.SS_Temperature(1.0),
        s.SS_RepP(1.0),
        s.SS_PresFreqP(),
        s.SS_XTC(0.0, 0.1),
        s.SS_LogitBias({}),
    ):
        assert isinstance(off.alt(), s.SS_NoOp)


def test_top_p_as_hugging_face_does_it():
    from transformers import TopPLogitsWarper

    rng = np.random.default_rng(0)
    for p in (0.1, 0.5, 0.9, 0.99):
        x = torch.from_numpy(rng.normal(0, 3, (1, 200)).astype(np.float32))
        want = TopPLogitsWarper(p)(None, x)[0]
        assert torch.equal(after(s.SS_TopP(p), x[0].tolist()).logits > -math.inf, want > -math.inf)


def test_logit_bias_drops_what_cannot_be_added():
    out = after(s.SS_LogitBias({0: 1.5, 1: -math.inf, 2: math.nan, 3: math.inf, 4: 0.0, 99: 1.0}), [0.0] * 5).logits.tolist()
    assert out == [1.5, -math.inf, 0.0, 0.0, 0.0]


def test_repetition_penalty_as_hugging_face_does_it():
    from transformers import RepetitionPenaltyLogitsProcessor

    x = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    past = [3, 3, 7, 29]
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([past]), x.clone())[0]
    torch.testing.assert_close(after(s.SS_RepP(1.3), x[0].tolist(), past).logits, want)


def test_penalty_ranges_fade():
    past = [1, 2, 3, 4]
    out = after(s.SS_PresFreqP(1.0, 0.0, sustain_range=1, decay_range=2), [0.0] * 5, past).logits.tolist()
    np.testing.assert_allclose(out, [0, 0, -1 / 3, -2 / 3, -1], atol=1e-6)
    out = after(s.SS_PresFreqP(0.5, 0.25), [0.0] * 5, [1, 1, 2]).logits.tolist()
    np.testing.assert_allclose(out, [0, -1.0, -0.75, 0, 0], atol=1e-6)
    out = after(s.SS_RepP(2.0, sustain_range=2), [2.0] * 5, past).logits.tolist()
    assert out == [2, 2, 2, 1, 1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.sets(st.integers(0, 3), max_size=1))
@settings(max_examples=150, deadline=None)
def test_dry_lengths_by_brute_force(past, breakers):
    want = {}
    for i in range(1, len(past)):  # past[i] would continue a repeat of the n tokens before it
        n = 0
        while n < i and past[i - 1 - n] == past[len(past) - 1 - n] and past[i - 1 - n] not in breakers:
            n += 1
        if n:
            want[past[i]] = max(want.get(past[i], 0), n)
    got = s.SS_DRY(1.0, dry_sequence_breakers=breakers).repeats(np.array(past))
    assert got == want


def test_dry_penalty():
    out = after(s.SS_DRY(0.8, 1.75, 2, dry_sequence_breakers=[]), [0.0] * 6, [1, 2, 3, 4, 1, 2, 3]).logits.tolist()
    np.testing.assert_allclose(out, [0, 0, 0, 0, -0.8 * 1.75, 0], rtol=1e-6)
    huge = after(s.SS_DRY(1.0, 10.0, 1, dry_sequence_breakers=[]), [0.0] * 3, [1] * 500).logits
    assert bool(huge.isfinite().all()) and float(huge[1]) < -1e38


def test_xtc_is_the_mean_over_its_coin():
    out = after(s.SS_XTC(0.4, 0.2), LOGITS)
    p = np.exp(LOGITS)
    without = np.array([0, 0.25, 0.125, 0.0625, 0.0625]) / 0.5
    np.testing.assert_allclose(out.probs().numpy(), 0.6 * p + 0.4 * without, atol=1e-6)
    np.testing.assert_allclose(after(s.SS_XTC(1.0, 0.2, [0]), LOGITS).probs().numpy(), p, atol=1e-6)
    assert isinstance(s.SS_XTC(1.0, 0.51).alt(), s.SS_NoOp)


def test_adaptive_p_moves_the_mean_to_its_target():
    rng = np.random.default_rng(0)
    step, memory, chosen = s.SS_AdaptiveP(0.3, 0.9), {}, []
    for i in range(600):
        x = torch.from_numpy(rng.normal(0, 3, 50).astype(np.float32))
        st_ = s.State(x, np.zeros(0, np.int32), s.uniform(1, i), memory)
        step.run(st_)
        chosen.append(float(x.softmax(0)[st_.token]))
    assert abs(np.mean(chosen) - 0.3) < 0.08
    assert isinstance(s.SS_AdaptiveP(1.0).alt(), s.SS_Sample)


def fuse(steps):
    return s.CustomSampler(steps).plan()


def test_what_can_be_fused_and_what_not():
    T, K, P, M, S = s.SS_Temperature(0.7), s.SS_TopK(5), s.SS_TopP(0.9), s.SS_MinP(0.1), s.SS_Sample()
    assert fuse([T, K, P, M, S]) == s.Plan([], {"temperature": 0.7, "temperature_last": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1})
    assert fuse([K, P, M, T, S]).params["temperature_last"] == 1.0
    assert fuse([M, K, S]) == s.Plan([], {"temperature": 1.0, "top_k": 5, "min_p": 0.1})
    assert fuse([M, P, S]).before == [M]  # top-p after min-p is not ops.sample's order
    assert fuse([M, K, P, S]).before == [M]
    assert fuse([P, K, S]).before == [P]
    assert fuse([T, K, T, S]).before == [T]
    assert fuse([s.SS_XTC(0.5, 0.1), S]).before and fuse([s.SS_AdaptiveP(0.5)]).params is None
    rep = s.SS_RepP(1.2, 64)
    assert fuse([s.SS_LogitBias({1: 2.0}), rep, T, S]).history == 64
    assert fuse([s.SS_RepP(1.2, 64, 10), S]).before and fuse([rep, s.SS_PresFreqP(1.0, 0, 32), S]).before == [rep]
    assert fuse([rep, T, K, s.SS_Argmax()]).params == {"temperature": 0.0, "repetition_penalty": 1.2}


def draw_both(sampler, logits, past, seed):
    """The same rows through ops.sample and step by step."""
    out = []
    for fused in (True, False):
        jobs = []
        for i in range(len(logits)):
            job = Job(past, 5, sampler=sampler, seed=seed + i)
            job.ids, job.n = np.array([*past, 0, 0], np.int32), len(past)
            jobs.append(job)
        drawer = Drawer(200)
        drawer.fused = fused
        out.append([d[0] for d in drawer.draw(logits.clone(), [(j, i, 0) for i, j in enumerate(jobs)])])
    return out


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.05},
        {"min_p": 0.02, "top_k": 20, "temperature": 1.4}, {"top_p": 0.7, "temp_last": True, "temperature": 2.0},
        {"min_p": 0.05, "top_p": 0.9},
        {"rep_p": 1.3}, {"pres_p": 0.5, "freq_p": 0.3}, {"rep_p": 1.2, "pres_p": 0.4, "rep_sustain_range": 4},
        {"rep_p": 1.2, "rep_decay_range": 5, "rep_sustain_range": 3},
        {"logit_bias": {3: 4.0, 5: -math.inf}}, {"dry_multiplier": 0.8, "dry_sequence_breakers": []}, {"temperature": 0.0, "rep_p": 1.5},
        {"xtc_probability": 0.5}, {"adaptive_target": 0.4},
    ],
)  # fmt: skip
def test_fused_and_step_by_step_draw_the_same(options):
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1)) * 3
    past = [5, 9, 5, 9, 5, 100, 199, 9, 5]
    a, b = draw_both(presets.ComboSampler(**options), logits, past, 11)
    assert a == b


@pytest.mark.parametrize("fused", [True, False])
def test_draws_follow_the_distribution(fused):
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    n = 4000
    logits = torch.from_numpy(np.log(np.tile(p, (n, 1)))).float()
    job = Job([1], 5, sampler=presets.CategoricalSampler(), seed=3)
    job.ids, job.n = np.array([1, 0], np.int32), 1
    drawer = Drawer(5)
    drawer.fused = fused
    drawn = [d[0] for d in drawer.draw(logits, [(job, i, i) for i in range(n)])]
    counts = np.bincount(drawn, minlength=5)
    chi = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi < 18.5  # 99.9 % of chi-square with 4 degrees of freedom


def test_columns_beyond_the_tokenizer_are_never_drawn():
    job = Job([1], 5, sampler=presets.CategoricalSampler(5.0), seed=3)
    job.ids, job.n = np.array([1, 0], np.int32), 1
    logits = torch.zeros(200, 64)
    logits[:, 60:] = 50
    drawn = [d[0] for d in Drawer(60).draw(logits, [(job, i, i) for i in range(200)])]
    assert max(drawn) < 60


def test_forward_as_programs_call_it():
    sampler = presets.TopKSampler(3)
    logits = torch.randn(4, 1, 50, generator=torch.Generator().manual_seed(0)).half()
    a = sampler.forward(logits, rand_u32=123)
    assert a.shape == (4, 1) and a.dtype == torch.int64 and torch.equal(a, sampler.forward(logits, rand_u32=123))
    top = logits.float().topk(3, -1).indices
    assert all(int(a[i, 0]) in top[i, 0].tolist() for i in range(4))
    words = np.zeros(2, np.int32)
    words[0] = 1 << 7
    assert presets.ArgmaxSampler().forward(logits, logit_mask=torch.from_numpy(words)).tolist() == [[7]] * 4
    dense = torch.full((50,), -math.inf).half()
    dense[9] = 0
    assert presets.ArgmaxSampler().forward(logits, logit_mask=dense).tolist() == [[9]] * 4
    with pytest.raises(NumericalError, match="NaN"):
        sampler.forward(torch.full((1, 1, 5), math.nan))
    with pytest.raises(ValueError, match="last step"):
        s.CustomSampler([s.SS_TopK(3)])


def test_draw_is_the_documented_function_of_seed_and_counter():
    x = torch.zeros(1, 1000)
    for seed, counter in ((0, 0), (2**63 + 5, 7), (1, 1 << 40)):
        params = ops.pack_sample_params([ops.SampleParams(seed=seed, counter=counter)])
        assert int(ops.sample(x, params)[0]) == int(s.uniform(seed, counter) * 1000)


def test_default_lists_come_from_the_jobs_tokenizer():
    tokenizer = ToyTokenizer(["a", "b", "\n", "d"])
    dry = s.SS_DRY(1.0, 2.0, 1)
    st_ = state([0.0] * 4, [2, 0, 1, 2, 0])
    st_.tokenizer = tokenizer
    dry.run(st_)
    assert st_.logits.tolist() == [0, -1, 0, 0]  # the repeat doesn't reach over the line break: length 1
    xtc = s.SS_XTC(1.0, 0.1)
    st_ = state([1.0, 1.0, 1.5, 0.9])
    st_.tokenizer = tokenizer
    xtc.run(st_)
    assert kept(st_) == [2, 3]  # the line break stays, and the least likely


def test_token_lists_of_a_tokenizer():
    tokenizer = ToyTokenizer(["a", "\n", "b:\n", '"', "<s>"], special=[4])
    assert s.dry_default_sequence_breaker_tokens(tokenizer) == {1, 2, 3, 4}
    assert s.xtc_default_protected_token_ids(tokenizer) == {1, 2, 4}
    assert s.dry_sequence_breaker_tokens(tokenizer, ["a"]) == {0}


@pytest.mark.parametrize(
    "options,named",
    [
        ({"top_k": 1.5}, "top_k"), ({"top_k": "3"}, "top_k"), ({"top_p": 2}, "top_p 2"), ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"), ({"min_p": 1.5}, "min_p"), ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"rep_p": 0}, "rep_p"),
        ({"rep_p": -2.0}, "rep_p"), ({"freq_p": float("inf")}, "freq_p"), ({"pres_p": None}, "pres_p"),
        ({"rep_sustain_range": 2.5}, "sustain_range"), ({"dry_multiplier": -1}, "dry_multiplier"), ({"dry_range": "x"}, "dry_range"),
        ({"xtc_probability": 1.2}, "xtc_probability"), ({"xtc_threshold": -1}, "xtc_threshold"),
        ({"adaptive_target": "a"}, "adaptive_target"), ({"logit_bias": {"a": 1}}, "SS_LogitBias"),
        ({"logit_bias": {1: "x"}}, "SS_LogitBias"), ({"logit_bias": [1]}, "SS_LogitBias"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_work_are_named(options, named):
    with pytest.raises(ArgumentError, match=named):
        presets.ComboSampler(**options)


def test_options_at_their_limits_work():
    for options in ({"top_k": 40.0}, {"top_k": -1}, {"top_p": 1}, {"top_p": 0.0}, {"min_p": 1}, {"temperature": -1}, {"temperature": 0}):
        presets.ComboSampler(**options)
    assert presets.ComboSampler(top_k=40.0).plan().params["top_k"] == 40
