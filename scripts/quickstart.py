"""The main job in one command: data → SFT → evaluation → GRPO → evaluation → report, each stage as a person types it.

A stage whose result is there is not run again, and a training stage that was killed goes on from its checkpoint, so the
same command continues whatever was interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.console import run_main

EXAMPLE = "bash scripts/quickstart.sh --seed 1 --output_dir runs/quickstart_seed1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A command, and the file or folder that is there when it has finished."""

    name: str
    command: list[str]
    result: Path


def stages(folder: Path, *, configs: str, seed: int, sandbox: str) -> list[Stage]:
    """The stages of a run in `folder`, with the configurations `configs/*_{configs}.toml`."""
    data, sft, grpo = folder / "data" / "train.jsonl", folder / "sft", folder / "grpo"

    data_in, rollouts_in = ["--sandbox.backend", sandbox], ["--rollout.sandbox.backend", sandbox]

    def command(name: str, *arguments: str, launch: bool = False) -> list[str]:
        start = _launch() if launch else [sys.executable]
        config = f"configs/{name.removeprefix('run_').removeprefix('make_')}_{configs}.toml"
        return [*start, "-m", f"scripts.{name}", "--config", config, "--seed", str(seed), *arguments]

    def evaluation(name: str, label: str, *model: str) -> Stage:
        output = folder / "eval" / f"{name}.json"
        arguments = ["--name", label, "--output", str(output), *rollouts_in, *model]
        return Stage(name=f"evaluation of the {label}", command=command("run_eval", *arguments), result=output)

    return [
        Stage(name="data", command=command("make_data", "--output", str(data), *data_in), result=data),
        evaluation("base", "base model"),
        Stage(
            name="SFT",
            command=command("run_sft", "--sft.data", str(data), "--output_dir", str(sft), launch=True),
            result=sft / "final",
        ),
        evaluation("sft", "warm start", "--model", str(sft / "final")),
        Stage(
            name="GRPO",
            command=command(
                "run_grpo", "--model", str(sft / "final"), "--output_dir", str(grpo), *rollouts_in, launch=True
            ),
            result=grpo / "final",
        ),
        evaluation("grpo", "GRPO model", "--model", str(grpo / "final")),
    ]


def quickstart(folder: Path, *, configs: str, seed: int, sandbox: str) -> None:
    """Run what is left to run, then write the report.

    Raises:
        ValueError: a stage failed; the message says how to go on.
    """
    started = time.perf_counter()
    for stage in stages(folder, configs=configs, seed=seed, sandbox=sandbox):
        if stage.result.exists():
            print(f"== {stage.name}: done before ({stage.result}; delete {folder} to start over)", flush=True)
            continue
        print(f"== {stage.name}\n   {shlex.join(_shown(stage.command))}", flush=True)
        stage_started = time.perf_counter()
        code = subprocess.run(stage.command, env=_environment()).returncode
        if code:
            raise ValueError(f"the stage {stage.name!r} ended with exit code {code}; start the same command to go on")
        print(f"   {time.perf_counter() - stage_started:.0f} s", flush=True)
    report = folder / "report.html"
    make_report = [sys.executable, "-m", "scripts.make_report", str(folder), "--output", str(report)]
    subprocess.run(make_report, check=True, env=_environment())
    print(f"== report: {report} ({time.perf_counter() - started:.0f} s for this call)")


def fastest_sandbox() -> str:
    """bubblewrap where it works: a container for each trajectory would take longer than all the rest. Else auto."""
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    works = shutil.which("bwrap") and subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0
    return "bubblewrap" if works else "auto"


def _environment() -> dict[str, str]:
    """This process's variables without the one that forbids byte code: the packages come without any, and to compile
    vLLM and torch again in each stage takes 20 s."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _launch() -> list[str]:
    """`accelerate launch` for one process, with every choice made, so that it asks and guesses nothing."""
    threads = str(os.cpu_count() or 1)
    device = [] if shutil.which("nvidia-smi") else ["--cpu", "--num_cpu_threads_per_process", threads]
    choices = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [str(Path(sys.executable).with_name("accelerate")), "launch", *device, *choices]


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
