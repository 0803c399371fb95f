"""The OpenAI-compatible server: right answers, right errors, nothing leaks from one request to another."""

import json
import math

import pytest
import torch
from starlette.testclient import TestClient

from exl3.serve import create_app
from exl3.serve.protocol import Limits, RequestError, parse_chat, parse_completion

GREEDY = {"temperature": 0, "ignore_eos": True}


def completion(client, **body):
    return client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 8, **GREEDY, **body})


def chat(client, text="Hi", **body):
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], "max_tokens": 8, **GREEDY, **body})


def events(response):
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def greedy(model, ids, n):
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model.logits([ids])[0, -1].argmax()))
    return ids[-n:]


def test_completion_is_the_models(client, model):
    r = completion(client, model="tiny").json()
    ids = greedy(model, model.tokenizer.encode("Hello"), 8)
    assert r["choices"][0]["text"] == model.tokenizer.decode(ids)
    assert r["choices"][0]["finish_reason"] == "length" and r["object"] == "text_completion" and r["model"] == "tiny"
    assert r["usage"]["prompt_tokens"] == 5 and r["usage"]["completion_tokens"] == 8 and r["usage"]["total_tokens"] == 13
    by_ids = completion(client, prompt=model.tokenizer.encode("Hello")).json()
    assert by_ids["choices"][0]["text"] == r["choices"][0]["text"]


