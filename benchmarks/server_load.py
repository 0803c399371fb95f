"""The server under load: many concurrent streams, a third of whose clients vanish midway, while the health route is asked all the time.

    python benchmarks/server_load.py [--model DIR] [--streams 64] [--seconds 120]

Held at the end: no stuck job, no lost page, the health route answered throughout. Adds a record to benchmarks/results; exits 1 on failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from engine_soak import HERE, tiny_model


class Load:
    """Clients over raw sockets, so that vanishing is really vanishing."""

    def __init__(self, port: int, seconds: float, seed: int) -> None:
        self.port, self.end, self.rng = port, time.monotonic() + seconds, random.Random(seed)
        self.finished = self.vanished = self.refused = self.broken = self.tokens = 0
        self.health: list[float] = []
        self.unhealthy = 0

    async def request(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def client(self) -> None:
        while time.monotonic() < self.end:
            vanish = self.rng.random() < 1 / 3
            text = "word " * self.rng.randint(1, 60)
            body = {
                "messages": [{"role": "user", "content": text}], "max_tokens": self.rng.choice([8, 30, 80]), "stream": True,
                "ignore_eos": True, "temperature": self.rng.choice([0, 1.0]),
            }  # fmt: skip
            reader, writer = await self.request(body)
            status = await reader.readline()
            if b"200" not in status:
                self.refused += b"429" in status
                self.broken += b"429" not in status
                writer.close()
                await asyncio.sleep(0.2)
                continue
            done, events, stop_at = False, 0, self.rng.randint(1, 6)
            async for line in reader:
                if line.startswith(b"data: "):
                    events += 1
                    done = done or b"[DONE]" in line
                    if b'"error"' in line:
                        self.broken += 1
                if vanish and events >= stop_at:
                    break
            if vanish and not done:
                self.vanished += 1
                writer.transport.abort()
            else:
                self.finished += done
                self.broken += not done
                self.tokens += events
                writer.close()

    async def watch(self) -> None:
        while time.monotonic() < self.end:
            start = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            self.unhealthy += b"200" not in await reader.readline()
            self.health.append(time.monotonic() - start)
            writer.close()
            await asyncio.sleep(0.5)

    async def run(self, streams: int) -> None:
        await asyncio.gather(self.watch(), *(self.client() for _ in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: a random tiny one")
    parser.add_argument("--device", default=None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=16384, help="cache size")
    args = parser.parse_args()
    import torch
    import uvicorn

    import exl3
    from exl3.cache import Cache
    from exl3.serve import create_app

    warnings.simplefilter("ignore")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = exl3.load(args.model or tiny_model(), device=device, max_tokens=2048)
    app = create_app(model, Cache(model, args.tokens, model.device), model_name="load", grace=5.0)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", backlog=1024))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and server.servers):
        time.sleep(0.05)
    load = Load(server.servers[0].sockets[0].getsockname()[1], args.seconds, 0)
    asyncio.run(load.run(args.streams))
    engine = app.state.server.engine
    with contextlib.suppress(TimeoutError):
        end = time.monotonic() + 10
        while (engine.generator.num_remaining_jobs() or engine.jobs) and time.monotonic() < end:
            time.sleep(0.05)
    stuck, lost = engine.generator.num_remaining_jobs() + len(engine.jobs), engine.generator.pagetable.referenced
    server.should_exit = True
    thread.join(20)
    row = {
        "streams": args.streams, "seconds": args.seconds, "finished": load.finished, "vanished": load.vanished, "refused": load.refused,
        "broken": load.broken, "events_per_second": round(load.tokens / args.seconds, 1), "stuck_jobs": stuck, "pages_lost": lost,
        "health_asked": len(load.health), "health_failed": load.unhealthy,
        "health_median_ms": round(1e3 * statistics.median(load.health), 1),
        "health_max_ms": round(1e3 * max(load.health), 1), "stopped": not thread.is_alive(),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    record = {
        "name": "server_load", "device": str(model.device), "versions": {"torch": torch.__version__}, "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "rows": [row],
    }  # fmt: skip
    with open(Path(HERE) / "results" / "server_load.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")
    if stuck or lost or load.unhealthy or load.broken or thread.is_alive():
        sys.exit("failed")


if __name__ == "__main__":
    main()
