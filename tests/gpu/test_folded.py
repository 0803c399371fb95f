"""Products through rebuilt matrices against x @ dequant(W) in float64, on a card; and the matrices themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Library, exact_weight, random_weight, relative

from exl3 import ops
from exl3.errors import BackendError
from exl3.ops import folded, reference
from exl3.ops.tape import Tape

ROWS = 1100
CODEBOOKS = [("mul1", k) for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)] + [("mcg", 4), ("mcg", 7), ("3inst", 3), ("3inst", 8)]


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cuda", "no_wgmma"])
@pytest.mark.parametrize("codebook,K", CODEBOOKS)
def test_matrix(request: Any, library: str, codebook: str, K: float) -> None:
    lib: Library = request.getfixturevalue(library)
    w = random_weight(500, 650, K, codebook, "cuda")
    out = lib.reconstruct(w, True, torch.float16)
    assert relative(out, exact_weight(w)) < 7e-4
    assert torch.equal(out, lib.reconstruct(w, True, torch.float16))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Dtypes of results that came through rebuilt matrices."""
    try:
        ops.backend("cuda")
    except BackendError as error:
        pytest.skip(str(error))
    if not folded.measured(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this card keeps the fused product")
    found: list[torch.dtype] = []
    inner = folded._multiply
    monkeypatch.setattr(folded, "worth", lambda rows, n_in, n_out: True)
    monkeypatch.setattr(folded, "_multiply", lambda x, w, out, accumulate: (found.append(out.dtype), inner(x, w, out, accumulate)))
    yield found


def weights() -> tuple[list[dict[str, Any]], list[ops.Weight]]:
    made = [random_weight(1024, n, 4, "mul1", "cuda", bias=bias) for n, bias in ((512, True), (256, False), (264, True))]
    return made, [ops.Weight(w["trellis"], w["suh"], w["svh"], w["bias"], w["in"], w["out"], w["codebook"], w["multiplier"]) for w in made]


def exact(x: torch.Tensor, w: dict[str, Any]) -> torch.Tensor:
    y = x.double().cpu() @ exact_weight(w)
    return y if w["bias"] is None else y + w["bias"].cpu().double()


@pytest.mark.gpu
@torch.inference_mode()
def test_products(used: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    made, group = weights()
    norm = torch.rand(1024, device="cuda") + 0.5
    x = torch.randn(ROWS, 1024, device="cuda") * 3
    h = reference.rms_norm(x.double(), norm.double(), 1e-5)
    for dtype in (torch.float16, torch.float32):
        for y, w in zip(ops.linear(x, group, norm=norm, eps=1e-5, dtype=dtype), made):
            assert y.dtype == dtype and relative(y, exact(h, w)) < 1e-3
    assert used == [torch.float16] * 3 + [torch.float32] * 3
    x = x.half()
    out = torch.randn(ROWS, 512, device="cuda")
    want = out.cpu().double() + exact(x, made[0])
    ops.linear(x, group[0], out=out, accumulate=True)
    assert relative(out, want) < 1e-3
    y = ops.linear(x, (group[0], group[0]), activation="silu", norm=norm, eps=1e-5)
    gate = exact(reference.rms_norm(x.double(), norm.double(), 1e-5), made[0])
    assert relative(y, torch.nn.functional.silu(gate) * gate) < 1e-3
    assert len(used) == 9


@pytest.mark.gpu
@torch.inference_mode()
def test_not_where_it_would_be_wrong(used: list[torch.dtype]) -> None:
    """Few rows, recorded calls, inputs that fp16 may not hold, results in bfloat16."""
    _, group = weights()
    x = torch.randn(ROWS, 1024, device="cuda").half()
    ops.linear(x[: folded.LEAST_ROWS - 1], group[0])
    ops.linear(x.float(), group[0])
    ops.linear(x, group[0], dtype=torch.bfloat16)
    with Tape(x.device):
        ops.linear(x, group[0])
    assert not used


def test_which_shapes_are_worth_it() -> None:
    """As measured: later where there are many columns, never where the matrix is too large."""
    assert not folded.worth(1023, 4096, 4096) and folded.worth(1024, 4096, 4096) and folded.worth(1024, 14336, 4096)
    assert not folded.worth(1535, 4096, 14336) and folded.worth(1536, 4096, 14336)
    assert not folded.worth(4096, 8192, 128256)
