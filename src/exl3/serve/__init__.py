"""An OpenAI-compatible server (optional extra: `pip install exl3[serve]`).

Files in reading order: protocol (requests checked, answers shaped), tools (tool calls in a model's text), answer (jobs behind one request),
metrics, app (routes), run (`exl3 serve`), page.html (the chat page).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["create_app", "serve"]

if TYPE_CHECKING:
    from exl3.serve.app import create_app as create_app
    from exl3.serve.run import serve as serve


def __getattr__(name: str) -> Any:
    import importlib

    modules = {"create_app": "app", "serve": "run"}
    if name not in modules:
        raise AttributeError(f"module 'exl3.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"exl3.serve.{modules[name]}"), name)
