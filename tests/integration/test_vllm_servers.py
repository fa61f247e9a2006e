"""Two real vLLM servers: one is killed in the middle of a rollout, and nothing is lost and nothing is double.

Five minutes on two cores that had a load of eight, most of it the starts of three servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, cast

import pytest

from data.chat import Renderer
from data.ledger import Ledger
from data.tool_formats.base import ParsedTurn
from data.types import Completion, SamplingParams, Source
from envs.sandbox.local import LocalFactory
from envs.types import ToolCall
from rollouts.engine import RecordingEngine
from rollouts.engine_server import ServerEngine
from rollouts.scheduler import sample_groups
from rollouts.server_patience import Patience
from rollouts.types import StopReason, Trajectory
from tests.requirements import require
from tests.rollouts.desk import EMBEDDED, RENDERER, Desk, make_runner
from tests.rollouts.real_servers import RealServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TASKS, SIBLINGS, TURNS = 12, 4, 4
COMPLETIONS = TASKS * SIBLINGS * TURNS
CONTEXT = 1024
PATIENCE = Patience(health_interval_s=1.0, health_timeout_s=30.0, backoff_s=1.0)


class EveryTurnCalls:
    """A renderer for which every turn is a call that says the turn's text: a base model calls no tools by itself, and
    these trajectories need turns. A third of the vocabulary ends a turn, so turns end by themselves."""

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner
        self.stop_token_ids = tuple(token for token in range(0, 768, 3) if token not in inner.control_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def parse(self, token_ids: Sequence[int], *, call_id_prefix: str, **_: Any) -> ParsedTurn:
        text = self._inner.decode(token_ids)
        call = ToolCall(call_id=f"{call_id_prefix}_0", name="echo", arguments={"text": text})
        return ParsedTurn(content="", calls=(call,))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    require("vllm")
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as ends:
        started: list[RealServer] = []
        for number in range(2):
            started.append(RealServer(EMBEDDED, folder / f"{number}.log", max_context_tokens=CONTEXT))
            ends.callback(started[-1].kill)
        for server in started:
            server.wait()
        yield started


def connect(servers: Sequence[RealServer]) -> ServerEngine:
    addresses = [server.address for server in servers]
    return ServerEngine(addresses, model=EMBEDDED, max_context_tokens=CONTEXT, patience=PATIENCE)


async def roll_out(
    engine: ServerEngine, ledger: Ledger, *, prefix: str = "step-0", when: Callable[[], None] = lambda: None
) -> list[Trajectory]:
    """Every task's group, with `when` called after every completion."""

    class Watched(Ledger):
        def record(self, completion: Completion) -> None:
            ledger.record(completion)
            when()

    async with LocalFactory() as sandboxes:
        runner = make_runner(
            RecordingEngine(engine, Watched()),
            sandboxes,
            renderer=cast("Renderer", EveryTurnCalls(RENDERER)),
            max_turns=TURNS,
            max_turn_tokens=60,
            max_repeated_calls=TURNS + 1,
            wall_clock_s=300.0,
        )
        tasks = Desk().tasks("train", TASKS, 0)
        groups = await sample_groups(runner, tasks, num_generations=SIBLINGS, prefix=prefix)
    return [trajectory for group in groups for trajectory in group.trajectories]


def check_whole(trajectories: Sequence[Trajectory], ledger: Ledger) -> None:
    """Every trajectory went its way to the end, and its sampled tokens are those of the ledger, each once."""
    assert [t.stop_reason for t in trajectories] == [StopReason.MAX_TURNS] * TASKS * SIBLINGS
    assert [len(t.turns) for t in trajectories] == [TURNS] * TASKS * SIBLINGS
    sampled = [s for t in trajectories for stream in t.streams for s in stream if s.source is Source.MODEL]
    assert len({segment.completion_id for segment in sampled}) == len(sampled) == COMPLETIONS
    recorded = {completion.completion_id: completion for completion in ledger}
    assert len(recorded) == COMPLETIONS
    for segment in sampled:
        completion = recorded[str(segment.completion_id)]
        assert (segment.token_ids, segment.logprobs) == (completion.token_ids, completion.logprobs)


async def check_scores(trajectories: Sequence[Trajectory], engine: ServerEngine) -> None:
    """Whoever sampled a token, a server says the same of it now."""
    streams = [stream for trajectory in trajectories for stream in trajectory.streams]
    scores = await asyncio.gather(*(engine.score(stream.token_ids) for stream in streams))
    for stream, score in zip(streams, scores, strict=True):
        places = accumulate((len(segment.token_ids) for segment in stream), initial=0)
        for place, segment in zip(places, stream, strict=False):
            if segment.source is Source.MODEL:
                again = score[place - 1 : place - 1 + len(segment.token_ids)]
                assert segment.logprobs == pytest.approx(again, abs=1e-3)


def test_a_cancelled_completion_is_not_sampled_to_its_end(servers: list[RealServer]) -> None:
    engine = connect(servers[:1])

    async def cancel() -> None:
        params = SamplingParams(max_tokens=1000, stop_token_ids=(), seed=1)
        for attempt in range(5):  # one may end before the eighth is seen to run
            calls = (engine.generate(f"t{attempt}-{n}/0", [5, 6, n], params) for n in range(8))
            work = [asyncio.create_task(call) for call in calls]
            while (seen := await asyncio.to_thread(servers[0].running)) < 8 and not any(task.done() for task in work):
                pass
            if seen == 8:
                break
            await asyncio.gather(*work)
        else:
            raise AssertionError("eight requests never ran at once")
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        assert all(task.cancelled() for task in work)
        async with asyncio.timeout(20):
            while await asyncio.to_thread(servers[0].running):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)
        await engine.close()

    asyncio.run(cancel())


def test_a_server_killed_in_mid_rollout_loses_nothing_and_doubles_nothing(servers: list[RealServer]) -> None:
    victim, survivor = servers
    ledger = Ledger()
    engine = connect(servers)

    def kill_at_a_quarter() -> None:
        if len(list(ledger)) == COMPLETIONS // 4:
            victim.kill()

    async def story() -> tuple[list[Trajectory], list[Trajectory]]:
        trajectories = await roll_out(engine, ledger, when=kill_at_a_quarter)
        check_whole(trajectories, ledger)
        assert (engine.counts.lost, engine.counts.returned) == (1, 0)
        assert engine.counts.resent > 0  # it was killed with requests in flight
        await check_scores(trajectories, engine)
        victim.start()
        alone = Ledger()
        one = connect([survivor])
        again = await roll_out(one, alone)
        check_whole(again, alone)
        await one.close()
        await asyncio.to_thread(victim.wait)
        async with asyncio.timeout(60):
            while not engine.counts.returned:  # noqa: ASYNC110 - another thread's state
                await asyncio.sleep(0.1)
        last = Ledger()
        check_whole(await roll_out(engine, last, prefix="step-1"), last)
        assert victim.finished() >= COMPLETIONS // 4  # it works again
        assert (engine.counts.lost, engine.counts.returned) == (1, 1)
        await engine.close()
        return trajectories, again

    trajectories, again = asyncio.run(story())
    same = [
        [s.token_ids for s in one.streams[0]] == [s.token_ids for s in other.streams[0]]
        for one, other in zip(trajectories, again, strict=True)
    ]
    # All of them on a quiet day; a batch of another shape may round the last bit otherwise, and one token may turn.
    assert sum(same) >= 0.9 * len(same)
