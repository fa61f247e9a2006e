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


class RendererConfig(Section):
    """How messages become tokens, and how calls are read out of a turn."""

    name: str = "auto"
    """`auto`: the hand-written renderer of a known family where it agrees with the model's own chat template, else that
    template itself. Or `template`, or the name of a family in data/README.md."""
    tool_format: Literal[
        "auto", "hermes", "qwen3_coder", "glm", "llama3_json", "pythonic", "mistral", "gemma", "harmony", "react"
    ] = "auto"
    """How the model writes calls. `auto`: as the renderer's family or the chat template says."""
    thinking: Literal["keep", "follow"] = "keep"
    """When a new user message comes: `keep` all thinking in the stream, or `follow` a template that drops it, in a new
    stream."""
    enable_thinking: bool | None = None
    """For templates that know this switch; unless given, the template's own default."""


class EngineConfig(Section):
    """What samples. `transformers` is the reference and needs no vLLM; it is slower. `server`: `vllm serve` processes,
    at `servers`."""

    kind: Literal["vllm", "transformers", "server"] = "vllm"
    servers: tuple[str, ...] = ()
    """Base addresses such as `http://127.0.0.1:8000`."""
    adapter: str | None = None
    """The folder of a LoRA adapter (PEFT) to sample with; for servers, the name under which they serve it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU. Servers have their own (`scripts.serve --dtype`)."""
    max_context_tokens: int = Field(default=1024, ge=16)
    max_concurrent: int = Field(default=64, ge=1)
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Of vLLM in this process; servers have their own (`scripts.serve --gpu-memory-utilization`)."""
    sync_timeout_s: float = Field(default=300.0, gt=0)
    """Of servers: how long all of them together have for new weights. One that has not taken them by then ends the
    run."""

    @model_validator(mode="after")
    def _no_key_of_another(self) -> Self:
        foreign = {
            "vllm": ("sync_timeout_s",),
            "transformers": ("gpu_memory_utilization", "sync_timeout_s"),
            "server": ("dtype", "gpu_memory_utilization"),
        }
        for key in foreign[self.kind]:
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                where = "; scripts.serve has it" if self.kind == "server" else ""
                raise ValueError(f"{key} does nothing where kind is {self.kind}: leave it at {default}{where}")
        return self


class LimitsConfig(Section):
    """When a trajectory is ended, and what a tool may give back. Tokens are the policy's own. The wall clock bounds the
    conversation with its tools; starting and ending the sandbox and grading have as much again, each."""

    max_turns: int = Field(default=8, ge=1)
    max_turn_tokens: int = Field(default=64, ge=1)
    max_trajectory_tokens: int = Field(default=256, ge=1)
    max_parse_errors: int = Field(default=3, ge=1)
    """Turns in a row with a call that cannot be read."""
    max_repeated_calls: int = Field(default=4, ge=2)
    """Times in a row that the same calls came back with the same results."""
    max_tool_errors: int = Field(default=3, ge=1)
    """Turns in a row in which a tool itself failed, not the call."""
    max_cost_usd: float | None = Field(default=None, gt=0)
    """By the prices of `rollout.prices`; never exceeded: the last turn is cut where the money ends."""
    max_observation_tokens: int | None = Field(default=None, ge=16)
    """A longer tool result loses its middle, and says how much went. Unless given, a quarter of the engine's context,
    2048 at most."""
    tool_retries: int = Field(default=2, ge=0)
    """Times that a call is made again after a failure that the tool calls transient; the model sees none of them."""
    retry_backoff_s: float = Field(default=0.2, ge=0)
    """Before the first retry; twice as long before each further one."""
    wall_clock_s: float = Field(default=120.0, gt=0)


class PricesConfig(Section):
    """Dollars per million tokens, for the cost of a run and `limits.max_cost_usd`; 0 where nothing is paid."""

    input: float = Field(default=0.0, ge=0)
    cached_input: float | None = Field(default=None, ge=0)
    """Of tokens that were in the previous call's context; unless given, as any other input."""
    output: float = Field(default=0.0, ge=0)


class ScheduleConfig(Section):
    """How many trajectories run, and what happens to one that our machinery lost."""

    max_trajectories: int | None = Field(default=None, ge=1)
    """At once, with those whose tools run; unless given, twice what the engine (all servers together) samples at once.
    New ones begin while the engine has room."""
    infrastructure_retries: int = Field(default=1, ge=0)
    """Times that a trajectory lost to sandbox or engine is begun again."""


class SamplingConfig(Section):
    """How tokens are drawn. Training takes the whole distribution at its temperature: whatever else changes or cuts it
    would make the trainer's logprobs those of another policy, and is for evaluation only."""

    temperature: float = Field(default=1.0, ge=0.01)
    """vLLM samples at 0.01 where less is asked for, and the trainer would divide by another number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    constrain_calls: bool = False
    """Hold each tool call, once begun, to the tools' schemas (vLLM's structured outputs)."""


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
    renderer: RendererConfig = RendererConfig()
    engine: EngineConfig = EngineConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    limits: LimitsConfig = LimitsConfig()
    prices: PricesConfig = PricesConfig()
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _observations_fit(self) -> Self:
        allowed, context = self.limits.max_observation_tokens, self.engine.max_context_tokens
        if allowed is not None and allowed >= context:
            raise ValueError(
                f"limits.max_observation_tokens is {allowed} and engine.max_context_tokens {context}: one tool result "
                "could fill the context and end its trajectory; lower the first, or take it out"
            )
        return self
