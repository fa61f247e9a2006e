"""What each command can be told: the sections of the packages' configurations, put together.

A configuration is one TOML file (`--config F`); any key can be set on the command line (`--section.key value`), which
wins. Unknown keys are refused.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli_w
from pydantic import AfterValidator, AliasChoices, BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliToggleFlag,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from data.files import check_regular
from data.jsonl import replace_text
from rollouts.config import EnvConfig, EvalConfig, RendererConfig, RolloutConfig, SandboxConfig, SynthesizeConfig
from train.config import (
    CheckpointConfig,
    GrpoConfig,
    HeldOutConfig,
    LoraSettings,
    OptimizerConfig,
    SftConfig,
    WandbConfig,
    check_trainable,
)


class Settings(BaseSettings):
    """The base of all: nothing comes from environment variables, unknown keys are refused."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        use_attribute_docstrings=True,
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _writable(path: str) -> str:
    if not path:
        raise ValueError("name the file to write")
    check_regular(Path(path))
    return path


OutputFile = Annotated[str, AfterValidator(_writable)]


class DataSettings(Settings):
    """python -m scripts.make_data --config configs/data_quickstart.toml"""

    output: OutputFile
    """The JSONL file to write."""
    seed: int = Field(default=0, ge=0)
    env: EnvConfig = EnvConfig()
    sandbox: SandboxConfig = SandboxConfig()
    synthesize: SynthesizeConfig = SynthesizeConfig()


class SftSettings(Settings):
    """accelerate launch --quiet -m scripts.run_sft --config configs/sft_quickstart.toml --sft.max_steps 50"""

    model: str
    """The model folder to start from."""
    output_dir: str = Field(min_length=1)
    """The run folder; started again, the run continues."""
    seed: int = Field(default=0, ge=0)
    sft: SftConfig
    renderer: RendererConfig = RendererConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    wandb: WandbConfig = WandbConfig()


class GrpoSettings(Settings):
    """accelerate launch --quiet -m scripts.run_grpo --config configs/grpo_quickstart.toml --grpo.max_steps 20"""

    model: str
    """The model folder to start from."""
    output_dir: str = Field(min_length=1)
    """The run folder; started again, the run continues."""
    seed: int = Field(default=0, ge=0)
    rollout: Annotated[RolloutConfig, AfterValidator(check_trainable)] = RolloutConfig()
    grpo: GrpoConfig = GrpoConfig()
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: HeldOutConfig = HeldOutConfig()
    wandb: WandbConfig = WandbConfig()
    replay: str | None = None
    """The folder of a run: train on the samples that it dumped, without an engine."""
    dry_run: CliToggleFlag[bool] = Field(
        default=False, exclude=True, validation_alias=AliasChoices("dry_run", "dry-run")
    )
    """Resolve the configuration, estimate memory, roll out one task, print its loss mask, and stop."""


class EvalSettings(Settings):
    """python -m scripts.run_eval --config configs/eval_quickstart.toml --model runs/sft/final --attempts 8"""

    model: str
    """The model folder to sample from."""
    output: OutputFile
    """The file to write."""
    name: str = "evaluation"
    """What reports call it, and what the ids of its trajectories begin with."""
    seed: int = Field(default=0, ge=0)
    attempts: int = Field(default=8, ge=1)
    """Attempts at each task."""
    evaluation: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()


class RolloutSettings(EvalSettings):
    """python -m scripts.run_rollouts --config configs/eval_quickstart.toml --output rollouts.jsonl

    Samples `attempts` trajectories of each task and appends each to `output` when it ends. Ctrl-C at any time: the same
    command goes on with what is missing. It needs no model weights where engine.kind is "server".
    """


S = TypeVar("S", bound=Settings)


def load_settings(kind: type[S], arguments: Sequence[str] | None = None) -> S:
    """The settings of a command: `--config F` first, then what the command line says.

    Raises:
        ValueError: the file is no TOML, or a key (of the file or the command line) is unknown, missing or has a wrong
            value; it names the key and where it was given.
        FileNotFoundError: there is no such file.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    path, rest = _take_config(rest)
    values = _read_toml(path) if path is not None else {}
    _refuse_unknown_keys(kind, rest)
    try:
        source = CliSettingsSource[Any](kind, cli_parse_args=rest, cli_prog_name=_program(kind), root_parser=None)
    except SettingsError as error:
        words = str(error).removeprefix("error parsing CLI: ")
        raise ValueError(f"command line: {words}; --help lists every key") from error
    try:
        return kind(_cli_settings_source=source, **values)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ValueError(_one_line(error, path, rest)) from error


def resolved(settings: Settings) -> dict[str, Any]:
    """Every key with its value, as it is written to a run folder's `config.toml`."""
    return settings.model_dump(mode="json", exclude_none=True)


