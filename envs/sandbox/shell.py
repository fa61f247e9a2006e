"""A shell session made of single commands: each begins with the folder and the variables that the last one ended with.

A shell that is kept open loses everything when a command is late and has to be killed, and its end-of-command mark can
be forged. Here every command is a shell of its own, which tells at its exit, through the server program, what its
current folder and its exported variables are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from envs.sandbox.base import MAX_OUTPUT_BYTES
from envs.types import ExecResult

STATE_FD = 9
# The shell's own bookkeeping, which it sets anew.
_NOT_KEPT = frozenset({"_", "SHLVL", "PWD"})


class Runner(Protocol):
    """What a session needs of its sandbox."""

    resets: int

    @property
    def variables(self) -> Mapping[str, str]: ...

    async def run(
        self,
        argv: list[str],
        *,
        timeout_s: float,
        cwd: str,
        variables: Mapping[str, str],
        stdin: bytes,
        max_output_bytes: int,
        wants_state: bool = False,
    ) -> tuple[ExecResult, bytes]: ...


class ShellSession:
    """See `Shell`. `server` is the path of the server program inside the sandbox."""

    def __init__(self, sandbox: Runner, program: str, server: str) -> None:
        if not program or "\0" in program:
            raise ValueError(f"shell {program!r} names no program")
        self._sandbox = sandbox
        self._program = program
        self._trap = f"trap '\"{server}\" state {STATE_FD} 2>/dev/null' EXIT; "
        self._begin()

    def _begin(self) -> None:
        self._resets = self._sandbox.resets
        self.cwd = "."
        self._variables = dict(self._sandbox.variables)

    async def run(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = MAX_OUTPUT_BYTES
    ) -> ExecResult:
        """See `Shell.run`."""
        if "\0" in command:
            raise ValueError("a command must not hold NUL characters: replace them first")
        if self._resets != self._sandbox.resets:
            self._begin()
        text = command.encode("utf-8", "replace").decode("utf-8")
        done, state = await self._sandbox.run(
            [self._program, "-c", self._trap + text],
            timeout_s=timeout_s,
            cwd=self.cwd,
            variables=self._variables,
            stdin=stdin,
            max_output_bytes=max_output_bytes,
            wants_state=True,
        )
        self._take(state)
        return done

    def _take(self, state: bytes) -> None:
        """The state is the folder and NAME=value, each ended by NUL; a shell that was killed left none."""
        if not state.endswith(b"\0"):
            return
        cwd, *variables = state[:-1].decode("utf-8", "replace").split("\0")
        self.cwd = cwd or self.cwd
        pairs = (text.partition("=") for text in variables)
        self._variables = {name: value for name, _, value in pairs if name and name not in _NOT_KEPT}
