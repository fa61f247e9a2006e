"""The words of a tool-using conversation: messages, calls, results, tasks.

They follow the OpenAI chat shapes in typed form. Nothing here knows tokens, engines or rewards' use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that a model asked for.

    `arguments` is the decoded JSON object. A call that could not be decoded never becomes a ToolCall; it
    becomes a parse error that the model reads. (In a file of demonstrations it keeps its text, and is not trained.)
    """

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What the model is told about a tool: its name, one sentence, and a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    timeout_s: float | None = None
    """Its own deadline for one call, where the run's does not fit; the model is not told."""

    def as_openai(self) -> dict[str, Any]:
        """The `tools` entry of a chat-completions request; also what chat templates expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came back from a call. `is_error` marks an observation that tells the model how to recover; `failed` says
    that the tool itself did, whatever the call was: too many in a row end the trajectory. `ends_trajectory` says that
    the environment is done and no further turn is sampled."""

    call_id: str
    content: str
    is_error: bool = False
    failed: bool = False
    duration_s: float = 0.0
    ends_trajectory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message.

    `call_id` names the call that a `tool` message answers. `thinking` is what an assistant thought before its
    `content`, without markers; graders do not see it as an answer. `train=False` keeps an assistant turn of a
    demonstration as context only (a mistake that the next turn repairs, for example).
    """

    role: Role
    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    train: bool = True

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"role {self.role!r} is unknown; roles: {', '.join(get_args(Role))}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only an assistant message may hold tool calls, not a {self.role} message")
        if self.thinking and self.role != "assistant":
            raise ValueError(f"only an assistant message may hold thinking, not a {self.role} message")
        if (self.call_id is not None) != (self.role == "tool"):
            raise ValueError(f"a tool message, and only a tool message, has a call_id; role is {self.role}")

    def as_openai(self) -> dict[str, Any]:
        """The chat-completions form, as chat templates expect it; arguments stay an object (or a text that is none)."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            row["reasoning_content"] = self.thinking
        if self.tool_calls:
            arguments = [
                dict(c.arguments) if isinstance(c.arguments, Mapping) else c.arguments for c in self.tool_calls
            ]
            row["tool_calls"] = [
                {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": given}}
                for call, given in zip(self.tool_calls, arguments, strict=True)
            ]
        if self.call_id is not None:
            row["tool_call_id"] = self.call_id
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `prompt` and `files` are what the model and the sandbox may see before grading.

    `hidden` (a gold answer, tests) is for the environment's grading alone. It is left out of `repr`, so
    that it does not reach a log by accident.
    """

    task_id: str
    prompt: str
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended inside a sandbox. Every field is the command's own doing.

    What the sandbox itself did wrong is a `SandboxError`, never an ExecResult. `exit_code` is the exact
    code (128 + signal when a signal ended it, 124 when `timed_out`). `stdout` and `stderr` are text with
    undecodable bytes replaced; `output_truncated` says that more came than `max_output_bytes`. `oom_killed`:
    the kernel killed a process of it for memory. `processes_left` are still running: background processes, or after
    a time-out those that could not be killed.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    oom_killed: bool = False
    output_truncated: bool = False
    processes_left: int = 0
    duration_s: float = 0.0
