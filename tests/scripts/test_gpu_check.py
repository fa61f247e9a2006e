"""The checks of `gpu_check` on a CPU, where all of them but the freed memory can be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.gpu_check import check_gpu, main
from tests.requirements import require


@pytest.mark.slow
@pytest.mark.vllm
def test_every_check_passes_here() -> None:
    require("vllm")
    lines = check_gpu(Path("models/embedded"))
    assert len(lines) == 10
    assert all(line.startswith("passed: ") for line in lines)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        main()
