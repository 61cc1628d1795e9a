"""Where rows come from: files, globs, folders saved by `datasets`, the Hub; with their share of an epoch.

A source is named by a mapping (`datasets`, `eval_datasets`), or by `dataset_name` and `--data` where nothing else is to
be said. Its identity is its content, so that prepared data are found again wherever the files lie.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import datasets
import httpx2
from datasets.exceptions import DatasetGenerationError, DatasetsError
from huggingface_hub import is_offline_mode
from huggingface_hub.constants import HF_HOME

from recipe.arguments import DataArguments
from recipe.data.digests import Digests
from recipe.data.files import COMPRESSED, READERS, format_of
from recipe.data.hub import find_builder
from recipe.data.rows import Chunk
from recipe.data.tables import read_dataset
from recipe.errors import UserError, raise_if

FORMATS = f"{', '.join(READERS)} (the text formats also with {' or '.join(COMPRESSED)})"


@dataclass(frozen=True)
class Spec:
    """What the configuration says of one source; all but `path` is optional.

    Attributes:
        path: a file, a glob of files, a folder that `datasets` saved, or a hub id.
        name: configuration of a hub data set.
        split: of a saved folder or a hub data set.
        revision: branch, tag or commit of a hub data set.
        text_field: column of text rows, in the place of `dataset_text_field`.
        weight: share of the rows of an epoch, against the other sources' weights.
        samples: rows in an epoch.
        key: where the configuration says it, for messages.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str | None = None
    weight: float | None = None
    samples: int | None = None
    key: str = "dataset_name"

    @property
    def split_key(self) -> str:
        """Where the configuration says `split`."""
        keys = {"dataset_name": "dataset_train_split", "dataset_test_split": "dataset_test_split"}
        return keys.get(self.key, f"{self.key}.split")


KEYS: dict[str, tuple[type, ...]] = {
    "path": (str,),
    "name": (str,),
    "split": (str,),
    "revision": (str,),
    "text_field": (str,),
    "weight": (int, float),
    "samples": (int,),
}


def read_specs(args: DataArguments) -> tuple[list[Spec], list[Spec]]:
    """The training sources and the evaluation sources that the keys name; no file is looked at.

    Raises:
        UserError: every key that is missing, unknown, of the wrong type, or does not go with another.
    """
    problems: list[str] = []
    if args.data:
        train = [Spec(path, key="--data") for path in args.data]
    elif args.datasets:
        train = _specs(args.datasets, "datasets", problems)
        if args.dataset_name:
            problems.append("dataset_name and datasets both name the training data; leave one out")
    elif args.dataset_name:
        train = [
            Spec(str(args.dataset_name), args.dataset_config, args.dataset_train_split, args.dataset_revision),
        ]
    else:
        train = []
        problems.append(f"dataset_name is not set; give a file ({FORMATS}), a glob, a saved folder or a hub id")
    test = _specs(args.eval_datasets, "eval_datasets", problems) if args.eval_datasets else []
    if args.dataset_test_split is not None:
        if not args.dataset_name or args.data:
            problems.append(
                f"dataset_test_split '{args.dataset_test_split}' is a split of dataset_name, which is not what is "
                "trained on; set eval_datasets or eval_samples"
            )
        test += [replace(spec, split=args.dataset_test_split, key="dataset_test_split") for spec in train[:1]]
    problems += _shares(train)
    if any(spec.weight is not None or spec.samples is not None for spec in test):
        problems.append("eval_datasets: evaluation takes every row once; leave weight and samples out")
    asked = {
        "eval_samples": args.eval_samples or None,
        "eval_datasets": args.eval_datasets,
        "dataset_test_split": args.dataset_test_split,
    }
    named = [f"{key} ({value})" if key != "eval_datasets" else key for key, value in asked.items() if value]
    if len(named) > 1:
        problems.append(f"{' and '.join(named)} are {len(named)} evaluation sets; leave all but one out")
    raise_if(problems)
    return train, test


