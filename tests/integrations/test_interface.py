"""Names, arguments, options, result keys and error texts of exllamav3 1.6.5, each checked against the stand-in."""

import argparse
import importlib
import inspect

import pytest
import torch

from exl3.integrations import exllamav3 as shim


def named(**parameters):
    return parameters


ROOT = """Config Model Tokenizer MMEmbedding Cache CacheLayer_fp16 CacheLayer_quant Generator Job AsyncGenerator AsyncJob Filter
FormatronFilter LLGuidanceFilter Sampler CustomSampler SS_Base SS_Argmax SS_Sample SS_Sample_mn SS_Temperature SS_Normalize SS_Sort SS_MinP
SS_TopK SS_TopP SS_NoOp SS_RepP SS_PresFreqP SS_DRY SS_XTC SS_AdaptiveP SS_BanTokens SS_LogitBias DefaultSampler ArgmaxSampler GreedySampler
CategoricalSampler GumbelSampler TopKSampler TopPSampler ComboSampler AdaptivePSampler
xtc_default_protected_token_ids dry_default_sequence_breaker_tokens
dry_sequence_breaker_tokens __version__"""
SAMPLERS = ROOT[ROOT.index("Sampler CustomSampler") :].replace("__version__", "")
MODULES = {
    "": ROOT,
    "model_init": "add_args init get_arg_sampler",
    "cache": "Cache CacheLayer CacheLayer_fp16 CacheLayer_quant CacheLayer_MLA_fp16 CacheLayer_MLA_quant CacheLayer_dsa RecurrentCache",
    "tokenizer": "Tokenizer MMEmbedding FIRST_MM_EMBEDDING_INDEX global_allocator",
    "tokenizer.mm_embedding": "MMEmbedding FIRST_MM_EMBEDDING_INDEX global_allocator",
    "generator": "Generator Job AsyncGenerator AsyncJob",
    "generator.sampler": SAMPLERS,
    "generator.sampler.custom": "CustomSampler SS_Base SS_Argmax SS_TopP SS_Sample",
    "generator.filter": "Filter FormatronFilter LLGuidanceFilter",
    "generator.filter.llguidance": "LLGuidanceFilter llguidance_available",
    "model.lora": "LoRA",
    "loader": "SafetensorsCollection VariantSafetensorsCollection",
    "version": "__version__",
    "util": "Timer",
    "util.memory": "free_mem",
    "constants": "PAGE_SIZE MAX_MLP_INTERMEDIATE",
}
GENERATOR = named(
    max_batch_size=256, max_chunk_size=2048, shared_chunk_size=None, prefill_cooldown=4, max_q_size=8, draft_model=None, draft_cache=None,
    num_draft_tokens=None, dynamic_draft_tokens=False, draft_confidence=0.4, ngram_match_min=0, ngram_corpus=None, hybrid_draft_tokens=0,
    draft_max_rows=0, sparse_draft_head=0, record_draft_stats=False, enable_defrag=True, show_visualizer=False, cpu_cache_size=0,
    disk_cache_dir=None, disk_cache_size=50 << 30, disk_cache_flush_on_idle=True, disk_cache_checkpoint_interval=4096,
    disk_cache_write_interval=2.0, recurrent_cache_size=4 << 30, recurrent_checkpoint_interval=None, recurrent_checkpoint_interval_pp=32768,
)  # fmt: skip
JOB = named(
    max_new_tokens=None, min_new_tokens=0, max_skips=4, sampler=None, seed=None, stop_conditions=None, decode_special_tokens=False,
    return_top_tokens=0, return_logits=False, return_probs=False, filters=None, token_healing=False, identifier=None, banned_strings=None,
    embeddings=None, max_rq_tokens=None, stop_on_loop=None, rq_state=None,
)  # fmt: skip
LOAD = named(
    device=None, reserve_per_device=None, use_per_device=None, tensor_p=False, tp_output_device=None, tp_backend="native",
    tp_dev_limits=None, tp_options=None, max_chunk_size=2048, max_batch_size=1, max_output_size=32, max_output_factor=1,
    autosplit_no_forward=False,
    draft_model=None, progressbar=False, verbose=False, callback=None,
)  # fmt: skip
COMBO = dict.fromkeys(
    """rep_p freq_p pres_p rep_sustain_range rep_decay_range dry_multiplier dry_base dry_allowed_length dry_range dry_sequence_breakers
    temperature min_p top_k top_p temp_last adaptive_target adaptive_decay logit_bias""".split(),
    ...,
) | named(temperature=1, min_p=0, top_k=0, top_p=1, temp_last=False, adaptive_target=1, adaptive_decay=0.9)
REQUIRED = object()
FILTER = named(tokenizer=REQUIRED, trigger_token=None, prefix_str=None, eos_after_completed=False)
# callable -> parameters in order, with defaults; ...: any default
SIGNATURES = {
    "Config.from_directory": named(directory=REQUIRED),
    "Model.from_config": named(config=REQUIRED, component="text"),
    "Model.load_gen": LOAD,
    "Model.warmup": named(
        cache=None, max_chunk_size=2048, max_batch_size=8, max_q_len=16, long_context=True, progressbar=False, callback=None, verbose=False
    ),
    "Model.forward": named(input_ids=REQUIRED, params=...),
    "Model.prefill": named(input_ids=REQUIRED, params=...),
    "Model.default_chat_prompt": named(prompt=REQUIRED, system_prompt=None),
    "Cache": named(model=REQUIRED, max_num_tokens=REQUIRED, layer_type=None, max_batch_size=16, max_history=0, recurrent_dtype=torch.half),
    "Tokenizer.from_config": named(config=REQUIRED),
    "Tokenizer.encode": named(
        text=REQUIRED, add_bos=False, add_eos=False, encode_special_tokens=False, return_offsets=False, embeddings=None
    ),
    "Tokenizer.decode": named(ids=REQUIRED, decode_special_tokens=False),
    "Tokenizer.get_id_to_piece_list": named(include_special_tokens=False),
    "Tokenizer.hf_chat_template": named(messages=REQUIRED, add_generation_prompt=True, embeddings=None),
    "Tokenizer.hf_render_chat_template": named(messages=REQUIRED, add_generation_prompt=True),
    "Generator": named(model=REQUIRED, cache=REQUIRED, tokenizer=REQUIRED) | GENERATOR,
    "Generator.generate": named(prompt=REQUIRED) | dict.fromkeys(
        """max_new_tokens min_new_tokens seed sampler token_healing encode_special_tokens decode_special_tokens stop_conditions add_bos
        abort_event completion_only filters return_last_results embeddings max_rq_tokens stop_on_loop""".split(), ...
    ),
    "Generator.flush_cache_to_disk": named(wait=False, max_pages=None),
    "Job": named(input_ids=REQUIRED) | JOB,
    "CustomSampler.forward": named(
        logits=REQUIRED, sequence_ids=None, rand_u32=None, tokenizer=None, logit_mask=None, return_state=False
    ),
    "SS_Temperature": named(temperature=REQUIRED), "SS_MinP": named(min_p=REQUIRED), "SS_TopP": named(top_p=REQUIRED),
    "SS_TopK": named(top_k=REQUIRED), "SS_RepP": named(rep_p=1.0, sustain_range=10**8, decay_range=0),
    "SS_PresFreqP": named(pres_p=0, freq_p=0, sustain_range=10**8, decay_range=0),
    "SS_DRY": named(
        dry_multiplier=0, dry_base=1.75, dry_allowed_length=2, dry_range=0, dry_sequence_breakers=None, tokenizer=None
    ),
    "SS_XTC": named(probability=REQUIRED, threshold=REQUIRED, protected_token_ids=None, tokenizer=None),
    "SS_AdaptiveP": named(target=1.0, decay=0.0),
    "CategoricalSampler": named(temperature=1), "TopKSampler": named(top_k=REQUIRED, temperature=1),
    "TopPSampler": named(top_p=REQUIRED, temperature=1, temperature_last=False),
    "AdaptivePSampler": named(min_p=0.08, target=0.5, decay=0.9),
    "ComboSampler": COMBO, "DefaultSampler": {}, "ArgmaxSampler": {},
    "Filter": FILTER,
    "LLGuidanceFilter": FILTER | named(
        json_schema=None, regex=None, lark_grammar=None, gbnf_grammar=None, llg_grammar=None, consume_prefix=False
    ),
    "model.lora.LoRA.from_directory": named(model=REQUIRED, directory=REQUIRED, lora_scaling=1.0),
    "model_init.add_args": named(
        parser=REQUIRED, cache=True, default_cache_size=8192, default_recurrent_cache_size=4.0, default_cpu_cache_size=0,
        default_disk_cache_size=50, add_sampling_args=False, default_sampling_args=..., default_autosplit_max_batch_size=1,
        add_draft_model_args=False, default_chunk_size=4096,
    ),
    "model_init.init": dict.fromkeys("args load_tokenizer quiet progress override_dynamic_seq_len min_draft_len".split(), ...),
    "model_init.get_arg_sampler": named(args=REQUIRED),
}  # fmt: skip
METHODS = {
    "Model": "load unload forward prefill warmup get_cache_layers get_recurrent_layers get_name get_storage_info default_chat_prompt",
    "Generator": """enqueue cancel iterate clear_queue num_remaining_jobs num_active_jobs num_pending_jobs close flush_cache_to_disk
        has_idle_work idle_work get_cache_stats generate""",
    "Job": "constrain_output_now set_sampler set_filters set_banned_strings",
    "AsyncGenerator": "enqueue cancel close",
    "AsyncJob": "cancel __aiter__ constrain_output_now set_sampler set_filters set_banned_strings",
    "Tokenizer": """encode decode single_id single_token num_tokens padding_mask get_id_to_piece_list get_id_to_ord_list
        get_piece_to_id_dict get_fixed_vocab get_vocab_dict get_tokens_with_prefix_string get_tokens_with_prefix_id
        hf_chat_template hf_render_chat_template""",
    "Filter": "attach feed rewind rollback_tokens reset accept_token get_next_logit_mask is_completed use_background_worker",
    "Cache": "attach_to_model detach_from_model copy_page get_all_tensors",
    "Config": "from_directory read_cfg assert_cfg override_dynamic_seq_len",
}
# (flag, attribute, default) of add_args with everything switched on
OPTIONS = [
    ("-m", "model_dir", "d"), ("-gs", "gpu_split", "auto"), ("-or", "override", None), ("-lm", "load_metrics", False),
    ("-lv", "load_verbose", False), ("-nw", "no_warmup", False), ("-swa_full", "swa_full", False), ("-chunk_size", "chunk_size", 4096),
    ("-layer_map", "layer_map", None),
    ("-ambs", "autosplit_max_batch_size", 1), ("-asnf", "autosplit_no_forward", False), ("-tp", "tensor_parallel", False),
    ("-tpb", "tp_backend", "native"), ("-tp_attn", ..., None), ("-tp_mlp", ..., None), ("-tp_moe", ..., None), ("-tp_linear", ..., None),
    ("-tp_linear_attn", ..., None), ("-tp_moe_ts", ..., False), ("-mcl", ..., 0), ("-mcs", ..., 0), ("-mcpa", ..., False),
    ("-mct", ..., None),
    ("-ngl", "ngram_lock", False), ("-ngr", "ngram_ram", False), ("-embd", "embed_disk", False), ("-cs", "cache_size", 8192),
    ("-cq", "cache_quant", None), ("-rs32", ..., False), ("-cca", ..., 0.0), ("-ccs", "cpu_cache_size", 0),
    ("-dcd", "disk_cache_dir", None),
    ("-dcs", "disk_cache_size", 50), ("-rcs", "recurrent_cache_size", 4.0), ("-temp", "temperature", 0.8), ("-temp_first", ..., False),
    ("-repp", ..., 1), ("-presp", ..., 0), ("-freqp", ..., 0), ("-penr", ..., 1024), ("-minp", "min_p", 0.08), ("-topk", "top_k", 0),
    ("-topp", "top_p", 1), ("-adaptive_target", "adaptive_target", 1), ("-adaptive_decay", "adaptive_decay", 0.9), ("-dm", ..., None),
    ("-ndt", "num_draft_tokens", None), ("-mtp", ..., False), ("-ngram", ..., 0), ("-hdt", ..., 0), ("-ngram_corpus", ..., None),
    ("-dds", ..., False), ("-sdh", ..., 0), ("-dc", "draft_confidence", 0.4), ("-dmcl", ..., 0),
]  # fmt: skip
ENDING = """eos_reason full_completion new_tokens prompt_tokens time_enqueued time_prefill time_generate cached_pages cached_tokens"""
CACHE_STATS = """page_size max_tokens used_tokens cached_tokens free_tokens tier_cached_tokens tier_max_tokens disk_cached_tokens disk_pages
disk_states disk_used_bytes disk_max_bytes alloc_pages alloc_prompt_pages alloc_cached_pages alloc_tier_pages alloc_disk_pages hit_rate
tier_hit_rate disk_hit_rate active_jobs pending_jobs"""


