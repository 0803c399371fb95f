"""The server behind a real socket: clients that go away, shutdown, the command line."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

pytest.importorskip("uvicorn")


@contextlib.contextmanager
def running(model, **options):
    import uvicorn

    from exl3.serve import create_app

    app = create_app(model, model_name="tiny", grace=options.pop("grace", 1.0), **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=3))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not (server.started and server.servers) and time.monotonic() < end:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield app, port, server, thread
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def send(port, body, path="/v1/completions"):
    """A raw request; the connection is the caller's to break."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def post(port, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as r:
        return json.loads(r.read())


def slow_down(engine, seconds):
    """A step takes at least `seconds`: an answer does not end before the server looks, however busy the machine."""
    step = engine.generator.iterate

    def iterate(*args, **kwargs):
        time.sleep(seconds)
        return step(*args, **kwargs)

    engine.generator.iterate = iterate


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_takes_its_job_along(model, stream):
    with running(model) as (app, port, _, _):
        engine = app.state.server.engine
        slow_down(engine, 0.02)
        body = {"prompt": "Hello", "max_tokens": 900, "stream": stream, "ignore_eos": True, "n": 2}
        connection = send(port, body)
        wait_for(lambda: engine.generator.num_active_jobs() == 2)
        if stream:
            assert b"200 OK" in connection.recv(1000)
        connection.close()
        wait_for(lambda: engine.generator.num_remaining_jobs() == 0 and not engine.jobs)
        assert engine.generator.pagetable.referenced == 0
        assert app.state.server.metrics.cancelled == 1
        assert post(port, {"prompt": "x", "max_tokens": 2, "ignore_eos": True})["usage"]["completion_tokens"] == 2


def test_shutdown_lets_answers_finish(model):
    with running(model, grace=20.0) as (app, port, server, _):
        engine, answers = app.state.server.engine, []
        thread = threading.Thread(target=lambda: answers.append(post(port, {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True})))
        thread.start()
        wait_for(lambda: engine.generator.num_active_jobs() == 1)
        server.should_exit = True
        thread.join(30)
        assert answers[0]["usage"]["completion_tokens"] == 60


def test_queue_limit(model):
    from exl3.serve.protocol import Limits

    with running(model, limits=Limits(max_queue=2), grace=0) as (app, port, _, _):
        body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        engine = app.state.server.engine
        slow_down(engine, 0.02)
        connections = [send(port, body) for _ in range(2)]
        wait_for(lambda: engine.generator.num_remaining_jobs() == 2)
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(port, {"prompt": "x", "max_tokens": 1})
        assert caught.value.code == 429 and caught.value.headers["retry-after"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as r:
            assert r.status == 200
        for c in connections:
            c.close()
        wait_for(lambda: engine.generator.num_remaining_jobs() == 0)


def test_command_line(model, tmp_path):
    (tmp_path / "keys").write_text("k\n\nl\n")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = ["--port", str(port), "--device", "cpu", "--cache-bits", "8,6", "--cache-tokens", "512"]
    options += ["--api-key-file", str(tmp_path / "keys")]
    command = [sys.executable, "-m", "exl3", "serve", model.path, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = f"http://127.0.0.1:{port}"

        def up():
            if process.poll() is not None:
                raise AssertionError(process.stdout.read())
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=10) as r:
                    return r.status == 200
            except OSError:
                time.sleep(0.2)
                return False

        wait_for(up, 90)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(port, {"prompt": "x"})
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_chat_page_in_a_browser(model):
    """Types a message into the page in a headless browser and reads the answer. Needs playwright with a browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    with running(model) as (app, port, _, _), playwright.sync_playwright() as p:
        try:  # a browser of the system, else playwright's own
            browser = p.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {error}")
        page = browser.new_page()
        page.set_default_timeout(60_000)
        playwright.expect.set_options(timeout=60_000)
        foreign = []
        page.on("request", lambda r: foreign.append(r.url) if f":{port}/" not in r.url else None)
        errors = []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.goto(f"http://127.0.0.1:{port}/")
        expect = playwright.expect  # waits without evaluating script text, which the page's security policy forbids
        expect(page.locator("#model")).to_have_text("tiny")
        page.fill("#text", "Hello")
        page.press("#text", "Enter")
        expect(page.locator(".message.assistant")).not_to_be_empty()
        assert page.inner_text(".message.user") == "Hello"
        if page.inner_text("#send") == "Stop":
            page.click("#send")
        expect(page.locator("#send")).to_have_text("Send")
        wait_for(lambda: app.state.server.engine.generator.num_remaining_jobs() == 0)
        page.click("#fresh")
        assert page.locator(".message").count() == 0 and not foreign and not errors
        browser.close()
