"""The stand-in for exllamav3, called as TabbyAPI and text-generation-webui call the original."""

import asyncio
import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import exl3
from exl3.integrations import exllamav3 as shim
from exl3.integrations.exllamav3.names import MODULES


@pytest.fixture(autouse=True)
def installed():
    shim.install()
    shim.install()
    yield
    shim.uninstall()
    assert importlib.util.find_spec("exllamav3") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("exllamav3")


@pytest.fixture(scope="module")
def whole(model_dir):
    """Right answers: greedy continuations from whole-sequence logits."""
    model = exl3.load(model_dir, device="cpu")

    def greedy(ids, n):
        ids = list(ids)
        for _ in range(n):
            ids.append(int(model.logits([ids])[0, -1].argmax()))
        return ids[-n:]

    greedy.logits = model.logits
    return greedy


def test_every_name_is_there():
    from packaging.version import Version

    assert importlib.util.find_spec("exllamav3") is not None
    version = importlib.import_module("exllamav3.version").__version__
    assert Version(version) >= Version("1.4.1")
    assert importlib.metadata.version("exllamav3") == version
    for module, names in MODULES.items():
        if module == "integration.transformers":
            continue
        loaded = importlib.import_module(f"exllamav3.{module}".rstrip("."))
        for name in names:
            assert getattr(loaded, name) is not None, (module, name)
    import exllamav3

    assert exllamav3.generator.sampler.SS_TopK is exllamav3.SS_TopK
    assert exllamav3.constants.PAGE_SIZE == 256
    namespace = {}
    exec("from exllamav3 import *", namespace)
    assert {"Config", "Model", "SS_DRY", "ComboSampler", "dry_sequence_breaker_tokens"} <= set(namespace)
    with pytest.raises(AttributeError, match="no_such_name"):
        exllamav3.no_such_name  # noqa: B018


def load_pair(model_dir, tokens=2048, **cache):
    from exllamav3 import Cache, Config, Model, Tokenizer

    config = Config.from_directory(model_dir)
    model = Model.from_config(config)
    made = Cache(model, max_num_tokens=tokens, **cache)
    assert not made.initialized
    model.load(device="cpu")
    assert made.initialized
    return config, model, made, Tokenizer.from_config(config)


