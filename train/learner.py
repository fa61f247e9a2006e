"""One optimizer update on samples: pack, forward and backward over this process's share, reduce, clip, update.

Every process has a learner and sees all samples; each takes every n-th micro-batch. Loss weights are those of the
global batch, so gradients are summed over micro-batches and processes, and no split changes the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, get_scheduler

from data.collator import MicroBatch, pack
from data.types import TrainingSample
from train.config import GrpoConfig, OptimizerConfig
from train.lora import adapter_state
from train.loss import grpo_loss, sample_weights
from train.model import computing, disable_dropout, score, trained_logprobs


class Learner:
    """The model with its optimizer and schedule. Its dropout is switched off; the learning rate changes between steps.

    `temperature` is the sampling temperature: the trainer's logprobs are of the same distribution.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        accelerator: Accelerator,
        *,
        config: GrpoConfig,
        optimizer: OptimizerConfig,
        temperature: float,
        pad_token_id: int,
    ) -> None:
        disable_dropout(model)
        self.model = model
        self._accelerator = accelerator
        self._config = config
        self._max_grad_norm = optimizer.max_grad_norm
        self._temperature = temperature
        self._pad_token_id = pad_token_id
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
        """The step's micro-batches, the same in every process. Samples without a trained token are left out."""
        trained = [sample for sample in samples if any(sample.loss_mask)]
        return pack(
            trained,
            sample_weights(trained, self._config.loss_type),
            max_tokens=self._config.max_micro_batch_tokens,
            pad_token_id=self._pad_token_id,
        )

    def gradient(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Leave the gradient of the whole step in every process's parameters; return the step's loss metrics."""
        self._optimizer.zero_grad()
        mine = batches[self._accelerator.process_index :: self._accelerator.num_processes]
        sums = torch.zeros(5, dtype=torch.float64)
        largest = torch.zeros(1)
        for batch in mine:
            batch = batch.to(self._accelerator.device)
            with computing(self._config.dtype, self._accelerator.device):
                logprobs, entropy = trained_logprobs(self.model, batch, temperature=self._temperature)
            trained = batch.loss_mask
            terms = grpo_loss(
                logprobs,
                batch.sampled_logprobs[trained],
                batch.advantages[trained],
                batch.loss_weights[trained],
                epsilon=self._config.epsilon,
                epsilon_high=self._config.epsilon_high,
            )
            terms.loss.backward()
            sums += torch.tensor(
                [
                    terms.loss.item(), entropy.sum().item(), terms.clipped, terms.logprob_gap_sum, logprobs.numel(),
                ],
                dtype=torch.float64,
            )  # fmt: skip
            largest = torch.maximum(largest, torch.tensor([terms.logprob_gap_max]))
        self._sum_over_processes()
        sums, largest = self._reduce(sums, "sum"), self._reduce(largest, "max")
        loss, entropy_sum, clipped, gap, n = sums.tolist()
        return {
            "loss": loss,
            "entropy": entropy_sum / n,
            "clip_ratio": clipped / n,
            "logprob_gap/mean": gap / n,
            "logprob_gap/max": largest.item(),
        }

    def update(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One optimizer update; returns its metrics."""
        metrics = self.gradient(batches)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        if not torch.isfinite(norm):
            raise ValueError(f"the gradient norm is {norm.item()}; nothing was updated")
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

    def _reduce(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        if self._accelerator.num_processes == 1:
            return values
        values = values.to(self._accelerator.device)
        operations = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
        torch.distributed.all_reduce(values, op=operations[operation])
        return values.cpu()
