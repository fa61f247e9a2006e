"""What a person sees of a loss mask: the text of tokens, the reasons, the totals, and the page."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from data.rows import SampleBuilder
from data.types import Excluded, Segment, Source
from rollouts.types import StopReason
from tests.train.mask_rows import HOSTILE, changed, ids, pair, plain_ids, samples, trajectory, vocabulary
from train.config import GrpoConfig
from train.report.layout import arrange
from train.report.mask_page import PAGE_LIMITS, render_mask_page
from train.report.masks import KIND_WORDS, MaskView, sample_view, totals, trajectory_views
from train.report.terminal import print_masks
from train.report.token_text import visible


def packed(*, tool_text: str = "12") -> list[MaskView]:
    rows = samples(pair(tool_text=tool_text))
    return [sample_view(row, vocabulary(), kind="packed") for row in rows]


def shown_text(view: MaskView) -> str:
    return "".join(part.text for token in view.tokens for part in token.text)


class Page(HTMLParser):
    """Scripts, attributes and visible text of a page, as a browser's parser would find them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.control_boxes: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if ("class", "c") in attrs and any(name == "data-i" for name, _ in attrs):
            self.control_boxes.append("")
            self._open[-1] = "control"

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() not in (tag, "control" if tag == "span" else tag):
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif self._open and self._open[-1] != "style":
            self.text += data
            if self._open[-1] == "control":
                self.control_boxes[-1] += data


# --- text of tokens -----------------------------------------------------------------------------------------------


def test_a40_characters_that_are_split_over_tokens_are_shown_whole() -> None:
    tokens = plain_ids(HOSTILE)
    shown = vocabulary().show(tokens)
    assert "".join(part.text for one in shown for part in one.parts) == HOSTILE
    drink = shown[0]
    assert (drink.start, drink.end, drink.parts[0].text) == (0, 4, "🍸")


def test_a40_bytes_that_are_no_text_are_shown_as_bytes() -> None:
    tokens = plain_ids("🍸")
    shown = vocabulary().show(tokens[:2])
    assert [part.text for one in shown for part in one.parts] == ["<0xF0>", "<0x9F>"]
    assert all(part.mark for one in shown for part in one.parts)


def test_a40_plain_text_that_spells_a_control_token_is_no_control_token() -> None:
    plain = vocabulary().show(plain_ids("<|im_end|>"))
    real = vocabulary().show(ids("<|im_end|>"))
    assert not any(one.control for one in plain)
    assert [one.control for one in real] == [True]


def test_a_character_does_not_swallow_the_border_of_a_completion() -> None:
    tokens = plain_ids("🍸")
    shown = vocabulary().show(tokens, breaks=frozenset({2}))
    assert [(one.start, one.end) for one in shown] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_an_unknown_id_is_shown_by_number() -> None:
    assert vocabulary().show([99_999])[0].parts[0].text == "<id 99999>"


@given(st.lists(st.integers(0, 767), max_size=40), st.frozensets(st.integers(0, 40), max_size=5))
def test_groups_cover_every_token_once_and_respect_breaks(tokens: list[int], breaks: frozenset[int]) -> None:
    shown = vocabulary().show(tokens, breaks=breaks)
    assert [i for one in shown for i in range(one.start, one.end)] == list(range(len(tokens)))
    assert not any(one.start < cut < one.end for one in shown for cut in breaks)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(part.text for one in shown for part in one.parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b", ["a b"]),
        ("a  b", ["a", "·", "·", "b"]),
        ("a\n", ["a", "↵", "\n"]),
        ("\t", ["⇥"]),
        ("\u202eevil", ["U+202E", "evil"]),
        ("a\u200bb", ["a", "U+200B", "b"]),
        ("\x1b[31m", ["U+001B", "[31m"]),
        ("\U000e0041", ["U+E0041"]),
        ("ก\u0e31", ["ก\u0e31"]),
    ],
)
def test_what_cannot_be_seen_is_marked(text: str, expected: list[str]) -> None:
    assert [part.text for part in visible(text)] == expected


# --- masks and reasons --------------------------------------------------------------------------------------------


