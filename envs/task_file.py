"""What does a task folder say? Its text, its two sandboxes (the agent's and the tests'), its hidden tests and solution.

    task.toml   instruction.md   environment/Dockerfile   tests/test.sh   solution/solve.sh

The layout is Harbor's. Where we differ: no network unless it is declared, and with a plain Dockerfile no root either.
Compose files, several steps, prior conversations and Windows are refused. Nothing runs here and no image is built.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from envs.dockerfile import DEFAULT_WORKDIR, SYSTEM_FOLDERS, USERS, PlainDockerfile, last_workdir, read_dockerfile
from envs.sandbox.base import DEFAULT_IMAGE, MIB, Network, SandboxFile, SandboxLimits, SandboxSpec, User
from envs.task_toml import Artifact, Environment, Phase, TaskToml, read_task_toml
from envs.task_tree import read_tree

TESTS, VERIFIER_LOGS, ARTIFACT_LOGS = "/tests", "/logs/verifier", "/logs/artifacts"
GraderMode = Literal["shared", "separate"]

IMAGE_LIMITS = SandboxLimits(
    memory_bytes=2048 * MIB, max_processes=256, max_file_bytes=1024 * MIB, disk_bytes=2048 * MIB
)
"""For an image that is run as it is, where `task.toml` says nothing: such images hold whole distributions."""

_NETWORKS: Mapping[str, Network] = {"no-network": "none", "allowlist": "allowlist", "public": "public"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """One task, read whole. `name` is the folder's. `artifacts` are absolute paths."""

    name: str
    instruction: str
    toml: TaskToml
    sandbox: SandboxSpec
    grader_mode: GraderMode
    grader: SandboxSpec
    """The tests' own sandbox; for `shared` it is the agent's."""
    artifacts: tuple[str, ...]
    tests: Mapping[str, SandboxFile] = field(repr=False)
    """By absolute path below /tests."""
    solution: Mapping[str, SandboxFile] = field(repr=False)
    """By path below `solution/`; empty where there is none."""

    @property
    def relaxed(self) -> tuple[str, ...]:
        """What one of its sandboxes has that the defaults do not give, in words."""
        return tuple(dict.fromkeys((*self.sandbox.relaxed, *self.grader.relaxed)))


def read_task_folder(path: Path) -> TaskFolder:
    """Read a task.

    Raises:
        ValueError: a file is missing, or says what cannot be done here; one line names the file and what to do.
    """
    _check_files(path)
    file = path / "task.toml"
    toml = read_task_toml(file)
    base = _base_spec(path, toml)
    sandbox = _with_phase(base, toml, toml.agent, f"{file}: agent")
    # What the tests get must lie where their sandbox can be written, so the mode decides about the folders too.
    mode = toml.verifier.environment_mode or ("separate" if toml.artifacts else "shared")
    grader = _with_phase(base, toml, toml.verifier, f"{file}: verifier", like=toml.agent)
    grader = replace(grader, folders=(*base.folders, ARTIFACT_LOGS, VERIFIER_LOGS, TESTS))
    sandbox = replace(sandbox, folders=(*base.folders, ARTIFACT_LOGS))
    if mode == "separate" and (path / "tests" / "Dockerfile").exists():
        raise ValueError(
            f"{path}/tests/Dockerfile: not supported: the tests run in a sandbox like the agent's; delete it"
        )
    if mode == "shared":
        if (grader.user, grader.network, grader.allowed_hosts) != (
            sandbox.user,
            sandbox.network,
            sandbox.allowed_hosts,
        ):
            raise ValueError(
                f"{file}: verifier: user and network must be the agent's where both share a sandbox; take them out, "
                'or set environment_mode = "separate"'
            )
        sandbox = grader
    return TaskFolder(
        name=path.name,
        instruction=_text(path / "instruction.md"),
        toml=toml,
        sandbox=sandbox,
        grader_mode=mode,
        grader=grader,
        artifacts=_artifacts(file, toml, grader),
        tests={f"{TESTS}/{name}": test for name, test in read_tree(path / "tests").items()},
        solution=read_tree(path / "solution") if (path / "solution").is_dir() else {},
    )


def _check_files(path: Path) -> None:
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (path / name).is_file():
            where = name if (path / name.split("/")[0]).exists() or "/" not in name else f"{name.split('/')[0]}/"
            raise ValueError(
                f"{path}: there is no {where}; a task folder needs task.toml, instruction.md, tests/test.sh"
            )
    for name, reason in (
        ("steps", "tasks of several steps do not run here; make one task folder of each step"),
        ("trajectory.json", "a conversation begins with instruction.md here; put into it what the model must know"),
        ("environment/docker-compose.yaml", "a task has one container here; write environment/Dockerfile"),
        ("environment/docker-compose.yml", "a task has one container here; write environment/Dockerfile"),
    ):
        if (path / name).exists():
            raise ValueError(f"{path / name}: not supported: {reason}")


