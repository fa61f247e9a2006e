"""Which tokens may come next in a turn whose calls are held to a grammar?

The grammar is a structural tag (`ToolFormat.structural_tag`): prose is free, and from a call's opening marker on, only
what the tools' schemas allow. It is followed token by token with xgrammar, as vLLM does, so the same ids always give
the same sets, while sampling and afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class CallGrammar:
    """The grammars of one tokenizer; each structural tag is compiled once.

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer; those are never allowed.

    Raises:
        ValueError: xgrammar is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError("constrained calls need xgrammar: install it (vLLM brings it along)") from error
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"constrained calls: xgrammar cannot read the tokenizer: {_one_line(error)}") from error
        self._vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        end = tokenizer.eos_token_id
        self._end_of_text = (end,) if isinstance(end, int) else ()

    def start(self, structural_tag: str, stop_token_ids: Sequence[int]) -> GrammarState:
        """The grammar before the first token of a turn.

        Args:
            structural_tag: xgrammar's JSON.
            stop_token_ids: what may end the turn where the grammar lets it end; the tokenizer's own end-of-text id is
                another.

        Raises:
            ValueError: it is no structural tag.
        """
        import xgrammar

        try:
            compiled = self._compiler.compile_structural_tag(structural_tag)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"constrained calls: not a structural tag: {_one_line(error)}") from error
        stops = [*dict.fromkeys((*stop_token_ids, *self._end_of_text))]
        return GrammarState(xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops), self._vocab_size)


class GrammarState:
    """A place in a turn. Behind a token that ends the grammar everything is allowed."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = matcher
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    def allowed(self) -> Tensor:
        """Which tokens may come next, `[vocabulary]` (bool)."""
        import torch

        if self._matcher.is_terminated():
            return torch.ones(self._vocab_size, dtype=torch.bool)
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32)
        return (bits & 1).bool().flatten()[: self._vocab_size]

    def accept(self, token_id: int) -> None:
        """Go on to the place behind `token_id`.

        Raises:
            ValueError: the grammar does not allow it here.
        """
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token_id):
            raise ValueError(f"the grammar of the call does not allow token {token_id} here")


def _one_line(error: BaseException) -> str:
    """What went wrong, without the place in xgrammar's source."""
    return " ".join(str(error).rpartition(" is false: ")[2].split())
