"""A stand-in for the package exllamav3: programs written for it run on exl3 unchanged.

    import exl3.integrations.exllamav3 as shim
    shim.install()
    import exllamav3                # ours

or `python -m exl3.integrations.exllamav3 program.py arguments ...`. What exl3 does not support yet refuses by name when it is used.

Files in reading order: names (which name lives in which module), config, tokenizer, model, cache, generation, model_init, other.
"""

from __future__ import annotations

from exl3.integrations.exllamav3.names import VERSION, install, uninstall

__all__ = ["VERSION", "install", "uninstall"]