def test_stream_joined_is_the_answer(client):
    whole = completion(client, max_tokens=40).json()["choices"][0]["text"]
    parts = events(completion(client, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(p["choices"][0]["text"] for p in parts[:-1]) == whole
    assert parts[-2]["choices"][0]["finish_reason"] == "length" and parts[-1]["usage"]["completion_tokens"] == 40
    whole = chat(client, max_tokens=40).json()["choices"][0]["message"]["content"]
    parts = events(chat(client, max_tokens=40, stream=True))
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant" and parts[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parts) == whole
    assert len({p["id"] for p in parts}) == 1


def test_several_prompts_and_choices(client):
    r = completion(client, prompt=["ab", "cd"], n=2, temperature=1.0, seed=5).json()
    assert [c["index"] for c in r["choices"]] == [0, 1, 2, 3]
    again = completion(client, prompt=["ab", "cd"], n=2, temperature=1.0, seed=5).json()
    assert [c["text"] for c in r["choices"]] == [c["text"] for c in again["choices"]]
    assert r["choices"][0]["text"] != r["choices"][1]["text"] and r["usage"]["completion_tokens"] == 32 and r["usage"]["prompt_tokens"] == 4
    parts = events(completion(client, prompt=["ab", "cd"], n=2, temperature=1.0, seed=5, stream=True))
    for i in range(4):
        assert "".join(p["choices"][0]["text"] for p in parts if p["choices"][0]["index"] == i) == r["choices"][i]["text"]


def test_stop_strings_and_bias(client):
    text = completion(client, max_tokens=30).json()["choices"][0]["text"]
    stop = next(c for c in text[3:] if text.index(c) >= 3)
    r = completion(client, max_tokens=30, stop=[stop]).json()["choices"][0]
    assert r["text"] == text[: text.index(stop)] and r["finish_reason"] == "stop"
    a = client.app.state.server.model.tokenizer.encode("A")[0]
    assert completion(client, logit_bias={str(a): 100}).json()["choices"][0]["text"] == "A" * 8
    assert "A" not in completion(client, logit_bias={str(a): -100}, max_tokens=30, temperature=2.0).json()["choices"][0]["text"]


def test_logprobs(client, model):
    r = chat(client, logprobs=True, top_logprobs=2, max_tokens=5).json()["choices"][0]
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    want = greedy(model, ids, 5)
    logs = model.logits([ids + want])[0].log_softmax(-1)
    content = r["logprobs"]["content"]
    assert len(content) == 5
    for i, entry in enumerate(content):
        assert abs(entry["logprob"] - float(logs[len(ids) - 1 + i, want[i]])) < 0.02
        assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    streamed = events(chat(client, logprobs=True, top_logprobs=2, max_tokens=5, stream=True))
    joined = [e for p in streamed for e in ((p["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert [e["bytes"] for e in joined] == [e["bytes"] for e in content]


def test_echo_scores_the_prompt(client, model):
    prompt = "The quick brown fox"
    r = completion(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
    ids = model.tokenizer.encode(prompt)
    logs = model.logits([ids])[0].log_softmax(-1)
    got = r["logprobs"]["token_logprobs"]
    assert r["text"] == prompt and got[0] is None and len(got) == len(ids)
    torch.testing.assert_close(torch.tensor(got[1:]), logs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=0.02, rtol=0.01)
    assert "".join(r["logprobs"]["tokens"]) == prompt and r["logprobs"]["text_offset"] == list(range(len(prompt)))
    both = completion(client, prompt=prompt, max_tokens=3, echo=True, logprobs=0).json()["choices"][0]
    assert len(both["logprobs"]["tokens"]) == len(ids) + 3 and both["text"].startswith(prompt)


def test_constrained_output(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        r = chat(client, response_format=form, temperature=1.0, seed=seed, max_tokens=200, ignore_eos=False).json()["choices"][0]
        if r["finish_reason"] == "stop":  # white space without end would be valid too
            assert json.loads(r["message"]["content"])["ok"] in ("yes", "no")
    assert completion(client, regex="[0-9]{3}", temperature=1.0, max_tokens=20).json()["choices"][0]["text"].isdigit()
    assert completion(client, gbnf_grammar='root ::= "up" | "down"', max_tokens=20).json()["choices"][0]["text"] in ("up", "down")


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
    }
]


def test_forced_tool_call(client):
    pytest.importorskip("llguidance")
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        r = chat(client, tools=TOOLS, tool_choice=choice, temperature=1.0, seed=3, max_tokens=300, ignore_eos=False).json()["choices"][0]
        if r["finish_reason"] == "length":
            continue
        call = r["message"]["tool_calls"][0]
        assert r["finish_reason"] == "tool_calls" and call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    plain = chat(client, tools=TOOLS, tool_choice="none").json()
    without = chat(client).json()
    assert plain["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert chat(client, tools=[]).json()["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert chat(client, tools=TOOLS).json()["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


# bad input


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"), ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"), ({"n": 0}, "n"),
        ({"n": 99}, "n"), ({"stop": 5}, "stop"), ({"stop": [1]}, "stop"), ({"stop": ["x"] * 99}, "stop"), ({"top_p": 2}, "top_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logprobs": 99}, "logprobs"), ({"prompt": None}, "prompt"), ({"prompt": {}}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"), ({"no_such_field": 1}, "no_such_field"), ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"seed": 1.5}, "seed"), ({"stream": "yes"}, "stream"), ({"max_tokens": True}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"), ({"regex": "a", "gbnf_grammar": "b"}, "gbnf_grammar"),
        ({"stream_options": {"x": 1}}, "x"), ({"prompt": "x" * 10, "temperature": math.inf}, None),
    ],
)  # fmt: skip
def test_bad_fields_are_named(client, body, field):
    data = {"prompt": "Hello", "max_tokens": 4, **body}
    r = client.post("/v1/completions", content=json.dumps(data))
    assert r.status_code == 400
    error = r.json()["error"]
    assert error["type"] == "invalid_request_error" and (field is None or (error["param"] == field and field in error["message"]))
    assert completion(client, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "x"}]}, {"messages": ["x"]}, {},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
    ],
)  # fmt: skip
def test_bad_messages(client, body):
    r = client.post("/v1/chat/completions", json={"max_tokens": 1, **body})
    assert r.status_code == 400 and r.json()["error"]["param"] == "messages"


