"""The main job in one command: data → SFT → evaluation → GRPO → evaluation → report, each stage as a person types it.

A stage whose result is there is not run again, and a training stage that was killed goes on from its checkpoint, so the
same command continues whatever was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.console import run_main
from scripts.try_sandbox import sandbox_works

STOP_S = 15.0
"""How long an interrupted stage may take to clean up."""

EXAMPLE = "bash scripts/quickstart.sh --seed 1 --output_dir runs/quickstart_seed1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A command, the file or folder that is there when it has finished, and the stage whose result it starts from."""

    name: str
    command: list[str]
    result: Path
    after: str | None = None


def stages(folder: Path, *, configs: str, seed: int, sandbox: str) -> list[Stage]:
    """The stages of a run in `folder`, with the configurations `configs/*_{configs}.toml`."""
    data, sft, grpo = folder / "data" / "train.jsonl", folder / "sft", folder / "grpo"

    data_in, rollouts_in = ["--sandbox.backend", sandbox], ["--rollout.sandbox.backend", sandbox]

    def command(name: str, *arguments: str, launch: bool = False) -> list[str]:
        start = _launch() if launch else [sys.executable]
        config = f"configs/{name.removeprefix('run_').removeprefix('make_')}_{configs}.toml"
        return [*start, "-m", f"scripts.{name}", "--config", config, "--seed", str(seed), *arguments]

    def evaluation(name: str, label: str, *model: str, after: str | None = None) -> Stage:
        output = folder / "eval" / f"{name}.json"
        arguments = ["--name", label, "--output", str(output), *rollouts_in, *model]
        return Stage(
            name=f"evaluation of the {label}", command=command("run_eval", *arguments), result=output, after=after
        )

    return [
        Stage(name="data", command=command("make_data", "--output", str(data), *data_in), result=data),
        evaluation("base", "base model"),
        Stage(
            name="SFT",
            command=command("run_sft", "--sft.data", str(data), "--output_dir", str(sft), launch=True),
            result=sft / "final",
            after="data",
        ),
        evaluation("sft", "warm start", "--model", str(sft / "final"), after="SFT"),
        Stage(
            name="GRPO",
            command=command(
                "run_grpo", "--model", str(sft / "final"), "--output_dir", str(grpo), *rollouts_in, launch=True
            ),
            result=grpo / "final",
            after="SFT",
        ),
        evaluation("grpo", "GRPO model", "--model", str(grpo / "final"), after="GRPO"),
    ]


def quickstart(folder: Path, *, configs: str, seed: int, sandbox: str) -> None:
    """Run what is left to run, then write the report.

    Raises:
        ValueError: the folder holds another run, or a stage failed; the message says how to go on.
    """
    started = time.perf_counter()
    hold_choices(folder, {"configs": configs, "seed": seed})
    run_stages(folder, stages(folder, configs=configs, seed=seed, sandbox=sandbox))
    report = folder / "report.html"
    run_command("report", [sys.executable, "-m", "scripts.make_report", str(folder), "--output", str(report)])
    print(f"== report: {report} ({time.perf_counter() - started:.0f} s for this call)")


def run_stages(folder: Path, planned: Sequence[Stage]) -> None:
    """Run the stages whose result is not there.

    Raises:
        ValueError: a stage failed, or a later result is of an earlier one than the stage would make.
    """
    for stage in planned:
        if stage.result.exists():
            print(f"== {stage.name}: done before ({stage.result}; delete {folder} to start over)", flush=True)
            continue
        _check_nothing_is_older(stage, planned)
        print(f"== {stage.name}\n   {shlex.join(_shown(stage.command))}", flush=True)
        run_command(stage.name, stage.command)


def hold_choices(folder: Path, choices: Mapping[str, Any]) -> None:
    """A folder holds one run: results of another seed or other configurations would be taken for this one's.

    Raises:
        ValueError: it holds a run with other choices.
    """
    path = folder / "quickstart.json"
    if path.exists():
        old = json.loads(path.read_text())
        if old != choices:
            was = ", ".join(f"--{name} {value}" for name, value in old.items())
            raise ValueError(f"{folder} holds a run with {was}; delete the folder, or choose another --output_dir")
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(choices))
    temporary.replace(path)


def _check_nothing_is_older(stage: Stage, planned: Sequence[Stage]) -> None:
    """What was made from an earlier result of this stage must not be taken for what comes out of the next one."""
    made = {stage.name}
    for later in planned:
        if later.after in made:
            made.add(later.name)
            if later.result.exists():
                raise ValueError(
                    f"{stage.result} is gone, and {later.result} was made from it: delete that too, then start the "
                    "same command to go on"
                )


def run_command(name: str, command: Sequence[str]) -> None:
    """Run a stage and say how long it took. Ctrl-C, SIGTERM and the end of the terminal end all of its processes, which
    first get a moment to remove their sandboxes.

    Raises:
        ValueError: it failed.
    """
    started = time.perf_counter()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A session of its own: a launcher's processes can then be reached together.
    process = subprocess.Popen(command, env=_environment(), start_new_session=True)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise ValueError(f"the stage {name!r} ended with exit code {code}; start the same command to go on")
    print(f"   {time.perf_counter() - started:.0f} s", flush=True)


def fastest_sandbox() -> str:
    """bubblewrap where it works: a container for each trajectory would take longer than all the rest. Else auto."""
    return "bubblewrap" if sandbox_works("bubblewrap") else "auto"


def _environment() -> dict[str, str]:
    """This process's variables without the one that forbids byte code: the packages come without any, and to compile
    vLLM and torch again in each stage takes 20 s."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _launch() -> list[str]:
    """`accelerate launch` for one process, with every choice made, so that it asks and guesses nothing."""
    threads = str(os.cpu_count() or 1)
    device = [] if shutil.which("nvidia-smi") else ["--cpu", "--num_cpu_threads_per_process", threads]
    choices = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    # Quiet: an error of the command is one line, and not the launcher's traceback after it.
    return [str(Path(sys.executable).with_name("accelerate")), "launch", "--quiet", *device, *choices]


def _shown(command: list[str]) -> list[str]:
    """The command as a person would type it: without the folder of the environment."""
    return [Path(part).name if part.startswith(str(Path(sys.executable).parent)) else part for part in command]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"example: {EXAMPLE}")
    parser.add_argument("--output_dir", default="runs/quickstart", help="where everything goes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every stage (%(default)s)")
    parser.add_argument(
        "--configs", default="quickstart", help="which configs/*_NAME.toml: quickstart, smollm2 (%(default)s)"
    )
    parser.add_argument(
        "--sandbox",
        choices=["auto", "bubblewrap", "docker"],
        help="where tools run (default: bubblewrap where it works, which is faster here than Docker; else auto)",
    )
    arguments = parser.parse_args()
    quickstart(
        Path(arguments.output_dir),
        configs=arguments.configs,
        seed=arguments.seed,
        sandbox=arguments.sandbox or fastest_sandbox(),
    )


if __name__ == "__main__":
    run_main(main)
