"""The packaging scripts as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / ".github/scripts"


def script(name: str):
    if not SCRIPTS.is_dir():
        pytest.skip("a source archive without .github")
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture
def matrix():
    return script("matrix")
