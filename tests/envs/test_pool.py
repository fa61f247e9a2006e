"""Does the pool keep its bounds, never hand out what is dead or used, and lose nothing, whatever happens meanwhile?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox.base import SandboxError, SandboxLimits, SandboxSpec
from envs.sandbox.pool import Pool
from tests.envs.scripted_launcher import ScriptedLauncher

SPEC = SandboxSpec()
OTHER = SandboxSpec(limits=SandboxLimits(cpus=2))


def with_pool(
    use: Callable[[Pool, ScriptedLauncher], Awaitable[None]],
    *,
    launch_s: float = 0.0,
    max_warm: int = 8,
    max_starting: int = 3,
) -> ScriptedLauncher:
    """Run `use` with a pool that is closed afterwards; what was not taken has ended then."""

    async def main() -> ScriptedLauncher:
        launcher = ScriptedLauncher(launch_s)
        pool = Pool(launcher, max_warm=max_warm, max_starting=max_starting)
        await use(pool, launcher)
        await pool.close()
        return launcher

    return asyncio.run(main())


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_ready_one_is_handed_out_and_replaced() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 3)
        await settle()
        assert (pool.ready, launcher.tries) == (3, 3)
        taken, was_ready = await pool.take(SPEC, 3)
        assert was_ready
        await settle()
        assert (pool.ready, launcher.tries) == (3, 4)
        await taken.end()

    assert with_pool(use).alive == 0


def test_the_files_of_a_task_make_no_other_kind() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 1)
        await settle()
        assert (await pool.take(SandboxSpec(files={"a": b"1"}), 1))[1]
        assert not (await pool.take(OTHER, 0))[1]

    with_pool(use)


def test_a_dead_one_is_not_handed_out() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 2)
        await settle()
        launcher.launched[0].die()
        taken, was_ready = await pool.take(SPEC, 2)
        assert (taken.name, was_ready) == (launcher.launched[1].name, True)
        await settle()
        assert launcher.launched[0].ended
        for one in launcher.launched:
            one.die()
        assert not (await pool.take(SPEC, 0))[1]

    with_pool(use)


def test_nothing_is_handed_out_twice() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        taken = [(await pool.take(SPEC, 2))[0] for _ in range(10)]
        assert len({one.name for one in taken}) == 10
        for one in taken:
            await one.end()
        await settle()
        assert (await pool.take(SPEC, 2))[0].name not in {one.name for one in taken}

    with_pool(use)


def test_only_a_few_start_at_once() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        await asyncio.gather(*(pool.take(SPEC, 4) for _ in range(12)))

    launcher = with_pool(use, launch_s=0.002, max_starting=3)
    assert launcher.most_at_once == 3


def test_the_shelf_is_bounded_over_all_kinds() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 5)
        pool.expect(OTHER, 5)
        await settle()
        assert pool.ready == 6

    with_pool(use, max_warm=6)


def test_who_waits_comes_before_the_shelf() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 8)
        await pool.take(OTHER, 0)
        assert launcher.tries <= 6  # three for the shelf were starting already, and two may start beside it

    with_pool(use, launch_s=0.005, max_starting=3)


def test_a_failed_start_is_told_to_who_waits_and_is_not_hammered() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        launcher.failing = True
        with pytest.raises(SandboxError, match="it fails now"):
            await pool.take(SPEC, 4)
        await settle()
        tries = launcher.tries
        await settle()
        assert launcher.tries == tries
        launcher.failing = False
        assert not (await pool.take(SPEC, 0))[1]

    with_pool(use)


def test_a_cancelled_taker_loses_nothing() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        takers = [asyncio.ensure_future(pool.take(SPEC, 0)) for _ in range(4)]
        await asyncio.sleep(0)
        for taker in takers[:3]:
            taker.cancel()
        (taken, _) = await takers[3]
        await taken.end()

    assert with_pool(use, launch_s=0.002).alive == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["take", "cancel", "die", "fail", "mend", "wait", "empty"]), max_size=25),
    st.integers(0, 4),
)
def test_whatever_happens_the_bounds_hold_and_all_of_it_ends(steps: list[str], warm: int) -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        takers: list[asyncio.Future[object]] = []
        for step in steps:
            match step:
                case "take":
                    takers.append(asyncio.ensure_future(pool.take(SPEC if len(takers) % 2 else OTHER, warm)))
                case "cancel" if takers:
                    takers[-1].cancel()
                case "die" if launcher.launched:
                    launcher.launched[-1].die()
                case "fail" | "mend":
                    launcher.failing = step == "fail"
                case "wait":
                    await settle()
                case "empty":
                    await pool.empty()
            assert pool.ready <= 5
        for result in await asyncio.gather(*takers, return_exceptions=True):
            if isinstance(result, tuple):
                await result[0].end()
            else:
                assert isinstance(result, SandboxError | asyncio.CancelledError)

    launcher = with_pool(use, max_warm=5, max_starting=2)
    assert launcher.alive == 0
    assert launcher.most_at_once <= 2
