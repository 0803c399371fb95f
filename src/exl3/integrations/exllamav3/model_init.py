"""The command-line options that exllamav3's scripts share: `add_args`, `init`, `get_arg_sampler`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from exl3.errors import ArgumentError, UnsupportedError
from exl3.generate.presets import ComboSampler
from exl3.integrations.exllamav3.cache import Cache, CacheLayer_fp16, CacheLayer_quant
from exl3.integrations.exllamav3.config import Config
from exl3.integrations.exllamav3.model import Model
from exl3.integrations.exllamav3.tokenizer import Tokenizer

default_sampling_args = {
    "temperature": 0.8, "temperature_first": False, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "penalty_range": 1024, "min_p": 0.08, "top_k": 0, "top_p": 1.0, "adaptive_target": 1.0, "adaptive_decay": 0.9,
}  # fmt: skip

# options of parts that exl3 lacks: flags, default, help
_REFUSED: list[tuple[tuple[str, ...], Any]] = [
    (("-or", "--override"), None), (("-layer_map", "--layer_map"), None), (("-tp", "--tensor_parallel"), False),
    (("-mcl", "--moe_cpu_layers"), 0), (("-mcs", "--moe_cpu_split"), 0), (("-mcpa", "--moe_cpu_pinned_arena"), False),
    (("-embd", "--embed_disk"), False), (("-dcd", "--disk_cache_dir"), None), (("-mtp", "--mtp_draft"), False),
    (("-ngram_corpus", "--ngram_corpus"), None), (("-hdt", "--hybrid_draft_tokens"), 0), (("-sdh", "--sparse_draft_head"), 0),
    (("-dmcl", "--draft_moe_cpu_layers"), 0),
]  # fmt: skip
# options that change nothing here
_IGNORED: list[tuple[tuple[str, ...], Any, type | None]] = [
    (("-lm", "--load_metrics"), False, None), (("-lv", "--load_verbose"), False, None), (("-nw", "--no_warmup"), False, None),
    (("-swa_full", "--swa_full"), False, None), (("-ambs", "--autosplit_max_batch_size"), 1, int),
    (("-asnf", "--autosplit_no_forward"), False, None), (("-tpb", "--tp_backend"), "native", str),
    (("-tp_attn", "--tp_max_parallelism_attn"), None, int),
    (("-tp_mlp", "--tp_max_parallelism_mlp"), None, int), (("-tp_moe", "--tp_max_parallelism_moe"), None, int),
    (("-tp_linear", "--tp_max_parallelism_linear"), None, int), (("-tp_linear_attn", "--tp_max_parallelism_linear_attn"), None, int),
    (("-tp_moe_ts", "--tp_moe_tensor_split"), False, None), (("-mct", "--moe_cpu_threads"), None, int),
    (("-ngl", "--ngram_lock"), False, None), (("-ngr", "--ngram_ram"), False, None),
]  # fmt: skip


def _add(parser: Any, flags: tuple[str, ...], default: Any, kind: type | None = None, text: str = "") -> None:
    if default is False:
        parser.add_argument(*flags, action="store_true", help=text)
    else:
        parser.add_argument(*flags, type=kind or str, default=default, help=text)


def add_args(
    parser: ArgumentParser,
    cache: bool = True,
    default_cache_size: int = 8192,
    default_recurrent_cache_size: float = 4.0,
    default_cpu_cache_size: float = 0,
    default_disk_cache_size: float = 50,
    add_sampling_args: bool = False,
    default_sampling_args: dict[str, Any] = default_sampling_args,
    default_autosplit_max_batch_size: int = 1,
    add_draft_model_args: bool = False,
    default_chunk_size: int = 4096,
) -> None:
    """Adds the options to a parser."""
    parser.add_argument("-m", "--model_dir", type=str, required=True, help="model directory")
    parser.add_argument("-gs", "--gpu_split", type=str, default="auto", help="auto, or GB for each GPU, comma-separated")
    parser.add_argument("-chunk_size", "--chunk_size", type=int, default=default_chunk_size, help="prompt tokens in one pass")
    for flags, default in _REFUSED:
        _add(parser, flags, default, int if default == 0 and default is not False else str, "not supported yet")
    for flags, default, kind in _IGNORED:
        _add(parser, flags, default, kind, "accepted, changes nothing")
    if cache:
        parser.add_argument("-cs", "--cache_size", type=int, default=default_cache_size, help="cache size in tokens")
        parser.add_argument("-cq", "--cache_quant", type=str, help="bits of keys and values: k or k,v")
        parser.add_argument("-cca", "--cache_compand_a", type=float, default=0.0, help="compander of a quantized cache")
        parser.add_argument("-rs32", "--recurrent_state_fp32", action="store_true", help="accepted, changes nothing")
        parser.add_argument("-ccs", "--cpu_cache_size", type=float, default=default_cpu_cache_size, help="not supported yet")
        parser.add_argument("-dcs", "--disk_cache_size", type=float, default=default_disk_cache_size, help="accepted, changes nothing")
        parser.add_argument(
            "-rcs", "--recurrent_cache_size", type=float, default=default_recurrent_cache_size, help="accepted, changes nothing"
        )
    if add_sampling_args:
        _add_sampling(parser, default_sampling_args)
    if add_draft_model_args:
        parser.add_argument("-dm", "--draft_model_dir", type=str, help="draft model directory")
        parser.add_argument("-ndt", "--num_draft_tokens", type=int, default=None, help="tokens in a draft")
        parser.add_argument("-ngram", "--ngram_match_min", type=int, default=0, help="n-gram drafts: shortest match")
        parser.add_argument("-dds", "--dynamic_draft_tokens", action="store_true", help="adapt the draft's length")
        parser.add_argument("-dc", "--draft_confidence", type=float, default=0.4, help="accepted, changes nothing")


def _add_sampling(parser: ArgumentParser, d: dict[str, Any]) -> None:
    d = {**default_sampling_args, **d}
    parser.add_argument("-temp", "--temperature", type=float, default=d["temperature"])
    parser.add_argument("-temp_first", "--temperature_first", action="store_true", default=d["temperature_first"])
    parser.add_argument("-repp", "--repetition_penalty", type=float, default=d["repetition_penalty"])
    parser.add_argument("-presp", "--presence_penalty", type=float, default=d["presence_penalty"])
    parser.add_argument("-freqp", "--frequency_penalty", type=float, default=d["frequency_penalty"])
    parser.add_argument("-penr", "--penalty_range", type=int, default=d["penalty_range"])
    parser.add_argument("-minp", "--min_p", type=float, default=d["min_p"])
    parser.add_argument("-topk", "--top_k", type=int, default=d["top_k"])
    parser.add_argument("-topp", "--top_p", type=float, default=d["top_p"])
    parser.add_argument("-adaptive_target", "--adaptive_target", type=float, default=d["adaptive_target"])
    parser.add_argument("-adaptive_decay", "--adaptive_decay", type=float, default=d["adaptive_decay"])


def get_arg_sampler(args: Namespace) -> ComboSampler:
    """The sampler the options describe."""
    return ComboSampler(
        rep_p=args.repetition_penalty, pres_p=args.presence_penalty, freq_p=args.frequency_penalty, rep_sustain_range=args.penalty_range,
        rep_decay_range=args.penalty_range, temperature=args.temperature, min_p=args.min_p, top_k=args.top_k, top_p=args.top_p,
        temp_last=not args.temperature_first, adaptive_target=args.adaptive_target, adaptive_decay=args.adaptive_decay,
    )  # fmt: skip


def _cache(model: Model, args: Namespace) -> Cache | None:
    if not hasattr(args, "cache_size"):
        return None
    if args.cpu_cache_size:
        raise UnsupportedError("--cpu_cache_size is not supported by exl3 yet")
    if args.cache_quant is None:
        return Cache(model, max_num_tokens=args.cache_size, layer_type=CacheLayer_fp16)
    try:
        bits = [int(b) for b in args.cache_quant.split(",")]
    except ValueError:
        bits = []
    if len(bits) not in (1, 2):
        raise ArgumentError(f"--cache_quant {args.cache_quant!r}: bits for keys and values are needed, as 8 or 8,6")
    return Cache(model, args.cache_size, CacheLayer_quant, k_bits=bits[0], v_bits=bits[-1], compand_a=args.cache_compand_a)


def init(
    args: Namespace,
    load_tokenizer: bool = True,
    quiet: bool = False,
    progress: bool = True,
    override_dynamic_seq_len: int | None = None,
    min_draft_len: int = 0,
    **load_kwargs: Any,
) -> tuple[Any, ...]:
    """Loads what the options name: (model, config, cache, tokenizer), with draft options also (draft_model, draft_config, draft_cache)."""
    for flags, default in _REFUSED:
        name = flags[1].lstrip("-")
        if getattr(args, name, default) not in (default, None):
            raise UnsupportedError(f"{flags[1]} is not supported by exl3 yet")
    split = None if args.gpu_split in (None, "auto") else [float(x) for x in args.gpu_split.split(",")]

    def load(directory: str) -> tuple[Model, Config, Cache | None]:
        config = Config.from_directory(directory)
        model = Model.from_config(config)
        cache = _cache(model, args)
        model.load(use_per_device=split, **load_kwargs)
        return model, config, cache

    model, config, cache = load(args.model_dir)
    tokenizer = Tokenizer.from_config(config) if load_tokenizer else None
    if not hasattr(args, "draft_model_dir"):
        return model, config, cache, tokenizer
    draft: tuple[Any, Any, Any] = load(args.draft_model_dir) if args.draft_model_dir else (None, None, None)
    return model, config, cache, tokenizer, *draft
