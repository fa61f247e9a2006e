"""The tools of task folders in real sandboxes: a shell that lasts, exact edits, and results that a model can use."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox.open import Backend
from envs.task_tools import MAX_RESULT_CHARS, TOOLS, bash_text
from envs.tools import check_tools
from envs.types import ExecResult
from tests.envs.task_folders import SHARED, Attempt, attempt, each_backend, task


@each_backend
def test_a_shell_lasts_and_says_everything(backend: Backend, tmp_path: Path) -> None:
    async def work(one: Attempt) -> None:
        assert await one.bash("cat word.txt") == "harbour"
        assert await one.bash("mkdir d; cd d; export A=1") == "(no output)"
        assert await one.bash("pwd; echo $A") == "/app/d\n1"
        assert await one.bash("echo out; echo err >&2; exit 3") == "out\nerr\n[exit code 3]"
        assert "[exit code 127]" in await one.bash("no-such-program")
        assert (await one.result("bash", command="false")).is_error is False
        result = await one.result("bash", command="echo begun; sleep 60", timeout_s=1)
        assert (result.content, result.is_error) == ("begun\n[killed: it ran longer than 1 s]", True)
        assert await one.bash("pwd") == "/app/d", "what went before is still there"
        background = await one.bash("sleep 100 >/dev/null 2>&1 & echo started")
        assert background == "started\n[processes still running in the background: 1]"
        long = await one.bash("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i + 1)); done")
        assert len(long) <= MAX_RESULT_CHARS
        assert long.startswith("line 0\n")
        assert "line 19999\n[there was more output than is shown" in long
        assert await one.bash(r"printf '\377a'") == "\N{REPLACEMENT CHARACTER}a"

    attempt(backend, task(tmp_path), work)


@each_backend
def test_wrong_calls_are_told_how_to_go_on(backend: Backend, tmp_path: Path) -> None:
    async def work(one: Attempt) -> None:
        for name, arguments, says in (
            ("python", {}, "error: unknown tool 'python'; tools: bash, edit_file"),
            ("bash", {}, "error: bash: 'command' is a required property; arguments: command, timeout_s"),
            ("bash", {"command": 3}, "error: bash: 3 is not of type 'string' in 'command'"),
            ("bash", {"command": "a", "timeout_s": 10**6}, "error: bash: 1000000 is greater than the maximum of 600"),
            ("bash", {"command": "echo a\0b"}, "error: bash: the command holds a character"),
            ("bash", {"command": "echo \ud800"}, "error: bash: the command holds a character"),
            ("edit_file", {"path": "a"}, "error: edit_file: "),
        ):
            result = await one.result(name, **arguments)
            assert result.is_error
            assert result.content.startswith(says)

    attempt(backend, task(tmp_path), work)


@each_backend
def test_edits(backend: Backend, tmp_path: Path) -> None:
    async def edit(one: Attempt, path: str, old: str, new: str) -> tuple[str, bool]:
        result = await one.result("edit_file", path=path, old_text=old, new_text=new)
        return result.content, result.is_error

    async def work(one: Attempt) -> None:
        assert await edit(one, "new/deep.txt", "", "one\ntwo\nóne\n") == ("made new/deep.txt", False)
        assert await edit(one, "/app/new/deep.txt", "two", "2") == ("edited /app/new/deep.txt", False)
        assert await one.bash("cat new/deep.txt") == "one\n2\nóne"
        content, is_error = await edit(one, "new/deep.txt", "", "again")
        assert is_error
        assert "new/deep.txt exists; give the old_text" in content
        for old, count in (("three", 0), ("ne", 2)):
            content, is_error = await edit(one, "new/deep.txt", old, "x")
            assert is_error
            assert f"old_text is {count} times in new/deep.txt, it must be there once" in content
        assert await one.bash("cat new/deep.txt") == "one\n2\nóne", "a refused edit changes nothing"
        await one.bash(r"printf '#!/bin/sh\necho one\n' >run; chmod 750 run; ln -s run link")
        assert (await edit(one, "link", "one", "$HOME \\1 &"))[1] is False
        assert await one.bash("cat run; stat -c %a run; test -L link && echo link") == (
            "#!/bin/sh\necho $HOME \\1 &\n750\nlink"
        )
        await one.bash(r"printf 'a\377' >bytes; mkdir folder; mkfifo pipe; head -c 1100000 /dev/zero >large")
        for path, says in (
            ("bytes", "is not UTF-8 text"),
            ("folder", "no file that can be read"),
            ("pipe", "no file that can be read"),
            ("none", "no file that can be read"),
            ("large", "larger than 1 MiB"),
            ("", "path names no file"),
            ("a\0b", "path names no file"),
        ):
            content, is_error = await edit(one, path, "a", "b")
            assert is_error, path
            assert says in content, path
        for path in ("/etc/new.txt", "run/below.txt", "/proc/new"):
            content, is_error = await edit(one, path, "", "x")
            assert is_error, path
            assert content.startswith("error: edit_file: not written: "), path
        assert (await edit(one, "x", "", "\ud800"))[1] is True

    attempt(backend, task(tmp_path), work)


@each_backend
def test_calls_of_one_turn_run_in_their_order(backend: Backend, tmp_path: Path) -> None:
    async def work(one: Attempt) -> None:
        commands = ["sleep 0.3; echo a >>log", "echo b >>log", "echo c >>log; cat log"]
        results = await asyncio.gather(*(one.bash(command) for command in commands))
        assert results[-1] == "a\nb\nc"

    attempt(backend, task(tmp_path), work)


@each_backend
def test_the_agents_time_is_bounded(backend: Backend, tmp_path: Path) -> None:
    async def work(one: Attempt) -> None:
        slow = await one.result("bash", command="sleep 60", timeout_s=60)
        assert "[killed: it ran longer than" in slow.content
        late = await one.result("bash", command="echo x")
        assert late.content == "error: the time for this task is over; say that you are done"
        assert set((await one.grade()).values()) == {0}

    attempt(backend, task(tmp_path, f"{SHARED}[agent]\ntimeout_sec = 1.5\n"), work)


@given(
    stdout=st.text(max_size=9000),
    stderr=st.text(max_size=9000),
    code=st.integers(0, 255),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(deadline=None, max_examples=50)
def test_a_result_is_never_empty_nor_too_long(
    stdout: str, stderr: str, code: int, flags: tuple[bool, bool, bool]
) -> None:
    timed_out, oom, truncated = flags
    done = ExecResult(
        exit_code=code, stdout=stdout, stderr=stderr, timed_out=timed_out, oom_killed=oom, output_truncated=truncated
    )
    text = bash_text(done, timeout_s=1)
    assert 0 < len(text) <= MAX_RESULT_CHARS
    assert (f"[exit code {code}]" in text[-200:]) >= (code != 0 and not timed_out)


def test_the_tools_have_schemas() -> None:
    check_tools(TOOLS)
    assert [tool.name for tool in TOOLS] == ["bash", "edit_file"]
