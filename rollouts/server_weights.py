"""How servers take new weights today: one file on a disk that all of them see, read by each.

Slow and simple, for one machine and for tests. vLLM's development mode (`VLLM_SERVER_DEV_MODE=1`) has the addresses.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from rollouts.engine import EngineError
from rollouts.engine_checks import TIED_HEAD, check_weights_fit, read_model_facts
from rollouts.server_http import ServerFault, call

if TYPE_CHECKING:
    from torch import Tensor

_CACHE_TRIES = 20
_EMBEDDING = "embed_tokens.weight"


def write_weights(state_dict: Mapping[str, Tensor], model: Path, folder: Path) -> Path:
    """Write the weights of `model` as one safetensors file into `folder`, which is emptied first.

    A tied head is written as well: a CPU server repacks only the layers whose names it is given, and would keep
    sampling from the old head without a complaint.

    Raises:
        EngineError: a name is unknown or missing, or a shape differs.
    """
    from safetensors.torch import save_file

    facts = read_model_facts(model)
    tensors = check_weights_fit(state_dict, facts)
    if facts.tied_head:
        embedding = next(tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDING))
        tensors[TIED_HEAD] = embedding.detach().clone()
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


async def drop_caches(client: httpx.AsyncClient, addresses: Sequence[str]) -> None:
    """Have every server forget the prefixes that it has cached.

    Raises:
        EngineError: one does not answer, was not started for this, or samples for somebody else.
    """
    await _on_all(addresses, lambda address: _drop_cache(client, address))


async def load_into(
    client: httpx.AsyncClient, addresses: Sequence[str], folder: Path, policy_version: int, *, timeout_s: float
) -> None:
    """Have every server read the weights in `folder`, drop what it has cached, and call them `policy_version`.

    Raises:
        EngineError: one of them did not; the message has what each of those said. Some may have the new ones then.
    """
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

    async def load(address: str) -> None:
        await call(client, address, "/collective_rpc", reload, timeout_s=timeout_s)
        await _drop_cache(client, address)
        await call(client, address, "/update_weight_version", {"new_version": str(policy_version)})

    await _on_all(addresses, load)


async def _on_all(addresses: Sequence[str], act: Callable[[str], Awaitable[None]]) -> None:
    done = await asyncio.gather(*map(act, addresses), return_exceptions=True)
    failed: list[str] = []
    for address, error in zip(addresses, done, strict=True):
        if isinstance(error, ServerFault | EngineError):
            failed.append(f"server {address}: {error}")
        elif error is not None:
            raise error
    if failed:
        raise EngineError(f"{len(failed)} of {len(addresses)} servers did not take the weights: {'; '.join(failed)}")


async def _drop_cache(client: httpx.AsyncClient, address: str) -> None:
    """A request that was cancelled a moment ago may still hold blocks."""
    for _ in range(_CACHE_TRIES):
        if (await call(client, address, "/reset_prefix_cache", {})).get("success"):
            return
        await asyncio.sleep(0.1)
    raise EngineError("its prefix cache is in use: other clients sample from it")
