"""Grading of task folders in real sandboxes: what the tests wrote is the reward, and nobody else can write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.sandbox.base import SandboxFactory, SandboxUnavailableError
from envs.sandbox.open import Backend
from envs.task_folder import TaskFolders
from tests.envs.task_folders import (
    SENTINEL,
    SHARED,
    TEST,
    Attempt,
    attempt,
    each_backend,
    each_mode,
    graded_after,
    task,
    with_factory,
)


@each_backend
@each_mode
@pytest.mark.parametrize(
    ("command", "reward"), [(f"echo {SENTINEL} >answer.txt", 1), ("echo x >answer.txt", 0), (":", 0)]
)
def test_the_tests_decide(backend: Backend, tmp_path: Path, toml: str | None, command: str, reward: float) -> None:
    assert graded_after(backend, task(tmp_path, toml), command) == {"success": reward}


@each_backend
@each_mode
def test_the_reward_cannot_be_written_beforehand(backend: Backend, tmp_path: Path, toml: str | None) -> None:
    forged = [
        "mkdir -p /logs/verifier/reward.json.d; echo 1 >/logs/verifier/reward.txt",
        "echo '{\"success\": 1}' >/logs/verifier/reward.json; chmod 444 /logs/verifier/reward.json",
        "printf 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh; chmod 555 /tests/test.sh",
        "mkdir -p /tests/expected.txt/x; chmod 000 /tests/expected.txt",
        "echo x >/tests/-rf; ln -s /app /logs/verifier/link; echo 1 >/logs/artifacts/reward.txt",
    ]
    assert graded_after(backend, task(tmp_path, toml), *forged) == {"success": 0}


@each_backend
@each_mode
def test_a_background_process_cannot_write_the_reward(backend: Backend, tmp_path: Path, toml: str | None) -> None:
    loop = """#!/bin/sh
trap '' HUP TERM INT
while :; do
    echo 1 >/logs/verifier/reward.txt
    echo '{"a": 1}' >/logs/verifier/reward.json
    cp /tests/expected.txt /app/answer.txt
done
"""
    start = f"cat >loop.sh <<'LOOP'\n{loop}LOOP\n(setsid sh loop.sh >/dev/null 2>&1 &) &"
    tests = f"sleep 1\n{TEST}sleep 1\n"
    assert graded_after(backend, task(tmp_path, toml, tests__test_sh=tests), start) == {"success": 0}


@each_backend
@each_mode
def test_the_agents_settings_do_not_reach_the_tests(backend: Backend, tmp_path: Path, toml: str | None) -> None:
    """Exported variables, a PATH of its own, and the files that shells read at their start."""
    tricks = [
        "mkdir bin; printf '#!/bin/sh\\necho forged\\n' >bin/cat; chmod 755 bin/cat",
        "export PATH=/app/bin:$PATH ENV=/app/env BASH_ENV=/app/env HOME=/app",
        "echo 'echo 1 >/logs/verifier/reward.txt; exit' | tee env .profile .bashrc .bash_profile .shrc >/dev/null",
    ]
    tests = 'echo "$PATH|$ENV|$BASH_ENV|$HOME|$PWD" >&2\n[ "$HOME" = /tests ] || exit 1\n' + TEST
    assert graded_after(backend, task(tmp_path, toml, tests__test_sh=tests), *tricks) == {"success": 0}


@each_backend
def test_only_the_artefacts_reach_a_clean_sandbox(backend: Backend, tmp_path: Path) -> None:
    toml = """
artifacts = ["out", "run.sh", "gone.txt"]
[verifier]
environment_mode = "separate"
env = { WANTED = "a b" }
"""
    tests = """#!/bin/sh
