"""Files of a state in shards, through torch's distributed checkpoints: every rank writes and reads its own part.

What is small and whole stays in a file of rank 0, with a mark in the place of each sharded tensor; the tensors lie in
a folder beside it. torch cuts them anew where they are read by another number of ranks.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.common.durable import is_file_name, open_regular
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import is_sharded, local_of, rows_over_the_ranks, sharded_like

IN_SHARDS = "tensor in shards"  # a mark's key: number of the tensor in the folder


def folder_of(file: Path) -> Path:
    """Folder of the shards that belong to a file: ``optimizer_shards`` beside ``optimizer.pt``."""
    return file.with_name(f"{file.stem}_shards")


def write_shards(tree: Any, file: Path) -> Any:
    """Write the sharded tensors of a state beside a file, each rank its own; all ranks together.

    Args:
        tree: state of one structure on all ranks: dicts, lists and tuples of anything.
        file: file that the rest will be written to, on a disk that all ranks see.

    Returns:
        The rest, with marks in the place of sharded tensors.
    """
    import torch.distributed.checkpoint as dcp

    tensors: dict[str, torch.Tensor] = {}
    rest = _marked(tree, tensors)
    if tensors:
        dcp.save(tensors, storage_writer=writer_to(folder_of(file)))
    return rest


def read_shards(rest: Any, file: Path, like: torch.Tensor) -> Any:
    """The state that `write_shards` wrote, over the ranks there are now; all ranks together.

    Args:
        rest: what it returned, as it was read again.
        file: the file that it was read from.
        like: any sharded parameter, for the ranks.

    Raises:
        DPConfigError: if the folder of the shards is not there, or its index is more than that.
    """
    import torch.distributed.checkpoint as dcp

    tensors: dict[str, torch.Tensor] = {}
    tree = _unmarked(rest, tensors, like)
    if tensors and not folder_of(file).is_dir():
        raise DPConfigError(
            f"{folder_of(file)} is not there, which holds the shards of {file.name}. Put output_dir on a disk that "
            "all machines see, or resume from a whole checkpoint."
        )
    if tensors:
        reader = reader_of(folder_of(file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dcp.load(tensors, storage_reader=reader)
    return tree


def has_marks(tree: Any) -> bool:
    """Whether a state that was read has tensors in a folder of shards."""
    if isinstance(tree, dict):
        return IN_SHARDS in tree or any(map(has_marks, tree.values()))
    return isinstance(tree, (list, tuple)) and any(map(has_marks, tree))


def _marked(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A copy of a state in which sharded tensors are marks, and are put into `tensors` by their numbers."""
    if is_sharded(tree):
        number = len(tensors)
        device = tree.device_mesh.device_type  # a filter may keep its buffers in the host's memory
        tensors[str(number)] = sharded_like(tree, tree.detach().to_local().to(device))
        return {IN_SHARDS: number, "shape": list(tree.shape), "dtype": str(tree.dtype).removeprefix("torch.")}
    if isinstance(tree, dict):
        return {key: _marked(value, tensors) for key, value in tree.items()}
    return type(tree)(_marked(value, tensors) for value in tree) if isinstance(tree, (list, tuple)) else tree


def _unmarked(rest: Any, tensors: dict[str, torch.Tensor], like: torch.Tensor) -> Any:
    """The state with fresh sharded tensors in the place of marks, which are put into `tensors` by their numbers."""
    if isinstance(rest, dict) and IN_SHARDS in rest:
        dtype = getattr(torch, rest["dtype"])
        shell = rows_over_the_ranks(like, torch.empty(rest["shape"], dtype=dtype, device="meta"))
        local_of(shell).zero_()
        tensors[str(rest[IN_SHARDS])] = shell
        return shell
    if isinstance(rest, dict):
        return {key: _unmarked(value, tensors, like) for key, value in rest.items()}
    return type(rest)(_unmarked(value, tensors, like) for value in rest) if isinstance(rest, (list, tuple)) else rest


# --- index of a folder of shards: what torch's distributed checkpoints keep in ``.metadata``. torch reads it as any
# pickle, and whoever made the file could run code then. All else in a checkpoint is data alone, so it is read as such.

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
