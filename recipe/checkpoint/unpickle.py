"""DCP's `.metadata` is a pickle, and a pickle runs whatever it names: here it may name only what a checkpoint needs."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Classes and functions that torch 2.4 to 2.13 put into a `.metadata`, of FSDP1 and of FSDP2; none of them runs code of
# the file's. Dtypes are named as attributes of torch.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "pathlib": {"PosixPath", "Path"},
    "collections": {"OrderedDict"},
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: the one in C (twice as fast) lets a file set attributes of a class that it may name, which
    outlive the reading: with `PosixPath._str` every path of the process would be another."""

    stack: list[Any]  # typeshed knows the class and not what is in it
    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs, and was not opened")

    def load_build(self) -> None:
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]}, and was not opened")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` without running anything that it brings.

    Raises:
        ValueError: it is missing, cut off, or names anything but what describes tensors.
    """
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except Exception as error:  # noqa: BLE001 - a pickle of other content raises whatever it likes
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} holds a {type(found).__name__} and no metadata of a checkpoint")
    found.storage_meta = found.storage_meta or StorageMeta()
    return found