def _specs(entries: list[Any], key: str, problems: list[str]) -> list[Spec]:
    found = []
    for number, entry in enumerate(entries):
        where = f"{key}[{number}]"
        if isinstance(entry, str):
            entry = {"path": entry}
        if not isinstance(entry, dict) or not entry.get("path"):
            problems.append(f"{where} is {entry!r}; give a path, or a mapping with path and any of {_others()}")
            continue
        unknown = [name for name in entry if name not in KEYS]
        wrong = [
            f"{where}.{name} is {value!r}; give {' or '.join(kind.__name__ for kind in KEYS[name])}"
            for name, value in entry.items()
            if name in KEYS and value is not None and type(value) not in KEYS[name]
        ]
        problems += [f"{where} has the unknown key '{name}'; known are path, {_others()}" for name in unknown] + wrong
        if not unknown and not wrong:
            found.append(Spec(**{name: value for name, value in entry.items() if value is not None}, key=where))
    return found


def _others() -> str:
    return ", ".join(name for name in KEYS if name != "path")


def _shares(specs: list[Spec]) -> list[str]:
    """Weights are shares of a whole, so all sources have one or none has; samples count by themselves."""
    problems = []
    for spec in specs:
        if spec.weight is not None and not 0 < spec.weight < math.inf:
            problems.append(f"{spec.key}.weight is {spec.weight:g}; set more than 0")
        if spec.samples is not None and spec.samples < 1:
            problems.append(f"{spec.key}.samples is {spec.samples}; set 1 or more")
    weighted = [spec.weight is not None for spec in specs]
    if any(weighted) and not all(weighted):
        without = specs[weighted.index(False)]
        problems.append(f"{without.key} has no weight, and others have; give every source a weight, or none")
    if any(weighted) and any(spec.samples is not None for spec in specs):
        problems.append("datasets: weight and samples both say how many rows an epoch has; use one of the two")
    return problems


@dataclass(frozen=True)
class Source:
    """One source, found and not yet read.

    Attributes:
        spec: as it was asked for.
        size: of all its chunks, in `unit`s, for the progress bar.
        unit: 'B' or 'row'.
        chunks: reads it from the first row on, anew at each call.
        identify: what changes when the content does.
        notes: what to tell the user, such as what was downloaded.
        revision: the commit of a hub data set.
    """

    spec: Spec
    size: int
    unit: str
    chunks: Callable[[], Iterator[Chunk]]
    identify: Callable[[], str]
    notes: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def name(self) -> str:
        """For messages and reports."""
        split = f" ({self.spec.split})" if self.unit == "row" else ""
        revision = f" at {self.revision[:12]}" if self.revision else ""
        return f"{self.spec.path}{split}{revision}"

    @cached_property
    def identity(self) -> str:
        return self.identify()


def open_sources(specs: list[Spec], digests: Digests) -> list[Source]:
    """Find every source; what is not on this machine and is a hub id is fetched.

    Raises:
        UserError: no such file, folder, hub id or split; a format that is not known.
    """
    found, problems = [], []
    for spec in specs:
        try:
            found.append(_open(spec, digests))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return found


def is_here(spec: Spec) -> bool:
    """Whether it is, or by its name has to be, on this machine's disks; else it is a hub id."""
    path = _path(spec)
    return (
        path.exists()
        or has_magic(spec.path)
        or format_of(path) is not None
        or path.suffix in COMPRESSED
        or spec.path.startswith(("/", "./", "../", "~"))
    )


def _path(spec: Spec) -> Path:
    try:
        path = Path(spec.path).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # no such user, a name that is too long
        raise UserError(f"{spec.key} '{spec.path}' cannot be looked for: {error}; give another path") from None
    return path


