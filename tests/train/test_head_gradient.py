"""Where the gradient is: at the head's input, exactly at the positions whose next token is trained, for SFT and GRPO,
packed and not; and what packed samples see of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.collator import MicroBatch, columns_of, pack, trajectory_index
from data.demonstrations import to_samples
from data.prefix_tree import Piece
from data.template_renderer import TemplateRenderer
from data.types import TrainingSample
from tests.train.tiny import load_embedded_tokenizer, make_model, sampled_sample, save_model, some_conversations
from train.config import CheckpointConfig, GrpoConfig, OptimizerConfig, SftConfig
from train.loss import TrainedTokens, policy_loss, sample_weights
from train.model import hidden_states, score, trained_logprobs
from train.sft import TokenTrainer, make_trainer, sft_arguments
from train.sft_data import IGNORED

ROWS = 4


def violations(gradient: Tensor, loss_mask: Tensor, previous: Tensor | None = None) -> list[tuple[int, int]]:
    """Positions `(row, column)` where there is a gradient `[B, L, H]` though no next token is trained, or none though
    one is; `loss_mask [B, L]`. The token before is in the column before, or where `previous [L]` says."""
    expected = torch.zeros_like(loss_mask)
    if previous is None:
        expected[:, :-1] = loss_mask[:, 1:]
    else:
        expected[:, previous[loss_mask[0]]] = True
    found = gradient.abs().sum(-1) != 0
    return [(int(row), int(column)) for row, column in (found != expected).nonzero()]


def grpo_violations(gradient: Tensor, batch: MicroBatch) -> list[tuple[int, int]]:
    return violations(gradient, batch.loss_mask[None], batch.previous)


class HeadInput:
    """Keeps what a model's decoder hands to the head, with its gradient."""

    def __init__(self, model: Any) -> None:
        self.states: list[Tensor] = []
        self.inputs: list[dict[str, Any]] = []
        model.get_decoder().register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        output.last_hidden_state.retain_grad()
        self.states.append(output.last_hidden_state)
        self.inputs.append(kwargs)

    @property
    def gradient(self) -> Tensor:
        found = self.states[-1].grad
        assert found is not None
        return found


def reference_gradient(states: Tensor, head: Tensor, token_ids: Tensor, weights: Tensor) -> Tensor:
    """The gradient `[B, L, H]` of the weighted negative log-likelihood, from the logits of all positions."""
    states = states.detach().requires_grad_()
    logprobs = torch.log_softmax(states @ head.T, dim=-1)[:, :-1]
    picked = logprobs.gather(-1, token_ids[:, 1:, None])[..., 0]
    (-(weights[:, 1:] * picked).sum()).backward()
    assert states.grad is not None
    return states.grad


def grpo_reference_gradient(states: Tensor, head: Tensor, batch: MicroBatch, weights: Tensor) -> Tensor:
    """The same `[1, C, H]` for a row of samples that share their beginnings; each sample's logits on their own."""
    states = states.detach().requires_grad_()
    loss = torch.zeros(())
    for placement in batch.placements:
        columns = columns_of(batch, placement)
        logprobs = torch.log_softmax(states[0, columns] @ head.T, dim=-1)[:-1]
        picked = logprobs.gather(-1, batch.token_ids[columns][1:, None])[:, 0]
        loss = loss - (weights[columns][1:] * picked).sum()
    loss.backward()
    assert states.grad is not None
    return states.grad


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model is not faster on more, and much slower where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(load_embedded_tokenizer(), name="tiny")


@pytest.fixture
def model() -> Any:
    return make_model(len(load_embedded_tokenizer())).train()


def sft_samples(renderer: TemplateRenderer) -> list[TrainingSample]:
    return to_samples(some_conversations(ROWS), renderer, max_length=400)[0]


def sft_trainer(folder: Path, renderer: TemplateRenderer, samples: Sequence[TrainingSample]) -> TokenTrainer:
    config = SftConfig(data="unused", per_device_train_batch_size=ROWS, max_steps=1)
    arguments = sft_arguments(folder / "checkpoints", 0, config, OptimizerConfig(), CheckpointConfig())
    path = str(save_model(folder / "model"))
    return make_trainer(path, load_embedded_tokenizer(), renderer.stop_token_ids[0], samples, arguments, config)


def grpo_batches(samples: Sequence[TrainingSample], *, packed: bool) -> list[MicroBatch]:
    weights = sample_weights(samples, "dapo")
    if packed:
        return pack(samples, weights, max_tokens=10_000)
    return [pack([s], [w], max_tokens=10_000)[0] for s, w in zip(samples, weights, strict=True)]


def padded_to(sample: TrainingSample, length: int) -> TrainingSample:
    """The sample with untrained text in front."""
    front = length - len(sample)
    fill: dict[str, Any] = {
        "token_ids": (9,), "source": sample.source[:1], "loss_mask": (False,), "sampled_logprobs": (0.0,),
        "advantages": (0.0,), "turn": (-1,), "completion_index": (-1,), "completion_position": (-1,),
        "policy_version": (-1,), "excluded": (None,),
    }  # fmt: skip
    return replace(sample, **{name: value * front + getattr(sample, name) for name, value in fill.items()})


