"""Counters and histograms in Prometheus's text format."""

from __future__ import annotations

from collections import Counter
from typing import Any

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Histogram:
    """Seconds in fixed buckets."""

    def __init__(self) -> None:
        self.buckets = [0] * len(_SECONDS)
        self.count, self.total = 0, 0.0

    def add(self, seconds: float) -> None:
        """One observation."""
        self.count += 1
        self.total += seconds
        for i, top in enumerate(_SECONDS):
            self.buckets[i] += seconds <= top

    def lines(self, name: str) -> list[str]:
        """The exposition."""
        made = [f"# TYPE {name} histogram"]
        made += [f'{name}_bucket{{le="{top:g}"}} {n}' for top, n in zip(_SECONDS, self.buckets)]
        return [*made, f'{name}_bucket{{le="+Inf"}} {self.count}', f"{name}_sum {self.total:.6f}", f"{name}_count {self.count}"]


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.cancelled = 0
        self.first_token, self.request = Histogram(), Histogram()

    def finished(self, last: dict[str, Any]) -> None:
        """Takes the last result of a job."""
        self.prompt_tokens += last["prompt_tokens"]
        self.cached_tokens += last["cached_tokens"]
        self.generated_tokens += last["new_tokens"]
        self.first_token.add(last["time_enqueued"] + last["time_prefill"])
        self.request.add(last["time_enqueued"] + last["time_prefill"] + last["time_generate"])

    def text(self, stats: dict[str, Any]) -> str:
        """The whole page; `stats`: of `Generator.get_cache_stats`."""
        lines = ["# TYPE exl3_requests_total counter"]
        lines += [f'exl3_requests_total{{route="{r}",status="{s}"}} {n}' for (r, s), n in sorted(self.requests.items())]
        for name, value in (
            ("prompt_tokens", self.prompt_tokens), ("cached_tokens", self.cached_tokens), ("generated_tokens", self.generated_tokens),
            ("cancelled_requests", self.cancelled),
        ):  # fmt: skip
            lines += [f"# TYPE exl3_{name}_total counter", f"exl3_{name}_total {value}"]
        for name in ("active_jobs", "pending_jobs", "max_tokens", "used_tokens", "cached_tokens", "free_tokens"):
            label = name if name.endswith("jobs") else f"cache_{name}"
            lines += [f"# TYPE exl3_{label} gauge", f"exl3_{label} {stats[name]}"]
        lines += self.first_token.lines("exl3_first_token_seconds") + self.request.lines("exl3_request_seconds")
        return "\n".join(lines) + "\n"
