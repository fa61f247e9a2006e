"""A copy of a tokenizer that knows some of its tokens under other names, so that their own texts are text to it.

Left out: which tokens, which names, and what is done with the copy (`data/guard.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer


def copy_with_names(backend: Tokenizer, names: Mapping[str, str]) -> tuple[Tokenizer, dict[int, int]]:
    """A copy of the tokenizer that knows the control tokens under other names, and the ids of the copy that stand for
    others of the original. It shares the vocabulary, so it costs milliseconds, unless the vocabulary holds a control
    token too: under its own name the model could produce it from text."""
    model = backend.model
    if any(model.token_to_id(text) is not None for text in names):
        model = _renamed_model(backend, names)
    copy = Tokenizer(model)
    for part in ("normalizer", "pre_tokenizer"):
        if (value := getattr(backend, part)) is not None:
            setattr(copy, part, value)
    # No post-processor: it adds nothing here, and it may cut blanks off the spans of tokens.
    ids: dict[int, int] = {}
    for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
        name = names.get(token.content, token.content)
        copy.add_tokens([_renamed(token, name)])
        copied = copy.token_to_id(name)
        assert copied is not None
        ids[copied] = token_id
        if token.content in names and [ids.get(one) for one in copy.encode(name).ids] != [token_id]:
            raise ValueError(f"the tokenizer's normalizer changes private-use characters, so {token.content!r} is lost")
    return copy, ids


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=False,  # whoever writes a name means it
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _renamed_model(backend: Tokenizer, names: Mapping[str, str]) -> Any:
    """The model with the control tokens of its vocabulary under their names."""
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    if "merges" in model:
        # What is merged into a control token, or out of one, would be text that holds it.
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_parts(merge))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts, "model": model})).model


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    """The two parts of a merge, and what they make."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
