"""Benchmarks: figures measured in one run, next to a named peer; the last line of output is one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.console import run_main

# Each benchmark is imported when it is asked for, so that none needs what another one needs.


def _learning(arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.bench_learning import learning

    return learning(arguments.output_dir, arguments.seeds)


def _sandbox(arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.bench_sandbox import sandbox

    return sandbox(
        backends=arguments.backends,
        image=arguments.image,
        with_swe_rex=not arguments.without_swe_rex,
        commands=arguments.commands,
        starts=arguments.starts,
        burst=arguments.burst,
    )


def _soak(arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.bench_soak import soak

    return soak(
        trajectories=arguments.trajectories,
        faults=arguments.faults,
        backend=arguments.backend,
        image=arguments.image,
        concurrency=arguments.concurrency,
        owners=arguments.owners,
        seed=arguments.seed,
        daemon_restarts=not arguments.no_daemon_restarts,
    )


def _rollouts(arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.bench_rollouts import rollouts

    size = {"trajectories": 48, "limit": 16, "repeats": 1} if arguments.quick else {"repeats": arguments.repeats or 3}
    return rollouts(model=arguments.model, seed=arguments.seed, **size)


def _resume(arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.bench_resume import resume

    return resume(kills=arguments.kills, steps=arguments.steps, seed=arguments.seed)


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.bench_train import train

    return train(
        models=arguments.models,
        repeats=arguments.repeats,
        steps=arguments.steps,
        micro_batch=arguments.micro_batch,
        dtype=arguments.dtype,
        gradient_checkpointing=arguments.gradient_checkpointing,
        seed=arguments.seed,
    )


def _learning_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/bench_learning"))


def _sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backends", nargs="+", choices=["docker", "bubblewrap"], default=["docker", "bubblewrap"])
    add("--image", help="what all containers run, ours too; scripts/build_bench_image.sh makes the default one")
    add("--without-swe-rex", action="store_true", help="leave SWE-ReX out: its figures are null")
    add("--commands", type=_count, default=200, help="of each contender and each command line (default 200)")
    add("--starts", type=_count, default=30, help="of each contender, one after the other (default 30)")
    add("--burst", type=_count, default=64, help="sandboxes started and used at once (default 64)")


def _soak_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trajectories", type=_count, default=1000)
    add("--faults", action="store_true", help="with time-outs, floods, bombs, kills of owners and daemon restarts")
    add("--backend", choices=["docker", "bubblewrap", "both"], default="both")
    add("--image", help="of the Docker sandboxes; the small one of scripts/build_sandbox_image.sh unless given")
    add("--concurrency", type=_count, default=32, help="trajectories at once, all owners together (default 32)")
    add("--owners", type=_count, default=4, help="processes that own sandboxes (default 4)")
    add("--seed", type=int, default=0)
    add("--no-daemon-restarts", action="store_true", help="use the machine's Docker daemon, and leave it alone")


def _rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/embedded"))
    add("--seed", type=int, default=0)
    size = parser.add_mutually_exclusive_group()
    # Without a default: argparse takes a value that equals it for one that was not given.
    size.add_argument("--repeats", type=_count, help="timed runs of each contender (default 3)")
    size.add_argument(
        "--quick", action="store_true", help="48 trajectories, 16 at once, each contender once: two minutes"
    )


def _resume_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kills", type=_count, default=200)
    add("--steps", type=_count, default=12, help="of each run (default 12)")
    add("--seed", type=int, default=0)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=["embedded", "20M"], default=["embedded", "20M"])
    add("--repeats", type=_count, default=3, help="processes of each contender (default 3)")
    add("--steps", type=_count, default=2, help="timed steps in each of them (default 2)")
    add("--micro_batch", type=int, choices=[1, 2, 4, 8], default=4, help="trajectories in a micro-batch (default 4)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--gradient_checkpointing", action="store_true")
    add("--seed", type=int, default=0)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


Arguments = Callable[[argparse.ArgumentParser], None]
Measure = Callable[[argparse.Namespace], dict[str, Any]]

BENCHMARKS: dict[str, tuple[str, str, Arguments, Measure]] = {
    "learning": (
        "the quickstart for several seeds: held-out success before and after GRPO",
        "python -m scripts.bench learning --seeds 0 1 2",
        _learning_arguments,
        _learning,
    ),
    "sandbox": (
        "commands, starts and 64 sandboxes at once: ours against docker exec, containers.run and SWE-ReX",
        "python -m scripts.bench sandbox",
        _sandbox_arguments,
        _sandbox,
    ),
    "rollouts": (
        "256 trajectories with slow tools in one vLLM engine: ours against TRL's tool loop; and what a turn costs us",
        "python -m scripts.bench rollouts",
        _rollouts_arguments,
        _rollouts,
    ),
    "resume": (
        "small GRPO runs killed 200 times at random: each group trained once, the same weights; exit code 1 otherwise",
        "python -m scripts.bench resume",
        _resume_arguments,
        _resume,
    ),
    "train": (
        "an update on a group of agents' trajectories: time and memory of ours, TRL's trainer and the bare body",
        "python -m scripts.bench train",
        _train_arguments,
        _train,
    ),
    "soak": (
        "a thousand simulated trajectories, and what is left of them at the end; exit code 1 for anything",
        "python -m scripts.bench soak --trajectories 1000 --faults",
        _soak_arguments,
        _soak,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__, epilog="example: python -m scripts.bench sandbox"
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (about, example, arguments, measure) in BENCHMARKS.items():
        one = names.add_parser(name, help=about, description=f"{about}.", epilog=f"example: {example}")
        arguments(one)
        one.set_defaults(measure=measure)
    parsed = parser.parse_args()
    result = parsed.measure(parsed)
    print(json.dumps(result))
    if not result.get("passed", True):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
