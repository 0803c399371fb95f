"""`Model` as exllamav3 has it: made from a `Config`, loaded later, called with `forward(ids, params)`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from exl3.cache import Batch
from exl3.errors import ArgumentError, JobError, UnsupportedError
from exl3.integrations.exllamav3.config import Config


class Model:
    """Made by `from_config`. `inner` is the `exl3.Model` once loaded."""

    def __init__(self, config: Config, component: str = "text", **kwargs: Any) -> None:
        if component != "text":
            raise UnsupportedError(f"Model: component {component!r} is not supported by exl3 yet; only 'text' is")
        self.config, self.component = config, component
        self.inner: Any = None
        self.caps: dict[str, Any] = {"supports_tp": False}
        self.cache_weakrefs: list[Any] = []
        self.active_devices: list[Any] = []
        self.output_device: torch.device | None = None
        self.loaded_tp = False
        self.recurrent_state_cls = None
        self.draft_verifier_params: dict[str, Any] = {}

    @staticmethod
    def from_config(config: Config, component: str = "text", **kwargs: Any) -> Model:
        """A model without weights."""
        return Model(config, component, **kwargs)

    # loading

    def load_gen(
        self,
        device: Any = None,
        reserve_per_device: Any = None,
        use_per_device: Any = None,
        tensor_p: bool = False,
        progressbar: bool = False,
        max_chunk_size: int = 2048,
        max_batch_size: int = 1,
        max_output_size: int = 32,
        max_output_factor: int = 1,
        callback: Callable[[int, int], None] | None = None,
        generator: bool = True,
        tp_output_device: Any = None,
        tp_dev_limits: dict[str, int] | None = None,
        tp_backend: str = "native",
        verbose: bool = False,
        tp_options: dict[str, Any] | None = None,
        autosplit_no_forward: bool = False,
        draft_model: Any = None,
        **kwargs: Any,
    ) -> Iterator[tuple[int, int]]:
        """Loads, yielding (done, total). The whole model goes to one device."""
        if kwargs:
            raise ArgumentError(f"load: unknown argument {next(iter(kwargs))!r}")
        if tensor_p:
            raise UnsupportedError("load: tensor parallel (tensor_p) is not supported by exl3 yet")
        assert not (reserve_per_device is not None and use_per_device is not None), (
            "reserve_per_device and use_per_device exclude each other"
        )
        assert device is None or (reserve_per_device is None and use_per_device is None), "device goes without per-device memory limits"
        if self.inner is not None:
            raise JobError("load: the model is loaded already")
        self.config.infer_params.check()
        total = self.config.num_hidden_layers + 2
        if callback is not None:
            callback(0, total)
        yield 0, total
        self._load(_pick_device(device, reserve_per_device, use_per_device))
        if callback is not None:
            callback(total, total)
        yield total, total

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Loads at once; the arguments of `load_gen`."""
        for _ in self.load_gen(*args, **kwargs):
            pass

    def _load(self, device: Any) -> None:
        from exl3.models.loading import load

        caches = [c for c in (w() for w in self.cache_weakrefs) if c is not None]
        room = max((c.max_num_tokens for c in caches), default=None)
        self.inner = load(self.config.directory, device, max_tokens=room)
        try:
            for cache in caches:
                cache.alloc()
        except Exception:
            self.unload()
            raise
        self.output_device = self.inner.device
        self.active_devices = [self.inner.device]

    def unload(self) -> None:
        """Drops weights and cache tensors."""
        for cache in [c for c in (w() for w in self.cache_weakrefs) if c is not None]:
            cache.free()
        self.inner = None
        self.active_devices = []
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # running

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, params: dict[str, Any] | None = None) -> Tensor:
        """ids (b, n) -> logits (b, n, vocab) fp16 on the output device. See `params` of exllamav3: attn_mode, cache, batch_shape, past_len,
        cache_seqlens, block_table, last_tokens_only."""
        out = self._run(input_ids, params or {}, head=True)
        assert out is not None
        return out.half()

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, params: dict[str, Any] | None = None) -> None:
        """The same without logits: only the cache is filled."""
        self._run(input_ids, params or {}, head=False)

    def _run(self, input_ids: Tensor, params: dict[str, Any], head: bool) -> Tensor | None:
        if self.inner is None:
            raise JobError("the model is not loaded")
        for name in ("indexed_embeddings", "non_causal_spans", "inv_freq", "target_hidden", "export_state_layers"):
            if params.get(name) is not None:
                raise UnsupportedError(f"forward: {name} is not supported by exl3 yet")
        ids = self.inner.check_ids(input_ids)
        rows, n = ids.shape
        last = int(params.get("last_tokens_only") or n)
        if params.get("attn_mode", "flash_attn_nc") != "flash_attn":
            return self.inner.forward_whole(ids)[:, -last:] if head else None
        batch = self._paged_batch(ids, params, last)
        x = self.inner.embed(batch)
        for block in self.inner.blocks:
            x = block(x, batch)
        return self.inner.head(x, batch).view(rows, min(last, n), -1) if head else None

    def _paged_batch(self, ids: Tensor, params: dict[str, Any], last: int) -> Batch:
        cache = params.get("cache")
        if cache is None or cache.inner is None:
            raise ArgumentError("forward: attn_mode 'flash_attn' needs params['cache'], made before the model was loaded")
        rows, n = ids.shape
        device = ids.device
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        table = params.get("block_table")
        past: Any = params.get("cache_seqlens", params.get("past_len", 0))
        if table is None:
            shape = params.get("batch_shape")
            if shape is None:
                raise ArgumentError("forward: needs batch_shape and past_len, or block_table and cache_seqlens")
            assert shape[0] >= rows and shape[1] % 256 == 0, "batch_shape: (rows, multiple of 256)"
            pages = shape[1] // 256
            table = torch.arange(shape[0] * pages, **ints).view(shape[0], pages)[:rows]
        start = torch.as_tensor(past, **ints).reshape(-1).expand(rows)
        if bool((start + n > table.shape[1] * 256).any()) or int(table.max()) >= cache.inner.pages:
            raise ArgumentError(f"forward: {int(start.max()) + n} tokens do not fit the {table.shape[1]} pages of a row, or the cache")
        line = torch.arange(n, **ints)
        wanted = (torch.arange(rows, **ints)[:, None] * n + line[None, max(0, n - last) :]).reshape(-1)
        return Batch(
            ids=ids.reshape(-1),
            positions=(start[:, None] + line[None]).reshape(-1).contiguous(),
            token_row=torch.arange(rows, **ints).repeat_interleave(n),
            row_start=torch.arange(0, rows * n + 1, n, **ints),
            lengths=(start + n).contiguous(),
            block_table=table.to(**ints).contiguous(),
            logits_at=wanted,
            cache=cache.inner,
        )

    def warmup(
        self,
        cache: Any = None,
        max_chunk_size: int = 2048,
        max_batch_size: int = 8,
        max_q_len: int = 16,
        long_context: bool = True,
        progressbar: bool = False,
        callback: Callable[[int, int], None] | None = None,
        verbose: bool = False,
    ) -> list[str]:
        """One prompt chunk and one token: nothing is compiled at run time, but libraries and kernels are loaded here. Labels of passes that
        failed."""
        failed = []
        for done, rows in enumerate((1, min(max_chunk_size, 64))):
            if callback is not None:
                callback(done, 2)
            try:
                self.forward(torch.zeros(1, rows, dtype=torch.long))
            except Exception as error:
                failed.append(f"{rows} tokens: {error}")
        if callback is not None:
            callback(2, 2)
        return failed

    def lm_head_argmax(self, state: Tensor, params: dict[str, Any] | None = None) -> Tensor:
        """Refused: no drafter that needs it is supported."""
        raise UnsupportedError("lm_head_argmax is not supported by exl3 yet")

    def prefetch_tokens(self, ids: Any) -> None:
        """Nothing to prefetch."""

    # facts

    def get_cache_layers(self) -> list[Any]:
        """One entry per layer with keys and values."""
        return [] if self.inner is None else list(range(len(self.inner.cache_shapes)))

    def get_recurrent_layers(self) -> list[Any]:
        """None of the supported models has any."""
        return []

    def get_name(self) -> str:
        """The architecture."""
        return self.config.architecture

    def get_storage_info(self) -> tuple[float, float, int]:
        """(bits per weight of the layers, of the head, bits stored in all), from the files."""
        from exl3.files import Checkpoint

        checkpoint = Checkpoint.open(self.config.directory)
        bits: list[list[float]] = [[0.0, 0.0], [0.0, 0.0]]
        for key in checkpoint.linear_keys():
            linear = checkpoint.linear(key)
            weights = linear.in_features * linear.out_features
            at = bits["lm_head" in key]
            at[0] += linear.bits * weights
            at[1] += weights
        layers, head = (b / max(n, 1) for b, n in bits)
        return layers, head or 16.0, 8 * sum(t.nbytes for t in checkpoint.tensors.values())

    def default_chat_prompt(self, prompt: str, system_prompt: str | None = None) -> str:
        """One user turn in the model's own chat template."""
        from exl3.files.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_directory(self.config.directory)
        if tokenizer is None:
            return prompt
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return tokenizer.render_chat([*messages, {"role": "user", "content": prompt}])

    @staticmethod
    def get_additional_compiled_tensors(config: Config) -> dict[str, Any]:
        """None."""
        return {}


def _pick_device(device: Any, reserve: Any, use: Any) -> torch.device | None:
    """The first GPU that the per-device lists don't exclude; None: exl3's own choice."""
    if device is not None:
        return torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    limits: Sequence[float] = use if isinstance(use, (list, tuple)) else reserve if isinstance(reserve, (list, tuple)) else []
    for i in range(count):
        excluded = i < len(limits) and (limits[i] < 0 or (use is not None and limits[i] == 0))
        if not excluded and not (use is not None and i >= len(limits) > 0):
            return torch.device("cuda", i)
    return None
