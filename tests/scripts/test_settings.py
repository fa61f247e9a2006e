"""Configurations: every shipped file loads, the command line wins, and what is wrong is said in one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollouts.config import SamplingConfig
from scripts.settings import (
    DataSettings,
    EvalSettings,
    GrpoSettings,
    RolloutSettings,
    Settings,
    SftSettings,
    load_settings,
    resolved,
    save_resolved,
)

KINDS: dict[str, type[Settings]] = {
    "data": DataSettings,
    "eval": EvalSettings,
    "grpo": GrpoSettings,
    "sft": SftSettings,
}
CONFIGS = sorted(Path("configs").glob("*.toml"))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`section.key` → value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    settings = load_settings(KINDS[path.name.split("_")[0]], ["--config", str(path)])
    assert resolved(settings)


@pytest.mark.parametrize("path", [path for path in CONFIGS if "qwen3" in path.name], ids=lambda path: path.name)
def test_the_gpu_configurations_set_every_key(path: Path) -> None:
    settings = load_settings(KINDS[path.name.split("_")[0]], ["--config", str(path)])
    assert flat(tomllib.loads(path.read_text())).keys() == flat(resolved(settings)).keys()


def test_the_command_line_wins_over_the_file() -> None:
    arguments = ["--config", "configs/grpo_quickstart.toml", "--optimizer.learning_rate", "1e-4", "--dry-run"]
    settings = load_settings(GrpoSettings, arguments)
    assert settings.optimizer.learning_rate == 1e-4
    assert settings.dry_run
    assert settings.grpo.num_generations == load_settings(GrpoSettings, arguments[:2]).grpo.num_generations


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (
            "model = 'm'\noutput_dir = 'o'\n[grpo]\nnum_generations = 1",
            ["--grpo.max_steps", "3"],
            "grpo.num_generations",
        ),
        ("model = 'm'\noutput_dir = 'o'\n[grpo]\nmax_stepz = 3", [], "grpo.max_stepz: unknown key"),
        ("model = 'm'", [], "output_dir: missing; write it there, or give it on the command line"),
        ("model = 'm'\noutput_dir = 'o'\n[optimizer]\nlearning_rate = 'fast'", [], "optimizer.learning_rate"),
        ("model = ", [], "Invalid value"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, arguments: list[str], says: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"configuration .*c\.toml: ") as error:
        load_settings(GrpoSettings, ["--config", str(path), *arguments])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--env.folder", "foo"], "configuration configs/data_quickstart.toml and the command line: env: folder is"),
        (["--sandbox.backend", "podman"], "command line: sandbox.backend: Input should be"),
        (["--synthesize.num_tasks=abc"], "command line: synthesize.num_tasks: Input should be"),
        (["--output", "configs"], "command line: output: configs is a folder"),
        (["--output", ""], "command line: output: name the file to write"),
        (["--output", "/dev/null"], "command line: output: /dev/null is a device or a pipe; name a file"),
        (["--config", "configs/sft_quickstart.toml"], "--config is given twice; name one file"),
        (["--config=configs/sft_quickstart.toml"], "--config is given twice; name one file"),
    ],
)
def test_what_the_command_line_gave_is_not_blamed_on_the_file_alone(arguments: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        load_settings(DataSettings, ["--config", "configs/data_quickstart.toml", *arguments])


def test_one_of_several_values_of_the_command_line_is_found_there() -> None:
    given = ["--output", "o.json", "--model", "m", "--rollout.engine.kind", "wrong"]
    with pytest.raises(ValueError, match=r"^command line: rollout\.engine\.kind: "):
        load_settings(EvalSettings, given)
    with pytest.raises(ValueError, match=r"^configuration: model: missing; name a file with --config F, or give it on"):
        load_settings(EvalSettings, given[:2])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"configuration none\.toml: no such file"):
        load_settings(RolloutSettings, ["--config", "none.toml"])


def test_a_device_is_no_configuration() -> None:
    with pytest.raises(ValueError, match=r"^configuration /dev/null: this is a device; name a TOML file$"):
        load_settings(RolloutSettings, ["--config", "/dev/null"])


def test_a_folder_is_no_configuration() -> None:
    with pytest.raises(ValueError, match=r"^configuration configs: this is a folder; name a TOML file in it$"):
        load_settings(RolloutSettings, ["--config", "configs"])


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"model = '\xff'")
    with pytest.raises(ValueError, match=r"^configuration .*c\.toml: .*utf-8"):
        load_settings(RolloutSettings, ["--config", str(path)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--env.nam", "x"], "--env.nam: unknown key; did you mean --env.name? --help lists every key"),
        (["--env.nam=x"], "--env.nam: unknown key; did you mean --env.name?"),
        (["--zzz", "x"], "--zzz: unknown key; --help lists every key"),
        (["x"], "unrecognized arguments: x; --help lists every key"),
        (["--seed"], "argument --seed: expected one argument; --help lists every key"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^command line: ") as error:
        load_settings(DataSettings, ["--config", "configs/data_quickstart.toml", *arguments])
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_is_a_key_like_any_other(value: bool) -> None:
    arguments = ["--config", "configs/grpo_quickstart.toml", "--grpo.gradient_checkpointing", str(value).lower()]
    settings = load_settings(GrpoSettings, arguments)
    assert settings.grpo.gradient_checkpointing is value
    assert not settings.dry_run


def test_every_key_can_be_set() -> None:
    """The README says so: `--section.key value`, for every key of every configuration."""
    for path in CONFIGS:
        kind = KINDS[path.name.split("_")[0]]
        settings = load_settings(kind, ["--config", str(path)])
        options = [part for key, value in flat(resolved(settings)).items() for part in (f"--{key}", str(value))]
        assert load_settings(kind, options) == settings


SUPPORT = [
    ("top_p", "0.9"),
    ("top_k", "20"),
    ("min_p", "0.1"),
    ("repetition_penalty", "1.1"),
    ("presence_penalty", "0.5"),
    ("frequency_penalty", "-0.5"),
    ("constrain_calls", "true"),
]


@pytest.mark.parametrize(("key", "value"), SUPPORT)
def test_case_c07_what_changes_the_distribution_is_refused_for_training_and_allowed_elsewhere(
    key: str, value: str
) -> None:
    option = [f"--rollout.sampling.{key}", value]
    with pytest.raises(ValueError, match=rf"rollout: sampling\.{key} = .*set it for run_eval or run_rollouts") as error:
        load_settings(GrpoSettings, ["--config", "configs/grpo_quickstart.toml", *option])
    assert "\n" not in str(error.value)
    settings = load_settings(EvalSettings, ["--config", "configs/eval_quickstart.toml", *option])
    assert str(getattr(settings.rollout.sampling, key)).lower() == value


def test_the_refused_settings_are_all_but_the_temperature() -> None:
    assert {key for key, _ in SUPPORT} == SamplingConfig.model_fields.keys() - {"temperature"}
    settings = load_settings(
        GrpoSettings, ["--config", "configs/grpo_quickstart.toml", "--rollout.sampling.temperature", "0.7"]
    )
    assert settings.rollout.sampling.temperature == 0.7


def test_an_adapter_that_the_trainer_does_not_have_is_refused_for_training() -> None:
    option = ["--rollout.engine.adapter", "runs/adapter"]
    with pytest.raises(ValueError, match=r"rollout: engine\.adapter: .*merge it"):
        load_settings(GrpoSettings, ["--config", "configs/grpo_quickstart.toml", *option])
    settings = load_settings(EvalSettings, ["--config", "configs/eval_quickstart.toml", *option])
    assert settings.rollout.engine.adapter == "runs/adapter"


def test_servers_sample_for_training_too() -> None:
    option = ["--rollout.engine.kind", "server", "--rollout.engine.servers", "http://127.0.0.1:8000"]
    option += ["--rollout.engine.dtype", "auto", "--rollout.engine.sync_timeout_s", "20"]
    for kind, file in ((GrpoSettings, "grpo_quickstart"), (EvalSettings, "eval_quickstart")):
        settings = load_settings(kind, ["--config", f"configs/{file}.toml", *option])
        assert settings.rollout.engine.servers == ("http://127.0.0.1:8000",)
        assert settings.rollout.engine.sync_timeout_s == 20
    with pytest.raises(ValueError, match="sync_timeout_s does nothing where kind is vllm"):
        load_settings(GrpoSettings, ["--config", "configs/grpo_quickstart.toml", *option[6:]])


def test_an_observation_that_fills_the_context_is_refused() -> None:
    option = ["--config", "configs/eval_quickstart.toml", "--rollout.limits.max_observation_tokens", "640"]
    with pytest.raises(ValueError, match=r"max_observation_tokens is 640 and engine.max_context_tokens 640"):
        load_settings(EvalSettings, option)


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (*KINDS.values(), RolloutSettings):
        with pytest.raises(SystemExit) as stop:
            load_settings(kind, ["--help"])
        assert stop.value.code == 0
        assert "--config configs/" in capsys.readouterr().out


def test_another_configuration_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    arguments = ["--config", "configs/grpo_quickstart.toml", "--output_dir", str(tmp_path)]
    save_resolved(load_settings(GrpoSettings, [*arguments, "--grpo.max_steps", "9"]), tmp_path)
    save_resolved(load_settings(GrpoSettings, arguments), tmp_path)  # no step was made yet: nothing is mixed up
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    save_resolved(load_settings(GrpoSettings, arguments), tmp_path)
    with pytest.raises(ValueError, match=r"grpo\.max_steps was .*, now 7.*delete the folder"):
        save_resolved(load_settings(GrpoSettings, [*arguments, "--grpo.max_steps", "7"]), tmp_path)


def test_where_and_how_fast_it_runs_may_change_when_a_run_continues(tmp_path: Path) -> None:
    arguments = ["--config", "configs/grpo_quickstart.toml", "--output_dir", str(tmp_path)]
    save_resolved(load_settings(GrpoSettings, arguments), tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    other = ["--rollout.sandbox.backend", "docker", "--grpo.max_micro_batch_tokens", "2048", "--wandb.mode", "disabled"]
    save_resolved(load_settings(GrpoSettings, [*arguments, *other]), tmp_path)
    with pytest.raises(ValueError, match=r"rollout\.limits\.max_turns was 5, now 6"):
        save_resolved(load_settings(GrpoSettings, [*arguments, *other, "--rollout.limits.max_turns", "6"]), tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("optimizer.learning_rate", "inf", "finite"),
        ("grpo.sync_tolerance", "nan", "finite"),
        ("rollout.sampling.temperature", "0.001", "greater than or equal to 0.01"),
        ("seed", "-1", "greater than or equal to 0"),
        ("optimizer.lr_scheduler_type", "constant", "warmup_steps needs"),
    ],
)
def test_values_that_would_do_nothing_or_harm_are_refused(option: str, value: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_settings(GrpoSettings, ["--config", "configs/grpo_quickstart.toml", f"--{option}", value])