@pytest.fixture(autouse=True)
def installed():
    shim.install()
    yield
    shim.uninstall()


def find(path):
    found = importlib.import_module("exllamav3")
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_names(module):
    loaded = importlib.import_module(f"exllamav3.{module}".rstrip("."))
    for name in MODULES[module].split():
        assert getattr(loaded, name) is not None, name
    namespace = {}
    exec(f"from {loaded.__name__} import {', '.join(MODULES[module].split())}", namespace)


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments(path):
    got = {k: p for k, p in inspect.signature(find(path)).parameters.items() if k != "self"}
    for name, default in SIGNATURES[path].items():
        assert name in got, f"{path} lacks {name}"
        if default is REQUIRED:
            assert got[name].default is inspect.Parameter.empty, name
        elif default is not ...:
            assert got[name].default == default, (name, got[name].default)
    named = [n for n in got if n in SIGNATURES[path]]
    if path not in ("Model.load_gen", "Tokenizer.hf_render_chat_template"):  # called with keywords only
        assert named == list(SIGNATURES[path]), "another order"


@pytest.mark.parametrize("path", METHODS)
def test_methods(path):
    for name in METHODS[path].split():
        assert callable(getattr(find(path), name)), name


def test_options():
    from exllamav3 import model_init

    parser = argparse.ArgumentParser()
    model_init.add_args(parser, add_sampling_args=True, add_draft_model_args=True)
    args = parser.parse_args(["-m", "d"])
    actions = {flag: a for a in parser._actions for flag in a.option_strings}
    for flag, attribute, default in OPTIONS:
        assert flag in actions, flag
        action = actions[flag]
        assert attribute is ... or action.dest == attribute, (flag, action.dest)
        assert getattr(args, action.dest) == default, (flag, getattr(args, action.dest))
    assert set(actions) - {"-h", "--help"} <= {f for flag, _, _ in OPTIONS for f in actions[flag].option_strings}
    first = model_init.get_arg_sampler(parser.parse_args(["-m", "d", "-temp_first"]))
    assert [type(s).__name__ for s in first.steps] == ["SS_Temperature", "SS_MinP", "SS_Sample"]


