"""Figures of the evaluation against formulas evaluated another way."""

import math

import numpy as np
import pytest
import torch

from exl3.errors import ArgumentError, NumericalError
from exl3.evaluate.metrics import Accumulator, kl_divergence
from exl3.evaluate.rows import text_rows


def test_kl_of_two_known_distributions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    got = kl_divergence(torch.tensor(np.log(p))[None] + 3.0, torch.tensor(np.log(q))[None] - 7.0)
    assert abs(float(got) - expected) < 1e-6


def test_summary_matches_numpy_in_float64():
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(17, 101)), rng.normal(size=(17, 101)), rng.integers(0, 101, 17)) for _ in range(3)]
    acc = Accumulator()
    kl, nll = [], [[], []]
    agree = 0
    for a, b, ids in rows:
        acc.add(torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32), torch.tensor(ids))
        la, lb = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a, b))
        kl.append((np.exp(la) * (la - lb)).sum(-1))
        agree += (a.argmax(-1) == b.argmax(-1)).sum()
        for out, logp in zip(nll, (la, lb)):
            out.append(-logp[np.arange(16), ids[1:]])
    s = acc.summary()
    all_kl = np.concatenate(kl)
    assert s.positions == 51
    assert s.kl_mean == pytest.approx(all_kl.mean(), rel=1e-5)
    assert s.kl_median == pytest.approx(np.median(all_kl), rel=1e-5)
    assert s.kl_p99 == pytest.approx(np.quantile(all_kl, 0.99), rel=1e-5)
    assert s.top1 == agree / 51
    assert s.perplexity_reference == pytest.approx(math.exp(np.concatenate(nll[0]).mean()), rel=1e-5)
    assert s.perplexity_quantized == pytest.approx(math.exp(np.concatenate(nll[1]).mean()), rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 101, (1 << 24) + 1])  # the last is more than torch.quantile takes
def test_a_quantile_of_any_number_of_positions(count):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count))
    acc = Accumulator()
    acc._kl, acc._positions, acc._predicted = [values], count, count
    assert acc.summary().kl_p99 == pytest.approx(np.quantile(values.double().numpy(), 0.99), rel=1e-5)


def test_nan_logits_are_named():
    good, bad = torch.zeros(4, 8), torch.zeros(4, 8)
    bad[2, 3] = float("nan")
    with pytest.raises(NumericalError, match=r"quantized model.*token 2"):
        Accumulator().add(good, bad, torch.arange(4))


def test_other_vocabulary_is_refused():
    with pytest.raises(ArgumentError, match="not the same vocabulary"):
        kl_divergence(torch.zeros(2, 8), torch.zeros(2, 9))


class Bytes:
    """A tokenizer whose ids are the text's bytes."""

    bos_id = 256

    def encode(self, text, add_bos=False):
        return list(text.encode())


def test_rows_are_consecutive_pieces_without_bos():
    rows = text_rows(Bytes(), "abcdefghij", row_len=4)
    assert rows.tolist() == [list(b"abcd"), list(b"efgh")]
    with_bos = text_rows(Bytes(), "abcdefghij", row_len=4, rows=2, bos=True)
    assert with_bos.tolist() == [[256, *b"abc"], [256, *b"def"]]


def test_too_short_text_says_how_long_it_is():
    with pytest.raises(ArgumentError, match="3 tokens, one row needs 8"):
        text_rows(Bytes(), "abc", row_len=8)


def test_a_missing_reference_is_said_to_be_missing(tmp_path):
    from exl3.errors import MissingTensorError
    from exl3.evaluate import compare

    with pytest.raises(MissingTensorError, match="nowhere: no such directory"):
        compare(tmp_path / "nowhere", tmp_path, tmp_path / "text.txt")
