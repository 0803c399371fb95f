"""Architecture name -> family."""

from __future__ import annotations

import importlib
from typing import Any

from exl3.errors import UnsupportedError
from exl3.files.config import architecture
from exl3.models.model import Model

# architecture as config.json names it -> (module of this package, class)
FAMILIES = {
    "ApertusForCausalLM": ("apertus", "Apertus"),
    "ArceeForCausalLM": ("arcee", "Arcee"),
    "Cohere2ForCausalLM": ("cohere2", "Cohere2"),
    "Ernie4_5ForCausalLM": ("ernie4_5", "Ernie45"),
    "Exaone4ForCausalLM": ("exaone4", "Exaone4"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3"),
    "Glm4ForCausalLM": ("glm4", "Glm4"),
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2"),
    "Olmo3ForCausalLM": ("olmo3", "Olmo3"),
    "Phi3ForCausalLM": ("phi3", "Phi3"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "SeedOssForCausalLM": ("seed_oss", "SeedOss"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLM3"),
}


def family(config: dict[str, Any]) -> type[Model]:
    """The model class for a config.json. Raises UnsupportedError listing what is supported."""
    name = architecture(config)
    if name not in FAMILIES:
        raise UnsupportedError(f"config.json: architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    module, cls = FAMILIES[name]
    found: type[Model] = getattr(importlib.import_module(f"exl3.models.{module}"), cls)
    return found


def build(config: dict[str, Any]) -> Model:
    """An empty model (meta device) for the contents of a config.json. Raises FormatError or UnsupportedError naming the key."""
    return family(config)(config)
