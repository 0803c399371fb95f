"""`Model.generate`: prompts of all kinds, results, streams, errors."""

import pytest
import torch
from stubs import ChainModel, HistoryModel, ToyTokenizer

from exl3.cache import Cache
from exl3.errors import ArgumentError
from exl3.generate import api
from exl3.generate.generator import Generator


class Shapes:
    """A real cache for a stub that keeps nothing in it."""

    num_hidden_layers = num_attention_heads = num_key_value_heads = 1
    head_dim = 8


def stub(chain, pieces=None, **options):
    tokenizer = ToyTokenizer(pieces or [f"<{i}>" for i in range(100)], **options)
    tokenizer.encode_chat = lambda messages, **o: tokenizer.encode(
        "".join(m["content"] for m in messages) + ("<9>" if o.get("tools") else "")
    )
    model = ChainModel(chain, vocab=len(tokenizer.pieces))
    model.tokenizer, model.cache_shapes = tokenizer, [(1, 8)]
    model.eos_token_ids = [50]
    return model


def test_text_ids_and_messages_give_the_same():
    model = stub({7: 50})
    for prompt in ("<5>", [5], torch.tensor([[5]]), [{"role": "user", "content": "<5>"}]):
        r = api.generate(model, prompt, 20)
        assert str(r) == r.text == "<6><7>" and r.ids == [6, 7]
        assert (r.finish_reason, r.stop, r.prompt_tokens, r.new_tokens) == ("stop_token", 50, 1, 3)
        assert 0 < r.first_token_seconds <= r.seconds
    assert set(r.as_dict()) >= {"text", "ids", "finish_reason", "new_tokens", "seconds"} and "extra" not in r.as_dict()
    assert api.generate(model, [{"role": "user", "content": "<5>"}], 1, tools=[{}]).text == "<10>"


def test_end_tokens_and_stop_strings():
    model = stub({7: 50})
    assert api.generate(model, "<5>", 4, stop_ids=[]).ids == [6, 7, 50, 51]
    assert api.generate(model, "<5>", 4, stop_ids=[6]).ids == []
    r = api.generate(model, "<5>", 9, stop="7>")
    assert (r.text, r.finish_reason, r.stop) == ("<6><", "stop_string", "7>")
    assert api.generate(model, "<5>", 9, stop=["zz", "6><7"]).text == "<"


def test_stream_joined_is_the_text():
    data = [bytes([b]) for b in "añ👩‍👧b".encode()]
    model = stub({5: 100}, [f"<{i}>" for i in range(100)] + data)
    whole = api.generate(model, "<5>", len(data), stop_ids=[]).text
    parts = list(api.generate(model, "<5>", len(data), stop_ids=[], stream=True))
    assert "".join(parts) == whole == "añ👩‍👧b" and len(parts) >= 3 and not any("�" in p for p in parts)


def test_stream_may_be_left_early():
    model = stub({})
    stream = api.generate(model, "<5>", 200, stop_ids=[], stream=True)
    assert next(stream) == "<6>"
    stream.close()
    engine = api.engine_of(model).generator
    assert engine.num_remaining_jobs() == 0 and engine.pagetable.referenced == 0
    assert api.generate(model, "<5>", 1).text == "<6>"


def test_streams_and_threads_share_the_engine():
    import threading

    model = stub({})
    outer = api.generate(model, "<5>", 30, stop_ids=[], stream=True)
    parts = [next(outer)]
    assert api.generate(model, "<40>", 3, stop_ids=[]).text == "<41><42><43>"  # while a stream is open
    got = {}

    def call(i):
        got[i] = api.generate(model, [i], 40, stop_ids=[]).ids

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6, 12)]
    for t in threads:
        t.start()
    parts += list(outer)
    for t in threads:
        t.join(60)
    assert "".join(parts) == "".join(f"<{i}>" for i in range(6, 36))
    assert got == {i: list(range(i + 1, i + 41)) for i in range(6, 12)}
    assert api.engine_of(model).generator.pagetable.referenced == 0


