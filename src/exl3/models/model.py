"""Model: embed, blocks, head. Everything that runs a network (engine, converter, evaluation) walks these three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exl3 import ops
from exl3.cache import Batch
from exl3.errors import ArgumentError
from exl3.files import Checkpoint
from exl3.files.tokenizer import Tokenizer
from exl3.models.config import Config
from exl3.models.stages import Stage, walk
from exl3.models.tensors import find_tensors
from exl3.nn import MLP, Attention, Embedding, Linear, RMSNorm, Rotary, project, rope_parameters


class Block(nn.Module):
    """One decoder layer. `block(x, batch)` updates the residual stream x `(tokens, hidden_size)` fp32 in place and returns it.

    `key` is the layer's name in the checkpoint ("model.layers.3"), known once the model is bound to one.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.key = f"model.layers.{layer}"

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        raise NotImplementedError

    def quant_groups(self) -> list[list[tuple[str, Linear]]]:
        """(checkpoint name, Linear) of every matrix the converter quantizes, in order of execution; the members of one group
        share their input."""
        return self.named(self.linear_groups())

    def linear_groups(self) -> list[list[Linear]]:
        """The groups of `quant_groups` without names."""
        return [group for child in self.children() if isinstance(child, Attention | MLP) for group in child.quant_groups()]

    def named(self, groups: list[list[Linear]]) -> list[list[tuple[str, Linear]]]:
        names = {id(module): f"{self.key}.{name}" for name, module in self.named_modules()}
        return [[(names[id(linear)], linear) for linear in group] for group in groups]

    def set_dtype(self, dtype: torch.dtype) -> None:
        """dtype of the values between operations inside the block."""
        for module in self.modules():
            if isinstance(module, Attention | MLP):
                module.dtype = dtype


