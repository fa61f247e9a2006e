"""The warm start: supervised training on demonstrations with TRL's `SFTTrainer`.

TRL gets token ids and labels that were made in `data.demonstrations`; it sees no text and tokenises nothing. Which rows
each step trains on is decided in `train.sft_data`.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from data.open_renderer import open_renderer
from data.types import TrainingSample
from rollouts.config import RendererConfig
from train.config import CheckpointConfig, OptimizerConfig, SftConfig, WandbConfig
from train.metrics import MetricsLog, start_wandb
from train.model import load_model, load_tokenizer
from train.sft_data import count_steps, load_samples, ordered_dataset, trained_by_source, training_order

OnStep = Callable[[Mapping[str, Any], int], None]
"""Called with a step's row of metrics and the number of steps of the run."""


def run_sft(
    *,
    model_path: str,
    output_dir: Path,
    seed: int,
    config: SftConfig,
    renderer_config: RendererConfig,
    optimizer: OptimizerConfig,
    checkpoint: CheckpointConfig,
    wandb: WandbConfig,
    on_step: OnStep = lambda row, steps: None,
) -> Path:
    """Train, or go on training, and return the folder of the finished model, `output_dir/final`.

    The loss is the mean over all trained tokens of a step, however they are split into micro-batches and processes.
    `metrics.jsonl` gets one row a step, `checkpoints/` what is needed to go on; where `final` exists nothing is done.
    `on_step` is called in process 0.

    Raises:
        ValueError: model, demonstrations or sizes cannot be used (before the first step), or loss or gradient stopped
            being finite (before such weights get into a checkpoint).
    """
    final = output_dir / "final"
    if final.exists():
        print(f"sft: {final} is there already; delete {output_dir} to start over", flush=True)
        return final
    tokenizer = load_tokenizer(model_path)
    renderer = open_renderer(tokenizer, model=model_path, **renderer_config.model_dump())
    samples, report = load_samples(config, renderer, tokenizer)
    stop_token_id = renderer.stop_token_ids[0]
    arguments = sft_arguments(output_dir / "checkpoints", seed, config, optimizer, checkpoint)
    trainer = make_trainer(model_path, tokenizer, stop_token_id, samples, arguments, config)
    found = latest_trainer_checkpoint(output_dir / "checkpoints")
    start_after = found[1] if found else 0
    log: MetricsLog | None = None
    if arguments.process_index == 0:
        print(f"sft: {renderer.description}", flush=True)
        print(f"sft: {report.line()} ({trained_by_source(samples)})", flush=True)
        if start_after:
            print(f"sft: continuing after step {start_after}", flush=True)
        sections = {"sft": config, "optimizer": optimizer, "checkpoint": checkpoint}
        known = {"model": model_path, "seed": seed} | {name: one.model_dump() for name, one in sections.items()}
        log = MetricsLog(output_dir, start_after=start_after, run=start_wandb(output_dir, wandb, known))
        trainer.add_callback(_StepMetrics(trainer, log, on_step))
    try:
        trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
        _save_final(trainer, final, stop_token_id)
    finally:
        if log is not None:
            log.close()
    return final


def sft_arguments(
    checkpoints: Path, seed: int, config: SftConfig, optimizer: OptimizerConfig, checkpoint: CheckpointConfig
) -> SFTConfig:
    """Our configuration in TRL's words; whatever TRL or transformers would decide by themselves is written out."""
    return SFTConfig(
        output_dir=str(checkpoints),
        seed=seed,
        use_cpu=not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU"),
        # The data set holds the rows of the whole run in order, so it is gone through once.
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.gradient_checkpointing else None,
        # TRL's default is bf16 wherever it is run, a CPU included.
        bf16=config.dtype == "bfloat16",
        fp16=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        loss_type="nll",
        average_tokens_across_devices=True,
        optim="adamw_torch_fused",
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.lr_scheduler_type,
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        max_grad_norm=optimizer.max_grad_norm,
        logging_steps=1,
        # By default a loss that is not a number is shown as the mean of the losses before it.
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=checkpoint.save_steps,
        save_total_limit=checkpoint.save_total_limit,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        # Every row trains a token, so every parameter has a gradient.
        ddp_find_unused_parameters=False,
    )


