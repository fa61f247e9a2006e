"""What do all pages share? One offline file: styles and script inside, and a policy that lets nothing else run.

Everything that comes from a run is escaped by the template engine. Should escaping ever fail, the content security
policy still forbids any script but ours (by its hash), any request, and any form.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from data.files import in_one_move
from train.report.layout import Piece
from train.report.token_text import safe


def render_page(template: str, *, styles: Sequence[str], scripts: Sequence[str], values: Mapping[str, Any]) -> str:
    """A page from a template of `train/report/templates`, with the named styles and scripts put into it."""
    environment = Environment(
        loader=PackageLoader("train.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"safe_text": safe, "text": _piece_text, "ids": _piece_ids, "logprobs": _piece_logprobs}
    style = "".join(_source(environment, name) for name in styles)
    script = "".join(_source(environment, name) for name in scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # Files of ours, which hold no text of a run.
    return environment.get_template(template).render(
        policy=policy, style=Markup(style), script=Markup(script), **values
    )


def write_page(path: Path, html: str) -> None:
    """Write a page in one move. What is no Unicode text (a lone half of a character) is spelled out."""
    with in_one_move(path) as file:
        file.write(html.encode("utf-8", "backslashreplace"))


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0].replace("\r\n", "\n")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _piece_text(piece: Piece) -> Markup:
    return Markup("").join(
        Markup("<i>{}</i>").format(part.text) if part.mark else Markup("{}").format(part.text) for part in piece.text
    )


def _piece_ids(piece: Piece) -> str:
    return " ".join(str(token.token_id) for token in piece.tokens)


def _piece_logprobs(piece: Piece) -> str:
    return " ".join(f"{token.logprob:.4f}" for token in piece.tokens if token.logprob is not None)
