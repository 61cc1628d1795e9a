"""Read a checkpoint back, and say of each file whether it is what was written."""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from recipe.checkpoint.manifest import Manifest, checksum


def size_problem(folder: Path, manifest: Manifest, name: str) -> str | None:
    """What is wrong with the file `name`, as far as its size says."""
    try:
        size = (folder / name).stat().st_size
    except OSError:
        return f"{name} is missing"
    expected = manifest.files[name]["size"]
    return None if size == expected else f"{name} has {size:,} bytes and was written with {expected:,}"


def content_problem(
    folder: Path, manifest: Manifest, name: str, on_block: Callable[[], object] = lambda: None
) -> str | None:
    """What is wrong with the file `name`, which is read to its end."""
    problem = size_problem(folder, manifest, name)
    if problem is None:
        try:
            if checksum(folder / name, on_block) != manifest.files[name]["xxh3_64"]:
                problem = f"{name} has other content than was written"
        except OSError as error:
            problem = f"{name} cannot be read ({error.strerror})"
    return problem


def verify(folder: Path, *, fast: bool, processes: int) -> Iterable[tuple[str, str | None]]:
    """(file, what is wrong with it or None) of every file of a checkpoint, in the manifest's order.

    Args:
        fast: look at sizes alone.
        processes: how many files are read at a time.

    Raises:
        ValueError: there is no usable manifest.
    """
    manifest = Manifest.read(folder)
    names = sorted(manifest.files)
    if fast:
        yield from ((name, size_problem(folder, manifest, name)) for name in names)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from zip(names, pool.map(partial(content_problem, folder, manifest), names), strict=True)
