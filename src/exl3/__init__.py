"""exl3: quantize language models to EXL3 and run them on NVIDIA GPUs, AMD RDNA GPUs and plain CPUs.

All public names are lazy: `import exl3` loads neither torch nor native code.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# rocprofiler's registration hook costs seconds at process start on ROCm; the user's own setting wins
os.environ.setdefault("ROCPROFILER_REGISTER_ENABLED", "0")

# public name -> module that defines it; a module of its own name is the submodule itself
_LAZY = {
    "load": "exl3.models.loading",
    "Model": "exl3.models.model",
    "Tokenizer": "exl3.files.tokenizer",
    "convert": "exl3.quantize.convert",
    "Report": "exl3.quantize.report",
    "Cache": "exl3.cache",
    "Generator": "exl3.generate",
    "Job": "exl3.generate",
    "AsyncGenerator": "exl3.generate",
    "AsyncJob": "exl3.generate",
    "Exl3Error": "exl3.errors",
}
_TORCHLESS = {"diagnose", "errors", "settings"}
_MODULES = {"codec", "files", "ops", "cache", "nn", "models", "parallel", "quantize", "generate", "evaluate", "integrations", *_TORCHLESS}

__all__ = ["__version__", *sorted(_LAZY), *sorted(_MODULES)]

if TYPE_CHECKING:
    from exl3 import codec as codec
    from exl3 import errors as errors
    from exl3 import evaluate as evaluate
    from exl3 import files as files
    from exl3 import generate as generate
    from exl3 import ops as ops
    from exl3 import settings as settings
    from exl3.cache import Cache as Cache
    from exl3.errors import Exl3Error as Exl3Error
    from exl3.files.tokenizer import Tokenizer as Tokenizer
    from exl3.models.loading import load as load
    from exl3.models.model import Model as Model
    from exl3.quantize.convert import convert as convert
    from exl3.quantize.report import Report as Report


def __getattr__(name: str) -> Any:
    if name in _LAZY.keys() | _MODULES - _TORCHLESS and name != "Exl3Error":
        diagnose.require()
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"exl3.{name}")
    else:
        raise AttributeError(f"module 'exl3' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


from exl3 import diagnose  # noqa: E402  it reads __version__

diagnose.at_import()
