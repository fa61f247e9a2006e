"""The command that starts a server: what it prints for a GPU and for a CPU, and how it refuses bad input."""

from __future__ import annotations

import re

import pytest

from rollouts.config import EngineConfig
from rollouts.server_command import serve_command
from scripts.serve import command_of, parser_of
from tests.scripts.test_bad_input import error_line, run


def test_it_prints_the_command_of_a_gpu_machine() -> None:
    done = run(
        "scripts.serve", "some/model", "--device", "gpu", "--adapter", "mine=a/b", "--takes-weights", "--print",
        "--dtype", "float32", "--gpu-memory-utilization", "0.8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "VLLM_SERVER_DEV_MODE=1 vllm serve some/model --host 127.0.0.1 --port 8000 --max-model-len 1024 "
        "--max-num-seqs 64 --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm "
        "--enable-prompt-tokens-details --structured-outputs-config.backend xgrammar --dtype float32 "
        '--weight-transfer-config \'{"backend": "agentgrad_tcp"}\' '
        "--worker-extension-cls rollouts.weight_transfer_worker.PolicyTransfer "
        "--enable-lora --lora-modules mine=a/b --gpu-memory-utilization 0.8"
    )


def test_on_a_cpu_no_prompt_is_split_over_steps() -> None:
    """A seeded request whose prompt is split would end the server."""
    text = str(serve_command("m", on_cpu=True, max_context_tokens=9000))
    assert "--no-enable-chunked-prefill --max-num-batched-tokens 9000" in text
    assert "vllm serve" not in text  # it fails there


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("models/none",), "model models/none: no such folder"),
        (("README.md",), "model README.md: this is a file; name the folder"),
        (("configs",), "model configs: there is no config.json in this folder"),
        (("models/embedded", "--adapter", "mine"), "--adapter mine: write NAME=FOLDER"),
        (("models/embedded", "--adapter", "a=models/none"), "--adapter a=models/none: no such folder"),
        (("models/embedded", "--adapter", "a=configs"), "--adapter a=configs: there is no adapter_config.json in"),
        (("m", "--adapter", "a=b", "--adapter", "a=c", "--print"), "--adapter a=c: the name a is given twice"),
        (("m", "--port", "0", "--print"), "--port 0: must be 1 to 65535"),
        (("m", "--port", "70000", "--print"), "--port 70000: must be 1 to 65535"),
        (("m", "--max-context-tokens", "-1", "--print"), "--max-context-tokens -1: must be 1 or more"),
        (("m", "--max-concurrent", "0", "--print"), "--max-concurrent 0: must be 1 or more"),
        (("m", "--gpu-memory-utilization", "1.5", "--print"), "--gpu-memory-utilization 1.5: must be more than 0"),
        (("m", "--gpu-memory-utilization", "nan", "--print"), "--gpu-memory-utilization nan: must be more than 0"),
        (("models/embedded", "--device", "cpu", "--gpu-memory-utilization", "0.5"), "a CPU takes no GPU memory"),
    ],
)
def test_bad_input_is_refused_before_vllm_has_it(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        command_of(parser_of().parse_args(arguments))


def test_bad_input_is_one_line() -> None:
    assert "model models/none: no such folder" in error_line(run("scripts.serve", "models/none"))


def test_a_server_samples_as_many_at_once_as_rollouts_send_unless_told_otherwise() -> None:
    """vLLM does not publish its number: nothing could compare the two later."""
    engine = EngineConfig()
    command = str(serve_command("m", on_cpu=False))
    assert f"--max-model-len {engine.max_context_tokens} --max-num-seqs {engine.max_concurrent} " in command
    shown = " ".join(run("scripts.serve", "--help").stdout.split())
    assert f"for more wait in the server, unseen (default: {engine.max_concurrent})" in shown
    assert "VLLM_API_KEY" in shown