def test_the_cache_grows_with_what_is_asked_for():
    model = stub({})
    model.max_tokens = 40_000
    assert api.generate(model, [5], 3).ids == [6, 7, 8]
    assert api.engine_of(model).generator.max_total_tokens == 8192
    assert api.generate(model, [5] * 9000, 3).ids == [6, 7, 8]
    assert api.engine_of(model).generator.max_total_tokens == 16384
    assert api.generate(model, [5] * 30_000, 3).ids == [6, 7, 8]
    assert api.engine_of(model).generator.max_total_tokens == 32768
    assert api.generate(model, [5] * 39_990, 200, stop_ids=[]).new_tokens == 10


def test_seeds_repeat_and_penalties_act():
    model = HistoryModel(vocab=60)
    model.cache_shapes = [(1, 8)]
    options = {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    model.embed, model.head = _self_contained(model)
    a = [api.generate(model, [3, 4], 12, seed=s, **options).ids for s in (1, 1, 2)]
    assert a[0] == a[1] != a[2]
    assert api.generate(model, [3, 4], 12, seed=None, **options).ids is not None
    assert api.generate(model, [3, 4], 12, repetition_penalty=1e5).ids == list(
        dict.fromkeys(api.generate(model, [3, 4], 12, repetition_penalty=1e5).ids)
    )


def _self_contained(model):
    """The stub with a store of its own beside the real cache."""
    store = torch.full((model.max_tokens // 256, 256), -1, dtype=torch.int32)
    embed, head = model.embed, model.head

    class Batch:
        def __init__(self, batch):
            self.__dict__.update(vars(batch))
            self.cache = type("C", (), {"tokens": store})

    return (lambda b: embed(Batch(b))), (lambda x, b: head(x, Batch(b)))


def test_no_new_tokens_scores_the_prompt():
    model = stub({})
    r = api.generate(model, [5, 6, 9], 0)
    assert r.text == "" and r.new_tokens == 0 and len(r.prompt_logprobs) == 2
    assert r.prompt_logprobs[0] > -0.01 > r.prompt_logprobs[1]
    for length in (1, 257):  # one token, and one token behind a full pass
        r = api.generate(model, [5] * length, 0)
        assert r.ids == [] and r.new_tokens == 0 and len(r.prompt_logprobs) == length - 1
        assert list(api.generate(model, [5] * length, 0, stream=True)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"seed": "x"},
        {"top_k": None},
        {"presence_penalty": "much"},
        {"frequency_penalty": None},
        {"stop": 5},
        {"stop": [7]},
        {"stop_ids": 5},
        {"stop_ids": "ab"},
        {"stop_ids": [1.5]},
        {"stop_conditions": [5]},
        {"template_options": 5},
        {"max_new_tokens": "9"},
        {"max_new_tokens": 2.5},
    ],
    ids=lambda w: next(iter(w)),
)
def test_values_of_a_wrong_type_are_named(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        api.generate(stub({}), [5, 6], **({"max_new_tokens": 1} | wrong))


def test_errors():
    model = stub({})
    with pytest.raises(ArgumentError, match="context"):
        api.generate(model, [5] * 5000, 1)
    with pytest.raises(ArgumentError, match="outside the vocabulary"):
        api.generate(model, [500], 1)
    nameless = stub({})
    nameless.bos_token_id = None
    for empty in ("", []):
        with pytest.raises(ArgumentError, match="empty"):
            api.generate(nameless, empty, 1)
    r = api.generate(model, [5], 10_000, stop_ids=[])
    assert r.new_tokens == 4095 and r.extra["clamped"]
    with pytest.raises(AssertionError, match="cannot be enqueued"):
        api.generate(model, [5], 10_000, clamp=False)
    model.tokenizer = None
    fresh = stub({})
    fresh.tokenizer = None
    assert api.generate(fresh, [5], 2, stop_ids=[]).ids == [6, 7]
    for call in (
        lambda: api.generate(fresh, "text", 2),
        lambda: api.generate(fresh, [5], 2, stream=True),
        lambda: api.generate(fresh, [5], 2, stop="x"),
    ):
        with pytest.raises(ArgumentError, match="tokenizer"):
            call()


def test_default_cache_is_made_for_the_context():
    model = stub({})
    assert Generator(model).max_total_tokens == 4096 and isinstance(Generator(model).cache, Cache)