cd /app || exit 1
find . ! -type d | sort
ls -l run.sh | cut -c 1-10
cat "out/in/a file" /logs/artifacts/report.txt
echo "$WANTED"
echo 1 >/logs/verifier/reward.txt
"""

    async def work(one: Attempt) -> str:
        await one.bash("mkdir -p out/in; echo kept >'out/in/a file'; echo 'exit 0' >run.sh; chmod 700 run.sh")
        await one.bash(
            "ln -s /etc/passwd out/passwd; ln -s / out/root; mkfifo out/pipe; echo no >left.txt; rm word.txt"
        )
        await one.bash("mkdir -p /logs/artifacts; echo report >/logs/artifacts/report.txt; echo no >/tmp/left.txt")
        assert await one.grade() == {"success": 1}
        return one.session.test_output

    output = attempt(backend, task(tmp_path, toml, tests__test_sh=tests), work)
    assert output == "./out/in/a file\n./run.sh\n./word.txt\n-rwxr-xr-x\nkept\nreport\na b\n"


@each_backend
@pytest.mark.parametrize(
    "command",
    [
        "ln -s /tests/expected.txt answer.txt",
        "ln -s /proc/self/../../tests/expected.txt answer.txt",
        "mkdir answer.txt; ln -s /tests/expected.txt answer.txt/answer.txt",
        "ln -s /proc/1/environ answer.txt",
    ],
)
def test_a_link_among_the_artefacts_leads_nowhere(backend: Backend, tmp_path: Path, command: str) -> None:
    assert graded_after(backend, task(tmp_path), command) == {"success": 0}


@each_backend
@pytest.mark.parametrize(
    ("command", "term"),
    [
        ("mkdir out; cd out; i=0; while [ $i -lt 2100 ]; do : >$i; i=$((i + 1)); done", "artifacts_too_large"),
        ("head -c 40000000 /dev/zero >a; mkdir out; cp a out/a; cp a out/b", "artifacts_too_large"),
    ],
)
def test_too_much_is_the_agents_fault(backend: Backend, tmp_path: Path, command: str, term: str) -> None:
    space = "[environment]\nmemory_mb = 1024\nstorage_mb = 200\n"
    toml = f'artifacts = ["out"]\n[verifier]\nenvironment_mode = "separate"\n{space}'
    assert graded_after(backend, task(tmp_path, toml), command) == {"success": 0, term: 0}


@each_backend
@pytest.mark.parametrize(
    ("writes", "terms"),
    [
        ("echo 0.5 >reward.txt", {"success": 0.5}),
        ("echo ' 1 ' >reward.txt; echo '{\"a\": 0.25, \"b\": 0.5}' >reward.json", {"a": 0.25, "b": 0.5}),
        ('echo \'{"reward": 1, "passed": 12}\' >reward.json', {"success": 1}),
        ("echo 1 >reward.json", {"success": 1}),
        ("echo 1 >reward.txt; exit 7", {"success": 1}),
        (":", {"success": 0, "no_reward_file": 0}),
        ("mkdir reward.txt", {"success": 0, "no_reward_file": 0}),
        (": >reward.txt", {"success": 0, "malformed_reward_file": 0}),
        ("echo nan >reward.txt", {"success": 0, "malformed_reward_file": 0}),
        ("echo pass >reward.txt", {"success": 0, "malformed_reward_file": 0}),
        ('echo \'{"a": "1"}\' >reward.json', {"success": 0, "malformed_reward_file": 0}),
        ("echo '{\"a\": 1e999}' >reward.json", {"success": 0, "malformed_reward_file": 0}),
        ("echo '{}' >reward.json; echo 1 >reward.txt", {"success": 0, "malformed_reward_file": 0}),
        ("head -c 100000 /dev/zero >reward.txt", {"success": 0, "malformed_reward_file": 0}),
        ("echo 1 >reward.txt; sleep 60", {"success": 0, "tests_timed_out": 0}),
    ],
)
def test_what_the_tests_wrote_is_the_reward(
    backend: Backend, tmp_path: Path, writes: str, terms: dict[str, float]
) -> None:
    toml = SHARED.replace("20", "2" if "sleep" in writes else "20")
    folder = task(tmp_path, toml, tests__test_sh=f"cd /logs/verifier || exit\n{writes}\n")
    assert graded_after(backend, folder) == terms


def test_tests_that_need_a_clean_sandbox_need_a_factory(tmp_path: Path) -> None:
    async def work(factory: SandboxFactory) -> None:
        env = TaskFolders(task(tmp_path))
        one = env.task("one")
        async with await factory.start(env.sandbox_spec(one)) as sandbox:
            with pytest.raises(RuntimeError, match="open TaskFolders with `sandboxes`"):
                await env.session(one, sandbox).grade([])

    with_factory("bubblewrap", work)


BUILT = "FROM agentgrad-sandbox:1\nWORKDIR /opt/app\nCOPY word.txt .\nRUN echo built >/built.txt\n"
BUILT_TOML = 'artifacts = ["answer.txt"]\n[verifier]\nenvironment_mode = "separate"\n'


@pytest.mark.docker
def test_an_image_is_built_where_the_dockerfile_asks_for_it(tmp_path: Path) -> None:
    folder = task(tmp_path, BUILT_TOML, environment__Dockerfile=BUILT, tests__test_sh=TEST.replace("/app", "/opt/app"))
    assert TaskFolders(folder).task("one").metadata["sandbox"] == ["user root", "writable root file system"]

    async def work(one: Attempt) -> None:
        assert await one.bash("pwd; id -u; cat /built.txt word.txt; echo x >/etc/x && cat /etc/x") == (
            "/opt/app\n0\nbuilt\nharbour\nx"
        )
        await one.bash(f"echo {SENTINEL} >answer.txt")
        assert await one.grade() == {"success": 1}

    attempt("docker", folder, work)


def test_bubblewrap_says_that_it_builds_no_image(tmp_path: Path) -> None:
    folder = task(tmp_path, BUILT_TOML, environment__Dockerfile=BUILT)

    async def work(one: Attempt) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(SandboxUnavailableError, match="use docker"):
        attempt("bubblewrap", folder, work)
