"""Task folders as an environment: the shipped tasks are sound, what is hidden stays hidden, splits, demonstrations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import Split
from envs.sandbox.base import SandboxFactory
from envs.sandbox.open import Backend
from envs.task_folder import TaskFolders, split_names
from envs.types import Message
from rollouts.synthesize import synthesize
from rollouts.validate import check_task
from tests.envs.task_folders import (
    SENTINEL,
    Attempt,
    attempt,
    each_backend,
    each_mode,
    graded_after,
    task,
    with_factory,
    write_task,
)

SPLITS: tuple[Split, Split] = ("train", "heldout")


# The tasks that are shipped.


@each_backend
def test_every_shipped_solution_scores_1_and_doing_nothing_0(backend: Backend) -> None:
    async def work(factory: SandboxFactory) -> None:
        env = TaskFolders(sandboxes=factory)
        for name in env.names:
            check = await check_task(env, factory, env.task(name), timeout_s=60)
            assert (check.problem, check.solution, check.empty) == (None, pytest.approx(1), 0), name

    with_factory(backend, work)


@each_backend
def test_half_a_solution_earns_a_part(backend: Backend) -> None:
    naive = r"""
        sed 1d orders.csv | awk -F , 'NF == 5 && !/"/ { sub(/\./, "", $3)
            printf "{\"order\":%d,\"customer\":\"%s\",\"total_cents\":%d}\n", $1, $2, $3 * $4 }' >orders.jsonl"""
    folder = TaskFolders().folder
    assert graded_after(backend, folder, naive, name="orders-to-json") == {"plain": 0.3, "quoted": 0, "complete": 0}


FORGING_SCRIPT = """cat >/app/rotate.sh <<'SCRIPT'
(
    trap '' HUP TERM
    while :; do
        echo 1 >/logs/verifier/reward.txt
        echo '{"success": 1}' >/logs/verifier/reward.json
        for file in /tests/*; do echo 'exit 0' >"$file"; done
    done
) >/dev/null 2>&1 &
exit 0
SCRIPT"""


@each_backend
def test_a_program_under_test_cannot_leave_something_that_writes_the_reward(backend: Backend) -> None:
    folder = TaskFolders().folder
    assert graded_after(backend, folder, FORGING_SCRIPT, name="fix-rotate-script") == {"success": 0}


@each_backend
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("merge-config", "ln -s /tests/expected.conf /app/merged.conf"),
        ("merge-config", "mkdir /app/merged.conf"),
        ("merge-config", "cp conf/1-base.conf merged.conf"),
        ("service-errors", "cp app.log report.tsv"),
        ("service-errors", ": >report.tsv"),
        ("service-errors", "ln -s /tests/expected.tsv report.tsv"),
        ("orders-to-json", ": >orders.jsonl"),
        ("orders-to-json", "cp orders.csv orders.jsonl"),
        ("recover-notes", "for f in tape/*; do sed 1,3d $f | base64 -d; done >notes.txt 2>/dev/null"),
        ("fix-rotate-script", "echo exit 0 >rotate.sh"),
        ("fix-rotate-script", "echo exit 2 >rotate.sh"),
        ("fix-rotate-script", "echo 'kill -9 $PPID' >rotate.sh"),
    ],
)
def test_guesses_and_tricks_earn_nothing(backend: Backend, name: str, command: str) -> None:
    assert sum(graded_after(backend, TaskFolders().folder, command, name=name).values()) == 0


# What is hidden stays hidden.


@each_backend
@each_mode
def test_d25_the_hidden_part_is_not_in_the_sandbox_before_grading(
    backend: Backend, tmp_path: Path, toml: str | None
) -> None:
    """Case D25: no sentinel of the tests or the solution in any file, in the environment, or in process 1's."""
    word = SENTINEL[:10]

    async def work(one: Attempt) -> None:
        mark = f"'[{word[0]}]{word[1:]}'"  # a pattern that does not match itself
        search = f"""
            for place in /* /.[!.]* /dev/shm; do
                case $place in /dev | /proc | /sys | /usr) continue ;; esac
                [ -L "$place" ] || find "$place" -type f -exec grep -l {mark} {{}} + 2>/dev/null
                [ -L "$place" ] || find "$place" -name .git 2>/dev/null
            done
            ls -A /tests /logs/verifier 2>/dev/null | grep -v -e : -e '^$'
            cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep {mark}
            env | grep {mark}
            echo end"""
        assert await one.bash(search, timeout_s=120) == "end"
        assert await one.bash(search.replace(mark, "'[h]arbour'"), timeout_s=120) == "/app/word.txt\nend", "it finds"
        assert set((await one.grade()).values()) == {0}

    attempt(backend, task(tmp_path, toml), work)
    one = TaskFolders(tmp_path).task("one")
    opening = TaskFolders(tmp_path).opening(one)
    assert not [text for text in (repr(one), str(one.files), str(one.metadata), repr(opening)) if word in text]
    assert SENTINEL.encode() in one.hidden["tests"]["/tests/expected.txt"].content


