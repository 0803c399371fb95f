import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
try:
    import starlette  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]  # the server is an optional extra


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import tiny
    import torch

    import exl3

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exl3.load(tiny.write(tmp_path_factory.mktemp("served")), device="cpu")


@pytest.fixture(scope="module")
def client(model):
    from starlette.testclient import TestClient

    from exl3.serve import create_app
    from exl3.serve.protocol import Limits

    app = create_app(model, model_name="tiny", limits=Limits(max_body_bytes=100_000, max_queue=40), grace=2.0, max_batch_size=8)
    with TestClient(app) as made:
        yield made
        engine = app.state.server.engine
        assert engine.generator.pagetable.referenced == 0 and not engine.jobs