def test_totals_are_those_of_the_rows() -> None:
    rows = samples(pair())
    total = totals(packed())
    assert total.tokens == sum(len(row) for row in rows)
    assert total.trained == sum(sum(row.loss_mask) for row in rows) == total.trained_by_source[Source.MODEL]
    assert not total.faults


def test_every_token_says_why() -> None:
    good = packed()[0]
    reasons = {(token.source, token.trained): token.why for token in good.tokens}
    assert reasons[Source.MODEL, True] == "trained with advantage +0.700: the policy sampled it"
    assert reasons[Source.TOOL, False].startswith("not trained: what a tool answered")
    first = next(token for token in good.tokens if token.source is Source.MODEL)
    assert (first.turn, first.completion_position, first.policy_version) == (0, 0, 3)
    assert first.completion_id == "step-4/train-0-1/0/0"
    assert first.logprob == -0.01


def test_a_truncated_attempt_is_left_out_with_its_reason() -> None:
    cut = trajectory(0, stop_reason=StopReason.MAX_TURNS)
    view = sample_view(samples([cut, trajectory(1)])[0], vocabulary(), kind="packed")
    assert totals([view]).excluded == {Excluded.TRUNCATED: totals([view]).by_source[Source.MODEL]}
    assert any("a limit cut the trajectory" in token.why for token in view.tokens)


def test_a_trained_tool_token_and_a_missing_reason_are_faults() -> None:
    good = samples(pair())[0]
    tool, model = good.source.index(Source.TOOL), good.source.index(Source.MODEL)
    for index, mask in ((tool, True), (model, False)):
        view = sample_view(changed(good, "loss_mask", index, mask), vocabulary(), kind="packed")
        assert [token.index for token in view.tokens if token.fault] == [index]
        assert view.tokens[index].why.startswith("FAULT")


def test_trajectories_show_the_mask_that_the_trainer_would_make() -> None:
    good, bad = trajectory_views(pair(), vocabulary(), config=GrpoConfig())
    assert [token.trained for token in good.tokens] == list(samples(pair())[0].loss_mask)
    assert good.facts["reward"] == "1"
    assert bad.facts["ended by"] == "final answer"
    assert all(token.advantage is None for token in good.tokens)
    dead = trajectory_views([trajectory(0), trajectory(1)], vocabulary(), config=GrpoConfig())
    assert totals(dead).trained == 0
    assert set(totals(dead).excluded) == {Excluded.DEAD_GROUP}
    # One attempt alone has no siblings that could make its group dead.
    assert totals(trajectory_views([trajectory(0)], vocabulary(), config=GrpoConfig())).trained > 0


def test_a_group_compared_with_the_step_is_dead_only_where_the_run_says_so() -> None:
    """Two groups, each of equal rewards: dead for GRPO, alive for REINFORCE++."""
    step = [trajectory(i, reward=reward, group_id=name) for i in (0, 1) for name, reward in (("a", 1.0), ("b", 0.0))]
    assert totals(trajectory_views(step, vocabulary(), config=GrpoConfig())).trained == 0
    batch = GrpoConfig(baseline="batch", scale_rewards="batch")
    assert all(totals([view]).trained for view in trajectory_views(step, vocabulary(), config=batch))


def test_what_turns_earned_is_shown() -> None:
    one = replace(trajectory(), turn_rewards=(0.25, 0.0))
    assert trajectory_views([one], vocabulary(), config=None)[0].facts["earned by turn"] == "0.25, 0"


@pytest.mark.parametrize("mask_truncated", [True, False, None])
def test_trajectories_that_a_limit_cut_are_shown_as_the_run_treats_them(mask_truncated: bool | None) -> None:
    cut = trajectory(1, reward=0.0, stop_reason=StopReason.MAX_TURNS)
    config = None if mask_truncated is None else GrpoConfig(mask_truncated_completions=mask_truncated)
    view = trajectory_views([trajectory(0), cut], vocabulary(), config=config)[1]
    assert (totals([view]).trained > 0) == (mask_truncated is False)
    assert ("default" in KIND_WORDS[view.kind]) == (mask_truncated is None)
    assert any(token.why == "would be trained: the policy sampled it" for token in view.tokens) == any(
        token.trained for token in view.tokens
    )