class Decoder(nn.Module):
    """Holds what lies below "model." in Hugging Face names: embed_tokens, layers, norm."""

    def __init__(self, embed_tokens: Embedding, layers: list[Block], norm: RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Model(nn.Module):
    """A decoder-only language model.

    device      where it lives, and of a model on several devices the first; "meta" until loaded
    dtype       of values between operations (the residual stream is always fp32)
    max_tokens  longest context this load allows
    path        the directory it was loaded from
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    config_class: ClassVar[type[Config]] = Config
    block_class: ClassVar[Any] = Block
    gpu_dtype: ClassVar[torch.dtype] = torch.float16  # bfloat16 where values between operations overflow fp16
    # (key of the decoder, key of the head) in the checkpoint, tried in order
    layouts: ClassVar[tuple[tuple[str, str], ...]] = (("model", "lm_head"), ("", "lm_head"))
    # tensors of other parts of a checkpoint (vision), left alone without a warning
    other_parts: ClassVar[tuple[str, ...]] = ()
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.source_config = config
        self.config = self.read_config(config)
        c = self.config
        self.rotaries = self.make_rotaries()
        layers = [self.block_class(c, i, self.rotaries) for i in range(c.num_hidden_layers)]
        self.model = Decoder(self.make_embedding(), layers, self.make_norm())
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        self.layout = self.layouts[0]
        self.device = torch.device("meta")
        self.split: list[tuple[torch.device, int]] = []  # (device, blocks on it) in order; empty: one device
        self.dtype = torch.float32
        self.max_tokens = c.max_position_embeddings
        self._tokenizer: Any = None
        self._tokenizer_read = False
        self.path: str | None = None

    # what a family may override

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> Any:
        return cls.config_class.from_dict(config)

    def make_rotaries(self) -> dict[str, Rotary]:
        """Rotary embeddings by layer kind."""
        return {"default": Rotary(rope_parameters(self.config.raw), self.config.head_size)}

    def make_embedding(self) -> Embedding:
        return Embedding(self.config.vocab_size, self.config.hidden_size)

    def make_norm(self) -> RMSNorm:
        """The norm before the head."""
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    # the walk

    @property
    def blocks(self) -> list[Any]:
        return list(self.model.layers)

    @property
    def stages(self) -> list[Stage]:
        """The blocks by device, in order of execution."""
        blocks, found, at = self.blocks, [], 0
        for device, count in self.split or [(self.run_device, len(blocks))]:
            found.append(Stage(device, blocks[at : at + count], at == 0, at + count == len(blocks)))
            at += count
        return found

    def prepare(self, batch: Batch) -> None:
        """Fill the rotary tables of this step; `embed` does it, walks that start in the middle may."""
        for rotary in self.rotaries.values():
            rotary.fill(batch)

    def embed(self, batch: Batch) -> Tensor:
        """The residual stream at the first block, `(tokens, hidden_size)` fp32; fills the step's rotary tables."""
        self.prepare(batch)
        x: Tensor = self.model.embed_tokens(batch.ids)
        return x

    def head(self, x: Tensor, batch: Batch) -> Tensor:
        """Logits `(len(logits_at) or tokens, vocab_size)` fp32 of the residual stream after the last block."""
        if batch.logits_at is not None:
            x = ops.take_rows(x, batch.logits_at)
        (logits,) = project(x, (self.lm_head,), norm=self.model.norm, dtype=torch.float32, norm_dtype=self.dtype, out=batch.logits)
        if self.logit_scale != 1.0 or self.logit_softcap:
            ops.softcap_(logits, self.logit_scale, self.logit_softcap)
        return logits

    def forward(self, batch: Batch) -> Tensor:
        """One step: logits of `batch`, `(L, vocab_size)` fp32."""
        logits: Tensor = walk(self, batch)
        return logits

    def forward_whole(self, ids: Tensor) -> Tensor:
        """Whole sequences without a cache: ids `(rows, tokens)` -> logits `(rows, tokens, vocab_size)` fp32."""
        rows, tokens = ids.shape
        logits = self.forward(Batch.whole(ids.to(self.device)))
        return (ops.move(logits, self.device) if self.split else logits).view(rows, tokens, -1)

    # the public face

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def tokenizer(self) -> Any:
        """`exl3.Tokenizer` of the directory, read on first use (a large vocabulary takes seconds); None where there is none."""
        if not self._tokenizer_read and self.path is not None:
            self._tokenizer = Tokenizer.from_directory(self.path)
            self._tokenizer_read = True
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer, self._tokenizer_read = value, True

    @torch.no_grad()
    def logits(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Logits of every position, no cache involved.

        ids  token ids `(batch, tokens)` or `(tokens,)`, any integer dtype, or nested lists of one length.
        Returns `(batch, tokens, vocab_size)` float32 on the model's device. Raises ArgumentError for empty input or ids
        outside the vocabulary.
        """
        return self.forward_whole(self.check_ids(ids))

    def generate(
        self, prompt: Any, max_new_tokens: int | None = 256, temperature: float = 0.0, *args: Any, stream: bool = False, **options: Any
    ) -> Any:
        """Continue a text, token ids or chat messages; arguments and result as `exl3.generate.generate` documents them:
        a `GenerationResult`, or with `stream=True` an iterator of text pieces."""
        import exl3  # upwards only through the package root's lazy names: this room knows no engine

        return exl3.generate.generate(self, prompt, max_new_tokens, temperature, *args, stream=stream, **options)

    def check_ids(self, ids: Any) -> Tensor:
        """`ids` as an int32 tensor `(batch, tokens)` on the model's device, checked."""
        try:
            tensor = torch.as_tensor(ids)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ArgumentError(f"ids: rows of one length with whole numbers are needed ({error})") from None
        tensor = tensor[None] if tensor.ndim == 1 else tensor
        if tensor.ndim != 2 or tensor.numel() == 0:
            raise ArgumentError(f"ids: shape (batch, tokens) with at least one token is needed, got {tuple(tensor.shape)}")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ArgumentError(f"ids: whole numbers are needed, got {tensor.dtype}")
        wrong = tensor[(tensor < 0) | (tensor >= self.vocab_size)]
        if len(wrong):
            raise ArgumentError(f"ids: {int(wrong[0])} is outside the vocabulary of {self.vocab_size} tokens")
        return tensor.to(device=self.device, dtype=torch.int32)

    # loading

    def load_block(
        self, index: int, checkpoint: Checkpoint, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Block:
        """Fill block `index` from `checkpoint` and return it; `unload_block` empties it. `dtype`: of dense matrices, default as stored."""
        block: Block = self.blocks[index]
        self.load_modules({block.key: block}, checkpoint, device, dtype)
        return block

    def unload_block(self, index: int) -> None:
        """Drop the tensors of block `index`."""
        unload(self.blocks[index])

    def load_embed(self, checkpoint: Checkpoint, device: torch.device | str | None = None) -> None:
        """Fill the token embedding."""
        self.load_modules({self.embed_key: self.model.embed_tokens}, checkpoint, device)

    def load_head(self, checkpoint: Checkpoint, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Fill the last norm and the head (from the embedding's table where the checkpoint holds no head)."""
        self.load_modules({f"{self.decoder_key}norm": self.model.norm, self.head_key: self.lm_head}, checkpoint, device, dtype)

    def load_modules(
        self,
        parts: dict[str, nn.Module],
        checkpoint: Checkpoint,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fill `parts`, checkpoint key -> module, with few reads. Raises MissingTensorError naming all that is missing."""
        found = find_tensors(self, parts, checkpoint)
        found.raise_missing(checkpoint)
        found.load(device or self.run_device, dtype)

    def unload(self) -> None:
        """Drop all tensors; `load_modules` may fill the model again."""
        engine = self.__dict__.pop("_engine", None)  # of `generate`, with its cache
        if engine is not None:
            engine.generator.close()
        unload(self)
        self.device, self.split = torch.device("meta"), []

    @property
    def run_device(self) -> torch.device:
        """The device to run on: `device`, or the CPU as long as the model is empty."""
        return torch.device("cpu") if self.device.type == "meta" else self.device

    @property
    def decoder_key(self) -> str:
        """What stands before "layers.0" in the checkpoint, with its dot."""
        return f"{self.layout[0]}." if self.layout[0] else ""

    @property
    def embed_key(self) -> str:
        """Name of the token embedding in the checkpoint: "model.embed_tokens"."""
        return f"{self.decoder_key}embed_tokens"

    @property
    def head_key(self) -> str:
        """Name of the head in the checkpoint: "lm_head"."""
        return self.layout[1]

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Everything that is loaded, checkpoint key -> module, in order of execution."""
        blocks = {block.key: block for block in self.blocks}
        return {self.embed_key: self.model.embed_tokens, **blocks, f"{self.decoder_key}norm": self.model.norm, self.head_key: self.lm_head}

    def bind(self, checkpoint: Checkpoint) -> None:
        """Find which of `layouts` names this checkpoint's tensors."""
        for layout in self.layouts:
            start = f"{layout[0]}." if layout[0] else ""
            if any(name.startswith(f"{start}embed_tokens.") for name in checkpoint.tensors):
                self.layout = layout
                break
        for block in self.blocks:
            block.key = f"{self.decoder_key}layers.{block.layer}"

    def place(
        self, device: torch.device | str, dtype: torch.dtype | None = None, split: Sequence[tuple[torch.device, int]] | None = None
    ) -> None:
        """Set the device, or the devices with the number of blocks on each (every number at least 1, all blocks in all), and the dtype
        between operations; tell the rotary tables `max_tokens`. Moves nothing."""
        self.split = list(split or ())
        self.device = self.split[0][0] if self.split else torch.device(device)
        for stage in self.stages:
            self.dtype = dtype or self.dtype_on(stage.device)  # the last stage's is the head's
            for block in stage.blocks:
                block.set_dtype(self.dtype)
        for rotary in self.rotaries.values():
            rotary.max_tokens = self.max_tokens

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """dtype of values between operations on `device`."""
        return torch.float32 if device.type == "cpu" else self.gpu_dtype

    @property
    def cache_devices(self) -> list[torch.device] | None:
        """Device of every entry of `cache_shapes` where the model lies on several; else None."""
        if not self.split:
            return None
        return [stage.device for stage in self.stages for _ in self.cache_shapes_of(stage.blocks)]

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """(kv_heads, head_dim) of every layer that keeps keys and values, in the order of `Cache.layers`."""
        return self.cache_shapes_of(self.blocks)

    def cache_shapes_of(self, blocks: Sequence[Any]) -> list[tuple[int, int]]:
        """The same for some blocks."""
        attentions = [module for block in blocks for module in block.modules() if isinstance(module, Attention)]
        return [(a.kv_heads, a.head_dim) for a in sorted(attentions, key=lambda a: a.layer)]


def unload(module: nn.Module) -> None:
    """Empty everything below `module`."""
    for child in module.modules():
        if not isinstance(child, Model) and callable(getattr(child, "unload", None)):
            child.unload()  # type: ignore[operator]
