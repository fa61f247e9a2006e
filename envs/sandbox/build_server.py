"""The server program that runs inside every sandbox: compiled once per host from the C files beside this one.

It is linked statically, so that it runs in any image. It is kept in the user's cache folder under the hash of its
source; a second process that wants it meanwhile waits.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.host_lock import host_lock

SOURCES = Path(__file__).with_name("server")
FLAGS = ("-std=gnu11", "-O2", "-static", "-s")
COMPILE_S = 120


def server_program(cache: Path | None = None) -> Path:
    """The path of the compiled server; blocking, about a second the first time.

    Raises:
        SandboxUnavailableError: there is no C compiler, or it failed; one line says what to install.
    """
    cache = cache or cache_folder()
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(platform.machine().encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    program = cache / f"server-{digest.hexdigest()[:24]}"
    if program.exists():
        return program
    with host_lock("server", cache):
        if not program.exists():
            _compile([str(source) for source in sources if source.suffix == ".c"], program)
    return program


def cache_folder() -> Path:
    """The user's folder for what can be made again: $XDG_CACHE_HOME or ~/.cache, else the temporary folder."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = place / "agentgrad"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"agentgrad-cache-{os.getuid()}"


def _compile(sources: list[str], program: Path) -> None:
    unfinished = program.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(
            [*_compiler(), *FLAGS, "-o", str(unfinished), *sources],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_S,
            check=False,
        )
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[-300:]
            raise SandboxUnavailableError(
                "the sandbox server could not be compiled (on Debian: apt-get install gcc libc6-dev; elsewhere a C "
                f"compiler with a static libc): {said}"
            )
        unfinished.chmod(0o755)
        unfinished.rename(program)
    except OSError as error:
        raise SandboxUnavailableError(f"the sandbox server cannot be written to {program.parent}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _compiler() -> list[str]:
    """The first of CC, cc, gcc, clang that is there; else the C compiler of the Python package ziglang."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-musl"]
    raise SandboxUnavailableError(
        "sandboxes need a C compiler once: run apt-get install gcc libc6-dev, or pip install ziglang"
    )
