"""What do `bash` and `edit_file` do, and how does a model read what came of it?

Both work inside the sandbox alone. Whether a call fits its schema has been checked before; what the command or the
edit got wrong is text that says how to go on. Grading is not done here.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from envs.sandbox.base import MIB, Sandbox, Shell
from envs.types import ExecResult, ToolSpec

DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 30, 600
MAX_STREAM_BYTES = 6000
MAX_RESULT_CHARS = 8000
"""A longer result loses its middle; a model's context is small."""
MAX_EDITED_BYTES = MIB
_CHECK_S = 30.0

TOOLS = (
    ToolSpec(
        name="bash",
        description="Run a command in a shell of the sandbox. The current folder and exported variables last.",
        parameters={
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout_s": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MAX_TIMEOUT_S,
                    "description": f"seconds until it is killed, {DEFAULT_TIMEOUT_S} unless given",
                },
            },
            "required": ["command"],
            "additionalProperties": False,
        },
        # The command has its own; this one is for a sandbox that does not keep it.
        timeout_s=MAX_TIMEOUT_S + 30.0,
    ),
    ToolSpec(
        name="edit_file",
        description="Replace old_text, which must be in the file once, by new_text. Empty old_text: make a new file.",
        parameters={
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "absolute, or relative to the working folder"},
                "old_text": {"type": "string"},
                "new_text": {"type": "string"},
            },
            "required": ["path", "old_text", "new_text"],
            "additionalProperties": False,
        },
    ),
)


async def run_bash(shell: Shell, arguments: Mapping[str, Any], *, left_s: float) -> tuple[str, bool]:
    """Run one command line, at most `left_s` seconds. → what the model reads, and whether it is an error."""
    command = arguments["command"]
    if not _is_plain(command):
        return "error: bash: the command holds a character that no command can (NUL, half a surrogate pair)", True
    timeout_s = min(float(arguments.get("timeout_s", DEFAULT_TIMEOUT_S)), left_s)
    done = await shell.run(command, timeout_s=timeout_s, max_output_bytes=MAX_STREAM_BYTES)
    return bash_text(done, timeout_s=timeout_s), done.timed_out or done.oom_killed


def bash_text(done: ExecResult, *, timeout_s: float) -> str:
    """The result of a command as text: stdout, stderr, and in brackets what else there is to know.

    >>> bash_text(ExecResult(exit_code=2, stdout="one", stderr="two"), timeout_s=1)
    'one\\ntwo\\n[exit code 2]'
    """
    notes = [
        (f"exit code {done.exit_code}", done.exit_code != 0 and not done.timed_out),
        (f"killed: it ran longer than {timeout_s:g} s", done.timed_out),
        ("out of memory: a process was killed", done.oom_killed),
        ("there was more output than is shown; write it to a file and look at parts of it", done.output_truncated),
        (f"processes still running in the background: {done.processes_left}", done.processes_left > 0),
    ]
    tail = "\n".join(f"[{text}]" for text, applies in notes if applies)
    output = "\n".join(stream.removesuffix("\n") for stream in (done.stdout, done.stderr) if stream)
    output = _cut(output, MAX_RESULT_CHARS - len(tail) - 1)
    return "\n".join(part for part in (output, tail) if part) or "(no output)"


async def edit_file(sandbox: Sandbox, workdir: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Do one edit. → what the model reads, and whether it is an error."""
    path, old, new = (arguments[name] for name in ("path", "old_text", "new_text"))
    shown = _cut(path, 200)
    if not path or not _is_plain(path):
        return "error: edit_file: path names no file; give a path such as notes.txt", True
    if not _is_plain(new.replace("\0", "")):
        return "error: edit_file: new_text holds half a surrogate pair, which is no text", True
    place = posixpath.join(workdir, path)
    mode = await _mode(sandbox, place)
    if not old:
        if mode is not None:
            return f"error: edit_file: {shown} exists; give the old_text to replace, or another path", True
        return await _write(sandbox, place, new.encode(), 0o644, f"made {shown}")
    try:
        content = await sandbox.read_file(place, max_bytes=MAX_EDITED_BYTES)
    except FileNotFoundError:
        return f"error: edit_file: {shown}: no file that can be read; an empty old_text makes a new one", True
    except ValueError:
        return (
            f"error: edit_file: {shown} is larger than {MAX_EDITED_BYTES // MIB} MiB; use bash, sed for example",
            True,
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return f"error: edit_file: {shown} is not UTF-8 text; use bash", True
    count = text.count(old)
    if count != 1:
        how = "give exactly what is there, spaces included" if count == 0 else "give more lines around it"
        return f"error: edit_file: old_text is {count} times in {shown}, it must be there once; {how}", True
    return await _write(sandbox, place, text.replace(old, new).encode(), mode or 0o644, f"edited {shown}")


async def _mode(sandbox: Sandbox, place: str) -> int | None:
    """The mode of a file, None where there is nothing; a link counts as what it leads to."""
    done = await sandbox.exec(["stat", "-L", "-c", "%a", place], timeout_s=_CHECK_S)
    text = done.stdout.strip()
    return int(text, 8) & 0o777 if done.exit_code == 0 and text.isdigit() else None


async def _write(sandbox: Sandbox, place: str, content: bytes, mode: int, done: str) -> tuple[str, bool]:
    try:
        await sandbox.write_file(place, content, mode=mode)
    except OSError as error:
        return _cut(f"error: edit_file: not written: {error.strerror or error}", 400), True
    return done, False


def _is_plain(text: str) -> bool:
    """Whether it can be a command or a path: no NUL, and it has a UTF-8 form."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _cut(text: str, most: int) -> str:
    """The text without its middle where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    mark = f"\n[… {len(text) - most} characters left out …]\n"
    kept = max(0, most - len(mark))
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]
