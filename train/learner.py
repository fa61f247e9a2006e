"""One optimizer update on samples: pack, forward and backward over this process's share, reduce, clip, update.

Every process has a learner and sees all samples; each takes every n-th micro-batch. Loss weights are those of the
global batch, so gradients are summed over micro-batches and processes, and no split changes the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler

from data.collator import MicroBatch, pack, trajectory_index
from data.types import TrainingSample
from train.config import GrpoConfig, OptimizerConfig
from train.lora import adapter_state
from train.loss import TrainedTokens, policy_loss, sample_weights
from train.loss_metrics import SUMS, LossTerms, loss_metrics, mean_metrics, peaks, worst_peaks
from train.model import computing, disable_dropout, score, trained_logprobs
from train.reference import check_reference, reference_model


class Learner:
    """The model with its optimizer and schedule. Its dropout is switched off; the learning rate changes between steps.

    `temperature` is the sampling temperature: the trainer's logprobs are of the same distribution.
    `max_trajectory_tokens` is that of rollout.limits, for loss_type dr_grpo; `reference` is from `load_reference`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        accelerator: Accelerator,
        *,
        config: GrpoConfig,
        optimizer: OptimizerConfig,
        temperature: float,
        max_trajectory_tokens: int | None = None,
        reference: PreTrainedModel | None = None,
    ) -> None:
        check_reference(model, reference, config)
        disable_dropout(model)
        self.model = model
        self._accelerator = accelerator
        self._config = config
        self._max_grad_norm = optimizer.max_grad_norm
        self._temperature = temperature
        self._max_trajectory_tokens = max_trajectory_tokens
        self._reference = reference
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.learning_rate,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            weight_decay=optimizer.weight_decay,
        )
        self._schedule = get_scheduler(
            optimizer.lr_scheduler_type,
            self._optimizer,
            num_warmup_steps=optimizer.warmup_steps,
            num_training_steps=config.max_steps,
        )
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """The step's micro-batches, the same in every process. Samples without a trained token are left out.

        Raises:
            ValueError: a sample, or a trajectory that must stay together, is longer than `max_micro_batch_tokens`.
        """
        # A layer of a Llama has about 12 H² weights, 24 H² operations a token; to see one more token takes 4 H.
        trained = [sample for sample in samples if any(sample.loss_mask)]
        return pack(
            trained,
            sample_weights(trained, self._config.loss_type, max_trajectory_tokens=self._max_trajectory_tokens),
            max_tokens=self._config.max_micro_batch_tokens,
            processes=self._accelerator.num_processes,
            whole_trajectories=self._config.sequence_level,
            attention_cost=1 / (6 * self.model.config.get_text_config().hidden_size),
        )

    def old_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The logprobs `[n]` of this process's micro-batches now: for an update that others of the step go before."""
        with torch.no_grad():
            return [self._forward(self.model, batch.to(self._accelerator.device))[0] for batch in self._mine(batches)]

    def gradient(self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Leave the gradient of the whole step in every process's parameters; return the step's loss metrics.

        `old`: what `old_logprobs` gave for these batches; None where no update has gone before.
        """
        self._optimizer.zero_grad()
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._accelerator.device)
        found: list[tuple[LossTerms, MicroBatch]] = []
        for number, batch in enumerate(self._mine(batches)):
            tokens = self._tokens(batch.to(self._accelerator.device), None if old is None else old[number])
            terms = policy_loss(tokens, self._config)
            terms.loss.backward()
            sums += terms.sums
            found.append((replace(terms, loss=terms.loss.detach()), batch))
        self._sum_over_processes()
        largest = peaks(found)
        if self._accelerator.num_processes > 1:
            largest = worst_peaks(gather_object([largest]))
        return loss_metrics(self._sum(sums).tolist(), largest, self._config)

    def _tokens(self, batch: MicroBatch, old: Tensor | None) -> TrainedTokens:
        trained = batch.loss_mask
        ref_logprobs = None
        if self._config.beta > 0:
            with reference_model(self.model, self._reference) as reference:
                ref_logprobs, _ = self._forward(reference, batch)
        logprobs, entropies = self._forward(self.model, batch)
        return TrainedTokens(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            sampled_logprobs=batch.sampled_logprobs[trained],
            advantages=batch.advantages[trained],
            weights=batch.loss_weights[trained],
            trajectory=trajectory_index(batch),
            entropies=entropies,
            ref_logprobs=ref_logprobs,
        )

    def _forward(self, model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with computing(self._config.dtype, self._accelerator.device):
            return trained_logprobs(model, batch, temperature=self._temperature)

    def _mine(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return batches[self._accelerator.process_index :: self._accelerator.num_processes]

    def update_step(self, updates: Sequence[Sequence[MicroBatch]]) -> dict[str, Any]:
        """The updates of a step, one after the other; returns the metrics of the step. All ratios are to the policy
        before the first of them, which takes one more forward pass over the micro-batches of the later ones."""
        old = [None, *(self.old_logprobs(batches) for batches in updates[1:])]
        return mean_metrics([self.update(batches, before) for batches, before in zip(updates, old, strict=True)])

    def update(self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """One optimizer update; returns its metrics. `old`: see `gradient`."""
        metrics = self.gradient(batches, old)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        if not torch.isfinite(norm):
            gap, token = metrics["logprob_gap/max"], metrics["logprob_gap/max_token"]
            raise ValueError(
                f"the gradient norm is {norm.item()}; nothing was updated. Engine and trainer differ most on the token "
                f"{token}, by {gap:.3g} nats"
            )
        metrics["learning_rate"] = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        return metrics | {"grad_norm": norm.item()}

    def end_step(self) -> None:
        """Move the schedule on, whether or not the step had anything to train on: it reaches its end with the run."""
        with warnings.catch_warnings():
            # torch expects an update before the first move, and a step of dead groups has none.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            self._schedule.step()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `train.model.score`: computed as in training."""
        self.model.eval()
        with computing(self._config.dtype, self._accelerator.device):
            logprobs = score(self.model, token_ids)
        self.model.train()
        return logprobs

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the full weights."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "adapter": adapter_state(self.model),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.model.load_state_dict(state["adapter"], strict=False)

    def _sum_over_processes(self) -> None:
        if self._accelerator.num_processes == 1:
            return
        for parameter in self._parameters:
            # A process without a micro-batch has no gradient, and must still take part.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        if self._accelerator.num_processes > 1:
            torch.distributed.all_reduce(values)
        return values
