"""Arguments of `Generator`, and how prompts and decoding share its steps."""

import pytest
from test_generator import greedy, make, prompt

from exl3.errors import ArgumentError


@pytest.mark.parametrize(
    "options,named",
    [
        ({"max_batch_size": 0}, "max_batch_size 0"), ({"max_batch_size": 2.5}, "max_batch_size"),
        ({"max_chunk_size": "x"}, "max_chunk_size"), ({"shared_chunk_size": -3}, "shared_chunk_size"),
        ({"prefill_cooldown": -1}, "prefill_cooldown"), ({"max_q_size": None}, "max_q_size"),
        ({"num_draft_tokens": 1.5, "ngram_match_min": 2}, "num_draft_tokens"), ({"ngram_match_min": "2"}, "ngram_match_min"),
        ({"draft_confidence": 3}, "draft_confidence"), ({"dynamic_draft_tokens": "yes"}, "dynamic_draft_tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_a_wrong_kind_are_named(options, named):
    with pytest.raises(ArgumentError, match=named):
        make(**options)


def test_prompts_come_sooner_while_most_jobs_wait():
    """Steps between prefill passes follow the share of jobs that decode already."""
    _, generator = make(64 * 256, max_chunk_size=256, shared_chunk_size=128, prefill_cooldown=4)
    generator.enqueue([greedy(prompt(i, 120), 60) for i in range(16)])
    gaps, since = [], 0
    while generator.num_remaining_jobs():
        prefilled = any(r["stage"] == "prefill" for r in generator.iterate())
        if prefilled:
            gaps.append(since)
        since = 0 if prefilled else since + 1
    assert gaps[2] <= 1 and max(gaps[8:]) == 3  # the step of the pass itself counts


def test_a_shared_chunk_is_what_takes_about_a_seventh_of_a_second():
    _, generator = make(4096, max_chunk_size=2048)
    assert generator._chunk(True) == 1024
    for rate, expected in ((100.0, 32), (4000.0, 600), (1e6, 2048)):
        generator._prefill_rate = rate
        assert generator._chunk(True) == expected and generator._chunk(False) == 2048
