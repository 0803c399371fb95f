"""Drivers and cards that no test machine has: what the CUDA backend says of them, in one sentence each."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("device") / "device"
    folders = [f"-I{HERE / 'mock_cuda'}", f"-I{HERE.parents[1] / 'cpp/include'}", f"-I{HERE.parents[1] / 'cuda'}"]
    subprocess.run(["g++", "-std=c++17", "-w", "-x", "c++", *folders, str(HERE / "device_on_cpu.cpp"), "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("old driver", "no NVIDIA driver, or one too old for CUDA 13.0 that libexl3_cuda was built with: update the driver"),
        ("no card", "no CUDA device can be used: no CUDA-capable device is detected"),
        (
            "no code",
            "libexl3_cuda has no code for this card (compute capability 6.1): it was built for 80 90a. "
            "Build for it: EXL3_CUDA_ARCHS=61 pip install .",
        ),
        ("fault", "linear: an error (cudaErrorOfTheMock)"),
        ("small", "linear: needs 1048576 bytes of shared memory, this card has 232448 a block"),
        ("good", "code for 90, wide 1"),
        ("good, code for 8.0", "code for 80, wide 0"),
    ],
)
def test_one_sentence_for_each(program, machine, said):
    done = subprocess.run([program, machine], capture_output=True, text=True)
    assert done.stdout.strip() == said and done.returncode == (not machine.startswith("good"))
