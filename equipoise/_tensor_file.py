"""Files of tensors, and what tells tensors apart."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def digest_of(named: Iterable[tuple[str, Any]]) -> str:
    """A digest of tensors, their names, shapes and dtypes, in this order; what is no tensor does not count."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in named:
        if isinstance(value, Tensor):
            digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file that has the permissions of any new file.

    The library's own gives it to its owner alone, so that nobody else could load a model from a shared folder.
    """
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=metadata)
    mask = os.umask(0)  # there is no other way to ask for it
    os.umask(mask)
    path.chmod(0o666 & ~mask)