def _base_spec(path: Path, toml: TaskToml) -> SandboxSpec:
    """The sandbox without what [agent] or [verifier] say of their own."""
    file, environment = path / "task.toml", toml.environment
    folder = path / "environment"
    dockerfile = folder / "Dockerfile"
    _check_variables(
        file, {"environment": environment.env, "verifier": toml.verifier.env, "solution": toml.solution.env}
    )
    plain: PlainDockerfile | None = None
    if environment.docker_image is None:
        if not dockerfile.is_file():
            raise ValueError(f"{path}: there is no environment/Dockerfile; write one, or set environment.docker_image")
        plain = read_dockerfile(dockerfile)
    workdir = environment.workdir
    if workdir is None:
        workdir = plain.workdir if plain else last_workdir(dockerfile) if dockerfile.is_file() else None
    try:
        if plain is not None:
            if workdir and workdir.split("/")[1:2] and workdir.split("/")[1] in SYSTEM_FOLDERS:
                raise ValueError(f"environment.workdir: {workdir} is the system's own folder; use one such as /app")
            return _plain_spec(plain, workdir or DEFAULT_WORKDIR, environment)
        if workdir is None:
            raise ValueError("environment.workdir: the image's working folder is not known here; name it")
        return SandboxSpec(
            image=environment.docker_image or str(folder.resolve()),
            workdir=workdir,
            env=environment.env,
            limits=_limits(environment, IMAGE_LIMITS),
            user="root",
            writable_root=True,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _plain_spec(plain: PlainDockerfile, workdir: str, environment: Environment) -> SandboxSpec:
    outside = {posixpath.dirname(name) for name in plain.files if not _lies_in(name, (workdir, "/tmp"))}
    folders = {folder for folder in outside if not _lies_in(folder, outside - {folder})}
    for folder in folders:
        if _lies_in(workdir, (folder,)):
            raise ValueError(
                f"environment/Dockerfile: COPY into {folder}, which holds the working folder {workdir}; copy into it"
            )
    if workdir != plain.workdir and not _lies_in(plain.workdir, {workdir, *folders}):
        folders.add(plain.workdir)
    return SandboxSpec(
        files=plain.files,
        image=None if plain.image == DEFAULT_IMAGE else plain.image,
        workdir=workdir,
        folders=tuple(sorted(folders)),
        env={**plain.env, **environment.env},
        limits=_limits(environment, SandboxLimits()),
        user=plain.user or "nobody",
    )


def _limits(environment: Environment, default: SandboxLimits) -> SandboxLimits:
    limits = replace(default, cpus=environment.cpus or default.cpus)
    if environment.memory_mb is not None:
        limits = replace(limits, memory_bytes=environment.memory_mb * MIB)
    if environment.storage_mb is not None:
        size = environment.storage_mb * MIB
        limits = replace(limits, disk_bytes=size, max_file_bytes=size)
    return limits


def _with_phase(base: SandboxSpec, toml: TaskToml, phase: Phase, where: str, like: Phase | None = None) -> SandboxSpec:
    """The sandbox of one phase; a user that it does not name is that of `like`, else the image's."""
    user = phase.user if phase.user is not None or like is None else like.user
    mode, hosts = toml.environment.network_mode, toml.environment.allowed_hosts
    if phase.network_mode is not None:
        mode, hosts = phase.network_mode, phase.allowed_hosts
    elif phase.allowed_hosts:
        raise ValueError(f'{where}.allowed_hosts: set network_mode = "allowlist" beside it')
    if (mode == "allowlist") != bool(hosts):
        raise ValueError(f'{where}: allowed_hosts go with network_mode "allowlist", and with nothing else')
    return replace(base, user=_user(user, base.user, where), network=_NETWORKS[mode], allowed_hosts=hosts)


def _user(user: str | int | None, default: User, where: str) -> User:
    if user is None:
        return default
    if str(user) not in USERS:
        raise ValueError(f"{where}.user: {user!r} is not known in sandboxes; use nobody or root, or leave the key out")
    return USERS[str(user)]


def _artifacts(file: Path, toml: TaskToml, grader: SandboxSpec) -> tuple[str, ...]:
    """Absolute paths, the conventional folder first; checked against where the tests' sandbox can be written."""
    paths = [ARTIFACT_LOGS]
    for entry in toml.artifacts:
        source = entry.source if isinstance(entry, Artifact) else entry
        path = posixpath.normpath(posixpath.join(grader.workdir, source))
        if ".." in source.split("/") or "\0" in source or not source.strip() or path == "/":
            raise ValueError(f"{file}: artifacts: {source!r} is no path of a file or folder; '..' and / are refused")
        if _lies_in(path, (TESTS, VERIFIER_LOGS)) or _lies_in(VERIFIER_LOGS, (path,)):
            raise ValueError(
                f"{file}: artifacts: {source!r} is where the tests and their reward are; use another place"
            )
        if not grader.writable_root and not _lies_in(path, (grader.workdir, "/tmp", *grader.folders)):
            raise ValueError(f"{file}: artifacts: {source!r} cannot be written here; put it into {grader.workdir}")
        paths.append(path)
    return tuple(dict.fromkeys(paths))


def _check_variables(file: Path, variables: Mapping[str, Mapping[str, str]]) -> None:
    """Templates would let a task's file choose what of this machine's environment a model can read."""
    for section, values in variables.items():
        for name, value in values.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{file}: {section}.env: {name!r} is no name of a variable with a value; rename it")
            if "${" in value:
                raise ValueError(f"{file}: {section}.env.{name}: templates are not filled in; write the value itself")


def _lies_in(path: str, folders: tuple[str, ...] | set[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text; save it as UTF-8") from error
    if not text:
        raise ValueError(f"{path}: empty; write what the model shall do")
    return text