class TokenTrainer(SFTTrainer):
    """TRL's trainer, which knows how many tokens a step trains, and tells nobody that it runs."""

    trained_tokens: int = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # What the loss is divided by: trained labels of all micro-batches and processes of the step.
        if num_items_in_batch is not None:
            self.trained_tokens = int(num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _send_telemetry(self) -> None:
        """TRL reports each run to its makers; a run of ours needs no network."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """TRL would write a README.md beside the checkpoints."""


def make_trainer(
    model_path: str,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_id: int,
    samples: Sequence[TrainingSample],
    arguments: SFTConfig,
    config: SftConfig,
) -> TokenTrainer:
    """The trainer with its model and the rows of the whole run.

    Padding is told from a row's length, never from its ids: the padding id may be the one that ends turns.

    Raises:
        ValueError: there are fewer rows than one step takes, or the model cannot be loaded.
    """
    rows_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    steps = count_steps(config, len(samples), rows_per_step=rows_per_step)
    lengths = [len(sample) for sample in samples]
    order = training_order(lengths, rows_per_step=rows_per_step, steps=steps, seed=arguments.seed)
    pad_token_id = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else stop_token_id
    trainer = TokenTrainer(
        # bfloat16 is what a step computes in; weights stay float32, where small updates are not rounded away.
        model=load_model(model_path, dtype="float32", device=arguments.device),
        args=arguments,
        train_dataset=ordered_dataset(samples, order),
        data_collator=DataCollatorForLanguageModeling(pad_token_id=pad_token_id),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class _StepMetrics(TrainerCallback):
    """One row of metrics a step; rows are published once a checkpoint holds their step."""

    def __init__(self, trainer: TokenTrainer, log: MetricsLog, on_step: OnStep) -> None:
        self._trainer = trainer
        self._log = log
        self._on_step = on_step
        self._started = 0.0
        self._tokens_seen = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return  # the summary at the end
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise ValueError(f"step {state.global_step}: {name} is {logs[name]}; lower optimizer.learning_rate")
        row = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "entropy": logs["entropy"],
            "mean_token_accuracy": logs["mean_token_accuracy"],
            "tokens/trained": self._trainer.trained_tokens,
            # TRL counts from the start of this process, not of the run.
            "tokens/total": int(logs["num_tokens"]) - self._tokens_seen,
            "time/step_s": time.perf_counter() - self._started,
        }
        self._tokens_seen = int(logs["num_tokens"])
        self._log.write(row)
        self._on_step(row, state.max_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._log.publish()


def latest_trainer_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint that the trainer wrote, and its step. `trainer_state.json` is what it writes last; a
    folder without a readable one was cut off, and is passed over."""
    found = sorted((int(path.name.removeprefix("checkpoint-")), path) for path in folder.glob("checkpoint-*"))
    for step, path in reversed(found):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if state["global_step"] == step:
            return path, step
    return None


def _save_final(trainer: TokenTrainer, final: Path, stop_token_id: int) -> None:
    """Write weights, tokenizer and chat template as an ordinary model folder, and move it into place: that `final`
    exists means that it is whole. Every process takes part."""
    partial = final.with_name(".final.partial")
    if trainer.args.process_index == 0:
        shutil.rmtree(partial, ignore_errors=True)
        # Generation ends at the token that ends turns; what else the model stopped at stays.
        model: Any = trainer.model
        generation = model.generation_config
        known = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        others = [token for token in known if token not in (None, stop_token_id)]
        generation.eos_token_id = [stop_token_id, *others] if others else stop_token_id
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(partial))
    if trainer.args.process_index == 0:
        (partial / "training_args.bin").unlink(missing_ok=True)
        partial.rename(final)
    trainer.accelerator.wait_for_everyone()
