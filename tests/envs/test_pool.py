"""Does the pool keep its bounds, never hand out what is dead or used, and lose nothing, whatever happens meanwhile?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox.base import SandboxError, SandboxLimits, SandboxSpec, SandboxUnavailableError
from envs.sandbox.launch import Launched
from envs.sandbox.pool import FORGET_S, Pool
from tests.envs.scripted_launcher import ScriptedLauncher

SPEC = SandboxSpec()
OTHER = SandboxSpec(limits=SandboxLimits(cpus=2))
FAULTS = [OSError(24, "Too many open files"), RuntimeError("a bug"), KeyError("a key"), ValueError("a value")]


def spec_of(number: int) -> SandboxSpec:
    return SandboxSpec(limits=SandboxLimits(cpus=1 + number))


def with_pool(
    use: Callable[[Pool, ScriptedLauncher], Awaitable[None]],
    *,
    launch_s: float = 0.0,
    max_warm: int = 8,
    max_starting: int = 3,
    forget_s: float = FORGET_S,
) -> ScriptedLauncher:
    """Run `use` with a pool that is closed afterwards; what was not taken has ended then."""

    async def main() -> ScriptedLauncher:
        launcher = ScriptedLauncher(launch_s)
        pool = Pool(launcher, max_warm=max_warm, max_starting=max_starting, forget_s=forget_s)
        await use(pool, launcher)
        await pool.close()
        return launcher

    return asyncio.run(main())


async def settle() -> None:
    for _ in range(100):
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


@given(st.sampled_from(FAULTS), st.integers(1, 6), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_whatever_goes_wrong_in_a_start_is_told(fault: Exception, takers: int, warm: int) -> None:
    """An error that no launcher should raise hangs nobody, and holds no place."""

    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        await (await pool.take(SPEC, 0))[0].end()
        launcher.fault = fault
        results = await asyncio.gather(*(pool.take(SPEC, warm) for _ in range(takers)), return_exceptions=True)
        for result in results:
            assert isinstance(result, SandboxError)
            assert str(result) == f"scripted: a sandbox could not be started: {type(fault).__name__}: {fault}"
        with pytest.raises(SandboxError, match="scripted"):
            await pool.take(OTHER, warm)
        launcher.fault = None
        await (await pool.take(SPEC, warm))[0].end()

    assert with_pool(use).alive == 0


# --- who comes first ---


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_who_has_waited_longest_comes_first(asking: list[int], max_starting: int) -> None:
    """Whatever the specs: many that wait for one of them do not keep the others waiting."""

    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        for number in range(4):
            await (await pool.take(spec_of(number), 0))[0].end()
        launcher.asked.clear()
        taken = await asyncio.gather(*(pool.take(spec_of(number), 0) for number in asking))
        assert launcher.asked == [spec_of(number) for number in asking]
        for launched, _ in taken:
            await launched.end()

    assert with_pool(use, max_starting=max_starting).alive == 0


def test_a_slow_preparation_takes_no_place_from_others() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        launcher.unprepared = [OTHER]
        slow = [asyncio.ensure_future(pool.take(OTHER, 2)) for _ in range(10)]
        await settle()
        await (await pool.take(SPEC, 0))[0].end()
        assert launcher.asked == [SPEC]
        launcher.may_prepare.set()
        for launched, _ in await asyncio.gather(*slow):
            await launched.end()

    assert with_pool(use).alive == 0


def test_a_failed_preparation_is_told_to_all_who_wait_and_tried_again() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        launcher.fault = SandboxUnavailableError("no such image")
        results = await asyncio.gather(*(pool.take(SPEC, 1) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, SandboxUnavailableError) for result in results)
        assert launcher.tries == 0
        launcher.fault = None
        await (await pool.take(SPEC, 0))[0].end()

    with_pool(use)


# --- whose the shelf is ---


def test_a_full_shelf_is_shared() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 6)
        await settle()
        assert pool.ready == 6
        pool.expect(OTHER, 6)
        await settle()
        assert (pool.ready, launcher.tries, launcher.alive) == (6, 9, 6)

    assert with_pool(use, max_warm=6).alive == 0


def test_specs_that_are_used_no_more_make_room_for_new_ones() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        for number in range(30):
            assert not (await pool.take(spec_of(number), 1))[1]
            await settle()
            assert (await pool.take(spec_of(number), 1))[1]
            await settle()
            assert pool.ready <= 6

    with_pool(use, max_warm=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), min_size=1, max_size=30))
def test_the_shelf_comes_to_rest(uses: list[tuple[int, int]]) -> None:
    """Stocks that want more than there is do not take from each other for ever, and no place stays empty."""

    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        for number, warm in uses:
            await (await pool.take(spec_of(number), warm))[0].end()
        await settle()
        before = launcher.tries
        await settle()
        wanted = sum(max(warm for number, warm in uses if number == one) for one in {number for number, _ in uses})
        assert (launcher.tries, pool.ready, launcher.alive) == (before, min(6, wanted), min(6, wanted))

    assert with_pool(use, max_warm=6).alive == 0


def test_two_specs_in_turns_do_not_take_from_each_other() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        for number in range(40):
            await (await pool.take(spec_of(number % 2), 6))[0].end()
            await settle()

    launcher = with_pool(use, max_warm=6)
    assert launcher.tries <= 40 + 6 + 6  # one for each that was taken, the shelf, and what it took to share it


def test_a_stock_that_nobody_uses_is_given_up_but_for_who_waits() -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        pool.expect(SPEC, 3)
        await settle()
        launcher.may_start.clear()
        waiting = asyncio.ensure_future(pool.take(OTHER, 0))
        await settle()
        pool.forget()
        await settle()
        assert (pool.ready, launcher.alive) == (0, 0)
        launcher.may_start.set()
        await (await waiting)[0].end()

    with_pool(use, forget_s=-1.0)


# --- emptied and closed ---


def test_emptying_stops_when_somebody_asks() -> None:
    """He waits for no end of what others wanted, and what he expects stays."""

    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        launcher.may_start.clear()
        pool.expect(SPEC, 2)
        emptying = [asyncio.ensure_future(pool.empty()) for _ in range(2)]
        await settle()
        assert not any(one.done() for one in emptying)
        pool.expect(OTHER, 1)
        await asyncio.gather(*emptying)
        launcher.may_start.set()
        await settle()
        assert (pool.ready, launcher.alive) == (1, 1)
        assert (await pool.take(OTHER, 0))[1]

    with_pool(use)


@pytest.mark.parametrize("unprepared", [[], [SPEC]])
def test_closing_tells_who_waits_and_starts_nothing_more(unprepared: list[SandboxSpec]) -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        launcher.may_start.clear()
        launcher.unprepared = unprepared
        waiting = [asyncio.ensure_future(pool.take(SPEC, 4)) for _ in range(7)]
        await settle()
        closing = asyncio.ensure_future(pool.close())
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, SandboxError)
            assert str(result) == "the pool is closed"
        launcher.may_start.set()
        await closing
        assert launcher.tries == (0 if unprepared else 3)
        with pytest.raises(SandboxError, match="closed"):
            await pool.take(SPEC, 0)

    assert with_pool(use).alive == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["take", "cancel", "die", "fail", "break", "mend", "wait", "empty", "begin to empty", "forget"]
        ),
        max_size=25,
    ),
    st.integers(0, 4),
)
def test_whatever_happens_the_bounds_hold_and_all_of_it_ends(steps: list[str], warm: int) -> None:
    async def use(pool: Pool, launcher: ScriptedLauncher) -> None:
        takers: list[asyncio.Future[tuple[Launched, bool]]] = []
        emptying: list[asyncio.Future[None]] = []
        for step in steps:
            match step:
                case "take":
                    takers.append(asyncio.ensure_future(pool.take(SPEC if len(takers) % 2 else OTHER, warm)))
                case "cancel" if takers:
                    takers[-1].cancel()
                case "die" if launcher.launched:
                    launcher.launched[-1].die()
                case "fail" | "break" | "mend":
                    launcher.failing = step == "fail"
                    launcher.fault = RuntimeError("a bug") if step == "break" else None
                case "wait":
                    await settle()
                case "empty":
                    await pool.empty()
                case "begin to empty":
                    emptying.append(asyncio.ensure_future(pool.empty()))
                case "forget":
                    pool.forget()
            assert pool.ready <= 5
        for result in await asyncio.gather(*takers, return_exceptions=True):
            if isinstance(result, tuple):
                await result[0].end()
            else:
                assert isinstance(result, SandboxError | asyncio.CancelledError)
        await asyncio.gather(*emptying)

    launcher = with_pool(use, max_warm=5, max_starting=2, forget_s=-1.0)
    assert launcher.alive == 0
    assert launcher.most_at_once <= 2
