"""What every engine checks before it works: that a request fits, that a model is there, that weights have its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from data.types import SamplingParams
from rollouts.engine import EngineError

if TYPE_CHECKING:
    from torch import Tensor

TIED_HEAD = "lm_head.weight"
"""A model with tied embeddings may name its head or leave it out: it is the embedding."""
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's folder says without loading it.

    shapes: of every tensor in the safetensors files, by Hugging Face name.
    """

    vocab_size: int
    max_positions: int
    tied_head: bool
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def check_prompt(
    prompt_ids: Sequence[int], params: SamplingParams, *, max_context_tokens: int, vocab_size: int
) -> None:
    """Raise `ValueError` for a prompt that is empty, holds ids outside the vocabulary, or leaves no room."""
    if not prompt_ids:
        raise ValueError("the prompt is empty: an engine needs at least one token id to sample after")
    _check_ids(prompt_ids, vocab_size)
    needed = len(prompt_ids) + params.max_tokens
    if needed > max_context_tokens:
        raise ValueError(
            f"prompt ({len(prompt_ids)} tokens) and max_tokens ({params.max_tokens}) need {needed} tokens, "
            f"the context holds {max_context_tokens}: shorten the prompt or lower max_tokens"
        )


def check_scored(token_ids: Sequence[int], *, max_context_tokens: int, vocab_size: int) -> None:
    """Raise `ValueError` for a sequence that cannot be scored: under two tokens, outside the vocabulary, too long."""
    if not 2 <= len(token_ids) <= max_context_tokens:
        raise ValueError(f"score takes 2 to {max_context_tokens} token ids, not {len(token_ids)}")
    _check_ids(token_ids, vocab_size)


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ValueError(f"token ids run from {min(token_ids)} to {max(token_ids)}, the vocabulary has {vocab_size}")


def read_model_facts(model_path: Path) -> ModelFacts:
    """Read `config.json` and the headers of the safetensors files; no weights are loaded.

    Raises:
        ValueError: the folder, its configuration or its weights are missing.
    """
    if not (model_path / "config.json").is_file():
        raise ValueError(f"no model in {model_path}: expected a folder with config.json and *.safetensors")
    shapes = tensor_shapes(model_path)
    if not shapes:
        raise ValueError(f"no *.safetensors in {model_path}: write the model there with save_pretrained")

    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, local_files_only=True).get_text_config()
    return ModelFacts(
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        tied_head=bool(config.tie_word_embeddings),
        shapes=shapes,
    )


def tensor_shapes(folder: Path, pattern: str = "*.safetensors") -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the folder's safetensors files, by name; no tensor is loaded.

    Raises:
        ValueError: a file is none.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob(pattern)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} holds no weights ({error}); a pointer of Git LFS, or cut short?") from error
    return shapes


def check_context(max_context_tokens: int | None, facts: ModelFacts) -> int:
    """The context to use: what was asked for, or all that the model has. Raises `ValueError` when it has less."""
    if max_context_tokens is None:
        return facts.max_positions
    if not 2 <= max_context_tokens <= facts.max_positions:
        raise ValueError(f"max_context_tokens is {max_context_tokens}, the model takes 2 to {facts.max_positions}")
    return max_context_tokens


def check_no_adapter(adapter: Path | None) -> None:
    """Raise `EngineError` for full weights under an adapter: they would be sampled from with it on top."""
    if adapter is not None:
        raise EngineError(f"load_weights: the engine samples with the adapter {adapter}; sync it with load_adapter")


def check_weights_fit(state_dict: Mapping[str, Tensor], facts: ModelFacts) -> dict[str, Tensor]:
    """The given tensors under exactly the names of the model's files, without a tied head.

    Checked before anything is loaded, because vLLM only logs a missing name, and an unknown one stops it halfway.

    Raises:
        EngineError: a name is unknown or missing, a shape differs, or a head that the model ties to its embeddings has
            weights of its own: an engine would sample from the embeddings.
    """
    optional = {TIED_HEAD} if facts.tied_head else set()
    unknown = state_dict.keys() - facts.shapes.keys() - optional
    missing = facts.shapes.keys() - state_dict.keys() - optional
    if unknown or missing:
        raise EngineError(f"weights do not fit the model: unknown names {_some(unknown)}; missing {_some(missing)}")
    wanted = {name: state_dict[name] for name in facts.shapes if name not in optional}
    wrong = [name for name, tensor in wanted.items() if tuple(tensor.shape) != facts.shapes[name]]
    if wrong:
        name = wrong[0]
        raise EngineError(
            f"weights do not fit the model: {len(wrong)} shapes differ, {name} is "
            f"{list(state_dict[name].shape)} and must be {list(facts.shapes[name])}"
        )
    if facts.tied_head and TIED_HEAD in state_dict:
        _check_tied(state_dict[TIED_HEAD], wanted)
    return wanted


def _check_tied(head: Tensor, weights: Mapping[str, Tensor]) -> None:
    import torch

    for name, embedding in weights.items():
        if name.endswith(EMBEDDING) and not (head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)):
            raise EngineError(
                f"weights do not fit the model: it ties {TIED_HEAD} to {name}, and they differ; train both as one, or "
                "save the model with tie_word_embeddings = false and start from that"
            )


def _some(names: set[str], shown: int = 4) -> str:
    if not names:
        return "none"
    listed = ", ".join(sorted(names)[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"
