"""`Config`: what config.json says, and the options that are set between reading it and loading."""

from __future__ import annotations

import os
import uuid
from typing import Any

from exl3.errors import FormatError, UnsupportedError
from exl3.files.config import architecture, eos_ids, read_config, read_generation_config, text_config

_MISSING = object()


class InferParams:
    """Load-time options of the incumbent. Changing one that has no counterpart here is refused when the model is loaded."""

    def __init__(self) -> None:
        self.no_reconstruct = False
        self.mgemm_K_threshold = 6
        self.mgemm_n_threshold = 8192
        self.moe_cpu_offload = self.draft_moe_cpu_offload = self.moe_cpu_offload_assigned = self.moe_cpu_split = 0
        self.moe_cpu_pinned_arena = False
        self.moe_cpu_component = None
        self.moe_cpu_threads = self.draft_moe_cpu_threads = None
        self.vision_pinned = False
        self.ngram_stream_from_disk = True
        self.ngram_lock = self.embed_stream_from_disk = False

    def check(self) -> None:
        """Refuses by name what can't be done."""
        for name in ("moe_cpu_offload", "moe_cpu_split", "moe_cpu_pinned_arena", "embed_stream_from_disk"):
            if getattr(self, name):
                raise UnsupportedError(f"infer_params.{name} is not supported by exl3 yet; leave it at its default")


class Config:
    """A model directory's configuration. Made by `from_directory`."""

    def __init__(self, directory: str, load_method: str = "mt_fread", layer_map: Any = None) -> None:
        if layer_map is not None:
            raise UnsupportedError("Config: layer_map is not supported by exl3 yet")
        self.directory = str(directory)
        self.config_filename = os.path.join(self.directory, "config.json")
        self.config_dict: dict[str, Any] = read_config(self.directory)
        self.architecture = self.arch_string = architecture(self.config_dict)
        self.uuid = uuid.uuid4()
        self.layer_map = self.layer_map_str = None
        self.load_isq = False
        self.infer_params = InferParams()
        text = text_config(self.config_dict)
        from exl3.integrations.exllamav3.model import Model
        from exl3.models.registry import family

        made = family(self.config_dict).read_config(self.config_dict)
        self.model_classes: dict[str, Any] = {"text": Model}
        self.vocab_size: int = made.vocab_size
        self.num_hidden_layers, self.head_dim = made.num_hidden_layers, made.head_dim
        self.num_q_heads, self.num_kv_heads = made.num_attention_heads, made.num_key_value_heads
        self.max_position_embeddings: int = made.max_position_embeddings
        self.initializer_range = text.get("initializer_range", 0.02)
        self.bos_token_id = text.get("bos_token_id", self.config_dict.get("bos_token_id"))
        self.pad_token_id = text.get("pad_token_id", self.config_dict.get("pad_token_id"))
        self.image_token_id = self.config_dict.get("image_token_id", self.config_dict.get("image_token_index"))
        self.eos_token_id_list: list[int] = eos_ids(self.config_dict, read_generation_config(self.directory))
        self.eos_token_id = self.eos_token_id_list[0] if self.eos_token_id_list else None

    @staticmethod
    def from_directory(directory: str, **kwargs: Any) -> Config:
        """Reads and checks config.json."""
        return Config(directory, **kwargs)

    @property
    def stc(self) -> Any:
        """The directory's tensors."""
        from exl3.integrations.exllamav3.other import SafetensorsCollection

        return SafetensorsCollection(self.directory)

    def read_cfg(self, types: Any, keys: str | list[str], default: Any = _MISSING) -> Any:
        """A value of config.json; `keys` may be nested ("a->b") and may be alternatives."""
        for key in [keys] if isinstance(keys, str) else keys:
            value: Any = self.config_dict
            for part in key.split("->"):
                value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
            if value is _MISSING or value is None:
                continue
            kinds = tuple(types) if isinstance(types, (list, tuple)) else (types,)
            if float in kinds and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kinds):
                raise FormatError(f"config.json: {key} is {value!r}, expected {' or '.join(k.__name__ for k in kinds)}")
            return value
        if default is _MISSING:
            raise FormatError(f"config.json lacks {keys}")
        return default

    def assert_cfg(self, type_: Any, key: str, expected: Any = None, optional: bool = False) -> None:
        """Checks that a key has the expected value."""
        value = self.read_cfg(type_, key, None if optional else _MISSING)
        if value != expected and not (optional and value is None):
            raise AssertionError(f"config.json: {key} is {value!r}, expected {expected!r}")

    def override_dynamic_seq_len(self, new_max_position_embeddings: int) -> None:
        """Nothing to do: longrope looks at the length of each sequence."""

    def default_max_position_embeddings(self) -> int:
        """What counts where config.json is silent."""
        return 8192
