"""Which renderer a model gets: the hand-written one of its family, or one made from its own chat template.

Names mean nothing (models lie in folders): a family is recognised by writing what the model's own template writes
(`data/native_agreement.py`). Left out: how a renderer works (`data/family_renderer.py`, `data/template_renderer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from data.chat import Renderer, Thinking
from data.families import FAMILIES, family_traits
from data.family_renderer import FamilyRenderer
from data.native_agreement import difference
from data.react import ReactRenderer
from data.template_check import unread_turn
from data.template_renderer import TemplateRenderer
from data.tool_formats.detect import tool_format as format_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_renderer(
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
    name: str = "auto",
    tool_format: str = "auto",
    thinking: Thinking = "keep",
    enable_thinking: bool | None = None,
) -> Renderer:
    """The renderer for a model.

    Args:
        tokenizer: a fast tokenizer.
        model: what error messages call the model.
        name: `auto`: the family whose renderer agrees with the model's chat template, else that template itself;
            `template`: that template in any case; or a family's name (then the model needs no template).
        tool_format: how calls are read; `auto`: as the family or the template says; `react`: tools are taught, called
            and answered in ReAct text, whatever the template knows of tools. A format that does not read the model's
            own calls is refused: by a family at once, by a template when tools are asked for.
        thinking: `keep` all of it in the stream, or `follow` a template that drops it, in a new stream.
        enable_thinking: for families and templates that know this switch; None: the template's own default.

    Raises:
        ValueError: an unknown name, a family that the tokenizer does not fit, a template that cannot be followed.
    """
    if tool_format == "react":
        inner = open_renderer(tokenizer, model=model, name=name, thinking=thinking, enable_thinking=enable_thinking)
        return ReactRenderer(inner)
    if name == "auto" and (found := _agreeing(tokenizer, model, tool_format, thinking, enable_thinking)):
        return found
    if name in ("auto", "template"):
        if not tokenizer.chat_template:
            raise ValueError(
                f"model {model}: no chat template; add chat_template.jinja to the model folder, or name its family "
                f"(renderer.name): {', '.join(FAMILIES)}"
            )
        reader = None if tool_format == "auto" else format_named(tool_format)
        return TemplateRenderer(
            tokenizer, name=model, tool_format=reader, thinking=thinking, enable_thinking=enable_thinking
        )
    renderers = list(_of_family(tokenizer, name, model, tool_format, thinking, enable_thinking))
    _check_reading(renderers[0], model, tool_format)
    if not tokenizer.chat_template:
        return renderers[0]
    compare = partial(_difference, tokenizer=tokenizer, enable_thinking=enable_thinking)
    for renderer in renderers:
        if compare(renderer) is None:
            return renderer
    renderers[0].note_difference(compare(renderers[0]))
    return renderers[0]


def _agreeing(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    tool_format: str,
    thinking: Thinking,
    enable_thinking: bool | None,
) -> FamilyRenderer | None:
    """The first family that writes what the model's template writes."""
    if not tokenizer.chat_template:
        return None
    for family in FAMILIES:
        try:
            for renderer in _of_family(tokenizer, family, model, tool_format, thinking, enable_thinking):
                if _difference(renderer, tokenizer=tokenizer, enable_thinking=enable_thinking) is None:
                    _check_reading(renderer, model, tool_format)
                    return renderer
        except ValueError:
            continue  # the tokenizer lacks its tokens, it lacks the switch, or it writes calls in another format
    return None


def _check_reading(renderer: FamilyRenderer, model: str, tool_format: str) -> None:
    """A format that was set by hand must read what the family writes; its own does."""
    if tool_format != "auto" and (unread := unread_turn(renderer)):
        raise ValueError(
            f"model {model}: family {renderer.name} writes calls that are not read as {tool_format}, such as {unread}; "
            "set rollout.renderer.tool_format to auto, or to react"
        )


def _of_family(
    tokenizer: PreTrainedTokenizerBase,
    family: str,
    model: str,
    tool_format: str,
    thinking: Thinking,
    enable_thinking: bool | None,
) -> Iterator[FamilyRenderer]:
    """The family's renderer with its own default for thinking; then, unless that is given, with each of the two: models
    of one family have different defaults."""
    traits = family_traits(family)
    reads = traits.tool_format if tool_format == "auto" else tool_format
    for switch in (None, True, False) if enable_thinking is None and traits.switch else (enable_thinking,):
        yield FamilyRenderer(
            tokenizer,
            family,
            model=model,
            tool_format=format_named(reads) if reads else None,
            thinking=thinking,
            enable_thinking=switch,
        )


def _difference(
    renderer: FamilyRenderer, *, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None
) -> str | None:
    traits = family_traits(renderer.name)
    variables: dict[str, Any] = dict(traits.pinned)
    if enable_thinking is not None and traits.switch is not None:
        variables[traits.switch] = enable_thinking
    return difference(renderer, tokenizer, variables)
