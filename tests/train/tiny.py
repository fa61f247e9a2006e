"""A random Llama of 40k parameters with the embedded model's tokenizer and template, and conversations for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from data.demonstrations import Demonstration, write_demonstrations
from data.rows import SampleBuilder
from data.template_renderer import TemplateRenderer
from data.types import Completion, FinishReason, Segment, TrainingSample
from envs.types import Message, ToolCall, ToolSpec

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"

TOOL = ToolSpec(
    name="lookup",
    description="Look up a fact.",
    parameters={"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)


def load_embedded_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(EMBEDDED)


def make_model(vocab_size: int, *, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        # Larger than usual, so that what a token sees changes its logprobs visibly.
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """A model folder; its tokenizer is the embedded one unless another is given."""
    tokenizer = tokenizer or load_embedded_tokenizer()
    make_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tool_conversation(
    name: str,
    *,
    question: str = "how high?",
    tool_text: str = "12",
    answer: str = "It is 12.",
    first_train: bool = True,
) -> Demonstration:
    """Two assistant turns: a call, and the answer."""
    call = ToolCall(call_id="call_0", name="lookup", arguments={"key": f"height of {name}"})
    return Demonstration(
        task_id=name,
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content=question),
            Message(role="assistant", tool_calls=(call,), train=first_train),
            Message(role="tool", content=tool_text, call_id="call_0"),
            Message(role="assistant", content=answer),
        ),
        tools=(TOOL,),
    )


def some_conversations(count: int) -> list[Demonstration]:
    """Conversations of different lengths."""
    return [
        tool_conversation(f"tower {index}", question="how high? " * (1 + index % 5), answer=f"It is {index}.")
        for index in range(count)
    ]


def save_conversations(path: Path, conversations: Sequence[Demonstration]) -> Path:
    write_demonstrations(path, conversations)
    return path


def sampled_sample(
    renderer: TemplateRenderer,
    name: str,
    *,
    tool_text: str = "12",
    finish: FinishReason = "stop",
    advantage: float = 1.0,
) -> TrainingSample:
    """A row of RL: a sampled call, its result, a sampled answer. `finish` is how the first turn ended."""
    conversation = tool_conversation(name, tool_text=tool_text)
    messages = conversation.messages
    builder = SampleBuilder(name)
    for segment in renderer.opening(messages[:2], conversation.tools):
        builder.add_context(segment)
    for number, message in enumerate((messages[2], messages[4])):
        ids = renderer.turn_ids(message)
        if number == 0 and finish == "length":
            ids = ids[:-1]
        completion = Completion(
            completion_id=f"{name}/{number}",
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            finish_reason=finish if number == 0 else "stop",
            policy="policy",
            policy_version=(0,) * len(ids),
        )
        builder.add_sampled(Segment.sampled(completion), advantage=advantage, excluded=None)
        if number == 0:
            for segment in renderer.bridge(messages[3:4], prompt_ids=(1,), sampled_ids=ids, tools=conversation.tools):
                builder.add_context(segment)
    return builder.build()


def read_rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
