"""What `Generator` works out when it is made: unsupported arguments, special ids, the drafter."""

from __future__ import annotations

import warnings
from typing import Any

from exl3.errors import ArgumentError, UnsupportedError
from exl3.generate.arguments import flag, number, whole

# arguments of the incumbent that change nothing here, with the value that asks for nothing
IGNORED: dict[str, Any] = {"enable_defrag": None, "show_visualizer": None, "record_draft_stats": None, "recurrent_cache_size": None}
IGNORED |= {
    "recurrent_checkpoint_interval": None,
    "recurrent_checkpoint_interval_pp": None,
    "disk_cache_size": None,
    "disk_cache_flush_on_idle": None,
}
IGNORED |= {"disk_cache_checkpoint_interval": None, "disk_cache_write_interval": None}
UNSUPPORTED = {
    "disk_cache_dir": None,
    "cpu_cache_size": 0,
    "ngram_corpus": None,
    "hybrid_draft_tokens": 0,
    "draft_max_rows": 0,
    "sparse_draft_head": 0,
}


def check_unused(unused: dict[str, Any]) -> None:
    """Refuses by name what is not supported or not known."""
    for name, value in unused.items():
        if name in IGNORED:
            continue
        if name not in UNSUPPORTED:
            raise ArgumentError(f"Generator: unknown argument {name!r}")
        if value != UNSUPPORTED[name] and value is not None:
            raise UnsupportedError(f"Generator: {name} is not supported yet; leave it out")


def special_ids(model: Any, tokenizer: Any) -> tuple[list[int], int | None]:
    """(all end-of-sequence ids of all config files, the BOS id or None)."""
    own = getattr(model, "eos_token_ids", None)
    if own is not None:
        return list(own), getattr(model, "bos_token_id", None)
    config = getattr(model, "source_config", None) or {}
    bos = config.get("bos_token_id")
    if tokenizer is not None and tokenizer.bos_id is not None:
        bos = tokenizer.bos_id
    from exl3.files.config import eos_ids, read_generation_config

    path = getattr(model, "path", None)
    extra = read_generation_config(path) if path else None
    found = eos_ids(config, extra, None if tokenizer is None else tokenizer.eos_id)
    return found, bos if isinstance(bos, int) else None


def make_drafter(generator: Any, model: Any, cache: Any, count: int | None, ngram_min: int, dynamic: bool, confidence: float) -> Any:
    """The drafter the arguments ask for, or None."""
    ngram_min, dynamic = whole("ngram_match_min", ngram_min, 0), flag("dynamic_draft_tokens", dynamic)
    number("draft_confidence", confidence, 0, 1)
    if model is None and ngram_min <= 0:
        return None
    from exl3.generate.draft import ModelDrafter, NgramDrafter

    count = 4 if count is None else whole("num_draft_tokens", count, 0)
    if count < 1:
        return None
    if model is not None:
        if ngram_min > 0:
            warnings.warn("both a draft model and n-gram drafts were asked for: the draft model is used", stacklevel=3)
        return ModelDrafter(generator, model, cache, count, dynamic)
    return NgramDrafter(count, ngram_min, dynamic)
