"""What is a finished attempt worth? The tests run when nothing of the agent runs any more, and write the reward.

`separate`: in a clean sandbox that has only the declared artefacts of the agent's. `shared`: in the agent's own, after
its processes are dead, with /tests and /logs/verifier emptied and none of its variables. What neither can promise: a
test that runs a program which the agent wrote gives it the test's own rights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.sandbox.base import MIB, Sandbox, SandboxError, SandboxFactory, SandboxFile
from envs.task_file import TESTS, VERIFIER_LOGS, TaskFolder

MAX_ARTIFACT_FILES, MAX_ARTIFACT_BYTES = 2000, 64 * MIB
MAX_REWARD_BYTES = 64 * 1024
_STEP_S = 60.0

_EMPTY = """
for place; do
    chmod -R u+rwx "$place" 2>/dev/null
    find "$place" -mindepth 1 -maxdepth 1 -exec rm -rf {} +
    [ -z "$(ls -A "$place")" ] || exit 1
done
"""


class _NoRewardError(Exception):
    """The attempt is worth nothing, and the message (a name for a reward term) says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Reward terms, and what the tests printed, for the author of a task. Their sum is the reward."""

    terms: Mapping[str, float]
    output: str = ""


async def grade_folder(
    folder: TaskFolder, tests: Mapping[str, SandboxFile], sandbox: Sandbox, sandboxes: SandboxFactory | None
) -> Grade:
    """Grade what an attempt has left in its `sandbox`, which ends with it.

    An attempt that has earned nothing has the term `success` = 0, and where the tests gave no reward at all a second
    one, also 0, whose name says why: `no_reward_file`, `malformed_reward_file`, `tests_timed_out`,
    `artifacts_too_large`, `grading_blocked` (what the agent left is in the way of the tests).

    Raises:
        SandboxError: a sandbox failed; nothing is known about the attempt.
        RuntimeError: the tests need a sandbox of their own and there is no factory.
    """
    await sandbox.kill_all()
    try:
        if folder.grader_mode == "shared":
            await _empty(sandbox, (TESTS, VERIFIER_LOGS))
            return await _run_tests(folder, tests, sandbox)
        if sandboxes is None:
            raise RuntimeError(
                f"task {folder.name}: its tests need a second sandbox; open TaskFolders with `sandboxes`"
            )
        artifacts = await _collect(sandbox, folder.artifacts)
        # Its place is free before another one is asked for: a factory may bound how many there are.
        await sandbox.close()
        async with await sandboxes.start(folder.grader) as clean:
            await _put(clean, artifacts)
            return await _run_tests(folder, tests, clean)
    except _NoRewardError as reason:
        return Grade(terms={"success": 0.0, str(reason): 0.0})


async def _empty(sandbox: Sandbox, places: Sequence[str]) -> None:
    done = await sandbox.exec(["sh", "-c", _EMPTY, "sh", *places], timeout_s=_STEP_S)
    if done.exit_code != 0:
        raise _NoRewardError("grading_blocked")


async def _collect(sandbox: Sandbox, artifacts: Sequence[str]) -> dict[str, SandboxFile]:
    """The regular files at or below the declared paths. Links, devices and names that are no UTF-8 are left out: a
    link would lead to the tests' own files in the clean sandbox."""
    files: dict[str, SandboxFile] = {}
    left = MAX_ARTIFACT_BYTES
    for mode, condition in ((0o755, ("-perm", "-100")), (0o644, ("!", "-perm", "-100"))):
        argv = ["find", *artifacts, "-type", "f", *condition, "-print0"]
        done = await sandbox.exec(argv, timeout_s=_STEP_S, max_output_bytes=MIB)
        paths = [path for path in done.stdout.split("\0") if path]
        if done.output_truncated or done.timed_out or len(files) + len(paths) > MAX_ARTIFACT_FILES:
            raise _NoRewardError("artifacts_too_large")
        for path in paths:
            try:
                content = await sandbox.read_file(path, max_bytes=left)
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise _NoRewardError("artifacts_too_large") from error
            files[path] = SandboxFile(content=content, mode=mode)
            left -= len(content)
    return files


async def _put(sandbox: Sandbox, artifacts: Mapping[str, SandboxFile]) -> None:
    try:
        await sandbox.write_files(artifacts)
    except OSError as error:
        raise _NoRewardError("grading_blocked") from error


async def _run_tests(folder: TaskFolder, tests: Mapping[str, SandboxFile], sandbox: Sandbox) -> Grade:
    try:
        await sandbox.write_files(tests)
    except OSError as error:
        if folder.grader_mode == "shared":
            raise _NoRewardError("grading_blocked") from error
        raise SandboxError(f"task {folder.name}: the tests cannot be written: {error}") from error
    variables = dict(folder.toml.verifier.env)
    if not folder.grader.writable_root:
        # Programs read settings from the home folder, and the usual one is where the agent worked.
        variables = {"HOME": TESTS, **variables}
    done = await sandbox.exec(
        [await shell_of(sandbox), f"{TESTS}/test.sh"], timeout_s=folder.toml.verifier.timeout_sec, env=variables
    )
    output = f"{done.stdout}{done.stderr}"
    await sandbox.kill_all()
    try:
        terms = {"success": 0.0, "tests_timed_out": 0.0} if done.timed_out else await _read_reward(sandbox)
    except _NoRewardError as reason:
        terms = {"success": 0.0, str(reason): 0.0}
    return Grade(terms=terms, output=output)


async def shell_of(sandbox: Sandbox) -> str:
    """bash where the sandbox has it, else sh."""
    done = await sandbox.exec(["bash", "-c", ":"], timeout_s=_STEP_S)
    return "bash" if done.exit_code == 0 else "sh"


async def _read_reward(sandbox: Sandbox) -> dict[str, float]:
    """reward.json before reward.txt."""
    for name, read in (("reward.json", _json_terms), ("reward.txt", _text_terms)):
        try:
            content = await sandbox.read_file(f"{VERIFIER_LOGS}/{name}", max_bytes=MAX_REWARD_BYTES)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise _NoRewardError("malformed_reward_file") from error
        return read(content)
    raise _NoRewardError("no_reward_file")


def _json_terms(content: bytes) -> dict[str, float]:
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _NoRewardError("malformed_reward_file") from error
    if not isinstance(value, dict):
        return {"success": _number(value)}
    if "reward" in value:  # then the others only describe it
        return {"success": _number(value["reward"])}
    if not value:
        raise _NoRewardError("malformed_reward_file")
    return {name: _number(term) for name, term in value.items()}


def _text_terms(content: bytes) -> dict[str, float]:
    try:
        return {"success": _number(float(content.decode("ascii")))}
    except ValueError as error:
        raise _NoRewardError("malformed_reward_file") from error


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise _NoRewardError("malformed_reward_file")
    return number
