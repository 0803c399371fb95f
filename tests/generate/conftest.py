import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Stub models are no native operations: their steps can't be recorded."""
    monkeypatch.setenv("EXL3_STEP", "eager")
