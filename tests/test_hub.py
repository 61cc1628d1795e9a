"""The real huggingface_hub client, each time in a new process (it reads its environment once), against a stand-in for
the hub."""

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import INVALID, MEMBER, NARROW, STRANGER, Hub, Repository, User

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
SMALL = ["config.json", "generation_config.json", "model.safetensors.index.json"]
SMALL += ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
# As meta-llama/Llama-2-70b-chat-hf: the weights twice, and a licence; `consolidated` is a third copy, Mistral's.
FILES = {
    **{name: json.dumps({"file": name}).encode() for name in SMALL},
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    **{name: name.encode() for name in SHARDS},
    "pytorch_model-00001-of-00001.bin": b"a pickle",
    "consolidated.safetensors": b"the weights again",
    "LICENSE.md": b"...",
}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Hub:
    hub = Hub()
    hub.repositories = {
        "owner/open": Repository(FILES, sizes={name: 9_700_000_000 for name in SHARDS}),
        "owner/gated": Repository(FILES, gated=True),
        "owner/private": Repository(FILES, private=True),
        "owner/pickled": Repository({"config.json": b"1", "tokenizer.json": b"2", "pytorch_model.bin": b"a pickle"}),
        "owner/tiny": Repository({path.name: path.read_bytes() for path in tiny_model.iterdir()}),
    }
    return hub


@pytest.fixture
def user(server: Hub, tmp_path: Path) -> Iterator[User]:
    server.requests.clear()
    yield User(server, tmp_path / "home")
    server.says = None


