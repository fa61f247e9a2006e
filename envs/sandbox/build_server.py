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
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.host_lock import host_lock, private_folder

SOURCES = Path(__file__).with_name("server")
FLAGS = ("-std=gnu11", "-O2", "-static", "-s")
COMPILE_S = 300


def server_program(cache: Path | None = None) -> Path:
    """The path of the compiled server; blocking, about a second the first time.

    Raises:
        SandboxUnavailableError: there is no C compiler, or it failed; one line says what to install.
    """
    cache = private_folder(cache or cache_folder())
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"agentgrad-cache-{os.getuid()}"


def _compile(sources: list[str], program: Path) -> None:
    """Compile with the first compiler that can: one without a static libc cannot."""
    unfinished = program.with_suffix(f".{os.getpid()}")
    said = ""
    try:
        for compiler in _compilers():
            done = subprocess.run(
                [*compiler, *FLAGS, "-o", str(unfinished), *sources],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_S,
                check=False,
            )
            if done.returncode == 0:
                unfinished.chmod(0o755)
                unfinished.rename(program)
                return
            said = " ".join(done.stderr.split())[-300:]
    except subprocess.TimeoutExpired:
        said = f"it took longer than {COMPILE_S} s"
    except OSError as error:
        raise SandboxUnavailableError(f"the sandbox server cannot be written to {program.parent}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    raise SandboxUnavailableError(
        "sandboxes need a C compiler and a static libc once: run apt-get install gcc libc6-dev, or pip install ziglang"
        + (f" (the compiler said: {said})" if said else "")
    )


def _compilers() -> Iterator[list[str]]:
    """The machine's own, and the one that the Python package ziglang brings."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            yield [name]
    if find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-musl"]
