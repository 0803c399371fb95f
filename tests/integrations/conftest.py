import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import tiny


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return str(tiny.write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
