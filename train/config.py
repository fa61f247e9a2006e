"""What a person may set about training. Keys that mean the same as in TRL have TRL's names."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollouts.config import RolloutConfig, SamplingConfig, Section

Dtype = Literal["float32", "bfloat16"]
LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "rloo"]
CorrectionMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Baseline = Literal["group", "leave_one_out", "batch"]
ScaleRewards = Literal["group", "batch", "none"]


def check_trainable(rollout: RolloutConfig) -> RolloutConfig:
    """The rollouts of a training run: sampled from the trained policy itself, at some temperature, and nothing else.

    A cut (`top_p`, `top_k`, `min_p`, a grammar) renormalises over what it leaves, and a penalty makes another
    distribution at each token, while the trainer's logprobs are over the whole vocabulary: each ratio would carry the
    difference, however exact both sides are (trl #6789: half of them outside 0.9 to 1.1 at `top_p` 0.8).

    Raises:
        ValueError: something else than the temperature is set, or an adapter that the trainer does not have.
    """
    for name, field in SamplingConfig.model_fields.items():
        value = getattr(rollout.sampling, name)
        if name != "temperature" and value != field.default:
            raise ValueError(
                f"sampling.{name} = {value!r} samples from another distribution than the trainer's logprobs are of, so "
                "every importance ratio would be wrong; leave it out here, and set it for run_eval or run_rollouts"
            )
    if rollout.engine.adapter is not None:
        raise ValueError(
            "engine.adapter: the trainer would not have this adapter; merge it into a model folder and train that, and "
            "set it for run_eval or run_rollouts"
        )
    return rollout


class WandbConfig(Section):
    """Weights & Biases. `auto`: online with a key, offline without one."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "agentgrad"


class CheckpointConfig(Section):
    """What is kept to go on from. A run that is started again continues from its newest checkpoint."""

    save_steps: int = Field(default=10, ge=1)
    save_total_limit: int = Field(default=2, ge=1)


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, gt=0, lt=1)
    adam_beta2: float = Field(default=0.999, gt=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _warmup_has_a_schedule(self) -> Self:
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            raise ValueError("warmup_steps needs lr_scheduler_type constant_with_warmup, linear or cosine")
        return self


class LoraSettings(Section):
    """Low-rank adapters instead of all weights. Checkpoints still get full weights."""

    rank: int = Field(default=0, ge=0)
    """0: no adapters, all weights are trained."""
    alpha: int = Field(default=32, ge=1)
    sync: Literal["merged", "adapter"] = "merged"
    """What the engine gets: full weights, or the adapters alone, which is less to send and samples slower."""

    @model_validator(mode="after")
    def _sync_has_an_adapter(self) -> Self:
        if self.sync == "adapter" and not self.rank:
            raise ValueError("sync = 'adapter' needs a rank above 0: there are no adapters to send")
        return self


class GrpoConfig(Section):
    """The GRPO update."""

    max_steps: int = Field(default=100, ge=1)
    """Steps of the run: each samples `tasks_per_step` groups, updates the weights and syncs them to the engine."""
    num_tasks: int = Field(default=1024, ge=1)
    """Size of the task set; it is gone through in a new order each epoch."""
    tasks_per_step: int = Field(default=8, ge=1)
    num_generations: int = Field(default=8, ge=2)
    """Trajectories of each task; a group of one has no baseline."""
    max_staleness: int = Field(default=0, ge=0)
    """How many updates may lie between the weights that a trajectory was begun with and those that train it; sampling
    goes on during updates where it is not 0."""
    max_resampled_groups: int = Field(default=0, ge=0)
    """So many dead groups of a step are replaced by groups of further tasks (dynamic sampling)."""
    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates made from the trajectories of a step; each takes its share of every group's siblings. The clip
    bounds how far the later ones may move from what was sampled."""
    loss_type: LossType = "dapo"
    """What counts the same: every trained token of the batch ("dapo", "cispo"), every trajectory ("grpo", "rloo"), or
    every token over a constant, the trajectories times rollout.limits.max_trajectory_tokens ("dr_grpo"). "cispo" clips
    the weight of a token instead of taking its gradient away; "rloo" has one ratio for each trajectory."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """"sequence" is GSPO: the geometric mean of a trajectory's ratios. Its epsilons are near 3e-4."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    epsilon_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped at 1 + epsilon_high. With "cispo" this is the bound of the ratio itself: 5 is usual."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the model that the run started from. 0: no reference model is held."""
    vllm_importance_sampling_mode: CorrectionMode = "token_truncate"
    """How the loss is corrected where engine and trainer give a token different probabilities: by their ratio, of each
    token or each trajectory, truncated to the bounds below, or dropped outside of them."""
    vllm_importance_sampling_clip_max: float = Field(default=3.0, gt=0)
    """1e9 bounds nothing."""
    vllm_importance_sampling_clip_min: float = Field(default=0.0, ge=0)
    baseline: Baseline = "group"
    """What a trajectory's return is compared with: the mean of its group, of the others in it, or of the whole step."""
    scale_rewards: ScaleRewards = "group"
    """What the difference is divided by: the standard deviation of the group, of the whole step, or nothing."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """What a reward is worth one turn earlier. Below 1, an outcome that takes more turns is worth less to the first."""
    truncation_penalty: float = Field(default=0.0, le=0, allow_inf_nan=False)
    """Added to the reward of a trajectory that a limit cut, for training only; the reported reward is without it."""
    mask_truncated_completions: bool = True
    """Leave trajectories that a limit cut out of the update. Their rewards stay in the baseline."""
    max_micro_batch_tokens: int = Field(default=4096, ge=16)
    gradient_checkpointing: bool = False
    dtype: Dtype = "float32"
    """What a step computes in. Trained weights stay float32, where small updates are not rounded away."""
    vllm_enable_sleep_mode: bool = False
    """During updates the engine's memory is the trainer's: for one GPU that both share. Its weights wait in the host's
    memory meanwhile."""
    sync_tolerance: float = Field(default=0.01, gt=0)
    """How far engine and trainer may differ on fixed prompts after a weight sync (nats, the largest difference)."""

    @property
    def sequence_level(self) -> bool:
        """Whether something is computed over a whole trajectory, so that its samples must share a micro-batch."""
        return (
            self.loss_type == "rloo"
            or self.importance_sampling_level == "sequence"
            or self.vllm_importance_sampling_mode.startswith("sequence")
        )

    @model_validator(mode="after")
    def _loss_keys_fit_together(self) -> Self:
        if self.loss_type == "cispo" and self.epsilon_high < 1:
            raise ValueError(
                f"loss_type cispo bounds the ratio itself by epsilon_high, and {self.epsilon_high} would scale every "
                "token down; set epsilon_high to 1 or more (5.0 is usual)"
            )
        if self.loss_type == "cispo" and self.epsilon != type(self).model_fields["epsilon"].default:
            raise ValueError(
                "epsilon does nothing with loss_type cispo, which has one bound, epsilon_high; leave it out"
            )
        if self.loss_type == "rloo" and self.importance_sampling_level == "sequence":
            raise ValueError(
                "loss_type rloo has the product of a trajectory's ratios, importance_sampling_level sequence (GSPO) "
                "their geometric mean; leave importance_sampling_level out, or take loss_type grpo"
            )
        return self

    @model_validator(mode="after")
    def _correction_has_bounds(self) -> Self:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        mode, fields = self.vllm_importance_sampling_mode, type(self).model_fields
        if mode == "none":
            names = ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
            if any(getattr(self, name) != fields[name].default for name in names):
                raise ValueError(
                    "vllm_importance_sampling_mode none corrects nothing, so its clip_min and clip_max do nothing; "
                    "leave them out or choose a mode"
                )
        elif low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min = {low} must be less than vllm_importance_sampling_clip_max = "
                f"{high}"
            )
        return self

    @model_validator(mode="after")
    def _engine_sleeps_or_samples(self) -> Self:
        if self.vllm_enable_sleep_mode and self.max_staleness:
            raise ValueError(
                f"vllm_enable_sleep_mode with max_staleness = {self.max_staleness}: an engine that sleeps during "
                "updates cannot sample meanwhile; set max_staleness to 0, or give the engine a GPU of its own"
            )
        return self

    @model_validator(mode="after")
    def _advantages_are_sound(self) -> Self:
        if self.baseline == "batch" and self.scale_rewards == "group":
            raise ValueError(
                "baseline = 'batch' with scale_rewards = 'group': a group whose rewards are all equal would be divided "
                "by almost zero; set scale_rewards to 'batch' or 'none'"
            )
        if self.truncation_penalty and self.mask_truncated_completions:
            raise ValueError(
                "truncation_penalty has no use while mask_truncated_completions leaves those trajectories out; set "
                "mask_truncated_completions = false, or truncation_penalty = 0"
            )
        return self


class HeldOutConfig(Section):
    """Evaluation while a run goes on. The weights of the best one so far are kept in `best/`."""

    eval_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps, and after the last one; 0: never."""
    num_tasks: int = Field(default=64, ge=1)
    """Held-out tasks, the same each time."""
    attempts: int = Field(default=1, ge=1)
    """At each task."""


class SftConfig(Section):
    """The warm start."""

    data: str
    """Demonstrations, JSONL."""
    max_steps: int = Field(default=-1, ge=-1)
    """Optimizer steps; -1: `num_train_epochs` decides."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    per_device_train_batch_size: int = Field(default=8, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    max_length: int = Field(default=1024, ge=16)
    gradient_checkpointing: bool = False
    dtype: Dtype = "float32"
    """What a step computes in. Weights stay float32, where small updates are not rounded away."""
