"""Does a Dockerfile need a build, and if not, what does it put where?

A Dockerfile of nothing but FROM, WORKDIR, COPY, ENV, USER (nobody or root) and comments is *plain*: its image, files,
folder and variables are read here, and every kind of sandbox can give them. Everything else (RUN, ADD, stages,
variables, patterns, a .dockerignore) needs a real build, which is the Docker sandbox's work and not done here.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.sandbox.base import SandboxFile, User
from envs.task_tree import read_tree

DEFAULT_WORKDIR = "/app"
USERS: Mapping[str, User] = {"root": "root", "0": "root", "nobody": "nobody", "65534": "nobody"}

SYSTEM_FOLDERS = frozenset("bin boot dev etc lib lib32 lib64 libx32 logs proc root run sbin sys tests tmp usr".split())
"""What a sandbox has of its own at the root: a fresh folder there would hide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDockerfile:
    """What a plain Dockerfile says. `files` has absolute paths; `user` is None where it has no USER."""

    image: str
    workdir: str = DEFAULT_WORKDIR
    files: Mapping[str, SandboxFile] = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict)
    user: User | None = None


class _NeedsBuildError(Exception):
    """A line that is more than a plain Dockerfile has."""


def read_dockerfile(path: Path) -> PlainDockerfile | None:
    """What the Dockerfile says, or None when it needs a build.

    Raises:
        ValueError: it has no FROM, or copies what is not there.
    """
    lines = _instructions(path)
    if not lines or lines[0][0] not in ("FROM", "ARG"):
        raise ValueError(f"{path}: the first line must be FROM and an image, such as FROM agentgrad-sandbox:1")
    try:
        if (path.parent / ".dockerignore").exists():
            raise _NeedsBuildError
        plain = PlainDockerfile(image=_image(lines[0]))
        for line in lines[1:]:
            plain = _apply(plain, *line, path)
    except _NeedsBuildError:
        return None
    return plain


def last_workdir(path: Path) -> str | None:
    """The working folder of the image that a Dockerfile makes, where its own last stage says one without variables."""
    workdir: str | None = None
    for name, rest in _instructions(path):
        if name == "FROM":
            workdir = None
        elif name == "WORKDIR":
            target = posixpath.normpath(posixpath.join(workdir or "/", _unquoted(rest)))
            workdir = None if "$" in target else target
    return workdir


def _instructions(path: Path) -> list[tuple[str, str]]:
    """(NAME, the rest) of each instruction; comments are gone, and lines that end with a backslash are joined."""
    joined: list[str] = []
    open_line = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        open_line += text.removesuffix("\\") + " " if text.endswith("\\") else text
        if not text.endswith("\\"):
            joined.append(open_line)
            open_line = ""
    if open_line:
        joined.append(open_line)
    parts = (line.split(maxsplit=1) for line in joined)
    return [(part[0].upper(), part[1] if len(part) > 1 else "") for part in parts]


def _image(first: tuple[str, str]) -> str:
    name, rest = first
    if name != "FROM" or len(rest.split()) != 1 or "$" in rest or rest == "scratch":
        raise _NeedsBuildError
    return rest


def _apply(plain: PlainDockerfile, name: str, rest: str, path: Path) -> PlainDockerfile:
    if re.search(r"[$\\`]|<<", rest) or not rest:
        raise _NeedsBuildError
    if name == "WORKDIR":
        workdir = posixpath.normpath(posixpath.join(plain.workdir, _unquoted(rest)))
        if workdir.split("/")[1] in SYSTEM_FOLDERS | {""}:
            raise _NeedsBuildError
        return replace(plain, workdir=workdir)
    if name == "USER":
        if rest not in USERS:
            raise _NeedsBuildError
        return replace(plain, user=USERS[rest])
    if name == "ENV":
        return replace(plain, env={**plain.env, **_variables(rest)})
    if name == "COPY":
        return replace(plain, files={**plain.files, **_copied(plain, rest, path)})
    raise _NeedsBuildError


def _variables(rest: str) -> dict[str, str]:
    """`A=1 B="x y"`, or the older form `A value`."""
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise _NeedsBuildError from error
    if "=" not in words[0]:
        name, *value = rest.split(maxsplit=1)
        return {name: "".join(value)}
    if not all("=" in word for word in words):
        raise _NeedsBuildError
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _copied(plain: PlainDockerfile, rest: str, path: Path) -> dict[str, SandboxFile]:
    """The files of one COPY: a folder's content goes into the target, a file goes to it, or into it if it is one."""
    words = _copy_words(rest)
    if len(words) < 2 or any(re.search(r"^--|[*?\[]", word) for word in words):
        raise _NeedsBuildError
    *sources, target = words
    place = posixpath.normpath(posixpath.join(plain.workdir, target))
    into = target.endswith("/") or len(sources) > 1 or _is_folder(plain, place)
    files: dict[str, SandboxFile] = {}
    for source in sources:
        origin = path.parent / source.lstrip("/")
        if ".." in source.split("/") or not origin.exists():
            raise ValueError(f"{path}: COPY {source}: there is no such file or folder beside the Dockerfile")
        if origin.is_dir():
            found = {posixpath.join(place, name): file for name, file in read_tree(origin).items()}
        else:
            file = read_tree(path.parent, only=origin)[origin.relative_to(path.parent).as_posix()]
            found = {posixpath.join(place, origin.name) if into else place: file}
        files |= found
    if any(name.split("/")[1] in SYSTEM_FOLDERS - {"tmp"} or name.count("/") < 2 for name in files):
        raise _NeedsBuildError  # it changes the system's part of the image
    return files


def _copy_words(rest: str) -> list[str]:
    if not rest.startswith("["):
        return rest.split()
    try:
        words = json.loads(rest)
    except ValueError as error:
        raise _NeedsBuildError from error
    return [str(word) for word in words]


def _is_folder(plain: PlainDockerfile, place: str) -> bool:
    inside = f"{place}/"
    return f"{plain.workdir}/".startswith(inside) or any(name.startswith(inside) for name in plain.files)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
