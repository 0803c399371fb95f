"""`exl3 bench MODEL`: prefill and decode speed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import click

from exl3.cli.common import device_option, emit_json, json_flag, table
from exl3.errors import ArgumentError


@click.command("bench")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="default: 512, fewer where the model's context is shorter")
@click.option("--new-tokens", type=click.IntRange(min=2), help="default: 128, fewer where the context is shorter")
@click.option(
    "--context", type=click.IntRange(min=0), default=0, show_default=True, help="tokens already in the cache when decoding is timed"
)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@device_option
@json_flag
def command(
    model: str, prompt_tokens: int | None, new_tokens: int | None, context: int, repeat: int, device: str | None, as_json: bool
) -> None:
    """Tokens per second of the model in directory MODEL: prefill, and decode of one sequence. Medians of --repeat runs."""
    import exl3
    from exl3.parallel import plan

    limit = plan(model, device).max_tokens
    prompt_tokens = prompt_tokens or max(1, min(512, limit - 1))
    new_tokens = new_tokens or max(2, min(128, limit - max(context, 1)))
    need = max(prompt_tokens + 1, max(context, 1) + new_tokens)
    if need > limit:
        raise ArgumentError(
            f"--prompt-tokens {prompt_tokens}, --context {context} and --new-tokens {new_tokens} take {need} tokens; the model's context "
            f"is {limit}: lower them"
        )
    start = time.perf_counter()
    loaded = exl3.load(model, device=device, max_tokens=need)
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"model": model, "device": str(loaded.device), "load_seconds": seconds}
    result.update(measure(loaded, prompt_tokens, new_tokens, context, repeat))
    if as_json:
        emit_json(result)
        return
    table(
        [
            ("device", result["device"]),
            ("load", f"{seconds:.2f} s"),
            (f"prefill of {prompt_tokens}", f"{result['prefill_tokens_per_second']:.1f} tokens/s"),
            (f"decode of {new_tokens} at {context}", f"{result['decode_tokens_per_second']:.1f} tokens/s"),
        ]
    )


def measure(model: Any, prompt_tokens: int, new_tokens: int, context: int, repeat: int) -> dict[str, float]:
    """Medians over `repeat` runs; every run uses other tokens, so that no prefix is reused."""
    import torch

    rng = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(10, model.vocab_size - 10, (n,), generator=rng).tolist()

    def run(prompt: list[int], n: int) -> tuple[float, float]:
        """Seconds to the first token, and from there to the last."""
        start = time.perf_counter()
        result = model.generate(prompt, max_new_tokens=n, stop_ids=[], temperature=0.0)
        end = time.perf_counter()
        return result.first_token_seconds, end - start - result.first_token_seconds

    run(ids(8), 4)
    prefill = [prompt_tokens / run(ids(prompt_tokens), 1)[0] for _ in range(repeat)]
    decode = [(new_tokens - 1) / run(ids(max(context, 1)), new_tokens)[1] for _ in range(repeat)]
    return {
        "prompt_tokens": prompt_tokens,
        "prefill_tokens_per_second": statistics.median(prefill),
        "new_tokens": new_tokens,
        "context": context,
        "decode_tokens_per_second": statistics.median(decode),
    }
