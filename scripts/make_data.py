"""Make warm-start conversations: a demonstrator's calls are run for real, and only what earns the reward is kept."""

from __future__ import annotations

from pathlib import Path

from data.demonstrations import write_demonstrations
from rollouts.synthesize import synthesize
from scripts.console import progress, run_async, run_main
from scripts.open_env import open_env, open_sandboxes
from scripts.output_file import check_output
from scripts.settings import DataSettings, load_settings


async def make_data(settings: DataSettings) -> str:
    """Write the file; returns the line of result.

    Raises:
        ValueError: the file cannot be written, which is found out first.
    """
    config, output = settings.synthesize, Path(settings.output)
    check_output(output)
    async with open_sandboxes(settings.sandbox) as sandboxes:
        env = open_env(settings.env, sandboxes=sandboxes, mistake_rate=config.mistake_rate)
        tasks = env.tasks("train", config.num_tasks, settings.seed)
        with progress() as bar:
            place = bar.add_task("conversations", total=len(tasks), note="")
            done = await synthesize(
                env,
                sandboxes,
                tasks,
                seed=settings.seed,
                max_turns=config.max_turns,
                max_concurrent=config.max_concurrent,
                tool_timeout_s=settings.sandbox.tool_timeout_s,
                on_done=lambda: bar.advance(place),
            )
    count = write_demonstrations(output, done.demonstrations)
    return (
        f"{count} conversations in {settings.output}, run in {sandboxes.name} sandboxes; "
        f"{done.dropped} with a wrong answer were dropped"
    )


def main() -> None:
    settings = load_settings(DataSettings)
    print(f"data: {run_async(make_data(settings))}")


if __name__ == "__main__":
    run_main(main)
