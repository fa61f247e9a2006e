"""What does a simulated trajectory do in its sandbox, and what has to come of it?

Each kind is one function: it works in a sandbox and raises `WrongError` when a result is not what it has to be. A
`SandboxError` is not wrong; it is counted by whoever runs the trajectory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from envs.sandbox.base import MAX_OUTPUT_BYTES, MIB, Sandbox
from envs.types import ExecResult

TIMEOUT_S = 120.0
"""For commands that take milliseconds: a machine that is busy is not a fault."""
SHORT_S = 1.0
FLOOD_BYTES = 300_000_000
CUT_LINE_BYTES = 200

LOOP = "while :; do sleep 1; done"
"""Runs until it is killed. It is started with a mark as `$0`, which can be seen in /proc."""


class WrongError(Exception):
    """A command's result is not what it has to be."""


class PlannedError(Exception):
    """The fault of a trajectory that fails half way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A sandbox, and what is random in this trajectory. `mark` is in the arguments of whatever is left running."""

    sandbox: Sandbox
    mark: str
    random: random.Random

    async def sh(self, script: str, *, timeout_s: float = TIMEOUT_S, stdin: bytes = b"") -> ExecResult:
        """Run a script with the mark as `$0`."""
        return await self.sandbox.exec(["sh", "-c", script, self.mark], timeout_s=timeout_s, stdin=stdin)


def check(right: bool, what: str, done: ExecResult | None = None) -> None:
    if right:
        return
    if done is not None:
        what += (
            f": exit code {done.exit_code}, timed_out {done.timed_out}, oom_killed {done.oom_killed}, "
            f"processes_left {done.processes_left}, {len(done.stdout)} characters of stdout, "
            f"stdout {done.stdout[:80]!r}, stderr {done.stderr[:200]!r}"
        )
    raise WrongError(what)


async def still_works(work: Work) -> None:
    """After a fault the same sandbox answers as before."""
    number = work.random.randrange(10**9)
    done = await work.sh(f"echo {number}; echo problem >&2; exit 7")
    right = (done.exit_code, done.stdout, done.stderr) == (7, f"{number}\n", "problem\n")
    check(right and not done.timed_out, "a command after the fault", done)


async def plain(work: Work) -> None:
    """Files, streams, exit codes, concurrent commands and a shell session."""
    await still_works(work)
    content = work.random.randbytes(work.random.randrange(1, 200_000))
    await work.sandbox.write_file("folder/data", content)
    check(await work.sandbox.read_file("folder/data") == content, "the content of a file")
    done = await work.sh("cat; wc -c <folder/data >&2", stdin=b"given\n")
    right = (done.exit_code, done.stdout, done.stderr.strip()) == (0, "given\n", str(len(content)))
    check(right, "stdin and a file", done)
    all_done = await asyncio.gather(*(work.sh(f"sleep 0.05; echo {number}") for number in range(4)))
    for number, done in enumerate(all_done):
        check(done.stdout == f"{number}\n", "concurrent commands", done)
    shell = work.sandbox.shell()
    await shell.run("cd folder; export NAME=value", timeout_s=TIMEOUT_S)
    done = await shell.run('echo "$NAME"; ls', timeout_s=TIMEOUT_S)
    check(done.stdout == "value\ndata\n", "a shell session", done)


async def late(work: Work) -> None:
    """A command that times out, with children in sessions of their own and with parents that are gone."""
    script = f"""
        setsid sh -c '{LOOP}' "$0" &
        ( ( sh -c '{LOOP}' "$0" & ) & )
        setsid sh -c '( sh -c "{LOOP}" "$0" & )' "$0"
        echo started
        {LOOP}"""
    done = await work.sh(script, timeout_s=SHORT_S)
    right = done.timed_out and done.exit_code == 124 and done.processes_left == 0
    check(right and done.stdout in ("", "started\n"), "a command that times out", done)
    await nothing_is_left(work)
    await still_works(work)


async def nothing_is_left(work: Work) -> None:
    """No process of the sandbox has the mark in its arguments."""
    # The script that looks has the mark in its environment, and its grep is younger than the list of files.
    script = 'for file in /proc/[0-9]*/cmdline; do grep -q "$MARK" "$file" 2>/dev/null && echo "$file"; done; true'
    done = await work.sandbox.exec(script, timeout_s=TIMEOUT_S, env={"MARK": work.mark})
    check(done.exit_code == 0 and not done.stdout, "processes that a time-out left", done)


