"""A model directory with everything a frontend wants: random tiny Llama, byte-level tokenizer, chat template, end tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))
import plain_llama

TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_json(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")])
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write(directory: Path, seed: int = 0, **changes: object) -> Path:
    """The directory; ids 257 (</s>) and 259 (<|im_end|>) end a text."""
    config = {
        **plain_llama.CONFIG,
        "vocab_size": 260,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 256,
        "eos_token_id": 257,
        **changes,
    }
    plain_llama.write(directory, config, plain_llama.random_weights(config, seed))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))
    tokenizer_json(directory)
    return directory
