"""What the Docker daemon's sentences about images mean, and the one line that a person gets for each.

The daemon has no code for most of them: a registry that refuses, a full disk and a damaged archive are all status 500,
or come in the middle of an answer that began with status 200. So they are told apart by their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from docker.errors import APIError, DockerException
from urllib3.exceptions import HTTPError  # of the SDK's own HTTP library: an answer that breaks off

from envs.sandbox.base import DEFAULT_IMAGE, SandboxUnavailableError

Fault = Literal["space", "step", "busy", "broken", "unreachable", "absent", "login", "other"]
# The first that matches, in this order. `step` is a command of a Dockerfile, whose own text can hold all the others.
PATTERNS: dict[Fault, str] = {
    "step": r"^The command '",
    "space": r"no space left|disk quota exceeded",
    "busy": r"toomanyrequests|too many requests|HTTP 429",
    "broken": r"HTTP status:? 5\d\d|HTTP 5\d\d|\b5\d\d (Internal Server|Bad Gateway|Service Unavail|Gateway Time)"
    r"|TLS handshake timeout|connection reset|unexpected EOF",
    "unreachable": r"no such host|connection refused|i/o timeout|is unreachable|deadline exceeded|Client\.Timeout"
    r"|server misbehaving|dial tcp|proxyconnect|x509|server gave HTTP response",
    "absent": r"not found|manifest unknown|name unknown|no matching manifest|does not exist|HTTP 404",
    "login": r"unauthorized|authentication required|no basic auth|denied|HTTP 40[13]",
}
DAMAGED = r"unexpected EOF|archive/tar|gzip|checksum|bzip2|xz: |Error processing tar"
NO_DEFAULT_IMAGE = f"docker: there is no image {DEFAULT_IMAGE}: run bash scripts/build_sandbox_image.sh"


def fault_of(said: object) -> Fault:
    """What a sentence of the daemon's is about.

    >>> fault_of("toomanyrequests: You have reached your pull rate limit")
    'busy'
    """
    for fault, pattern in PATTERNS.items():
        if re.search(pattern, str(said), re.IGNORECASE):
            return fault
    return "other"


def pull_line(image: str, said: str, tries: int) -> str:
    """Why `image` could not be pulled, and what to do."""
    fault = fault_of(said)
    if fault == "space":
        return _no_space(image, said)
    text = {
        "busy": f"the registry allows no more pulls of {image} for now, {tries} tries ({said}): wait, run docker "
        "login, or use a mirror",
        "broken": f"the registry failed for {image}, {tries} tries ({said}): try again later",
        "unreachable": f"there is no image {image} here, and its registry cannot be reached ({said}): check the "
        "network, or load the image (docker load)",
        "absent": f"the registry has no image {image}, or does not show it without a login ({said}): check the name, "
        "or run docker login",
        "login": f"the registry refuses {image} ({said}): run docker login",
    }.get(fault, f"image {image} could not be pulled: {said}")
    return f"docker: {text}"


def import_line(archive: object, said: str) -> str:
    """Why a root-file-system archive could not be imported, and what to do."""
    if fault_of(said) == "space":
        return _no_space(archive, said)
    if re.search(DAMAGED, said):
        return f"docker: image {archive}: no whole tar archive ({said}): make it again"
    return f"docker: image {archive} could not be imported: {said}"


def build_line(what: str, said: str, log: str, how_to_see: str) -> str:
    """Why a build failed, with the end of its log."""
    if fault_of(said) == "space":
        return _no_space(what, said)
    ends = f"; its log ends: {log}" if log else ""
    return f"docker: the build of {what} failed: {said}{ends}: {how_to_see}"


def _no_space(what: object, said: str) -> str:
    return f"docker: no space left on the daemon's disk for {what} ({said}): free some (docker system prune)"


@contextmanager
def errors_in_one_line(image: str) -> Iterator[None]:
    """Every error of the SDK's, and of files, as SandboxUnavailableError with one line about `image`."""
    try:
        yield
    except APIError as error:
        raise SandboxUnavailableError(f"docker: image {image}: {one_line(error.explanation or error)}") from error
    except (DockerException, HTTPError) as error:
        raise SandboxUnavailableError(
            f"docker: image {image}: the daemon does not answer: {one_line(error)}"
        ) from error
    except OSError as error:  # the SDK's HTTP library raises it too, without a file
        what = f"{error.filename}: {error.strerror}" if error.filename else f"the daemon does not answer: {error}"
        raise SandboxUnavailableError(f"docker: image {image}: {one_line(what)}") from error


def one_line(text: Any) -> str:
    """One line of at most 400 characters, without a terminal's colours.

    >>> one_line("two\\n  lines")
    'two lines'
    """
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text))
    return " ".join("".join(character if character.isprintable() else " " for character in plain).split())[:400]