@pytest.fixture(scope="module")
def fetched(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in whose cache owner/open is complete."""
    home = tmp_path_factory.mktemp("fetched") / "home"
    assert User(server, home).resolve("owner/open").error == ""
    return home


@pytest.fixture
def cached(fetched: Path, user: User) -> tuple[User, Path]:
    """A user with owner/open in the cache, and its folder there."""
    shutil.copytree(fetched, user.home, symlinks=True)
    user.hub.requests.clear()
    (folder,) = (user.home / "hub/models--owner--open/snapshots").iterdir()
    return user, folder


# -- fetching ----------------------------------------------------------------------------------------------------------


def test_weights_are_fetched_by_the_index_and_never_a_pickle(user):
    answer = user.resolve("owner/open")
    assert answer.files() == user.hub.downloads() == sorted(SMALL + SHARDS)
    assert answer.warnings == []


def test_a_check_fetches_no_weights_and_says_what_a_job_would(user):
    answer = user.resolve("owner/open", download=False)
    assert answer.files() == user.hub.downloads() == SMALL
    (warning,) = answer.warnings
    assert "2 of 2 weight files of owner/open (19.4 GB) are not in the hub's cache" in warning
    assert str(user.home / "hub") in warning and "`hf download owner/open --exclude" in warning
    assert user.resolve("owner/open").files() == sorted(SMALL + SHARDS), "a job fetches the rest"
    assert user.resolve("owner/open", download=False).warnings == []


def test_a_check_counts_only_weights_that_are_missing(cached):
    user, folder = cached
    (folder / SHARDS[0]).unlink()
    assert "1 of 2 weight files of owner/open (9.7 GB)" in user.resolve("owner/open", download=False).warnings[0]
    assert user.hub.downloads() == []


@pytest.mark.parametrize("download", [True, False])
def test_a_repository_without_safetensors(user, download):
    error = user.resolve("owner/pickled", download=download).error
    assert f"owner/pickled has no model.safetensors on {user.hub.endpoint}; set model_name_or_path" in error
    assert user.hub.downloads() == ["config.json", "tokenizer.json"]


# -- complete in the cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize("offline", [None, "1"])
def test_a_complete_cache_makes_no_request(cached, offline, download):
    user, folder = cached
    answer = user.resolve("owner/open", "main", download, HF_HUB_OFFLINE=offline)
    assert (answer.folder, answer.warnings, user.hub.requests) == (folder, [], [])


def test_a_complete_cache_is_found_by_its_commit_and_without_a_revision(cached):
    user, folder = cached
    assert [user.resolve("owner/open", revision).folder for revision in (None, folder.name)] == [folder, folder]
    assert user.hub.requests == []


def test_a_cache_of_an_older_client_has_no_list_of_files(cached):
    user, folder = cached
    shutil.rmtree(folder.parent.parent / "trees")
    assert user.resolve("owner/open").folder == folder
    assert user.hub.requests == []
    (folder / SHARDS[1]).unlink()
    assert f"lacks {SHARDS[1]})" in user.resolve("owner/open", HF_HUB_OFFLINE="1").error


def test_reading_a_cached_model_makes_no_request_either(user):
    """Transformers is given a folder, and does not look further, though the environment does not say offline."""
    read = (
        "from recipe import model; from recipe.arguments import ModelArguments; from recipe.loading import Weights\n"
        "folder, _ = model.find_folder(ModelArguments(model_name_or_path='owner/tiny'), download=True)\n"
        "config, tokenizer = model.load_config(folder), model.load_tokenizer(folder)\n"
        "model.load_generation_config(folder, config, tokenizer)\n"
        "print(Weights(folder).problems(model.meta_model(config, None, model.torch_dtype('float32'))))"
    )
    user.resolve("owner/tiny")
    user.hub.requests.clear()
    assert user.python("-c", read).splitlines()[-1] == "[]"
    assert user.hub.requests == []


def test_the_command_that_is_given_makes_a_job_start_offline(user):
    """The way out of every message, as it stands there."""
    error = user.resolve("owner/open", "v1", HF_HUB_OFFLINE="1").error
    command = error.split("`")[1].replace("'", "").split()
    assert command == "hf download owner/open --revision v1 --exclude *.bin --exclude *.pth".split()
    user.python(str(Path(sys.executable).with_name("hf")), *command[1:])
    assert "pytorch_model-00001-of-00001.bin" not in user.hub.downloads()
    user.hub.requests.clear()
    assert user.resolve("owner/open", "v1", HF_HUB_OFFLINE="1").error == ""
    assert user.hub.requests == []


# -- offline -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("download", [True, False])
def test_offline_and_not_in_the_cache(user, download):
    error = user.resolve("owner/open", download=download, HF_HUB_OFFLINE="1", HF_TOKEN=MEMBER).error
    assert error == (
        f"owner/open is no local folder, is not in the hub's cache ({user.home}/hub), and HF_HUB_OFFLINE is set; run "
        "`hf download owner/open --exclude '*.bin' --exclude '*.pth'` on a machine with network and the same HF_HOME "
        f"({user.home}), or set model_name_or_path to a local folder"
    )
    assert user.hub.requests == []


@pytest.mark.parametrize(
    ("removed", "lacks"),
    [
        (["config.json"], "config.json"),
        ([SHARDS[1]], SHARDS[1]),
        (["model.safetensors.index.json"], "model.safetensors.index.json"),
        (["tokenizer_config.json", "generation_config.json"], "generation_config.json, tokenizer_config.json"),
        ([*SMALL, *SHARDS], ", ".join(SMALL[:4]) + ", tokenizer.json or tokenizer.model and 2 more"),
    ],
)
def test_offline_and_not_complete(removed, lacks, cached):
    user, folder = cached
    for name in removed:
        (folder / name).unlink()
    error = user.resolve("owner/open", HF_HUB_OFFLINE="1", HF_TOKEN=MEMBER).error
    assert f"owner/open is not complete in the hub's cache ({folder} lacks {lacks}), and HF_HUB_OFFLINE" in error
    assert "`hf download owner/open" in error and str(user.home) in error
    assert user.hub.requests == []


def test_a_cache_elsewhere_is_named_by_its_own_variable(user, tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    error = user.resolve("owner/open", HF_HUB_OFFLINE="1", HF_HUB_CACHE=elsewhere).error
    assert f"the same HF_HUB_CACHE ({elsewhere})" in error


# -- what the hub refuses ----------------------------------------------------------------------------------------------

LOGIN = ["is gated and there is no token", "`hf auth login` or set HF_TOKEN", "licence on http", "/owner/gated"]
LICENCE = ["is gated and the account of the token", "accept the licence on http", "/owner/gated"]
NOT_FOUND = ["does not exist, or is private", "check model_name_or_path"]
BAD_TOKEN = ["does not accept the token in HF_TOKEN (401)", "`hf auth login`", "unset HF_TOKEN"]


@pytest.mark.parametrize(
    ("name", "revision", "token", "says"),
    [
        ("owner/gated", "main", None, LOGIN),
        ("owner/gated", "main", STRANGER, LICENCE),
        ("owner/gated", "main", NARROW, ["answers 403", "Please enable access", "give the token that permission"]),
        ("owner/gated", "main", INVALID, BAD_TOKEN),
        ("owner/open", "main", INVALID, BAD_TOKEN),
        ("owner/nothing", "main", None, [*NOT_FOUND, "needs a login"]),
        ("owner/nothing", "main", MEMBER, [*NOT_FOUND, "cannot see it"]),
        ("owner/private", "main", None, [*NOT_FOUND, "needs a login"]),
        ("owner/private", "main", STRANGER, [*NOT_FOUND, "cannot see it"]),
        ("owner/open", "v2", MEMBER, ["/owner/open has no revision 'v2'", "set model_revision"]),
    ],
)
def test_each_refusal_has_its_own_remedy(name, revision, token, says, user):
    """Of a check, before the run is queued."""
    error = user.resolve(name, revision, download=False, HF_TOKEN=token).error
    assert [part for part in says if part not in error] == []
    others = [LOGIN, LICENCE, NOT_FOUND, BAD_TOKEN]
    assert sum(other[0] in error for other in others) == (says[0] in [other[0] for other in others])


def test_a_stored_token_that_is_not_valid_is_named_by_its_file(user):
    user.home.mkdir()
    (user.home / "token").write_text(INVALID)
    assert f"does not accept the token in {user.home}/token (401)" in user.resolve("owner/open").error


@pytest.mark.parametrize("name", ["owner/gated", "owner/private"])
def test_a_member_gets_the_model(name, user):
    assert user.resolve(name, HF_TOKEN=MEMBER).files() == sorted(SMALL + SHARDS)


@pytest.mark.parametrize(("name", "says"), [("owner/gated", LOGIN), ("owner/private", NOT_FOUND)])
def test_a_refusal_is_said_though_some_of_the_model_is_cached(name, says, user):
    folder = user.resolve(name, HF_TOKEN=MEMBER).folder
    (folder / SHARDS[0]).unlink()
    shutil.rmtree(folder.parent.parent / "trees")  # as an older client leaves it
    assert says[0] in user.resolve(name).error


@pytest.mark.parametrize("status", [403, 429, 503])
def test_another_answer_is_repeated_without_the_token(status, user):
    user.hub.says = (status, f"no, {STRANGER}")
    error = user.resolve("owner/open", HF_TOKEN=STRANGER).error
    assert f"answers {status} for owner/open (no, <token>); " in error and "set model_name_or_path" in error


# -- no network, no hub, no room ---------------------------------------------------------------------------------------


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def assert_no_network(error: str, state: str, user: User) -> None:
    assert state in error and "cannot be reached or is no hub (ConnectError" in error
    assert "`hf download owner/open" in error and f"the same HF_HOME ({user.home})" in error


def test_no_network(user):
    error = user.resolve("owner/open", HF_ENDPOINT=closed_port(), HF_TOKEN=MEMBER).error
    assert_no_network(error, "is not in the hub's cache", user)


def test_no_network_and_part_of_the_model(cached):
    user, folder = cached
    (folder / SHARDS[0]).unlink()
    error = user.resolve("owner/open", HF_ENDPOINT=closed_port(), HF_TOKEN=MEMBER).error
    assert_no_network(error, f"lacks {SHARDS[0]})", user)


def test_something_that_is_no_hub_answers(user):
    user.hub.says = (200, "<html>Log in to the guest network.</html>")
    assert "cannot be reached or is no hub" in user.resolve("owner/open").error


def test_a_cache_that_cannot_be_written(user, tmp_path):
    (tmp_path / "file").touch()
    error = user.resolve("owner/open", HF_HUB_CACHE=str(tmp_path / "file"), HF_TOKEN=MEMBER).error
    assert f"set HF_HUB_CACHE (now {tmp_path / 'file'}) to a folder that can be written to" in error


def test_a_name_that_no_hub_has(user):
    assert "'my models/tiny' is no folder and no hub id" in user.resolve("my models/tiny", HF_TOKEN=MEMBER).error