def test_targets_are_trained_in_a_warm_start_only() -> None:
    builder = SampleBuilder("demo")
    builder.add_context(Segment(source=Source.PROMPT, token_ids=ids("<|im_start|>user\nhi<|im_end|>\n")))
    builder.add_target(Segment(source=Source.TARGET, token_ids=ids("hello<|im_end|>")))
    row = builder.build()
    assert totals([sample_view(row, vocabulary(), kind="sft")]).faults == 0
    assert totals([sample_view(row, vocabulary(), kind="packed")]).faults == sum(row.loss_mask)


# --- layout -------------------------------------------------------------------------------------------------------


def test_messages_are_found_from_the_end_of_turn() -> None:
    conversations, _ = arrange(packed(), PAGE_LIMITS)
    labels = [block.label for block in conversations[0].blocks]
    assert labels == ["system", "user", "assistant, turn 0", "tool result", "assistant, turn 1"]
    assert sum(block.tokens for block in conversations[0].blocks) == len(conversations[0].view.tokens)


def test_what_is_cut_is_counted() -> None:
    (view, *_), limits = packed(tool_text="z" * 5_000), PAGE_LIMITS
    (conversation, *_), no_room = arrange([view], limits)
    tool = next(run for block in conversation.blocks for run in block.runs if run.first.source is Source.TOOL)
    assert tool.cut_tokens + sum(len(piece.tokens) for piece in (*tool.head, *tool.tail)) == tool.tokens
    assert len(tool.head) + len(tool.tail) == limits.run_tokens
    assert not no_room


# --- the page -----------------------------------------------------------------------------------------------------


def test_a40_hostile_text_stays_text() -> None:
    html = render_mask_page(packed(tool_text=HOSTILE), title="<script>alert(2)</script>", rows=2)
    page = Page(html)
    assert len(page.scripts) == 1
    assert "alert(" not in page.scripts[0]
    assert "<script>alert(1)</script>" in page.text.replace("\n", "")
    assert "🍸 สวัสดี" in page.text
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_a40_control_tokens_are_boxed_and_the_same_plain_text_is_not() -> None:
    views = packed(tool_text=HOSTILE)
    page = Page(render_mask_page(views, title="t", rows=2))
    placed = sum(token.control for view in views for token in view.tokens)
    assert len(page.control_boxes) == placed
    assert page.text.count("<|im_end|>") > page.control_boxes.count("<|im_end|>")


def test_a40_a_line_of_200k_characters_is_cut_with_a_mark() -> None:
    html = render_mask_page(packed(tool_text="x" * 200_000), title="t", rows=2)
    assert len(html.encode()) < 1_000_000
    assert re.search(r"… [\d,]+ more tool tokens \([\d,]+ characters\), all not trained, are not shown …", html)


def test_the_page_is_offline_and_only_its_own_script_may_run() -> None:
    html = render_mask_page(packed(), title="t", rows=2)
    page = Page(html)
    policy = next(
        value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "src" in value
    )
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    style = html.split("<style>")[1].split("</style>")[0]
    style_digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    assert f"style-src 'sha256-{style_digest}'" in policy
    assert not [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "style")]
    assert not re.search(r"https?://|@import|url\(", html)


def test_a_fault_is_seen_at_once() -> None:
    good = samples(pair())[0]
    row = changed(good, "loss_mask", good.source.index(Source.TOOL), True)
    html = render_mask_page([sample_view(row, vocabulary(), kind="packed")], title="t", rows=1)
    assert "1 token breaks the law of the mask" in html
    assert html.count(' fault"') == 1


def test_the_terminal_says_the_same() -> None:
    console = Console(width=100, record=True, force_terminal=False, highlight=False, quiet=False, file=None)
    with console.capture() as capture:
        print_masks(console, packed(tool_text=HOSTILE + " ⟦x⟧ \x1b[31m"), title="t", rows=9)
    text = capture.get()
    assert "«The answer is 14.⟦<|im_end|>⟧»" in text
    assert "<|im_end|> U+27E6xU+27E7 U+001B[31m" in text
    assert "\x1b" not in text
    assert "2 of 9 rows are shown" in text
    total = totals(packed(tool_text=HOSTILE + " ⟦x⟧ \x1b[31m"))
    assert f"total: {total.trained:,} of {total.tokens:,} tokens trained" in text