# The environment.


@given(names=st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=60, unique=True))
@settings(deadline=None)
def test_the_splits_share_nothing_and_leave_nothing_out(names: list[str]) -> None:
    splits = split_names(names)
    assert sorted(splits["train"] + splits["heldout"]) == sorted(names)
    assert all(splits.values())
    assert splits == split_names(sorted(names)), "the order of the folder says nothing"


def test_a_task_keeps_its_split_when_others_are_added() -> None:
    names = [f"task-{number}" for number in range(200)]
    few, many = split_names(names[:60]), split_names(names)
    for split in SPLITS:
        assert set(few[split]) <= set(many[split])


def test_tasks_of_a_split(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path, name=f"task-{number}")
    env = TaskFolders(tmp_path)
    splits = split_names(env.names)
    for split in SPLITS:
        every = [one.task_id for one in env.tasks(split, len(splits[split]), 0)]
        assert sorted(every) == sorted(splits[split])
        assert [one.task_id for one in env.tasks(split, 2, 0)] == every[:2]
        assert env.tasks(split, 2, 0) == env.tasks(split, 2, 0)
        with pytest.raises(ValueError, match=rf"has {len(every)} tasks of the split {split}, not 100; ask for fewer"):
            env.tasks(split, 100, 0)
    assert len({tuple(one.task_id for one in env.tasks("train", 3, seed)) for seed in range(8)}) > 1


def test_the_shipped_tasks_have_both_splits() -> None:
    env = TaskFolders()
    assert len(env.names) == 5
    assert all(env.tasks(split, 1, 0) for split in SPLITS)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none", r"none: no such folder"),
        (lambda folder: folder, r"holds no task"),
        (lambda folder: write_task(folder), r"is one task; name the folder that it lies in"),
        (lambda folder: write_task(folder, {"task.toml": "a = 1"}).parent, r"one/task\.toml: a: unknown key"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TaskFolders(make(tmp_path))


def test_an_unknown_task_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no task 'two' in .*; tasks: one"):
        TaskFolders(task(tmp_path)).task("two")


def test_a_demonstration_replays_the_solution(tmp_path: Path) -> None:
    env = TaskFolders(task(tmp_path, '[solution]\nenv = {WORD = "it\'s"}\n'))
    one = env.task("one")
    first = env.demonstrate(one, env.opening(one), 0)
    assert first.tool_calls[0].arguments["command"] == f"export WORD='it'\"'\"'s'\necho {SENTINEL} >answer.txt\n"
    done = [*env.opening(one), first, Message(role="tool", content="", call_id="call_0")]
    last = env.demonstrate(one, done, 0)
    assert (last.tool_calls, last.train) == ((), True)


@pytest.mark.parametrize("changes", [{"solution/solve.sh": None}, {"solution/patch.diff": "x"}])
def test_a_task_without_a_whole_solution_cannot_be_demonstrated(
    tmp_path: Path, changes: dict[str, str | bytes | None]
) -> None:
    write_task(tmp_path, changes)
    env = TaskFolders(tmp_path)
    one = env.task("one")
    with pytest.raises(ValueError, match=r"one: solution/ must hold solve\.sh and nothing else"):
        env.demonstrate(one, env.opening(one), 0)


def test_solutions_make_warm_start_data() -> None:
    async def work(factory: SandboxFactory) -> None:
        env = TaskFolders(sandboxes=factory)
        tasks = env.tasks("train", 2, 0)
        result = await synthesize(env, factory, tasks, seed=0, max_turns=4, max_concurrent=2, tool_timeout_s=60)
        assert [row.task_id for row in result.demonstrations] == [one.task_id for one in tasks]
        assert all(len(row.messages) == 5 for row in result.demonstrations)

    with_factory("bubblewrap", work)


def test_a_task_is_named_by_its_folder_and_hashed_as_documented() -> None:
    names = [f"n{number}" for number in range(50)]
    expected = {name for name in names if hashlib.sha256(f"task_folder/{name}".encode()).digest()[0] < 64}
    assert set(split_names(names)["heldout"]) == expected
