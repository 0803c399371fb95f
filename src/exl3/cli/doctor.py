"""`exl3 doctor`: versions, backends, self-tests; the report to paste into a bug."""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from exl3.cli.common import emit_json, json_flag, table


def report() -> dict[str, Any]:
    """Everything doctor knows, as a plain object. Never raises: what fails is part of the report."""
    import exl3
    from exl3 import diagnose

    facts = diagnose.facts(driver=True)
    out: dict[str, Any] = {
        "exl3": exl3.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()) or "unknown",
        "wheel": f"+{facts.label}" if facts.label else "no label (from PyPI, or built here)",
        "findings": [f"{f.level}: {f.text}" for f in diagnose.findings(facts)],
    }
    try:
        diagnose.require()
        import torch
    except Exception as e:  # a broken torch is what doctor is for
        out["torch"] = facts.torch or "not installed"
        out["failed"] = str(e)
        out["ok"] = False
        return out
    out["torch"] = torch.__version__
    out["torch_cuda"] = torch.version.cuda
    out["torch_hip"] = torch.version.hip
    out["threads"] = torch.get_num_threads()
    from exl3 import ops, settings

    out["backends"] = ops.describe()
    out["settings"] = settings.changed()
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    if torch.version.hip and facts.card == "amd" and facts.card_open and len(devices) == 1:
        out["findings"].append(
            "warning: an AMD card is here and torch sees none: rocminfo lists what ROCm sees; is HIP_VISIBLE_DEVICES or "
            "ROCR_VISIBLE_DEVICES set?"
        )
    out["self_test"] = {}
    for device in devices:
        try:
            ops.self_test(device)
            out["self_test"][device] = "passed"
        except Exception as e:
            out["self_test"][device] = f"FAILED: {e}"
    out["ok"] = all(v == "passed" for v in out["self_test"].values())
    return out


@click.command("doctor")
@json_flag
def command(as_json: bool) -> None:
    """Print versions, backends, instruction tiers and a self-test of every device. Exit status 1 when one fails."""
    result = report()
    if as_json:
        emit_json(result)
    else:
        rows: list[tuple[str, str]] = []
        for key, value in result.items():
            if isinstance(value, dict):
                rows += [(f"{key}.{k}", str(v)) for k, v in value.items()] or [(key, "-")]
            elif isinstance(value, list):
                rows += [(key, str(v)) for v in value] or [(key, "none")]
            else:
                rows.append((key, str(value)))
        table(rows)
    if not result["ok"]:
        raise SystemExit(1)
