"""`Tokenizer` as exllamav3 has it: tensors in and out, over `exl3.Tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from exl3.errors import FormatError, UnsupportedError
from exl3.files.tokenizer import Tokenizer as Inner
from exl3.integrations.exllamav3.config import Config


class Tokenizer:
    """Made by `from_config`. The tokenizer file's post-processor never runs: BOS only on request."""

    def __init__(self, config: Config) -> None:
        self.config = config
        inner = Inner.from_directory(config.directory)
        if inner is None:
            raise FormatError(f"{config.directory}: no tokenizer.json")
        self.inner: Inner = inner
        self.tokenizer = inner.backend
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = inner.bos_token, inner.eos_token, inner.pad_token, inner.unk_token
        self.bos_token_id = inner.bos_id if inner.bos_id is not None else config.bos_token_id
        self.eos_token_id = inner.eos_id if inner.eos_id is not None else config.eos_token_id
        self.unk_token_id = inner.unk_id
        pad = inner.pad_id if inner.pad_id is not None else config.pad_token_id
        self.pad_token_id = pad if isinstance(pad, int) else self.eos_token_id if self.eos_token_id is not None else 0
        if inner.eos_id is not None and inner.eos_id not in config.eos_token_id_list:
            config.eos_token_id_list.append(inner.eos_id)
        if config.eos_token_id is None:
            config.eos_token_id = inner.eos_id
        self.actual_vocab_size = self.raw_vocab_size = inner.vocab_size
        self.vocab_size = max(config.vocab_size, inner.vocab_size)
        # what exl3's text layer reads
        self.pieces, self.special_ids, self.backend = inner.pieces, inner.special_ids, inner.backend
        self.bos_id, self.eos_id, self.vocab = inner.bos_id, inner.eos_id, inner.vocab

    @staticmethod
    def from_config(config: Config, **kwargs: Any) -> Tokenizer:
        """The tokenizer of the config's directory."""
        return Tokenizer(config)

    def encode(
        self,
        text: str | Sequence[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Any = None,
    ) -> Any:
        """(b, n) int64; a list is padded on the left. With `return_offsets` also the padding of each row."""
        if embeddings:
            raise UnsupportedError("encode: embeddings (images) are not supported by exl3 yet")
        texts = [text] if isinstance(text, str) else list(text)
        rows = []
        for t in texts:
            ids = self.inner.encode(t, special=encode_special_tokens)
            if add_bos and self.bos_token_id is not None:
                ids = [self.bos_token_id, *ids]
            if add_eos and self.eos_token_id is not None:
                ids = [*ids, self.eos_token_id]
            rows.append(ids)
        width = max(map(len, rows), default=0)
        padded = torch.tensor([[self.pad_token_id] * (width - len(r)) + r for r in rows], dtype=torch.long).view(len(rows), width)
        if return_offsets:
            return padded, torch.tensor([[len(r) - width] for r in rows], dtype=torch.int)
        return padded

    def decode(self, ids: Any, decode_special_tokens: bool = False) -> Any:
        """str for one row, a list of str for (b, n). Ids outside the vocabulary give nothing."""
        rows: Any = ids.tolist() if isinstance(ids, torch.Tensor) else [r.tolist() if isinstance(r, torch.Tensor) else r for r in ids]
        if rows and isinstance(rows[0], list):
            return [self.inner.decode(r, special=decode_special_tokens) for r in rows]
        return self.inner.decode(rows, special=decode_special_tokens)

    def single_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the file or by its text; None if there is none."""
        found = self.inner.token_to_id(token)
        return found if found is not None else self.get_piece_to_id_dict().get(token)

    def single_token(self, token_id: int) -> torch.Tensor:
        """(1, 1) tensor of an id."""
        return torch.tensor([[token_id]], dtype=torch.long)

    def num_tokens(self, text: str) -> int:
        """Tokens in `text`."""
        return len(self.inner.encode(text, special=False))

    def padding_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """-inf where `ids` is padding, else 0; fp16."""
        return torch.zeros(ids.shape, dtype=torch.half).masked_fill_(ids == self.pad_token_id, -65504.0)

    @cached_property
    def _texts(self) -> list[str]:
        return [p.decode("utf-8", "replace") for p in self.inner.pieces]

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """Text of every id; special tokens are empty unless included."""
        if include_special_tokens:
            return list(self._texts)
        return ["" if i in self.inner.special_ids else t for i, t in enumerate(self._texts)]

    def get_id_to_ord_list(self) -> list[int]:
        """Byte value of ids that stand for a single byte, else -1."""
        return [p[0] if len(p) == 1 else -1 for p in self.inner.pieces]

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """Text -> lowest id."""
        made: dict[str, int] = {}
        for i, t in enumerate(self._texts):
            made.setdefault(t, i)
        return made

    def get_vocab_dict(self) -> dict[str, int]:
        """Token as spelled in the file -> id."""
        return dict(self.inner.vocab)

    def get_fixed_vocab(self) -> list[str]:
        """The same as `get_id_to_piece_list(True)`."""
        return list(self._texts)

    def get_tokens_with_prefix_string(self, prefix: str) -> list[int]:
        """Ids whose text begins with `prefix`."""
        from exl3.generate.text import Pieces

        return Pieces.of(self.inner).starting_with(prefix.encode())

    def get_tokens_with_prefix_id(self, prefix_id: int) -> list[int]:
        """Ids whose text begins with that of another id."""
        from exl3.generate.text import Pieces

        return Pieces.of(self.inner).starting_with(self.inner.pieces[prefix_id])

    @cached_property
    def newline_token_id(self) -> int | None:
        """Id of a line break."""
        return self.single_id("\n")

    @cached_property
    def space_token_id(self) -> int | None:
        """Id of a blank."""
        return self.single_id(" ")

    @cached_property
    def extended_piece_to_id(self) -> dict[str, int]:
        """Added tokens -> id."""
        return {t.content: i for i, t in self.inner.backend.get_added_tokens_decoder().items()}

    @cached_property
    def extended_id_to_piece(self) -> dict[int, str]:
        """Id -> added token."""
        return {i: t for t, i in self.extended_piece_to_id.items()}

    def hf_render_chat_template(self, messages: Any, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Messages through the model's chat template, as text."""
        return self.inner.render_chat(messages, add_generation_prompt=add_generation_prompt, **kwargs)

    def hf_chat_template(self, messages: Any, add_generation_prompt: bool = True, embeddings: Any = None, **kwargs: Any) -> torch.Tensor:
        """The same as ids (1, n)."""
        text = self.hf_render_chat_template(messages, add_generation_prompt, **kwargs)
        return self.encode(text, encode_special_tokens=True, embeddings=embeddings)
