"""Code in fences: which blocks hold a call, which only show one, and where each ends."""

from __future__ import annotations

import pytest

from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.types import FinishReason
from envs.types import ToolCall, ToolSpec
from tests.contracts.tool_formats import as_pairs

LS = ToolSpec(name="ls", description="", parameters={"properties": {"path": {"type": "string"}}})
CALL = '{"name": "ls", "parameters": {"path": "/srv"}}'
QUOTED = f"curl -d '{CALL}' host"


def parse(text: str, name: str = "llama3_json", *, finish_reason: FinishReason = "stop") -> ParsedTurn:
    return tool_format(name).parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=[LS])


BLOCKS = [
    f"```{label}\n{CALL}\n```"
    for label in (
        *("", "json", "JSON", "Json", "json5", "jsonc", " json", 'json title="call"', "javascript", "python", "bash"),
        *("text", "plaintext", "tool", "tool_call", "tool-call", "TOOL_CALLS", "tool_code", "c++", "objective-c"),
    )
]
AROUND = [
    f"I ran ```ls``` first.\n{CALL}",
    f"```bash```\n{CALL}",
    f"```ls -la```, and then\n\n```json\n{CALL}\n```",
    f"```json{CALL}```",
    f"````json\n{CALL}\n````",
    f"~~~json\n{CALL}\n~~~",
    f"```json\n// the call\n{CALL}\n```",
    f"```python\n# the call\n{CALL}\n```",
    f"```JSON\n[{CALL}]\n```",
    f"```bash\nls\n{CALL}",
    f"```bash\nls```\n{CALL}",
    f"```bash\nls\n``` and then\n{CALL}",
    f"```md\nuse ```x```\nin md\n```\n{CALL}",
    f"So: ```bash\nls\n```\n```json\n{CALL}\n```",
]


@pytest.mark.parametrize("text", [*BLOCKS, *AROUND])
def test_a_call_is_seen_whatever_fence_it_stands_in_or_behind_b11_b03(text: str) -> None:
    assert as_pairs(parse(text).calls) == [("ls", {"path": "/srv"})]
    for other in ("hermes", "pythonic", "react"):
        (error,) = parse(text, other).calls
        assert isinstance(error, CallError)


@pytest.mark.parametrize(
    "text",
    [
        f"```bash\n{QUOTED}\n```",
        f"```bash\ncat > README.md <<E\n```json\n{CALL}\n```\nE",
        f"````md\n```\n{QUOTED}\n```\n````",
        f"```python\ncall = {CALL}\nprint(call)\n```",
        f"```bash\n[ -f x ] && {QUOTED}\n```",
        f"```bash\n{{ {QUOTED}; }}\n```",
        f"~~~sh\n{QUOTED}\n~~~",
        f"```text\n$ {QUOTED}\n```",
        f"```bash\n{QUOTED}",
        f"Send `{CALL}` to it.",
        f"`{CALL}`",
        f'The body was "{CALL}" at noon.',
        f"The body ('{CALL}') was wrong.",
    ],
)
def test_code_that_quotes_a_call_is_prose_b11(text: str) -> None:
    for name in ("llama3_json", "hermes", "react"):
        assert parse(f"Try this:\n{text}", name) == ParsedTurn(content=f"Try this:\n{text}", calls=())


def test_what_a_cut_block_shows_is_no_call_and_a_whole_call_before_it_stays_b11() -> None:
    assert parse(f"```bash\nls\n{CALL}", finish_reason="length").calls == ()
    turn = parse(f"{CALL}\n```bash\n{QUOTED}", finish_reason="length")
    assert turn.calls == (ToolCall(call_id="c_0", name="ls", arguments={"path": "/srv"}),)