@pytest.fixture
def engine(model_dir):
    from exllamav3 import Cache, Config, Generator, Model, Tokenizer

    config = Config.from_directory(model_dir)
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=1024)
    model.load(device="cpu")
    return Generator(model=model, cache=cache, tokenizer=Tokenizer.from_config(config))


def run(engine, **options):
    from exllamav3 import GreedySampler, Job

    job = Job(**{"input_ids": torch.tensor([[70, 71, 72]]), "max_new_tokens": 6, "sampler": GreedySampler(), **options})
    engine.enqueue(job)
    results = []
    while engine.num_remaining_jobs():
        results += engine.iterate()
    return job, results


def test_results(engine):
    job, results = run(engine, identifier="mine", return_probs=True, return_top_tokens=2, return_logits=True)
    assert [r["stage"] for r in results[:2]] == ["started", "prefill"] and {r["stage"] for r in results[2:]} == {"streaming"}
    for r in results:
        assert r["job"] is job and r["serial"] == job.serial_number and r["identifier"] == "mine" and r["eos"] == (r is results[-1])
    assert set(results[0]) == {"job", "stage", "eos", "serial", "identifier"}
    assert set(results[1]) - set(results[0]) == {"curr_progress", "max_progress"}
    shapes = {"token_ids": (1, 1), "token_probs": (1, 1), "top_k_tokens": (1, 1, 2), "top_k_probs": (1, 1, 2), "logits": (1, 1, 260)}
    for r in results[2:]:
        assert {k: tuple(r[k].shape) for k in shapes} == shapes
    assert set(ENDING.split()) <= set(results[-1]) and results[-1]["eos_reason"] == "max_new_tokens" and results[-1]["new_tokens"] == 6
    assert "identifier" not in run(engine)[1][0]
    ids = [r["token_ids"][0, 0].item() for r in results[2:]]
    text = engine.tokenizer.decode(torch.tensor(ids))
    _, stopped = run(engine, stop_conditions=[ids[3]])
    end = stopped[-1]
    assert end["eos_reason"] == "stop_token" and end["eos_triggering_token_id"] == ids[3] and "eos_triggering_token_str" in end
    assert end["cached_tokens"] == 2 and end["cached_pages"] == 0
    stop = next(c for c in text[1:] if text.index(c) > 0)
    _, stopped = run(engine, stop_conditions=[stop])
    assert stopped[-1]["eos_reason"] == "stop_string" and stopped[-1]["eos_triggering_string"] == stop
    _, looped = run(engine, max_new_tokens=600, stop_on_loop=(40, 2))
    assert looped[-1]["eos_reason"] in ("loop_detected", "max_new_tokens")
    _, banned = run(engine, banned_strings=[text[0]], max_new_tokens=3)
    assert any(text[0].lower() in r.get("suppressed_text", "").lower() and "suppressed_tokens" in r for r in banned)
    assert set(engine.get_cache_stats()) == set(CACHE_STATS.split())


