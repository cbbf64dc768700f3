"""Index of a folder of shards: what torch's distributed checkpoints keep in ``.metadata``.

torch writes the index as a pickle, with the place of the folder on the machine, and reads it as any pickle: whoever
made the file could run code then. All else in a checkpoint is data alone, so the index is read as such, too.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.common.durable import is_file_name, open_regular
from hf_dpopt.common.errors import DPConfigError

INDEX = ".metadata"
_OF_AN_INDEX = {
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # their name in Python 3.13
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip


def writer_to(folder: Path) -> Any:
    """A writer of torch's that leaves the place of the folder on this machine out of the index."""
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def storage_meta(self) -> None:
            return None

    return Writer(folder)


def reader_of(folder: Path) -> Any:
    """A reader of torch's, with an index that holds the places of tensors and nothing else.

    Raises:
        DPConfigError: if there is no index, or another one.
    """
    from torch.distributed.checkpoint import FileSystemReader

    index = _read_index(folder)

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return index

    return Reader(folder)


def _read_index(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with open_regular(folder / INDEX) as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
        names = [part.relative_path for part in index.storage_data.values()]
        if not all(map(is_file_name, names)):
            raise pickle.UnpicklingError("it names a file outside of its folder")
    except Exception as error:  # a damaged pickle raises almost anything
        raise DPConfigError(
            f"{folder / INDEX} is no index of shards ({error}), and nothing was loaded. Resume from a whole "
            "checkpoint of this run."
        ) from error
    return index


class _Unpickler(pickle.Unpickler):
    """An unpickler of what an index is made of, and of nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _OF_AN_INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
