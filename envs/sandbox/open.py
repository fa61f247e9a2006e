"""Which sandbox can be had on this machine: one call that gives a factory, or one line that says why there is none."""

from __future__ import annotations

from typing import Literal

from envs.sandbox.base import DEFAULT_IMAGE, SandboxFactory, SandboxUnavailableError

Backend = Literal["auto", "docker", "bubblewrap", "local"]


async def open_factory(
    backend: Backend = "auto", image: str = DEFAULT_IMAGE, *, warm: int = 0, runtime: str | None = None
) -> SandboxFactory:
    """The factory of a back-end. `auto` takes Docker when its daemon answers and has `image`, else bubblewrap.

    The caller closes it. `local` has no isolation and is never chosen by `auto`.

    Args:
        image: of the specs that name none; see `envs/sandbox/images.py` for what it may be. bubblewrap takes the
            machine's own programs for the default one.
        warm: so many sandboxes of each kind are kept ready.
        runtime: Docker's name of another runtime than its own, such as runsc (gVisor).

    Raises:
        SandboxUnavailableError: it cannot be had here; for `auto` the line names the reason of both.
        ValueError: there is no such back-end, or `runtime` is not for it.
    """
    if runtime is not None and backend in ("bubblewrap", "local"):
        raise ValueError(f"a sandbox of {backend} has no container runtime {runtime}; use docker, or take it out")
    # Each back-end is imported when it is asked for, so that none needs what another one needs.
    if backend == "local":
        from envs.sandbox.local import LocalFactory

        return LocalFactory()
    if backend in ("docker", "bubblewrap"):
        from envs.sandbox.pool_client import PoolFactory
        from envs.sandbox.pool_wire import PoolKind

        return await PoolFactory.create(PoolKind(backend=backend, runtime=runtime), image=image, warm=warm)
    if backend == "auto":
        return await _first_available(image, warm, runtime)
    raise ValueError(f"there is no sandbox back-end {backend!r}; use auto, docker, bubblewrap or local")


async def _first_available(image: str, warm: int, runtime: str | None) -> SandboxFactory:
    reasons: list[str] = []
    for backend in ("docker", "bubblewrap"):
        try:
            return await open_factory(backend, image, warm=warm, runtime=runtime if backend == "docker" else None)
        except SandboxUnavailableError as error:
            reasons.append(str(error))
    raise SandboxUnavailableError(f"no sandbox can be had on this machine: {'; '.join(reasons)}")
