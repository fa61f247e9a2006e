"""LoRA: only adapters are trained, engines and checkpoints get full weights, the trainer's tensors stay as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rollouts.engine import EngineError
from rollouts.engine_checks import check_weights_fit, read_model_facts
from rollouts.engine_transformers import TransformersEngine
from tests.random_samples import random_samples, tiny_learner, tiny_model
from train.checkpoint import save_checkpoint
from train.config import GrpoConfig, LoraSettings, OptimizerConfig
from train.group_feed import FeedState
from train.learner import Learner
from train.lora import adapter_weights, add_lora, full_state_dict, load_trained
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


def wrapped(model: PreTrainedModel, **changed: Any) -> nn.Module:
    """The model with all that people put around it: PEFT, checkpointing, compiling."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **changed)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    peft = get_peft_model(model, config)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(peft.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.full_like(parameter, 0.01 * (number + 1)))
    layers: Any = peft.get_submodule("base_model.model.model.layers")
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = torch.compile(layers[1], backend="eager")
    return peft


@pytest.mark.parametrize(
    "changed", [{}, {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["norm"]}, {"bias": "all"}], ids=str
)
def test_case_c11_whatever_is_around_the_model_every_weight_has_its_own_name(changed: dict[str, Any]) -> None:
    plain = tiny_model(tie_word_embeddings=False).eval()
    names = plain.state_dict().keys()
    model = wrapped(tiny_model(tie_word_embeddings=False), **changed).eval()
    full = full_state_dict(model)
    assert full.keys() == names
    plain.load_state_dict(full)
    ids = torch.tensor([IDS])
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.equal(full["model.layers.0.mlp.down_proj.weight"], full["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("changed", [{"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_case_c11_a_tied_head_that_was_trained_alone_is_an_error(tmp_path: Path, changed: dict[str, Any]) -> None:
    """The engine would go on sampling from the embeddings, and nothing would say so."""
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    full = full_state_dict(wrapped(tiny_model(tie_word_embeddings=True), **changed))
    with pytest.raises(EngineError, match=r"it ties lm_head\.weight to model\.embed_tokens\.weight, and they differ"):
        check_weights_fit(full, read_model_facts(tmp_path))


def test_an_adapter_alone_is_sampled_with_as_the_merged_weights_are(tmp_path: Path) -> None:
    model = trained().model.eval()
    tiny_model().save_pretrained(tmp_path)
    alone, merged = TransformersEngine(tmp_path), TransformersEngine(tmp_path)

    async def scores() -> list[list[float]]:
        report = await alone.load_adapter(adapter_weights(model), 1)
        assert report.tensors == 2 * 2 * 7
        await merged.load_weights(full_state_dict(model), 1)
        both = [await engine.score(IDS) for engine in (alone, merged)]
        await alone.close()
        await merged.close()
        return both

    for engine_scores in asyncio.run(scores()):
        assert engine_scores == pytest.approx(score(model, IDS), abs=1e-5)


def test_case_c09_an_adapter_is_not_empty_and_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="no adapters"):
        adapter_weights(frozen(tiny_model()))
    with pytest.raises(ValueError, match=r"norm.* is more than an adapter; set lora\.sync to merged"):
        adapter_weights(wrapped(tiny_model(), modules_to_save=["norm"]))
    assert len(adapter_weights(wrapped(tiny_model())).tensors) == 2 * 2 * 2


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    return model


def test_case_c11_what_is_more_than_low_rank_matrices_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than low-rank matrices"):
        full_state_dict(wrapped(tiny_model(), use_dora=True))


def test_case_c11_what_no_wrapper_is_known_for_stays_and_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    odd = nn.Module()
    odd.inner = tiny_model()
    with pytest.raises(EngineError, match=r"unknown names inner\."):
        check_weights_fit(full_state_dict(odd), read_model_facts(tmp_path))


def test_a_checkpoint_is_an_ordinary_model_and_the_run_continues_from_it(tmp_path: Path) -> None:
    learner = trained()
    tokenizer = AutoTokenizer.from_pretrained("models/embedded")
    state = learner.state()
    path = save_checkpoint(tmp_path, 2, model=learner.model, tokenizer=tokenizer, state=state, feed=FeedState(), keep=1)
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
