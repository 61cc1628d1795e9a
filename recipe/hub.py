"""A model on the hub: what of it lies in the hub's cache, fetching the rest, and what to say when it cannot be had.

A model that is complete in the cache costs no request, so that a job on a node without network starts.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_cached_repo_tree, get_token, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from recipe.errors import UserError

INDEX, SINGLE = constants.SAFETENSORS_INDEX_FILE, constants.SAFETENSORS_SINGLE_FILE
# All that is fetched besides the weights, which are safetensors named one by one: never pickles, and not the second
# copy of the weights that some repositories have (original/, consolidated.safetensors).
SMALL = ["*.json", "*.model", "*.jinja", "*.txt"]
# Small files without which a run would be another one, where the repository has them.
READ = ["config.json", "generation_config.json", "*token*.json", "*.model", "*.jinja", "vocab.*", "merges.txt", INDEX]
TOKENIZERS = ["tokenizer.json", "*.model", "vocab.*", "tekken.json"]
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SHOWN = 5


def resolve(name: str, revision: str | None, download: bool) -> tuple[Path, list[str]]:
    """The folder of a hub model in the hub's cache, and warnings.

    Args:
        name: owner/name.
        revision: branch, tag or commit; None is the default branch.
        download: whether weights that are not in the cache are fetched. If not, all but they are, and there is a
            warning if and only if weights are missing in the folder.

    Raises:
        UserError: the cache lacks files and they cannot be had; it says which and the way out.
    """
    folder = _cached(name, revision)
    absent = [] if folder is None else _missing(name, folder)
    if folder is not None and not absent:
        return folder, []
    state = f"is no local folder, is not in the hub's cache ({constants.HF_HUB_CACHE})"
    if folder is not None:
        state = f"is not complete in the hub's cache ({folder} lacks {_few(absent)})"
    if is_offline_mode():
        raise UserError(f"{_label(name, revision)} {state}, and HF_HUB_OFFLINE is set; {_way_out(name, revision)}")
    return _fetch(name, revision, download, state)


def _cached(name: str, revision: str | None) -> Path | None:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=READ, local_files_only=True))
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError:
        raise UserError(f"model_name_or_path '{name}' is no folder and no hub id (owner/name)") from None


def _missing(name: str, folder: Path) -> list[str]:
    """What a run reads and the snapshot `folder` lacks, sorted."""
    needed = {"config.json", *(file for file in _listed(name, folder) if "/" not in file and _matches(file, READ))}
    absent = [file for file in needed if not (folder / file).is_file()]
    if not any(_matches(path.name, TOKENIZERS) for path in folder.glob("*")):
        absent.append("tokenizer.json or tokenizer.model")
    if INDEX not in absent:
        absent += [file for file in _weight_names(folder) if not (folder / file).is_file()]
    return sorted(set(absent))


def _listed(name: str, folder: Path) -> list[str]:
    """The files of the repository at the snapshot's commit, where the cache knows them; older clients kept no list."""
    try:
        return [file.path for file in get_cached_repo_tree(name, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return []


def _weight_names(folder: Path) -> list[str]:
    """The weight files by the index; one file where there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if all(name.endswith(".safetensors") for name in names):
            return names
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{index} is no index of safetensors files; remove it and fetch the model again")


def _fetch(name: str, revision: str | None, download: bool, state: str) -> tuple[Path, list[str]]:
    with _explained(name, revision, state):
        # Asked first, since `snapshot_download` goes on with an incomplete cache when the hub refuses, and has no
        # timeout of its own where packets are dropped.
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=SMALL))
        weights = _weight_names(folder)
        if download:
            # The snapshot is named after its commit: small files and weights come from one.
            snapshot_download(name, revision=folder.name, allow_patterns=weights)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    absent = _missing(name, folder)
    awaited = [] if download else [file for file in absent if file in weights and file in sizes]
    if never := [file for file in absent if file not in awaited]:
        raise UserError(
            f"{_label(name, revision)} has no {_few(never)} on {constants.ENDPOINT}; set model_name_or_path to a "
            "causal language model with a tokenizer and safetensors weights (pickled ones are not read)"
        )
    if not awaited:
        return folder, []
    return folder, [
        f"{len(awaited)} of {len(weights)} weight files of {_label(name, revision)} "
        f"({sum(sizes[file] for file in awaited) / 1e9:.1f} GB) are not in the hub's cache ({constants.HF_HUB_CACHE}), "
        f"and the job would have to download them; run `{_command(name, revision)}` before"
    ]


@contextmanager
def _explained(name: str, revision: str | None, state: str) -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, OSError, json.JSONDecodeError) as error:  # the last from a portal's page in HTML
        # `snapshot_download` wraps most of what goes wrong on the way.
        wrapped = isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None
        reason = _reason(name, revision, state, error.__cause__ if wrapped else error)
        if token := get_token():
            reason = reason.replace(token, "<token>")  # a proxy or a mirror may repeat what it was sent
        raise UserError(reason) from None


def _reason(name: str, revision: str | None, state: str, error: BaseException | None) -> str:
    if isinstance(error, HfHubHTTPError):
        return _refusal(name, revision, error)
    if isinstance(error, OSError) and error.errno is not None:  # of this machine; network errors are httpx2's
        key, value = _cache_setting()
        return (
            f"{_label(name, revision)} cannot be written to the hub's cache ({error}); set {key} (now {value}) to a "
            "folder that can be written to and has room"
        )
    return (
        f"{_label(name, revision)} {state}, and {constants.ENDPOINT} cannot be reached or is no hub "
        f"({type(error).__name__}: {error}); {_way_out(name, revision)}"
    )


def _refusal(name: str, revision: str | None, error: HfHubHTTPError) -> str:
    """What the hub's refusal means. 401 is about who asks, 403 about what that account may read."""
    status, logged_in = error.response.status_code, get_token() is not None
    page = f"{constants.ENDPOINT}/{name}"
    if status == 401 and logged_in:
        source = next((key for key in TOKEN_VARIABLES if os.environ.get(key)), constants.HF_TOKEN_PATH)
        return (
            f"{constants.ENDPOINT} does not accept the token in {source} (401), for {name} or any other model; log in "
            "again with `hf auth login`, and renew or unset HF_TOKEN, which goes before it"
        )
    if isinstance(error, GatedRepoError) and not logged_in:
        return (
            f"{name} is gated and there is no token (HF_TOKEN is not set, and {constants.HF_TOKEN_PATH} has none); log "
            f"in with `hf auth login` or set HF_TOKEN, with an account that has accepted the licence on {page}"
        )
    if isinstance(error, GatedRepoError):
        return (
            f"{name} is gated and the account of the token at hand has no access; accept the licence on {page} and "
            "wait until it is granted, or log in with another account (`hf auth login` or HF_TOKEN)"
        )
    if isinstance(error, RepositoryNotFoundError):
        who = "the account of the token at hand cannot see it" if logged_in else "needs a login (`hf auth login`)"
        return f"{page} does not exist, or is private and {who}; check model_name_or_path '{name}'"
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision '{revision}'; set model_revision to a branch, tag or full commit of it"
    remedy = "give the token that permission" if status == 403 and logged_in else "try again later"
    return (
        f"{constants.ENDPOINT} answers {status} for {_label(name, revision)} ({error.server_message or 'no reason'}); "
        f"{remedy}, or set model_name_or_path to a local folder"
    )


def _cache_setting() -> tuple[str, str]:
    """The variable that decides where the cache is, and its value."""
    if Path(constants.HF_HUB_CACHE) == Path(constants.HF_HOME) / "hub":
        return "HF_HOME", constants.HF_HOME
    return "HF_HUB_CACHE", constants.HF_HUB_CACHE


def _way_out(name: str, revision: str | None) -> str:
    key, value = _cache_setting()
    return (
        f"run `{_command(name, revision)}` on a machine with network and the same {key} ({value}), or set "
        "model_name_or_path to a local folder"
    )


def _command(name: str, revision: str | None) -> str:
    """Without the pickled copy of the weights that many repositories have next to safetensors."""
    at = "" if revision in (None, constants.DEFAULT_REVISION) else f" --revision {revision}"
    return f"hf download {name}{at} --exclude '*.bin' --exclude '*.pth'"


def _label(name: str, revision: str | None) -> str:
    return name if revision in (None, constants.DEFAULT_REVISION) else f"{name} (revision {revision})"


def _few(files: list[str]) -> str:
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return ", ".join(files[:SHOWN]) + more


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