def test_as_tabbyapi_calls_it(model_dir, whole):
    from exllamav3 import AsyncGenerator, AsyncJob, Cache, Config, LLGuidanceFilter, Model, Tokenizer
    from exllamav3.cache import CacheLayer_quant
    from exllamav3.generator.sampler import (
        CustomSampler,
        SS_Argmax,
        SS_MinP,
        SS_PresFreqP,
        SS_RepP,
        SS_Sample,
        SS_Temperature,
        SS_TopK,
        SS_TopP,
    )

    config = Config.from_directory(model_dir)
    config.infer_params.moe_cpu_offload = 0
    assert "vision" not in config.model_classes and set(config.eos_token_id_list) == {257, 259}
    model = Model.from_config(config)
    assert not model.caps.get("recurrent_states") and model.caps.get("default_draft_size", 4) == 4
    quantized = Cache(model, max_num_tokens=512, layer_type=CacheLayer_quant, k_bits=8, v_bits=5, max_batch_size=4, max_history=0)
    cache = Cache(model, max_num_tokens=1024, max_batch_size=4, max_history=0)
    tokenizer = Tokenizer.from_config(config)
    progress = []

    def load():
        with torch.inference_mode():
            for value in model.load_gen(
                reserve_per_device=[0.1], callback=lambda a, b: progress.append((a, b)), tensor_p=False, tp_backend="native",
                max_chunk_size=256, max_batch_size=4,
            ):  # fmt: skip
                if value:
                    assert 0 <= value[0] <= value[1]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(load).result()
    assert progress[-1][0] == progress[-1][1] and quantized.initialized

    async def main():
        generator = AsyncGenerator(
            model=model, cache=cache, draft_model=None, draft_cache=None, tokenizer=tokenizer, max_batch_size=4, max_chunk_size=256,
            recurrent_cache_size=1 << 30, cpu_cache_size=0, num_draft_tokens=None, dynamic_draft_tokens=False, ngram_match_min=0,
        )  # fmt: skip
        assert generator.generator.max_batch_size == 4 and generator.generator.recurrent_cache is None
        ids = tokenizer.encode("Hello there", add_bos=True, encode_special_tokens=True, embeddings=[])
        assert ids.shape[0] == 1 and ids[0, 0] == tokenizer.bos_token_id == 256

        async def job(sampler, **options):
            made = AsyncJob(
                generator, sampler=sampler, input_ids=[ids], min_new_tokens=0, token_healing=False, decode_special_tokens=True,
                banned_strings=[], embeddings=[], return_top_tokens=2, return_probs=True, stop_on_loop=(800, 2),
                **{"max_rq_tokens": 256, **options},
            )  # fmt: skip
            results = [r async for r in made]
            assert made.queue.empty() and not made.cancelled
            return results

        steps = [SS_RepP(1.0, 1024, 1), SS_PresFreqP(0.0, 0.0, 1024, 1), SS_Temperature(1.0), SS_TopK(0), SS_TopP(1.0), SS_MinP(0.0)]
        results = await job(CustomSampler([*steps, SS_Argmax()]), max_new_tokens=20, stop_conditions=[])
        got = [t for r in results for t in r.get("token_ids", torch.zeros(1, 0, dtype=torch.long))[0].tolist()]
        assert got == whole(ids[0].tolist(), 20)
        assert results[0]["stage"] == "started" and not results[0]["eos"]
        streaming = [r for r in results if "token_ids" in r]
        for r in streaming:
            n = r["token_ids"].shape[1]
            assert r["token_probs"].shape == (1, n) and r["top_k_tokens"].shape == (1, n, 2) == r["top_k_probs"].shape
        last = results[-1]
        text = "".join(r.get("text", "") for r in results)
        assert last["full_completion"] == text == tokenizer.decode(torch.tensor([got]), decode_special_tokens=True)[0]
        assert last["eos"] and last["eos_reason"] == "max_new_tokens"
        assert last["prompt_tokens"] == ids.shape[1] and last["new_tokens"] == 20 and last["cached_tokens"] == 0
        assert all(last[k] >= 0 for k in ("time_prefill", "time_generate", "time_enqueued"))
        stop = chr(0x100 + 0)  # some text that can't come
        again = await job(CustomSampler([*steps, SS_Sample()]), max_new_tokens=5, stop_conditions=[257, stop, None])
        assert again[-1]["cached_tokens"] == ids.shape[1] - 1
        if importlib.util.find_spec("llguidance") is not None:
            grammar = LLGuidanceFilter(tokenizer, eos_after_completed=True, regex="(yes|no)", trigger_token=None)
            held = await job(CustomSampler([*steps, SS_Sample()]), max_new_tokens=20, stop_conditions=[257], filters=[grammar])
            assert "".join(r.get("text", "") for r in held) in ("yes", "no")
        with pytest.raises(AssertionError, match="cannot be enqueued"):
            await job(CustomSampler([SS_Argmax()]), max_new_tokens=2000, stop_conditions=[], max_rq_tokens=None)
        gone = AsyncJob(generator, sampler=CustomSampler([SS_Argmax()]), input_ids=[ids], max_new_tokens=500, stop_conditions=[])
        await gone.cancel()
        while not gone.queue.empty():
            gone.queue.get_nowait()
        model.unload()
        await generator.close()

    asyncio.run(main())
    assert not cache.initialized
    model.load(device="cpu")  # and once more
    assert cache.initialized


