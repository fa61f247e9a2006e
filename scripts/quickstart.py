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

from data.jsonl import replace_text
from scripts.console import CONTINUES, run_main
from scripts.run_folder import only_writer
from scripts.try_sandbox import sandbox_works

STOP_S = 15.0
"""How long an interrupted stage may take to clean up."""

EXAMPLE = "bash scripts/quickstart.sh --seed 1 --output_dir runs/quickstart_seed1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A command, and the file or folder that is there when it has finished.

    folder: all that the stage writes. after: the stage whose result it starts from.
    """

    name: str
    command: list[str]
    result: Path
    folder: Path
    after: str | None = None


def stages(folder: Path, *, configs: str, seed: int, sandbox: str) -> list[Stage]:
    """The stages of a run in `folder`, with the configurations `configs/*_{configs}.toml`.

    Raises:
        ValueError: one of them is not there, or the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, not {seed}")
    missing = [
        name
        for kind in ("data", "sft", "eval", "grpo")
        if not (name := Path(f"configs/{kind}_{configs}.toml")).exists()
    ]
    if missing:
        raise ValueError(f"--configs {configs}: there is no {missing[0]}")
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
            name=f"evaluation of the {label}",
            command=command("run_eval", *arguments),
            result=output,
            folder=output,
            after=after,
        )

    return [
        Stage(name="data", command=command("make_data", "--output", str(data), *data_in), result=data, folder=data),
        evaluation("base", "base model"),
        Stage(
            name="SFT",
            command=command("run_sft", "--sft.data", str(data), "--output_dir", str(sft), launch=True),
            result=sft / "final",
            folder=sft,
            after="data",
        ),
        evaluation("sft", "warm start", "--model", str(sft / "final"), after="SFT"),
        Stage(
            name="GRPO",
            command=command(
                "run_grpo", "--model", str(sft / "final"), "--output_dir", str(grpo), *rollouts_in, launch=True
            ),
            result=grpo / "final",
            folder=grpo,
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
    planned = stages(folder, configs=configs, seed=seed, sandbox=sandbox)
    report = folder / "report.html"
    with only_writer(folder):
        hold_choices(folder, {"configs": configs, "seed": seed}, planned)
        run_stages(folder, planned)
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


def hold_choices(folder: Path, choices: Mapping[str, Any], planned: Sequence[Stage]) -> None:
    """A folder holds one run: results of another seed or other configurations would be taken for this one's.

    Raises:
        ValueError: it holds a run with other choices, or results of unknown ones.
    """
    path = folder / "quickstart.json"
    results = [stage.result for stage in planned if stage.result.exists()]
    if results and not path.exists():
        raise ValueError(f"{results[0]} is there, but not {path}; delete {folder}, or choose another --output_dir")
    if results and (old := json.loads(path.read_text(encoding="utf-8"))) != choices:
        was = ", ".join(f"--{name} {value}" for name, value in old.items())
        raise ValueError(f"{folder} holds a run with {was}; delete the folder, or choose another --output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(choices))


def _check_nothing_is_older(stage: Stage, planned: Sequence[Stage]) -> None:
    """What was made from an earlier result of this stage must not be taken for what comes out of the next one."""
    made = {stage.name}
    old: list[str] = []
    for later in planned:
        if later.after in made:
            made.add(later.name)
            if later.folder.exists():
                old.append(str(later.folder))
    if old:
        raise ValueError(
            f"{stage.result} is gone, and what was made from it is there: delete {', '.join(old)}, then start the same "
            "command to go on"
        )


def run_command(name: str, command: Sequence[str]) -> None:
    """Run a stage and say how long it took. Ctrl-C, SIGTERM and the end of the terminal end all of its processes, which
    first get a moment to remove their sandboxes; Ctrl-Z stops them all.

    Raises:
        ValueError: it failed.
    """
    started = time.perf_counter()
    # A session of its own, so that a launcher's processes can be reached together, and the launcher left alone.
    process = subprocess.Popen(command, env=_environment(), start_new_session=True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def pause(*_: object) -> None:
        os.killpg(process.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGCONT)

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: interrupt, signal.SIGHUP: interrupt, signal.SIGTSTP: pause}
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] != signal.SIG_IGN:  # under nohup, the end of the terminal ends nothing
                signal.signal(number, handler)
        code = process.wait()
    except KeyboardInterrupt:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        _stop(process)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise ValueError(
            f"the stage {name!r} ended with exit code {code} (if it says nothing above, it was killed, as for want of "
            "memory); start the same command to go on"
        )
    print(f"   {time.perf_counter() - started:.0f} s", flush=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the processes of a session, and kill what is left after `STOP_S`."""
    for pid in [pid for pid in _session(process.pid) if pid != process.pid] or [process.pid]:
        # A launcher is not told: it would leave its processes alone, with a traceback.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + STOP_S
    while (process.poll() is None or _session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _session(leader: int) -> list[int]:
    """The running processes of a session."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


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
    run_main(main, again=CONTINUES)
