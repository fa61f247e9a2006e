"""What a task may not ask of its sandbox is said at once, in one line, before anything is started."""

from __future__ import annotations

import math
from typing import Any

import pytest

from envs.sandbox.base import MIB, SandboxLimits, SandboxSpec


@pytest.mark.parametrize("name", ["memory_bytes", "max_processes", "max_file_bytes", "disk_bytes", "cpus"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_limits_are_numbers_above_0(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"sandbox limit {name} must be a number above 0, not"):
        SandboxLimits(**{name: value})


def test_a_sandbox_needs_some_memory() -> None:
    with pytest.raises(ValueError, match="memory_bytes must be at least 8388608"):
        SandboxLimits(memory_bytes=MIB)


@pytest.mark.parametrize("folder", ["", "/", "//", "/.", "work", "/a/../b", "/a:b", "/a\0", "/a/", "/" + "a" * 300])
def test_folders_are_plain_absolute_paths(folder: str) -> None:
    for asked in ({"workdir": folder}, {"folders": (folder,)}):
        with pytest.raises(ValueError, match="must be a plain absolute path such as /app"):
            SandboxSpec(**asked)


@pytest.mark.parametrize("folder", ["/proc", "/dev/shm", "/sys/x", "/.agentgrad"])
def test_folders_of_the_system_are_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="lies where the system has its own"):
        SandboxSpec(workdir=folder)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"image": ""}, "image must not be empty"),
        ({"user": "foo"}, "users: nobody, root"),
        ({"network": "all"}, "networks: none, allowlist, public"),
        ({"network": "allowlist", "allowed_hosts": ("not a host",)}, "allowed host 'not a host'"),
        ({"network": "allowlist", "allowed_hosts": ("http://y/",)}, "allowed host 'http://y/'"),
        ({"network": "allowlist"}, "allowed_hosts go with network 'allowlist'"),
        ({"allowed_hosts": ("example.org",)}, "allowed_hosts go with network 'allowlist'"),
        ({"env": {"A=B": "1"}}, "without '='"),
        ({"env": {"A": "\0"}}, "no NUL"),
    ],
)
def test_what_a_spec_may_not_say(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SandboxSpec(**asked)


def test_what_a_spec_may_say() -> None:
    hosts = ("example.org", "*.example.org", "1.1.1.1", "2606:4700::1111", "a_b.example")
    assert SandboxSpec(network="allowlist", allowed_hosts=hosts, workdir="/app/src", folders=("/logs/verifier",))