def test_as_text_generation_webui_calls_it(model_dir, whole):
    from exllamav3 import Cache, Config, Generator, Model, Tokenizer
    from exllamav3.cache import CacheLayer_fp16
    from exllamav3.generator import Job
    from exllamav3.generator.filter import Filter
    from exllamav3.generator.sampler import CustomSampler, SS_Argmax, SS_Temperature, SS_TopP
    from exllamav3.tokenizer.mm_embedding import FIRST_MM_EMBEDDING_INDEX, global_allocator

    assert global_allocator.next_token_index == FIRST_MM_EMBEDDING_INDEX == 1_000_000_000

    class LogitBias(Filter):
        def __init__(self, tokenizer, bias):
            super().__init__(tokenizer=tokenizer, trigger_token=None, prefix_str=None, eos_after_completed=False)
            self.bias = bias

        def reset(self):
            pass

        def accept_token(self, token):
            pass

        def is_completed(self):
            return False

        def use_background_worker(self):
            return False

        def get_next_logit_mask(self):
            mask = torch.zeros((1, self.vocab_size), dtype=self.logits_dtype)
            for token, value in self.bias.items():
                mask[0, token] = value
            return mask

    config = Config.from_directory(model_dir)
    assert config.vocab_size == 260 and "vision_config" not in config.config_dict
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=1024, layer_type=CacheLayer_fp16)
    model.load(progressbar=True, use_per_device=None, tensor_p=False, tp_backend="native")
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(model=model, cache=cache, tokenizer=tokenizer, draft_model=None, draft_cache=None, num_speculative_tokens=0)
    ids = tokenizer.encode("abc", add_bos=False)
    job = Job(
        input_ids=ids, max_new_tokens=12, decode_special_tokens=True, embeddings=None,
        sampler=CustomSampler([SS_Temperature(0.7), SS_TopP(0.9), SS_Argmax()]),
        seed=5, stop_conditions=None, filters=None, return_top_tokens=0, return_probs=False,
    )  # fmt: skip
    biased = Job(input_ids=ids, max_new_tokens=4, sampler=CustomSampler([SS_Argmax()]), filters=[LogitBias(tokenizer, {65: 90.0})])
    generator.enqueue(job)
    generator.enqueue(biased)
    queues = {job: [], biased: []}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            queues[result["job"]].append(result)
    got = [t for r in queues[job] for t in r.get("token_ids", torch.zeros(1, 0, dtype=torch.long))[0].tolist()]
    assert got == whole(ids[0].tolist(), 12)
    assert [t for r in queues[biased] if "token_ids" in r for t in r["token_ids"][0].tolist()] == [65] * 4
    generator.cancel(job)
    generator.clear_queue()

    # the Hugging Face wrapper: forward with the cache, in pieces
    seq = list(range(20, 90))
    want = whole.logits([seq])[0]
    model.prefill(torch.tensor([seq[:40]]), params={"attn_mode": "flash_attn", "cache": cache, "past_len": 0, "batch_shape": (1, 1024)})
    out = model.forward(
        torch.tensor([seq[40:]]), params={"attn_mode": "flash_attn", "cache": cache, "past_len": 40, "batch_shape": (1, 1024)}
    )
    assert out.shape == (1, 30, 260) and out.dtype == torch.half
    torch.testing.assert_close(out[0].float(), want[40:], atol=0.05, rtol=0.01)
    last = model.forward(torch.tensor([seq]), params={"attn_mode": "flash_attn_nc", "last_tokens_only": 1})
    torch.testing.assert_close(last[0].float(), want[-1:], atol=0.02, rtol=0.01)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    paged = {"attn_mode": "flash_attn", "cache": cache, "block_table": table, "cache_seqlens": torch.zeros(1, dtype=torch.int32)}
    torch.testing.assert_close(model.forward(torch.tensor([seq]), params=paged)[0].float(), want, atol=0.05, rtol=0.01)
    model.unload()
    with pytest.raises(RuntimeError, match="not loaded"):
        model.forward(torch.tensor([seq]))


def test_generate_and_draft(model_dir):
    from exllamav3 import Generator, GreedySampler

    _, model, cache, tokenizer = load_pair(model_dir)
    _, draft, draft_cache, _ = load_pair(model_dir)
    plain = Generator(model, cache, tokenizer).generate("abc", max_new_tokens=16, sampler=GreedySampler(), completion_only=True)
    generator = Generator(model=model, cache=cache, tokenizer=tokenizer, draft_model=draft, draft_cache=draft_cache, num_draft_tokens=3)
    text, last = generator.generate("abc", max_new_tokens=16, sampler=GreedySampler(), completion_only=True, return_last_results=True)
    assert text == plain and last["accepted_draft_tokens"] > 8 and last["new_tokens"] == 16
    with pytest.warns(UserWarning, match="no_such_argument"):
        Generator(model=model, cache=draft_cache, tokenizer=tokenizer, max_batch_size=None, no_such_argument=1)
    assert generator.generate(("a", "b"), max_new_tokens=1, sampler=GreedySampler())[1].startswith("b")


def test_tokenizer(model_dir):
    from exllamav3 import Config, Tokenizer

    t = Tokenizer.from_config(Config.from_directory(model_dir))
    assert t.encode("ab").shape == (1, 2) and t.encode("ab").dtype == torch.int64
    both = t.encode(["a", "abc"], add_eos=True)
    assert both.shape == (2, 4) and both[0, :2].tolist() == [t.pad_token_id] * 2 and both[1, -1] == 257
    assert t.encode("<|im_end|>", encode_special_tokens=True).tolist() == [[259]]
    assert t.encode("<|im_end|>").shape[1] == len("<|im_end|>")
    assert t.decode(torch.tensor([259, 64]), decode_special_tokens=True).startswith("<|im_end|>")
    assert t.decode(t.encode(["héé", "x"])) == ["héé", "x"]
    assert t.single_id("<|im_end|>") == 259 and t.single_id("no such") is None
    pieces = t.get_id_to_piece_list(True)
    assert pieces[259] == "<|im_end|>" and t.get_id_to_piece_list()[259] == "" and len(pieces) == 260
    assert t.decode(t.hf_chat_template([{"role": "user", "content": "hi"}])[0], decode_special_tokens=True).endswith(
        "<|im_start|>assistant\n"
    )
    assert t.actual_vocab_size == 260 and t.bos_token == "<s>" and t.newline_token_id is not None


