"""LoRA: only adapters are trained, engines and checkpoints get full weights, the trainer's tensors stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.random_samples import random_samples, tiny_learner, tiny_model
from train.checkpoint import save_checkpoint
from train.config import GrpoConfig, LoraSettings, OptimizerConfig
from train.learner import Learner
from train.lora import add_lora, full_state_dict, load_trained
from train.model import score

IDS = [9, 30, 41, 12, 77, 25, 60]


def trained() -> Learner:
    """A learner with adapters, after one large step."""
    learner = tiny_learner(
        add_lora(tiny_model(), LoraSettings(rank=4, alpha=8), seed=0),
        GrpoConfig(max_micro_batch_tokens=512),
        OptimizerConfig(learning_rate=1e-2),
    )
    learner.update(learner.pack(random_samples(4, advantages=[1.0, -1.0, 1.0, -1.0])))
    learner.update(learner.pack(random_samples(4, advantages=[1.0, -1.0, 1.0, -1.0])))
    return learner


def test_c09_c11_full_weights_have_every_name_once_and_hold_the_update() -> None:
    model = trained().model.eval()
    plain = tiny_model().eval()
    full = full_state_dict(model)
    assert full.keys() == plain.state_dict().keys()
    changed = [name for name, tensor in plain.state_dict().items() if not torch.equal(full[name], tensor)]
    assert len(changed) == 2 * 7
    before = score(plain, IDS)
    plain.load_state_dict(full)
    torch.testing.assert_close(score(plain, IDS), score(model, IDS), atol=1e-5, rtol=1e-5)
    assert max(abs(a - b) for a, b in zip(before, score(plain, IDS), strict=True)) > 1e-3


def test_c10_making_full_weights_changes_nothing_and_repeats() -> None:
    model = trained().model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = full_state_dict(model), full_state_dict(model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_is_an_ordinary_model_and_the_run_continues_from_it(tmp_path: Path) -> None:
    learner = trained()
    tokenizer = AutoTokenizer.from_pretrained("models/embedded")
    path = save_checkpoint(tmp_path, 2, model=learner.model, tokenizer=tokenizer, state=learner.state(), keep=1)
    expected = score(learner.model.eval(), IDS)
    torch.testing.assert_close(score(AutoModelForCausalLM.from_pretrained(path), IDS), expected, atol=1e-5, rtol=1e-5)
    again = trained()
    again.load_state(torch.load(path / "trainer_state.pt", weights_only=True))
    torch.testing.assert_close(score(again.model.eval(), IDS), expected, atol=1e-6, rtol=1e-6)


def test_a_model_without_linear_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(ValueError, match=r"^lora: GPT2LMHeadModel has no nn.Linear layers .*; set lora.rank to 0"):
        add_lora(model, LoraSettings(rank=4), seed=0)


def test_every_process_starts_from_the_same_adapters_and_draws_as_before() -> None:
    """Gradients are summed over processes, and would be of different functions."""
    adapters = []
    for noise in (1, 2):
        model = tiny_model()
        torch.manual_seed(noise)
        add_lora(model, LoraSettings(rank=4), seed=7)
        drawn = torch.rand(1)
        torch.manual_seed(noise)
        assert torch.equal(drawn, torch.rand(1)), "the generator of the process is left alone"
        adapters.append({name: tensor for name, tensor in model.state_dict().items() if "lora_A" in name})
    first, second = adapters
    assert len(first) == 14
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = add_lora(tiny_model(), LoraSettings(rank=4), seed=8).state_dict()
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_frozen_weights_may_be_bfloat16_while_adapters_are_float32(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = load_trained(str(tmp_path), dtype="bfloat16", lora=LoraSettings(rank=4), device=torch.device("cpu"), seed=0)
    assert {tensor.dtype for tensor in full_state_dict(model).values()} == {torch.bfloat16}, "as they were read"
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    learner = tiny_learner(
        model, GrpoConfig(max_micro_batch_tokens=512, dtype="bfloat16"), OptimizerConfig(learning_rate=1e-2)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_B" in name}
    learner.update(learner.pack(random_samples(4, advantages=[1.0, -1.0, 1.0, -1.0])))
    assert all(not torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
