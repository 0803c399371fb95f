"""The packaging scripts as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / ".github/scripts"


def load(name: str):
    if not SCRIPTS.is_dir():
        pytest.skip("a source archive without .github")
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture
def script():
    """script(name): one of .github/scripts as a module."""
    return load


@pytest.fixture
def matrix():
    return load("matrix")
