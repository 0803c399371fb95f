"""The command line as a person meets it: exit statuses, one-line errors, JSON that a program reads."""

import json
import subprocess
import sys

import pytest


def exl3(*words, **more):
    return subprocess.run([sys.executable, "-m", "exl3", *map(str, words)], capture_output=True, text=True, timeout=300, **more)


def test_help_lists_every_verb_and_loads_no_torch():
    code = "import sys; from exl3.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    for verb in ("convert", "eval", "generate", "chat", "inspect", "plan", "doctor", "bench", "import-gguf", "serve"):
        assert verb in out
    assert out.rstrip().endswith("False")


def test_unknown_verb_and_missing_directory_have_exit_status_2():
    assert exl3("frobnicate").returncode == 2
    done = exl3("inspect", "/nonexistent/a")
    assert done.returncode == 2 and "/nonexistent/a" in done.stderr


def test_unsupported_architecture_is_one_line_that_lists_what_is_supported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}))
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    done = exl3("generate", tmp_path, "hello")
    assert done.returncode == 1
    assert "NoSuchForCausalLM" in done.stderr and "LlamaForCausalLM" in done.stderr
    assert "Traceback" not in done.stderr


def test_not_a_model_directory(tmp_path):
    done = exl3("inspect", tmp_path)
    assert done.returncode == 1 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_bad_ids_are_refused(tmp_path):
    done = exl3("generate", tmp_path, "1,x,3", "--ids")
    assert done.returncode == 1 and "--ids" in done.stderr and "Traceback" not in done.stderr


def test_doctor_reports_backend_and_self_test():
    done = exl3("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["exl3"] and report["torch"]
    assert report["self_test"]["cpu"] == "passed"
    assert done.returncode == (0 if report["ok"] else 1)


@pytest.mark.parametrize("value", ["1", "9", "8,4,2", "x"])
def test_plan_refuses_cache_bits_that_do_not_exist(tmp_path, value):
    done = exl3("plan", tmp_path, "--cache-bits", value)
    assert done.returncode == 1 and "--cache-bits" in done.stderr
