"""Which keys may a `task.toml` have, and what do they say?

The keys are Harbor's (schema 1.0 to 1.4). One that is read here does something, or is listed as `documentation` below;
one that asks for what we have not (`UNSUPPORTED`) is refused by name, and so is one that nobody knows. What the other
files of a task folder say is not looked at.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

NetworkMode = Literal["public", "no-network", "allowlist"]
Seconds = Annotated[float, Field(gt=0)]

_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)

UNSUPPORTED: Mapping[tuple[str, ...], str] = {
    ("steps",): "tasks of several steps do not run here; make one task folder of each step",
    ("multi_step_reward_strategy",): "it belongs to tasks of several steps, which do not run here",
    ("agent", "mcp_servers"): "MCP servers are not started here",
    ("environment", "mcp_servers"): "MCP servers are not started here",
    ("environment", "gpus"): "sandboxes have no GPU",
    ("environment", "gpu_types"): "sandboxes have no GPU",
    ("environment", "tpu"): "sandboxes have no TPU",
    ("environment", "skills_dir"): "there are no skills; put what the model must know into instruction.md",
    ("environment", "healthcheck"): "nothing is waited for; a task's image must be ready when it starts",
    ("verifier", "environment"): "the tests run in a sandbox like the agent's; put what they need into tests/",
    ("verifier", "collect"): "write what the tests need to a file and declare it in artifacts",
}
"""Keys of Harbor's that would change what a task is and that we cannot honour. Empty values are let through."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Artifact:
    """What the tests get of the agent's work. `destination` is documentation: no copy is kept outside."""

    source: str
    destination: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Phase:
    """What [agent] and [verifier] share. A network given here counts in place of [environment]'s."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Verifier(Phase):
    """`environment_mode`: a clean sandbox for the tests, or the agent's own."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Environment:
    """The sandbox. `build_timeout_sec` is documentation: the Docker sandbox has its own bound for a build."""

    build_timeout_sec: Seconds = 600.0
    docker_image: Annotated[str, Field(min_length=1)] | None = None
    os: Literal["linux"] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    network_mode: NetworkMode = "no-network"
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Solution:
    """Variables that the solution runs with."""

    env: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class About:
    """[task]: documentation, for whoever shares tasks."""

    name: str | None = None
    version: str | None = None
    description: str = ""
    authors: tuple[dict[str, str], ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class TaskToml:
    """All of a `task.toml`. `source`, `task` and `metadata` are documentation."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = "1.4"
    source: str | None = None
    artifacts: tuple[str | Artifact, ...] = ()
    task: About = About()
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: Phase = Phase()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()


def read_task_toml(path: Path) -> TaskToml:
    """The keys of a `task.toml`.

    Raises:
        ValueError: it is no TOML, a key is unknown, unsupported or has a wrong value; one line names file and key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no TOML: {error}") from error
    try:
        return TypeAdapter(TaskToml).validate_python(_supported(_renamed(values)))
    except ValidationError as error:
        raise ValueError(f"{path}: {_first_problem(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _supported(values: dict[str, Any]) -> dict[str, Any]:
    """Without the empty keys of `UNSUPPORTED`; one that is not empty is an error."""
    for key, reason in UNSUPPORTED.items():
        *sections, name = key
        place: Any = values
        for section in sections:
            place = place.get(section, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict) and place.pop(name, None):
            raise ValueError(f"{'.'.join(key)}: not supported: {reason}")
    for index, entry in enumerate(values.get("artifacts", []) if isinstance(values.get("artifacts"), list) else []):
        if isinstance(entry, dict):
            if entry.pop("exclude", None):
                raise ValueError(f"artifacts.{index}.exclude: not supported: name the files that the tests need")
            if entry.pop("service", None) not in (None, "", "main"):
                raise ValueError(f"artifacts.{index}.service: not supported: a task has one container here")
    environment = values.get("environment")
    if isinstance(environment, dict) and str(environment.get("os", "linux")).lower() != "linux":
        raise ValueError("environment.os: not supported: sandboxes are Linux; leave the key out")
    return values


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Keys of older schemas under the name that they have today."""
    if "version" in values:
        values.setdefault("schema_version", values.pop("version"))
    environment = values.get("environment")
    if not isinstance(environment, dict):
        return values
    if isinstance(environment.get("os"), str):
        environment["os"] = environment["os"].lower()
    for old in ("memory", "storage"):
        if old in environment:
            environment.setdefault(f"{old}_mb", _megabytes(environment.pop(old), f"environment.{old}"))
    if "allow_internet" in environment:
        allowed = environment.pop("allow_internet")
        environment.setdefault("network_mode", "public" if allowed is True else "no-network")
    return values


def _megabytes(size: object, key: str) -> int:
    """
    >>> _megabytes("2G", "environment.memory")
    2048
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG])B?", str(size).strip().upper())
    if found is None:
        raise ValueError(f"{key}: {size!r} is no size; write {key}_mb and a whole number")
    return max(1, int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2]]))


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    # The parts of a union's place that name its alternatives are no keys.
    key = ".".join(str(part) for part in first["loc"] if part not in ("str", "int", "Artifact"))
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key}: unknown key; take it out, or put it under [metadata], which is free"
    given = f" (given: {first['input']!r})" if isinstance(first["input"], str | int | float) else ""
    return f"{key}: {first['msg'].removeprefix('Value error, ')}{given}"
