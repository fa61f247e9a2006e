"""Docker images that can be started at once: found, pulled, built or imported, with the sandbox's server inside.

Blocking functions over the SDK's client, for a process or thread that may wait. Whatever is slow happens once on this
host, under a lock, and leaves a tag by which the next one finds it without asking a registry. The daemon itself
(is it there, may it be used) is the business of whoever made the client.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import random
import re
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from docker.errors import APIError, ImageNotFound
from docker.utils import exclude_paths

from envs.sandbox.base import DEFAULT_IMAGE, SandboxUnavailableError
from envs.sandbox.host_lock import made_once
from envs.sandbox.image_errors import (
    NO_DEFAULT_IMAGE,
    build_line,
    errors_in_one_line,
    fault_of,
    import_line,
    one_line,
    pull_line,
)
from envs.sandbox.launch import SERVER
from envs.sandbox.rootfs import archive_digest, is_archive

SERVER_LABEL = "agentgrad.server"
REGISTRY_WAITS_S = (2.0, 5.0, 15.0, 45.0)
"""Between the tries at a registry that is too busy or broken; each is lengthened by chance by up to one half."""
CONTEXT_MTIME = 1_577_836_800  # 2020: the zip files that builds make know no time before 1980
TAG_DIGITS = 24
LOG_LINES, LOG_CHARACTERS = 6, 500
# What an ELF header's e_machine is in Docker's words.
MACHINES = {3: "386", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "amd64", 183: "arm64", 243: "riscv64", 258: "loong64"}

logger = logging.getLogger(__name__)


def prepare_image(
    api: Any, image: str, server: Path, lock_folder: Path, *, waits_s: Sequence[float] = REGISTRY_WAITS_S
) -> str:
    """The id of an image, on the daemon already, that is `image` with the program `server` in `/.agentgrad/server`.

    Args:
        api: the SDK's `docker.APIClient`.
        image: a registry's name; or the path (it begins with `/`, `./` or `../`) of a folder with a Dockerfile, of a
            Dockerfile, or of a root file system in a tar archive.
        server: a static program for the image's kind of processor.
        lock_folder: where this user's processes on this host keep their locks.
        waits_s: between the tries at a registry that is too busy or broken.

    Raises:
        SandboxUnavailableError: it cannot be had; one line says why and what to do.
    """
    with errors_in_one_line(image):
        program = server.read_bytes()
        machine = _machine(program)
        if machine is None:
            raise SandboxUnavailableError(f"docker: {server} is no Linux program, and should be the sandbox's server")
        base = _base_image(api, image, lock_folder, waits_s)
        system, processor = base.get("Os") or "linux", base.get("Architecture") or machine
        if (system, processor) != ("linux", machine):
            raise SandboxUnavailableError(
                f"docker: image {image} is for {system}/{processor}, and the sandbox's server {server} for "
                f"linux/{machine}: use an image for linux/{machine}"
            )
        return _with_server(api, image, base, program, lock_folder)["Id"]


def _base_image(api: Any, image: str, lock_folder: Path, waits_s: Sequence[float]) -> Any:
    """What the daemon says about `image`, once it has it."""
    once = partial(_once, api, lock_folder)
    if not image.strip():
        raise SandboxUnavailableError(f"docker: {image!r} is no name of an image: give one, or a path")
    if not image.startswith(("/", "./", "../")):
        return once(image, partial(_pull, api, image, waits_s))
    path = Path(image)
    if not path.exists():
        raise SandboxUnavailableError(f"docker: image {image}: there is no such file or folder: check the path")
    if path.is_file() and is_archive(path):
        name = f"agentgrad-rootfs:{archive_digest(path)[:TAG_DIGITS]}"
        return once(name, partial(_import, api, path, name))
    dockerfile = path / "Dockerfile" if path.is_dir() else path
    if not dockerfile.is_file():
        raise SandboxUnavailableError(
            f"docker: image {image}: the folder holds no Dockerfile: name another, or add one"
        )
    with tempfile.TemporaryFile() as context:
        name = f"agentgrad-built:{_pack_context(dockerfile, context)[:TAG_DIGITS]}"
        return once(name, partial(_build_folder, api, dockerfile, context, name, waits_s))


def _with_server(api: Any, image: str, base: Any, program: bytes, lock_folder: Path) -> Any:
    server_digest = hashlib.sha256(program).hexdigest()
    name = f"agentgrad-ready:{hashlib.sha256((base['Id'] + server_digest).encode()).hexdigest()[:TAG_DIGITS]}"

    def make() -> None:
        if (base.get("Config") or {}).get("OnBuild"):
            raise SandboxUnavailableError(
                f"docker: image {image} has ONBUILD steps, for a build of yours: give a Dockerfile that starts from it"
            )
        # By its id, so that nothing can be pulled in its place.
        dockerfile = f"FROM {base['Id']}\nLABEL {SERVER_LABEL}={server_digest}\nCOPY server {SERVER}\n"
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as archive:
            for member, content, mode in (("Dockerfile", dockerfile.encode(), 0o644), ("server", program, 0o755)):
                entry = tarfile.TarInfo(member)
                entry.size, entry.mode, entry.mtime = len(content), mode, CONTEXT_MTIME
                archive.addfile(entry, io.BytesIO(content))
        try:
            _build(api, context, name, use_config_proxy=False)
        except APIError as error:
            line = build_line(f"{image} with the sandbox's server", one_line(error.explanation), "", "try again")
            raise SandboxUnavailableError(line) from error

    return _once(api, lock_folder, name, make)


def _once(api: Any, lock_folder: Path, name: str, make: Callable[[], None]) -> Any:
    return made_once(f"image {name} of {api.base_url}", lock_folder, partial(_find, api, name), make)


def _find(api: Any, name: str) -> Any | None:
    try:
        return api.inspect_image(name)
    except ImageNotFound:
        return None
    except APIError as error:
        if error.status_code != 400:
            raise
        said = one_line(error.explanation)
        line = f"docker: {name!r} is no name of an image ({said}): check it; a path begins with /, ./ or ../"
        raise SandboxUnavailableError(line) from error


def _pull(api: Any, image: str, waits_s: Sequence[float]) -> None:
    if image == DEFAULT_IMAGE:
        raise SandboxUnavailableError(NO_DEFAULT_IMAGE)
    if re.fullmatch(r"sha256:[0-9a-f]{64}", image):
        raise SandboxUnavailableError(f"docker: there is no image {image} here, and ids cannot be pulled: give a name")
    try:
        _with_waits(image, waits_s, lambda: _follow(api.pull(image, stream=True, decode=True)))
    except APIError as error:
        line = pull_line(image, one_line(error.explanation), len(waits_s) + 1)
        raise SandboxUnavailableError(line) from error


def _import(api: Any, archive: Path, name: str) -> None:
    repository, tag = name.split(":")
    try:
        answer = api.import_image(str(archive), repository=repository, tag=tag)
        _follow(json.loads(line) for line in answer.splitlines() if line.strip())
    except APIError as error:
        raise SandboxUnavailableError(import_line(archive, one_line(error.explanation))) from error


def _build_folder(api: Any, dockerfile: Path, context: IO[bytes], name: str, waits_s: Sequence[float]) -> None:
    default = rf"^\s*FROM\s+(--platform=\S+\s+)?{re.escape(DEFAULT_IMAGE)}(\s|$)"
    text = dockerfile.read_text(encoding="utf-8", errors="replace")
    if re.search(default, text, re.IGNORECASE | re.MULTILINE) and _find(api, DEFAULT_IMAGE) is None:
        raise SandboxUnavailableError(f"{NO_DEFAULT_IMAGE} ({dockerfile} starts from it)")
    try:
        _with_waits(str(dockerfile), waits_s, lambda: _build(api, context, name, dockerfile=dockerfile.name))
    except APIError as error:
        log = " | ".join(getattr(error, "log", ()))[-LOG_CHARACTERS:]
        how_to_see = f"docker build -f {dockerfile} {dockerfile.parent} shows all of it"
        line = build_line(str(dockerfile), one_line(error.explanation), log, how_to_see)
        raise SandboxUnavailableError(line) from error


def _build(api: Any, context: IO[bytes], name: str, **options: Any) -> None:
    context.seek(0)
    how = {"custom_context": True, "rm": True, "forcerm": True, "pull": False, "decode": True, **options}
    _follow(api.build(fileobj=context, tag=name, **how))


def _follow(lines: Iterable[Any]) -> None:
    """Read what the daemon says until it is done.

    Raises:
        APIError: what it says is an error; its `log` holds the last lines before.
    """
    log: list[str] = []
    for line in lines:
        failed = line.get("error") or line.get("message")  # `message`: the SDK reads refusals in pieces as answers
        if failed:
            error = APIError(failed, explanation=failed)
            error.log = log  # pyright: ignore[reportAttributeAccessIssue]
            raise error
        text = one_line(line.get("stream", ""))
        if text and not text.startswith(("--->", "Removing intermediate container")):
            log = [*log, text][-LOG_LINES:]


def _with_waits(what: str, waits_s: Sequence[float], ask: Callable[[], None]) -> None:
    for number, wait_s in enumerate(waits_s, start=1):
        try:
            return ask()
        except APIError as error:
            if fault_of(error.explanation) not in ("busy", "broken"):
                raise
            pause_s = wait_s * random.uniform(1.0, 1.5)
            said = one_line(error.explanation)
            logger.warning("%s: %s; try %d of %d in %.0f s", what, said, number + 1, len(waits_s) + 1, pause_s)
        time.sleep(pause_s)
    return ask()


def _pack_context(dockerfile: Path, file: IO[bytes]) -> str:
    """Write the build's context, what .dockerignore leaves of the Dockerfile's folder; the digest of it.

    Equal names, modes and contents give equal bytes: owners and times are the same for all.
    """
    folder, ignore = dockerfile.parent, dockerfile.parent / ".dockerignore"
    lines = ignore.read_text(encoding="utf-8-sig").splitlines() if ignore.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in sorted(exclude_paths(str(folder), patterns, dockerfile=dockerfile.name)):
            archive.dereference = name == dockerfile.name  # a link to one elsewhere could not be followed there
            entry = archive.gettarinfo(folder / name, arcname=name)
            if entry is None:
                continue  # a socket
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mode, entry.mtime = stat.S_IMODE(entry.mode), CONTEXT_MTIME
            if not entry.isreg():
                archive.addfile(entry)
                continue
            with (folder / name).open("rb") as content:
                archive.addfile(entry, content)
    digest = hashlib.sha256(dockerfile.name.encode() + b"\0")
    file.seek(0)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _machine(program: bytes) -> str | None:
    """The kind of processor that an ELF program is for."""
    if program[:4] != b"\x7fELF":
        return None
    return MACHINES.get(int.from_bytes(program[18:20], "big" if program[5] == 2 else "little"))
