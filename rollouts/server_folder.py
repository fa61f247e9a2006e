"""What does a model's folder say about the servers of that model?

Above all, whether a server has its weights. Names do not tell: every training run calls its last model `final`. So
where the folder that a server names is here too, the two are compared.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_HASHED = 1 << 20


def vocab_size(model: Path) -> int:
    """
    Raises:
        ValueError: there is no model in the folder.
    """
    if not (model / "config.json").is_file():
        raise ValueError(f"no config.json in {model}: name the folder of the model that the servers serve")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().vocab_size


def weights_digest(folder: Path) -> str:
    """Tells whether a model folder holds the same weights as before, without reading all of them: of each file the
    size, the beginning and the end."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED))
            file.seek(max(0, size - _HASHED))
            digest.update(file.read(_HASHED))
    return digest.hexdigest()[:16]


def check_folder(served: str, model: Path) -> None:
    """Compare the weights in the folder that a server names with those of `model`; a name that is no folder here says
    nothing, for the server may be on another machine.

    Raises:
        ValueError: they differ.
    """
    if not os.path.isdir(served) or os.path.samefile(served, model):  # noqa: PTH112, PTH121 - any text is no error
        return
    try:
        has_other = weights_digest(Path(served)) != weights_digest(model)
    except PermissionError:  # the server may belong to somebody else
        return
    if has_other:
        raise ValueError(
            f"it serves {Path(served).resolve()}, whose weights are not those of {model.resolve()}; start it with that "
            "folder, or name the served one as the model"
        )
