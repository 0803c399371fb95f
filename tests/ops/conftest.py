"""Operations are tested on the library that is installed; a missing library is an error, not a skip."""

import pytest
import torch

from exl3 import ops


@pytest.fixture(scope="session", autouse=True)
def native_library():
    ops.backend("cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1234)
