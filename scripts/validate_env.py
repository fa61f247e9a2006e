"""Is an environment sound? For every task: its solution scores 1, and an attempt that does nothing scores 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from envs.base import Env
from envs.sandbox.base import SandboxFactory
from envs.task_folder import TaskFolders
from envs.types import Task
from rollouts.config import EnvConfig, SandboxConfig
from rollouts.validate import TaskCheck, check_task
from scripts.console import progress, run_async, run_main
from scripts.open_env import open_env, open_sandboxes

EXAMPLE = "python -m scripts.validate_env task_folder --backend bubblewrap"
GENERATED_TASKS = 10
"""Of each split, where tasks are made up and have no end."""
TIMEOUT_S = 600.0


async def validate(arguments: argparse.Namespace) -> list[TaskCheck]:
    """Check the tasks, one after the other."""
    config = _env_config(arguments.name, arguments.folder)
    async with open_sandboxes(SandboxConfig(backend=arguments.backend, warm=0)) as sandboxes:
        env = open_env(config, sandboxes=sandboxes)
        return await _check_all(env, sandboxes, _tasks(env, arguments.task))


async def _check_all(env: Env, sandboxes: SandboxFactory, tasks: Sequence[Task]) -> list[TaskCheck]:
    checks: list[TaskCheck] = []
    with progress() as bar:
        place = bar.add_task("tasks", total=len(tasks), note="")
        for task in tasks:
            bar.update(place, note=task.task_id)
            checks.append(await check_task(env, sandboxes, task, timeout_s=TIMEOUT_S))
            bar.advance(place)
    return checks


def _env_config(name: str, folder: str | None) -> EnvConfig:
    if name == "task_folder":
        return EnvConfig(name="task_folder", folder=folder)
    if folder is not None and name == "lookup_calc":
        raise ValueError("--folder goes with task_folder; the tasks of lookup_calc are made up")
    if name == "lookup_calc":
        return EnvConfig()
    if folder is not None:
        raise ValueError(f"--folder goes with task_folder; the name {name} is a folder already")
    if not Path(name).is_dir():
        raise ValueError(
            f"there is no environment {name!r} and no such folder; use task_folder, lookup_calc or a folder"
        )
    return EnvConfig(name="task_folder", folder=name)


def _tasks(env: Env, name: str | None) -> list[Task]:
    if isinstance(env, TaskFolders):
        return [env.task(name)] if name is not None else [env.task(name) for name in env.names]
    if name is not None:
        raise ValueError(f"--task names a task folder; the tasks of {env.name} are made up")
    return [*env.tasks("train", GENERATED_TASKS, 0), *env.tasks("heldout", GENERATED_TASKS, 0)]


def table(checks: Sequence[TaskCheck]) -> Table:
    rows = Table(box=None, pad_edge=False)
    for title, justify in (("task", "left"), ("solution", "right"), ("empty", "right"), ("seconds", "right")):
        rows.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    rows.add_column("sandbox")
    for check in checks:
        rewards = ("-" if reward is None else f"{reward:g}" for reward in (check.solution, check.empty))
        rows.add_row(check.task_id, *rewards, f"{check.seconds:.1f}", ", ".join(check.relaxed) or "defaults")
    return rows


def main() -> None:
    checks = run_async(validate(_parser().parse_args()))
    Console(highlight=False).print(table(checks))
    wrong = [check for check in checks if check.problem is not None]
    for check in wrong:
        print(f"error: task {check.task_id}: {check.problem}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"{len(checks)} tasks: every solution scores 1, every empty attempt 0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.validate_env", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument("name", metavar="NAME", help="task_folder, lookup_calc, or a folder that holds task folders")
    parser.add_argument("--folder", metavar="PATH", help="for task_folder: the tasks (default: those of the package)")
    parser.add_argument("--task", metavar="NAME", help="this one task alone")
    parser.add_argument(
        "--backend", default="auto", choices=["auto", "bubblewrap", "docker"], help="where (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    run_main(main)
