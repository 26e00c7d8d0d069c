"""Files of tensors."""

import os
from pathlib import Path

from torch import Tensor


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file that has the permissions of any new file.

    The library's own gives it to its owner alone, so that nobody else could load a model from a shared folder.
    """
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=metadata)
    mask = os.umask(0)  # there is no other way to ask for it
    os.umask(mask)
    path.chmod(0o666 & ~mask)
