"""A data set of the hub at the revision that was asked for, from the cache or fetched."""

import json
import re
from glob import escape
from pathlib import Path

import datasets
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.cache.cache import Cache
from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

COMMIT = re.compile("[0-9a-f]{40}")


def find_builder(path: str, name: str | None, revision: str | None) -> datasets.DatasetBuilder:
    """What prepares configuration `name` of the data set `path`; its `hash` is the commit.

    A commit that the cache has costs no request. Where the hub cannot be had, `datasets` takes the newest that the
    cache has of the data set, whatever revision was asked for; this does not.

    Raises:
        LookupError: the hub does not give it, and the cache has other revisions only.
        OSError, ValueError, RuntimeError, DatasetsError: as `datasets.load_dataset_builder`.
    """
    if COMMIT.fullmatch(revision or ""):
        builder = _cached(path, name, revision)
        if builder is not None:
            return builder
    builder = datasets.load_dataset_builder(path, name, revision=revision)
    if not isinstance(builder, Cache):
        return builder
    cached = _cached(path, name, revision)
    if cached is None and revision is not None:
        raise LookupError(f"the Hub does not give it, and the cache has revision {builder.hash}")
    return cached or builder


def _cached(path: str, name: str | None, revision: str | None) -> datasets.DatasetBuilder | None:
    """The prepared data set at `revision` in the cache, if there is one and it is the only one."""
    commit = _commit(path, revision)
    if commit is None:
        return None
    *namespace, last = path.split("/")
    root = Path(datasets.config.HF_DATASETS_CACHE) / "___".join([*namespace, camelcase_to_snakecase(last)])
    found = []
    for folder in root.glob(f"{escape(name) if name else '*'}/*/{commit}"):
        info = folder / "dataset_info.json"
        # A folder that is not named after its configuration is of a call with other arguments.
        if info.is_file() and json.loads(info.read_text())["config_name"] == folder.parts[-3]:
            found.append(folder)
    if len(found) != 1:
        return None
    config, version, _ = found[0].parts[-3:]
    return Cache(repo_id=path, dataset_name=last, config_name=config, version=version, hash=commit)


def _commit(path: str, revision: str | None) -> str | None:
    """The commit that `revision` was when the hub was last asked; None where that is not known."""
    if COMMIT.fullmatch(revision or ""):
        return revision
    try:
        return Path(snapshot_download(path, repo_type="dataset", revision=revision, local_files_only=True)).name
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path).name
    except LocalEntryNotFoundError:
        return None