def _open(spec: Spec, digests: Digests) -> Source:
    path = _path(spec)
    if path.is_file():
        return _open_files(spec, [path], digests)
    if path.is_dir():
        return _open_saved(spec, path, digests)
    if has_magic(spec.path):
        files = sorted(p for p in map(Path, glob(str(path), recursive=True)) if p.is_file())
        if not files:
            raise UserError(f"{spec.key} '{spec.path}': no file matches (looked from {Path.cwd()})")
        return _open_files(spec, files, digests)
    if is_here(spec):
        raise UserError(f"{spec.key} '{spec.path}': no such file or folder (looked for {path.absolute()})")
    return _open_hub(spec)


def _open_files(spec: Spec, files: list[Path], digests: Digests) -> Source:
    formats = {path: format_of(path) for path in files}
    for path, suffix in formats.items():
        if suffix is None:
            raise UserError(
                f"{spec.key} '{spec.path}': the name of a file must end in one of {FORMATS}, not '{path.name}'"
            )
    if spec.split != "train":
        raise UserError(
            f"{spec.split_key} '{spec.split}': files have the split 'train' and no other; leave it out, and for "
            "evaluation hold rows out with eval_samples, or name other files in eval_datasets"
        )

    def chunks() -> Iterator[Chunk]:
        for path, suffix in formats.items():
            yield from READERS[str(suffix)](path)

    def identify() -> str:
        return " ".join(f"{suffix}:{digests.of(path)}" for path, suffix in formats.items())

    return Source(spec, sum(path.stat().st_size for path in files), "B", chunks, identify)


def _open_saved(spec: Spec, path: Path, digests: Digests) -> Source:
    """A folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    if not any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        raise UserError(
            f"{spec.key} '{spec.path}': the folder was not written by `datasets.save_to_disk`; for the files in it "
            f"give a glob, such as {path}/*.jsonl"
        )
    try:
        saved = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{spec.key} '{spec.path}': {path} cannot be loaded: {error}; save it anew") from None
    if isinstance(saved, datasets.DatasetDict):
        if spec.split not in saved:
            raise UserError(f"{spec.split_key} '{spec.split}' is none of the splits of {path}: {', '.join(saved)}")
        dataset = saved[spec.split]
    elif spec.split == "train":
        dataset = saved
    else:
        raise UserError(f"{spec.split_key} '{spec.split}': {path} was saved without splits; leave it out")
    files = [Path(file["filename"]) for file in dataset.cache_files]

    def identify() -> str:
        return "saved:" + " ".join(digests.of(file) for file in files)

    return Source(spec, len(dataset), "row", partial(read_dataset, spec.path, dataset), identify)


def _open_hub(spec: Spec) -> Source:
    try:
        builder = find_builder(spec.path, spec.name, spec.revision)
        cached = Path(builder.cache_dir).is_dir()
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=spec.split)
    # What these libraries raise has no common class; a script in the repository is a RuntimeError.
    except (OSError, ValueError, RuntimeError, LookupError, httpx2.HTTPError, DatasetsError) as error:
        why = error.__cause__ or error if isinstance(error, DatasetGenerationError) else error
        way_out = "check path, name, split and revision"
        if is_offline_mode():
            way_out = (
                f"HF_HUB_OFFLINE is set: fetch it once where there is a network, with the same HF_HOME ({HF_HOME})"
            )
        raise UserError(
            f"{spec.key} '{spec.path}' (configuration {spec.name or 'default'}, split '{spec.split}', revision "
            f"{spec.revision or 'main'}) is no file or folder here, and could not be loaded from the Hub: "
            f"{type(error).__name__}: {why}; {way_out}"
        ) from error
    revision = str(builder.hash)
    size = builder.info.download_size or 0
    how = "from the cache" if cached else f"downloaded {size / 1e6:,.1f} MB"
    note = f"{spec.path}: {how}, revision {revision}, split '{spec.split}', {len(dataset):,} rows"
    identity = f"hub:{spec.path}:{builder.config.name}:{spec.split}:{revision}"
    chunks = partial(read_dataset, spec.path, dataset)
    return Source(spec, len(dataset), "row", chunks, lambda: identity, (note,), revision)
