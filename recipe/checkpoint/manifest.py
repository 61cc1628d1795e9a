"""What a checkpoint says of itself: `manifest.json`, written last; a folder without it is no checkpoint."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

FILE = "manifest.json"
VERSION = 2


@dataclass
class Manifest:
    """One checkpoint's description.

    Attributes:
        step: optimizer steps done.
        samples_seen: samples of the stream (`recipe.sampling`) that these steps took; the next one takes those after.
        world_size: ranks that wrote it.
        run: what makes a run this run (`recipe.run_folder.fingerprint`): data, model, tokenizer, batch, seed, ...
        details: what a reader wants to know: strategy, wrap, dtypes, vocabulary rows, versions, tokens seen.
        files: {path relative to the checkpoint: {"size": bytes, "xxh3_64": hex digest}}.
    """

    step: int
    samples_seen: int
    world_size: int
    run: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = VERSION

    def write(self, folder: Path) -> None:
        values = asdict(self)
        path = folder / FILE
        with path.open("w") as file:
            json.dump(values | {"xxh3_64": _sum(values)}, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises `ValueError` with the reason where there is no usable manifest."""
        try:
            values = json.loads((folder / FILE).read_text())
            version, told = values["version"], values.pop("xxh3_64", None)
        except FileNotFoundError:
            raise ValueError(f"it has no {FILE}: it was never finished") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its {FILE} cannot be read ({error})") from None
        if version != VERSION:
            raise ValueError(f"its {FILE} is of version {version}, and this code reads version {VERSION}")
        if told != _sum(values):
            raise ValueError(f"its {FILE} has other content than was written")
        return cls(**values)


def _sum(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each of `names` (relative to `folder`)."""
    return {name: {"size": (folder / name).stat().st_size, "xxh3_64": checksum(folder / name)} for name in names}


def checksum(path: Path, on_block: Callable[[], object] = lambda: None) -> str:
    """xxh3 of a file's content, in hex. `on_block` is called every few megabytes."""
    digest = xxhash.xxh3_64()
    block = memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            on_block()
            digest.update(block[:size])
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != FILE)
