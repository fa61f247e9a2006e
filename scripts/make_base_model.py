"""What is the embedded model, and how is it made again from nothing?

A Llama of about a million parameters that reads the domain's text and copies well, and knows no tools: the base
that warm start and RL are shown on. Same arguments on the same machine give the same weights.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.base_model_corpus import copy_probes, documents, tokenizer_texts
from scripts.base_model_init import start_with_induction
from scripts.base_model_tokenizer import train_tokenizer

MAX_LENGTH = 1024
VOCAB_SIZE = 768
HEADS, HIDDEN_SIZE = 4, 128
ROW_LENGTHS = (256, 320, 384)
WARMUP_STEPS = 100
SAVE_STEPS = 250


def build_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    """A model with random weights. `head_dim` is 32, the smallest that vLLM's CPU kernels take."""
    torch.manual_seed(args.seed)
    end_of_turn: Any = tokenizer.eos_token_id
    pad: Any = tokenizer.pad_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=pad,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    start_with_induction(model)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=end_of_turn, pad_token_id=pad
    )
    return model


def batches(tokenizer: PreTrainedTokenizerFast, *, seed: int, batch_tokens: int) -> Iterator[torch.Tensor]:
    """Endless [rows, length] batches of documents one after another, each begun by <|endoftext|>.

    The length varies from batch to batch, so that copying works from any place and over any distance.
    """
    rng = random.Random(f"batches/{seed}")
    source = documents(seed)
    begin = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    buffer: list[int] = []
    while True:
        length = rng.choice(ROW_LENGTHS)
        wanted = batch_tokens // length * length
        while len(buffer) < wanted:
            for ids in tokenizer(list(islice(source, 256)))["input_ids"]:
                buffer += [begin, *ids]
        yield torch.tensor(buffer[:wanted]).view(-1, length)
        del buffer[:wanted]


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warmup, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> float:
    """Train in place; returns the mean loss (nats per token) of the last 50 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, args.steps))
    started, losses = time.monotonic(), []
    source = batches(tokenizer, seed=args.seed, batch_tokens=args.batch_tokens)
    for step, rows in enumerate(islice(source, args.steps), start=1):
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == args.steps:
            recent, elapsed_s = losses[-50:], time.monotonic() - started
            left_s = elapsed_s / step * (args.steps - step)
            print(f"step {step}/{args.steps}  loss {sum(recent) / len(recent):.3f}  {left_s:.0f} s left", flush=True)
        if step % SAVE_STEPS == 0:
            save(model, tokenizer, args.output)
            print(f"copied without a mistake: {copy_accuracy(model, tokenizer, 16)}", flush=True)
    recent = losses[-50:]
    return sum(recent) / len(recent)


@torch.no_grad()
def copy_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, float]:
    """Share of held-out probes, by kind, whose whole answer is the model's most likely text."""
    right: dict[str, list[bool]] = {}
    for kind, prompt, answer in copy_probes(seed=1, count=count):
        start, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(prompt + answer)["input_ids"]
        best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)
        right.setdefault(kind, []).append(best[start - 1 : -1].tolist() == ids[start:])
    return {kind: round(sum(hits) / len(hits), 3) for kind, hits in right.items()}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the ordinary Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # save_pretrained makes the weights readable for their owner alone; the folder is shipped.
    (folder / "model.safetensors").chmod(0o644)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the embedded base model: tokenizer, chat template and weights.",
        epilog="example: python -m scripts.make_base_model --output models/embedded --seed 0",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write (made when missing)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the initial weights")
    parser.add_argument("--steps", type=int, default=6000, help="optimizer steps; 0 keeps random weights")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the schedule")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    tokenizer = train_tokenizer(tokenizer_texts(args.seed, 5000), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)
    model = build_model(tokenizer, args)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    started = time.monotonic()
    if args.steps:
        loss = pretrain(model, tokenizer, args)
        print(f"final loss {loss:.3f} nats a token, {time.monotonic() - started:.0f} s")
        print(f"copied without a mistake: {copy_accuracy(model, tokenizer, 200)}")
    save(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
