"""What lies on disk. Reading order: safetensors (headers), slabs (reads), linears and checkpoint (an EXL3 or dense model
directory), config, shards (writing), tokenizer, gguf (import), lora (PEFT adapters)."""

from exl3.files.checkpoint import Checkpoint, EmbeddingFiles
from exl3.files.gguf import GGUF
from exl3.files.gguf_import import import_gguf
from exl3.files.linears import LinearFiles, load_linears
from exl3.files.lora import LoraAdapter
from exl3.files.safetensors import TensorInfo, read_header
from exl3.files.shards import ShardWriter, check_disk, write_shards, write_tensors
from exl3.files.slabs import read_tensors
from exl3.files.tokenizer import TextStream, Tokenizer

__all__ = [
    "GGUF",
    "Checkpoint",
    "EmbeddingFiles",
    "LinearFiles",
    "LoraAdapter",
    "ShardWriter",
    "TensorInfo",
    "TextStream",
    "Tokenizer",
    "check_disk",
    "import_gguf",
    "load_linears",
    "read_header",
    "read_tensors",
    "write_shards",
    "write_tensors",
]
