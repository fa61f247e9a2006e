"""What is sent when weights are sent: which tensors, in which type, in which pieces, and whether any of them changed.

Nothing here opens a connection. `weight_transfer_tcp` carries the bytes to the servers, `weight_transfer_worker` takes
them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES = 64 << 20
"""So much is held ready at once, on top of the weights themselves; a larger tensor is a bucket of its own."""


class WeightChannel(Protocol):
    """Carries one sync's bytes to the workers of all servers at once. Its methods run on the loop of the servers."""

    def init_info(self, server: str) -> dict[str, Any]:
        """What `/init_weight_transfer_engine` tells the workers of a server."""
        ...

    async def send(self, tensors: Mapping[str, Tensor], dtype: str) -> int:
        """Meet the workers and send them everything, while the servers are told to take it; returns the bytes that each
        worker got.

        Raises:
            EngineError: nobody is left to send to.
        """
        ...

    def leave(self, server: str) -> None:
        """This server has failed: nobody waits for it any more."""
        ...

    async def close(self) -> None: ...


def update_info(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Any]:
    """What `/update_weights` tells the workers: names, types and shapes, in the order in which the bytes come.

    >>> import torch
    >>> update_info({"w": torch.zeros(2, 3)}, "bfloat16")
    {'names': ['w'], 'dtype_names': ['bfloat16'], 'shapes': [[2, 3]]}
    """
    return {
        "names": list(tensors),
        "dtype_names": [str(sent_dtype(tensor, dtype)).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def sent_dtype(tensor: Tensor, dtype: str) -> torch.dtype:
    """Floating tensors go in the type that the server computes in, others as they are."""
    import torch

    return getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype


def buckets(tensors: Mapping[str, Tensor], dtype: str, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[memoryview]]:
    """The tensors' bytes in order, some tensors at a time. What is on the CPU in the right type already is not copied,
    and the tensors themselves are never changed.

    >>> import torch
    >>> two = {"a": torch.zeros(2), "b": torch.zeros(3)}
    >>> [[view.nbytes for view in bucket] for bucket in buckets(two, "float32", 8)]
    [[8], [12]]
    """
    bucket: list[memoryview] = []
    size = 0
    for tensor in tensors.values():
        if bucket and size + tensor.numel() * sent_dtype(tensor, dtype).itemsize > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(_bytes(tensor, dtype))
        size += bucket[-1].nbytes
    if bucket:
        yield bucket


def _bytes(tensor: Tensor, dtype: str) -> memoryview:
    import torch

    flat = tensor.detach().to(sent_dtype(tensor, dtype)).cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class PushedWeights:
    """Remembers what an engine was given last, by one number a tensor: a sync of weights that did not change is easily
    one of the wrong tensors, such as the frozen ones beside an adapter."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def count_changed(self, tensors: Mapping[str, Tensor]) -> int | None:
        """How many tensors differ from those that were given before; None where none were. Called once they arrived."""
        before, self._last = self._last, {name: fingerprint(tensor) for name, tensor in tensors.items()}
        return sum(before.get(name) != value for name, value in self._last.items()) if before else None


def fingerprint(tensor: Tensor) -> int:
    """The sum of a tensor's elements read as integers: a change of any one of them changes it.

    >>> import torch
    >>> a = torch.tensor([1.0, 2.0, 3.0])
    >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(a + torch.tensor([0, 1e-6, 0]))
    (True, False)
    """
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))
