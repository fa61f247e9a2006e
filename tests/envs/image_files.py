"""What the tests of images share: a tiny program in the server's place, folders and archives, and many processes."""

from __future__ import annotations

import io
import multiprocessing
import os
import struct
import tarfile
import uuid
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest

from envs.sandbox.base import DEFAULT_IMAGE, SandboxUnavailableError
from envs.sandbox.images import prepare_image

PROCESSES = 4
EXIT_CODE = 42


def program(machine: int = 62) -> bytes:
    """A static program that exits with 42 at once (on amd64), unlike any other by the text at its end."""
    code = b"\xbf" + struct.pack("<I", EXIT_CODE) + b"\xb8\x3c\0\0\0\x0f\x05"  # exit(42)
    start = 0x400000
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, machine, 1, start + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, start, start, 120 + len(code), 120 + len(code), 4096)
    return header + segment + code + uuid.uuid4().bytes


def reason(api: Any, image: str, server: Path) -> str:
    """Why the image cannot be had; registries are asked three times, without waiting."""
    with pytest.raises(SandboxUnavailableError) as raised:
        prepare_image(api, image, server, server.parent / "locks", waits_s=(0, 0))
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(("docker: ", "image ", "sandbox: "))
    return text


def prepare(api: Any, image: str, server: Path) -> str:
    return prepare_image(api, image, server, server.parent / "locks", waits_s=(0, 0))


def prepare_in_process(url: str | None, image: str, server: Path) -> str:
    client = docker.APIClient(url, version="auto") if url else docker.from_env().api
    try:
        return prepare(client, image, server)
    except SandboxUnavailableError as error:
        return str(error)
    finally:
        client.close()


def prepare_in_processes(url: str | None, image: str, server: Path) -> list[str]:
    """What each of several processes that begin together gets."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        return list(pool.map(prepare_in_process, [url] * PROCESSES, [image] * PROCESSES, [server] * PROCESSES))


def rootfs(path: Path, mode: str = "w") -> Path:
    """An archive that holds one file of random text and no shell."""
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        entry = tarfile.TarInfo("etc/mark")
        content = os.urandom(5000)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return path


def folder(path: Path, dockerfile: str = f"FROM {DEFAULT_IMAGE}\nCOPY . /task/\n") -> Path:
    path.mkdir()
    path.joinpath("Dockerfile").write_text(dockerfile)
    path.joinpath("mark").write_text(uuid.uuid4().hex)
    return path
