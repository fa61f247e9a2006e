"""Can tools be run here? Start a sandbox of one kind and run a command in it; otherwise one line says what helps."""

from __future__ import annotations

import argparse
import asyncio

from envs.sandbox.base import SandboxError, SandboxSpec, SandboxUnavailableError
from envs.sandbox.open import Backend, open_factory
from scripts.console import run_main

TIMEOUT_S = 30.0


def sandbox_works(backend: Backend) -> bool:
    try:
        asyncio.run(try_sandbox(backend))
    except SandboxUnavailableError:
        return False
    return True


async def try_sandbox(backend: Backend) -> str:
    """The name of the sandbox that was had; errors as `open_factory`."""
    factory = await open_factory(backend)
    try:
        async with await factory.start(SandboxSpec()) as sandbox:
            done = await sandbox.exec(["true"], timeout_s=TIMEOUT_S)
    except SandboxError as error:
        raise SandboxUnavailableError(f"{factory.name}: a sandbox does not start: {error}") from error
    finally:
        await factory.close()
    if done.exit_code != 0:
        raise SandboxUnavailableError(f"{factory.name}: a first command ended with {done.exit_code}: {done.stderr}")
    return factory.name


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.try_sandbox",
        description=__doc__,
        epilog="example: python -m scripts.try_sandbox docker",
    )
    parser.add_argument("backend", nargs="?", default="auto", choices=["auto", "docker", "bubblewrap"])
    print(f"sandbox: {asyncio.run(try_sandbox(parser.parse_args().backend))} works")


if __name__ == "__main__":
    run_main(main)
