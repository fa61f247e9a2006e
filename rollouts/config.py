"""What a person may set about sampling: the environment, the sandbox, the engine, the limits of a trajectory."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from envs.sandbox.base import DEFAULT_IMAGE


class Section(BaseModel):
    """A part of a configuration file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class EnvConfig(Section):
    """Which tasks. For `lookup_calc`, `max_calls` bounds the tool calls that a task needs, and `call_weights` says how
    often tasks of one, two and three calls come, relative to each other."""

    name: Literal["lookup_calc", "task_folder"] = "lookup_calc"
    max_calls: int = Field(default=3, ge=1, le=3)
    call_weights: tuple[float, float, float] = (1, 1, 1)
    folder: str | None = None
    """For `task_folder`: the folder that holds the task folders; unless given, the tasks that come with the package."""

    @model_validator(mode="after")
    def _no_key_of_another(self) -> Self:
        """A key that does nothing would be a wrong belief about the run."""
        own = {"lookup_calc": ("max_calls", "call_weights"), "task_folder": ("folder",)}
        for name, keys in own.items():
            for key in keys:
                if name != self.name and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is a key of {name}, and name is {self.name}; take it out")
        return self


class SandboxConfig(Section):
    """Where tools run. `auto`: Docker when its daemon answers and has the image, else bubblewrap."""

    backend: Literal["auto", "docker", "bubblewrap", "local"] = "auto"
    image: str = DEFAULT_IMAGE
    """Of tasks that name none: a registry's name; or the path (it begins with `/`, `./` or `../`) of a folder with a
    Dockerfile or of a root file system in a tar archive, which is all that bubblewrap takes."""
    warm: int = Field(default=4, ge=0, le=64)
    """So many sandboxes are started before they are asked for, by one process for all of this host."""
    runtime: str | None = None
    """Docker's name of another container runtime than its own, such as `runsc` (gVisor)."""
    tool_timeout_s: float = Field(default=15.0, gt=0)
    """When a tool has given no result by then, the model is told so and goes on."""


class EngineConfig(Section):
    """What samples. `transformers` is the reference and needs no vLLM; it is slower."""

    kind: Literal["vllm", "transformers"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context_tokens: int = Field(default=1024, ge=16)
    max_concurrent: int = Field(default=64, ge=1)
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)


class LimitsConfig(Section):
    """When a trajectory is ended. Tokens are the policy's own. The wall clock bounds the conversation with its tools;
    starting and ending the sandbox and grading have as much again, each."""

    max_turns: int = Field(default=8, ge=1)
    max_turn_tokens: int = Field(default=64, ge=1)
    max_trajectory_tokens: int = Field(default=256, ge=1)
    max_parse_errors: int = Field(default=3, ge=1)
    wall_clock_s: float = Field(default=120.0, gt=0)


class SamplingConfig(Section):
    """How tokens are drawn: from the whole distribution. A cut of it (top_p) would make the trainer's logprobs those of
    another policy."""

    temperature: float = Field(default=1.0, ge=0.01)
    """vLLM samples at 0.01 where less is asked for, and the trainer would divide by another number."""


class EvalConfig(Section):
    """Which tasks an evaluation attempts, sampled as `rollout` says."""

    split: Literal["train", "heldout"] = "heldout"
    num_tasks: int = Field(default=100, ge=1)


class SynthesizeConfig(Section):
    """Warm-start data: the demonstrator works on `num_tasks` tasks of the training split."""

    num_tasks: int = Field(default=2000, ge=1)
    mistake_rate: float = Field(default=0.1, ge=0, lt=1)
    """How often lookup_calc's demonstrator errs; what it repairs is kept as context, what it does not is dropped. A
    solution of task_folder is replayed as it is."""
    max_turns: int = Field(default=8, ge=1)
    max_concurrent: int = Field(default=8, ge=1)


class RolloutConfig(Section):
    """Everything about sampling."""

    env: EnvConfig = EnvConfig()
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = LimitsConfig()
    sampling: SamplingConfig = SamplingConfig()