def test_prompt_found_in_the_cache_counts_pages_apart(engine):
    prompt = torch.arange(3, 203).repeat(3)[None, :530]
    run(engine, input_ids=prompt)
    job, results = run(engine, input_ids=prompt)
    assert (job.cached_pages, job.cached_tokens) == (2, 17) and results[-1]["cached_tokens"] == 529


def test_error_texts(engine, model_dir):
    from exllamav3 import Cache, Generator, GreedySampler, Job, LLGuidanceFilter

    for length, new in ((2, 2000), (1500, 4)):
        with pytest.raises(AssertionError, match=r"requires \d+ pages .*cannot be enqueued"):
            engine.enqueue(Job(torch.zeros(1, length, dtype=torch.long), max_new_tokens=new))
    for call in (
        lambda: Job(torch.tensor([[1]]), max_new_tokens=0),
        lambda: Cache(engine.model_stand_in, 1000),
        lambda: engine.model_stand_in.load_gen(reserve_per_device=[1], use_per_device=[1]).__next__(),
        lambda: engine.model_stand_in.load_gen(device="cpu", use_per_device=[1]).__next__(),
        lambda: Generator(engine.model_stand_in, engine.cache, engine.tokenizer, recurrent_checkpoint_interval=100),
    ):
        engine.model_stand_in = getattr(engine, "model_stand_in", None) or stand_in(model_dir)
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(ValueError, match="one sequence"):
        Job([torch.tensor([[1, 2]]), torch.tensor([[1, 2]])], 4)
    with pytest.raises(ValueError, match="exactly one"):
        LLGuidanceFilter(engine.tokenizer)
    with pytest.warns(UserWarning, match="no_such"):
        Job(torch.tensor([[1]]), 4, no_such=1)
    engine.cancel(Job(torch.tensor([[1]]), 4))  # unknown: no error
    newer = Generator(engine.model, engine.cache, engine.tokenizer)
    with pytest.raises(RuntimeError, match="another Generator"):
        engine.iterate()
    assert newer.generate("a", max_new_tokens=2, sampler=GreedySampler())


def stand_in(model_dir):
    from exllamav3 import Config, Model

    return Model.from_config(Config.from_directory(model_dir))