def test_model_init(model_dir):
    import argparse

    from exllamav3 import model_init

    parser = argparse.ArgumentParser()
    model_init.add_args(parser, add_sampling_args=True, add_draft_model_args=True)
    args = parser.parse_args(["-m", model_dir, "-cs", "512", "-cq", "8,4", "-temp", "0.5", "-dm", model_dir, "-nw"])
    _, _, cache, tokenizer, _, _, draft_cache = model_init.init(args)
    assert (
        cache.max_num_tokens == 512 and (cache.k_bits, cache.v_bits) == (8, 4) and draft_cache.initialized and tokenizer.bos_token_id == 256
    )
    assert model_init.get_arg_sampler(args).plan() is not None
    for refused in (["-tp"], ["-mcl", "3"], ["-dcd", "x"]):
        with pytest.raises(NotImplementedError, match="not supported"):
            model_init.init(parser.parse_args(["-m", model_dir, *refused]))


@pytest.mark.parametrize(
    "call",
    [
        "Model.from_config(config, component='vision')", "MMEmbedding(None, None)", "FormatronFilter(None)",
        "LoRA.from_directory(None, 'x')",
        "Config.from_directory(config.directory, layer_map='0..1')", "VariantSafetensorsCollection('x')", "RecurrentCache(1)",
        "Cache(model, 256, CacheLayer_MLA_fp16)", "model.load(tensor_p=True)", "offload()",
        "Generator(model, cache, tokenizer, cpu_cache_size=1)",
    ],
)  # fmt: skip
def test_what_is_missing_refuses_by_name(model_dir, call):
    import exllamav3

    names = {}
    for module in ("", "cache", "model.lora", "loader"):
        loaded = importlib.import_module(f"exllamav3.{module}".rstrip("."))
        names |= {n: getattr(loaded, n) for n in MODULES[module]}
    config = exllamav3.Config.from_directory(model_dir)
    model = exllamav3.Model.from_config(config)

    def offload():
        config.infer_params.moe_cpu_offload = 4
        model.load()

    if call.startswith("Generator"):
        _, model, names["cache"], names["tokenizer"] = load_pair(model_dir, 256)
    with pytest.raises(NotImplementedError):
        eval(call, {**names, "config": config, "model": model, "offload": offload})


def test_tensor_collection_and_helpers(model_dir):
    from exllamav3.loader import SafetensorsCollection
    from exllamav3.util import Timer
    from exllamav3.util.memory import free_mem

    stc = SafetensorsCollection(model_dir)
    assert stc.has_tensor("lm_head.weight") and stc.get_tensor("nothing", optional=True) is None
    assert stc.get_tensor("model.norm.weight").shape == (64,) and "model.layers.0.mlp.up_proj.weight" in stc.list_tensors("model.layers.0")
    with Timer() as t:
        free_mem()
    assert t.interval > 0


def test_program_runs_unchanged(model_dir, tmp_path, whole):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import sys
        from exllamav3 import Cache, Config, Generator, GreedySampler, Job, Model, Tokenizer
        config = Config.from_directory({model_dir!r})
        model = Model.from_config(config)
        cache = Cache(model, max_num_tokens=512)
        model.load()
        tokenizer = Tokenizer.from_config(config)
        generator = Generator(model, cache, tokenizer)
        job = Job(tokenizer.encode(sys.argv[1]), max_new_tokens=6, sampler=GreedySampler())
        generator.enqueue(job)
        ids = []
        while generator.num_remaining_jobs():
            for r in generator.iterate():
                ids += r["token_ids"][0].tolist() if "token_ids" in r else []
        print("RESULT", ids)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "exl3.integrations.exllamav3", str(program), "abc"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    from exllamav3 import Config, Tokenizer

    ids = Tokenizer.from_config(Config.from_directory(model_dir)).encode("abc")[0].tolist()
    assert f"RESULT {whole(ids, 6)}" in done.stdout
    assert np.array(ids).size == 3