MAY_CHANGE = (
    "checkpoint.",
    "evaluation.",
    "wandb.",
    "grpo.max_micro_batch_tokens",
    "grpo.gradient_checkpointing",
    "grpo.sync_tolerance",
    "sft.gradient_checkpointing",
    "rollout.sandbox.backend",
    "rollout.sandbox.warm",
    "rollout.engine.max_concurrent",
    "rollout.engine.gpu_memory_utilization",
    "rollout.engine.servers",
    "rollout.engine.sync_timeout_s",
    "rollout.schedule.",
)
"""Keys that a run may continue with another value of: they say where and how fast it is computed, not what."""


def save_resolved(settings: Settings, folder: Path) -> None:
    """Write `config.toml` into a run folder.

    Raises:
        ValueError: the folder holds steps that were made with another configuration (`MAY_CHANGE` apart).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, values, metrics = folder / "config.toml", resolved(settings), folder / "metrics.jsonl"
    has_steps = metrics.exists() and metrics.stat().st_size > 0
    if has_steps and path.exists() and (difference := first_difference(_read_toml(path), values)):
        raise ValueError(
            f"{folder} holds a run with another configuration ({difference}); delete the folder or choose another "
            "output_dir"
        )
    replace_text(path, tomli_w.dumps(values))


def first_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str | None:
    """The first key in which two configurations differ that must not, in words; None: the run may continue.

    >>> first_difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b was 1, now 2'
    """
    for key in sorted(old.keys() | new.keys()):
        a, b, name = old.get(key), new.get(key), prefix + key
        if isinstance(a, dict) and isinstance(b, dict):
            difference = first_difference(a, b, f"{name}.")
            if difference:
                return difference
        elif a != b and not name.startswith(MAY_CHANGE):
            return f"{name} was {a!r}, now {b!r}"
    return None


def _take_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """`--config F` (or `--config=F`) out of the arguments; what is left is for the settings."""
    if sum(argument.partition("=")[0] == "--config" for argument in arguments) > 1:
        raise ValueError("--config is given twice; name one file")
    for index, argument in enumerate(arguments):
        if argument == "--config":
            if index + 1 == len(arguments):
                raise ValueError("--config needs a file")
            return Path(arguments[index + 1]), arguments[:index] + arguments[index + 2 :]
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config=")), arguments[:index] + arguments[index + 1 :]
    return None, arguments


def _refuse_unknown_keys(kind: type[Settings], arguments: Sequence[str]) -> None:
    """The parser would name no key that is like the unknown one."""
    known = {f"--{key}" for key in _keys(kind)}
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--") and option not in known | {"--help", "--dry-run"}:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"command line: {option}: unknown key; {hint}--help lists every key")


def _keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a configuration and its sections, `section.key`."""
    keys: list[str] = []
    for name, field in kind.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys += _keys(section, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _read_toml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ValueError(f"configuration {path}: this is a folder; name a TOML file in it")
    if path.is_char_device():
        raise ValueError(f"configuration {path}: this is a device; name a TOML file")
    if not path.exists():
        raise FileNotFoundError(f"configuration {path}: no such file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"configuration {path}: {error}") from error


def _program(kind: type[Settings]) -> str:
    return f"{(kind.__doc__ or '').split(' --')[0]} --config F"


def _one_line(error: ValidationError, path: Path | None, arguments: Sequence[str]) -> str:
    """The first of the problems, with its key, and with all that has a part in it: a problem of a section may come from
    any of its keys, of the file or of the command line."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    what = {"extra_forbidden": "unknown key", "missing": "missing"}.get(first["type"])
    if what is None:
        given = f" (given: {first['input']!r})" if isinstance(first["input"], str | int | float) else ""
        what = first["msg"].removeprefix("Value error, ") + given
    options = [argument.partition("=")[0].removeprefix("--") for argument in arguments if argument.startswith("--")]
    where = f"configuration {path}" if path is not None else "configuration"
    if any(f"{key}.".startswith(f"{option}.") for option in options):
        where = "command line"  # it wins over the file
    elif any(option.startswith(f"{key}.") for option in options):
        where = f"{where} and the command line" if path is not None else "command line"
    if first["type"] == "missing":
        file = "name a file with --config F" if path is None else "write it there"
        what = f"missing; {file}, or give it on the command line"
    return f"{where}: {key}: {what}"