async def flood(work: Work) -> None:
    """Far more output than is kept."""
    done = await work.sh(f'yes "$0" | head -c {FLOOD_BYTES}')
    # A sandbox may end a command that has written far too much.
    right = done.exit_code in (0, 137) and done.output_truncated and done.stdout.startswith(work.mark)
    check(right and len(done.stdout) <= MAX_OUTPUT_BYTES + CUT_LINE_BYTES, "a flood of output", done)
    await still_works(work)


async def fork_bomb(work: Work) -> None:
    """Processes that make processes; after `kill_all` the sandbox answers as before."""
    await work.sh("bomb() { bomb | bomb & }; bomb; sleep 60", timeout_s=SHORT_S)
    await work.sandbox.kill_all()
    await still_works(work)


async def memory_hog(work: Work) -> None:
    """A process far beyond the memory limit."""
    done = await work.sh("dd if=/dev/zero of=/dev/null bs=1073741824 count=1")
    check(done.oom_killed and done.exit_code != 0 and not done.timed_out, "a process beyond the memory limit", done)
    await still_works(work)


async def disk_filler(work: Work) -> None:
    """Files until no more fits; then they are removed."""
    script = """
        number=0
        while [ $number -lt 40 ] && dd if=/dev/zero of=fill$number bs=1048576 count=32 2>/dev/null; do
            number=$((number + 1))
        done
        rm -f fill*
        echo $number"""
    done = await work.sh(script)
    fitted = int(done.stdout) if done.stdout.strip().isdigit() else -1
    check(done.exit_code == 0 and 0 <= 32 * fitted * MIB <= 256 * MIB, "files beyond the limit of the disk", done)
    await work.sandbox.write_file("after", b"fits")
    check(await work.sandbox.read_file("after") == b"fits", "a file after the disk was full")
    await still_works(work)


async def background(work: Work) -> None:
    """Processes that are still there when the sandbox closes."""
    done = await work.sh(f"setsid sh -c '{LOOP}' \"$0\" >/dev/null 2>&1 & echo started")
    check((done.exit_code, done.stdout) == (0, "started\n"), "a background process", done)
    await still_works(work)


async def reset(work: Work) -> None:
    """A sandbox that begins again holds nothing of before."""
    await work.sandbox.write_file("old", b"old")
    await work.sh(f"setsid sh -c '{LOOP}' \"$0\" >/dev/null 2>&1 &")
    await work.sandbox.reset()
    done = await work.sh("ls")
    check((done.exit_code, done.stdout) == (0, "given\n"), "the files after a reset", done)
    await nothing_is_left(work)
    await still_works(work)


async def fails(work: Work) -> None:
    """The caller's own error, in the middle, with a command still running."""
    running = asyncio.ensure_future(work.sh(LOOP))
    try:
        await asyncio.sleep(work.random.uniform(0, 0.3))
        raise PlannedError
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_cancelled(work: Work) -> None:
    """Commands that follow each other until the caller is cancelled."""
    while True:
        await still_works(work)
        await work.sh("sleep 0.2")


Kind = Callable[[Work], Awaitable[None]]

KINDS: dict[str, tuple[Kind, int]] = {
    "plain": (plain, 30),
    "late": (late, 12),
    "flood": (flood, 8),
    "fork_bomb": (fork_bomb, 6),
    "memory_hog": (memory_hog, 8),
    "disk_filler": (disk_filler, 8),
    "background": (background, 8),
    "reset": (reset, 4),
    "fails": (fails, 8),
    "cancelled": (until_cancelled, 8),
}
"""Name → (what it does, how often of 100)."""


def kind_of(trajectory: int, seed: int, faults: bool) -> str:
    """The kind of a trajectory: the same for the same seed, whoever runs it."""
    if not faults:
        return "plain"
    # The first ones are one of each, so that a short run shows all of them.
    names = list(KINDS)
    if trajectory < len(names):
        return names[trajectory]
    return random.Random(f"{seed}/{trajectory}/kind").choices(names, [weight for _, weight in KINDS.values()])[0]
