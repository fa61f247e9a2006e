"""Which sandbox can be had on this machine: one call that gives a factory, or one line that says why there is none."""

from __future__ import annotations

from typing import Literal

from envs.sandbox.base import DEFAULT_IMAGE, SandboxFactory, SandboxUnavailableError

Backend = Literal["auto", "docker", "bubblewrap", "local"]


async def open_factory(backend: Backend = "auto", image: str = DEFAULT_IMAGE) -> SandboxFactory:
    """The factory of a back-end. `auto` takes Docker when its daemon answers and has `image`, else bubblewrap.

    The caller closes it. `local` has no isolation and is never chosen by `auto`.

    Raises:
        SandboxUnavailableError: it cannot be had here; for `auto` the line names the reason of both.
        ValueError: there is no such back-end.
    """
    # Each back-end is imported when it is asked for, so that none needs what another one needs.
    if backend == "local":
        from envs.sandbox.local import LocalFactory

        return LocalFactory()
    if backend == "bubblewrap":
        from envs.sandbox.bubblewrap import BubblewrapFactory

        return await BubblewrapFactory.create()
    if backend == "docker":
        from envs.sandbox.docker import DockerFactory

        return await DockerFactory.create(image)
    if backend == "auto":
        return await _first_available(image)
    raise ValueError(f"there is no sandbox back-end {backend!r}; use auto, docker, bubblewrap or local")


async def _first_available(image: str) -> SandboxFactory:
    reasons: list[str] = []
    for backend in ("docker", "bubblewrap"):
        try:
            return await open_factory(backend, image)
        except SandboxUnavailableError as error:
            reasons.append(str(error))
    raise SandboxUnavailableError(f"no sandbox can be had on this machine: {'; '.join(reasons)}")