def test_sft_gradient_through_a_real_step(tmp_path: Path, renderer: TemplateRenderer) -> None:
    samples = sft_samples(renderer)
    trainer = sft_trainer(tmp_path, renderer, samples)
    head = trainer.model.get_output_embeddings().weight.detach().clone()  # type: ignore[union-attr, operator]
    head_input = HeadInput(trainer.model)
    trainer.train()
    token_ids = head_input.inputs[0]["input_ids"]
    by_ids = {sample.token_ids: sample for sample in samples}
    loss_mask = torch.zeros(token_ids.shape, dtype=torch.bool)
    for row in range(ROWS):
        n = int(head_input.inputs[0]["attention_mask"][row].sum())
        loss_mask[row, :n] = torch.tensor(by_ids[tuple(token_ids[row, :n].tolist())].loss_mask)
    assert len(head_input.states) == 1
    assert violations(head_input.gradient, loss_mask) == []
    weights = loss_mask / loss_mask.sum()
    reference = reference_gradient(head_input.states[0], head, token_ids, weights)
    torch.testing.assert_close(head_input.gradient, reference, rtol=1e-4, atol=1e-7)


def sft_inputs(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """All samples in one row, kept apart by their positions."""
    token_ids = torch.cat([torch.tensor(sample.token_ids) for sample in samples])[None]
    position_ids = torch.cat([torch.arange(len(sample)) for sample in samples])[None]
    loss_mask = torch.cat([torch.tensor(sample.loss_mask) for sample in samples])[None]
    labels = token_ids.where(loss_mask, torch.tensor(IGNORED))
    return {"input_ids": token_ids, "position_ids": position_ids, "labels": labels}


def test_sft_gradient_of_packed_rows(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """The loss of the trainer, given packed rows (A31: labels at the first token of each sample are not trained)."""
    samples = sft_samples(renderer)
    inputs = sft_inputs(samples)
    trainer = sft_trainer(tmp_path, renderer, samples)
    model: Any = trainer.model.train()  # type: ignore[union-attr]
    head_input = HeadInput(model)
    loss_mask = inputs["labels"] != IGNORED
    assert not loss_mask[inputs["position_ids"] == 0].any()
    trainer.compute_loss(model, dict(inputs), num_items_in_batch=loss_mask.sum()).backward()
    assert violations(head_input.gradient, loss_mask) == []
    head = model.get_output_embeddings().weight.detach()
    reference = reference_gradient(head_input.states[0], head, inputs["input_ids"], loss_mask / loss_mask.sum())
    torch.testing.assert_close(head_input.gradient, reference, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("packed", [False, True])
def test_grpo_gradient(renderer: TemplateRenderer, model: Any, packed: bool) -> None:
    samples = [
        sampled_sample(renderer, f"tower {index}", advantage=0.5 - index, finish="length" if index == 1 else "stop")
        for index in range(3)
    ]
    batches = grpo_batches(samples, packed=packed)
    assert len(batches) == (1 if packed else 3)
    assert (len(batches[0].pieces) > len(samples)) == packed, "the samples share their prompt"
    head_input = HeadInput(model)
    for batch in batches:
        logprobs, entropies = trained_logprobs(model, batch, temperature=1.0)
        trained = batch.loss_mask
        # Where the ratio is one, the surrogate's gradient is that of the advantage-weighted likelihood.
        tokens = TrainedTokens(
            logprobs=logprobs, old_logprobs=logprobs.detach(), sampled_logprobs=logprobs.detach(),
            advantages=batch.advantages[trained], weights=batch.loss_weights[trained],
            trajectory=trajectory_index(batch), entropies=entropies,
        )  # fmt: skip
        policy_loss(tokens, GrpoConfig()).loss.backward()
        assert grpo_violations(head_input.gradient, batch) == []
        weights = batch.loss_weights * batch.advantages
        head = model.get_output_embeddings().weight.detach()
        reference = grpo_reference_gradient(head_input.states[-1], head, batch, weights)
        torch.testing.assert_close(head_input.gradient, reference, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_shifted_by_one_is_found(renderer: TemplateRenderer, model: Any, shift: int) -> None:
    batch = grpo_batches([sampled_sample(renderer, "tower")], packed=False)[0]
    shifted = replace(batch, loss_mask=batch.loss_mask.roll(shift))
    head_input = HeadInput(model)
    logprobs, _ = trained_logprobs(model, shifted, temperature=1.0)
    logprobs.sum().backward()
    assert grpo_violations(head_input.gradient, batch) != []
    assert grpo_violations(head_input.gradient, shifted) == []


def test_a_label_shifted_by_one_is_found(tmp_path: Path, renderer: TemplateRenderer) -> None:
    samples = sft_samples(renderer)
    inputs = sft_inputs(samples)
    loss_mask = inputs["labels"] != IGNORED
    trainer = sft_trainer(tmp_path, renderer, samples)
    model: Any = trainer.model.train()  # type: ignore[union-attr]
    head_input = HeadInput(model)
    trainer.compute_loss(model, inputs | {"labels": inputs["labels"].roll(1, dims=1)}).backward()
    assert violations(head_input.gradient, loss_mask) != []


def logprobs_by_sample(model: Any, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Logprobs `[n]` at each sample's trained tokens."""
    found: dict[str, Tensor] = {}
    for batch in batches:
        scattered = torch.zeros(batch.token_ids.shape)
        with torch.no_grad():
            scattered[batch.loss_mask] = trained_logprobs(model, batch, temperature=1.0)[0]
        for place in batch.placements:
            sample = scattered[columns_of(batch, place)]
            found[place.sample.trajectory_id] = sample[torch.tensor(place.sample.loss_mask)]
    return found


def test_packed_logprobs_equal_unpacked_ones(renderer: TemplateRenderer, model: Any) -> None:
    samples = [sampled_sample(renderer, f"tower {index}", tool_text="7" * (1 + index)) for index in range(3)]
    samples[0] = padded_to(samples[0], 3 * len(samples[2]))
    packed = pack(samples, [1.0] * 3, max_tokens=10_000)
    assert len(packed) == 1
    assert sorted(len(place.path) for place in packed[0].placements) == [1, 2, 2], "two of three share their beginning"
    alone = logprobs_by_sample(model, [b for s in samples for b in pack([s], [1.0], max_tokens=10_000)])
    together = logprobs_by_sample(model, packed)
    for name, logprobs in alone.items():
        torch.testing.assert_close(together[name], logprobs, rtol=0, atol=1e-5)


def test_samples_would_see_each_other_without_pieces(renderer: TemplateRenderer, model: Any) -> None:
    """Otherwise the test above would see nothing."""
    samples = [sampled_sample(renderer, f"tower {index}") for index in range(2)]
    batch = pack([padded_to(samples[0], 400), samples[1]], [1.0] * 2, max_tokens=10_000)[0]
    one_piece = [Piece(start=0, stop=len(batch.token_ids), parent=None)]
    with torch.no_grad():
        right = hidden_states(model, batch.token_ids, batch.position_ids, batch.pieces)
        wrong = hidden_states(model, batch.token_ids, batch.position_ids, one_piece)
    assert (right - wrong).abs().max() > 1e-2


def test_replacing_a_packed_neighbour_changes_nothing(renderer: TemplateRenderer, model: Any) -> None:
    """A31."""
    b = sampled_sample(renderer, "b")
    filler = replace(padded_to(b, 3 * len(b)), trajectory_id="filler")
    found = [
        logprobs_by_sample(model, pack([filler, a, b], [1.0] * 3, max_tokens=10_000))["b"]
        for a in (sampled_sample(renderer, "a"), sampled_sample(renderer, "a", tool_text="another result"))
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_the_tool_text_is_seen_and_the_loss_mask_is_not(renderer: TemplateRenderer, model: Any) -> None:
    """A15."""
    sample = sampled_sample(renderer, "tower")
    answer = [i for i, turn in enumerate(sample.turn) if turn == 1 and sample.loss_mask[i]]
    answer_only = replace(sample, loss_mask=tuple(i in answer for i in range(len(sample))))
    other = sampled_sample(renderer, "tower", tool_text="99")
    n = len(answer)

    def answers(one: TrainingSample) -> Tensor:
        return logprobs_by_sample(model, pack([one], [1.0], max_tokens=10_000))["tower"][-n:]

    plain = torch.tensor(score(model, list(sample.token_ids)))[[i - 1 for i in answer]]
    torch.testing.assert_close(answers(sample), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(answers(answer_only), answers(sample), rtol=0, atol=1e-5)
    assert (answers(other) - answers(sample)).abs().max() > 1e-3


def test_positions_of_turns_that_stopped_and_turns_that_were_cut(renderer: TemplateRenderer, model: Any) -> None:
    """A36: the stored row is what the next prompt held, whether the first turn ended with its closing token or was cut;
    ids and logprobs stay side by side."""
    stopped = sampled_sample(renderer, "stopped")
    cut = sampled_sample(renderer, "stopped", finish="length")
    assert stopped.token_ids == cut.token_ids
    assert sum(stopped.loss_mask) == sum(cut.loss_mask) + 1
    scored = [0.0, *score(model, list(cut.token_ids))]
    sampled = tuple(value if trained else 0.0 for value, trained in zip(scored, cut.loss_mask, strict=True))
    batch = pack([replace(cut, sampled_logprobs=sampled), stopped], [1.0] * 2, max_tokens=10_000)[0]
    logprobs, _ = trained_logprobs(model, batch, temperature=1.0)
    known = batch.sampled_logprobs[batch.loss_mask]
    torch.testing.assert_close(logprobs[: sum(cut.loss_mask)], known[: sum(cut.loss_mask)], rtol=0, atol=1e-5)