def test_bad_requests(client):
    assert client.post("/v1/completions", content=b"{not json").status_code == 400
    assert client.post("/v1/completions", content=b"[1]").status_code == 400
    assert client.post("/v1/completions", content=b"[" * 50_000).status_code == 400
    assert client.post("/v1/completions", content=b" " * 200_000).status_code == 413
    assert client.post("/v1/completions", content=(b" " * 60_000 for _ in range(3))).status_code == 413
    assert client.get("/v1/completions").status_code == 405 and client.get("/nothing").status_code == 404
    assert completion(client, model="other").json()["error"]["code"] == "model_not_found"
    assert completion(client, prompt=[5, 999]).status_code == 400
    long = completion(client, prompt=[5] * 5000)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert chat(client, tools=TOOLS, tool_choice={"function": {"name": "other"}}).status_code == 400
    assert chat(client, tools=[{"x": 1}]).status_code == 400
    pytest.importorskip("llguidance")
    assert completion(client, regex="((").status_code == 400 and completion(client, json_schema="{").status_code == 400
    assert completion(client, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "\ud800"}, {"stop": ["x\udfff"]}, {"chat_template_kwargs": {"template": "{{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"messages": []}}, {"gbnf_grammar": ""}, {"gbnf_grammar": "root ::= nothing"},
        {"gbnf_grammar": "root ::= " + "(" * 2000}, {"gbnf_grammar": "root ::= ["}, {"logit_bias": {"5": 1e39}},
        {"logit_bias": {"5": float("nan")}},
        {"logit_bias": {str(i): -100 for i in range(260)}}, {"lark_grammar": "start: nothing"}, {"regex": "(?<=a)b"},
        {"json_schema": {"type": "bogus"}},
    ],
)  # fmt: skip
def test_hostile_requests(client, body):
    """Each is a 400 of its own; the next request is served."""
    if any("grammar" in k or k in ("regex", "json_schema") for k in body):
        pytest.importorskip("llguidance")
    is_chat = "chat_template_kwargs" in body
    whole = {"max_tokens": 3, **({"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}), **body}
    r = client.post(f"/v1/{'chat/' if is_chat else ''}completions", content=json.dumps(whole).encode())
    assert r.status_code == 400 and r.json()["error"]["message"], r.text
    assert completion(client, max_tokens=1).status_code == 200


def test_surrogates_in_raw_bytes(client):
    assert client.post("/v1/completions", content=b'{"prompt": "\xed\xa0\x80"}').status_code == 400
    assert client.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}').status_code == 200


def test_too_many_tokens_are_clamped_to_the_context(client):
    r = completion(client, prompt=[65] * 2040, max_tokens=5000).json()
    assert r["usage"]["completion_tokens"] == 8 and r["choices"][0]["finish_reason"] == "length"
    assert completion(client, prompt="", max_tokens=2).json()["usage"]["prompt_tokens"] == 1  # BOS stands in


def test_keys(model):
    app = create_app(model, api_keys=["secret", "other"], grace=0)
    with TestClient(app) as client:
        assert client.get("/v1/models").status_code == 401 and completion(client).status_code == 401
        for headers in (
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer "},
            {"x-api-key": "é".encode()},
        ):
            assert client.get("/v1/models", headers=headers).status_code == 401
        for headers in ({"authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"x-api-key": "other"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == 200 and client.get("/").status_code == 200


def test_models_health_metrics_page(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 2048 and client.get("/v1/models/x").status_code == 404
    assert client.get("/health").json() == {"status": "ok", "error": None}
    completion(client)
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["exl3_generated_tokens_total"]) >= 8 and float(values["exl3_active_jobs"]) == 0
    assert float(values['exl3_requests_total{route="completions",status="200"}']) >= 1
    assert float(values['exl3_first_token_seconds_bucket{le="+Inf"}']) == float(values["exl3_first_token_seconds_count"])
    page = client.get("/")
    assert "content-security-policy" in page.headers and "http" not in page.text.split("<style>")[1]  # nothing is fetched from elsewhere


def test_engine_fault_turns_health_red(model):
    app = create_app(model, grace=0)
    with TestClient(app) as client:
        generator = app.state.server.engine.generator
        generator.runner.run = lambda rows: (_ for _ in ()).throw(RuntimeError("CUDA error: an illegal memory access was encountered"))
        r = completion(client)
        assert r.status_code in (500, 503) and "CUDA error" in r.json()["error"]["message"]
        assert client.get("/health").status_code == 503 and completion(client).status_code in (500, 503)


def test_one_bad_answer_leaves_the_rest(client, monkeypatch):
    generator = client.app.state.server.engine.generator
    draw = generator.drawer.draw

    def poisoned(logits, rows):
        for job, row, _ in rows:
            if job.prompt[0] == 88:
                logits[row] = math.nan
        return draw(logits, rows)

    monkeypatch.setattr(generator.drawer, "draw", poisoned)
    bad = completion(client, prompt=[88])
    assert bad.status_code == 500 and bad.json()["error"]["code"] == "bad_logits"
    parts = client.post("/v1/completions", json={"prompt": [88], "max_tokens": 4, "stream": True}).text
    assert "bad_logits" in parts and parts.endswith("data: [DONE]\n\n")
    assert completion(client).status_code == 200 and client.get("/health").status_code == 200


def test_defaults_of_the_protocol():
    made = parse_completion({"prompt": "x"}, Limits())
    assert made.max_tokens == 16 and made.temperature == 1.0 and made.n == 1 and made.stop == []
    made = parse_chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, Limits())
    assert made.messages[0]["content"] == "ab" and made.max_tokens is None
    assert parse_chat({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 7, "user": "me"}, Limits()).max_tokens == 7
    with pytest.raises(RequestError, match="top_logprobs"):
        parse_chat({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}, Limits())
