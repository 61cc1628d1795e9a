"""Data sets of the hub: the real `datasets` client, each time in a new process, against a stand-in for the hub."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import Hub, Repository, User

pytestmark = pytest.mark.slow

CODE = """
import json, sys
from pathlib import Path
from recipe.data.digests import Digests
from recipe.data.sources import Spec, open_sources
from recipe.errors import UserError
for fields in json.loads(sys.argv[1]):
    try:
        source, = open_sources([Spec(**fields)], Digests(Path("unused")))
        found = {name: getattr(source, name) for name in ("name", "unit", "size", "notes", "revision", "identity")}
        found["texts"] = [row.fields["text"] for chunk in source.chunks() for row in chunk.rows()]
        found["place"] = [chunk.place(1) for chunk in source.chunks()][0]
    except UserError as error:
        found = {"error": str(error)}
    print("SOURCE", json.dumps(found))
"""
NAME = "datasets/owner/Texts"
CONFIGURED = b"""---
configs:
- config_name: small
  data_files: small.jsonl
- config_name: large
  data_files:
  - {split: train, path: large.jsonl}
  - {split: test, path: small.jsonl}
---
"""


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


OLD = Repository({"data.jsonl": lines("a", "b", "c")})
NEW = Repository({"data.jsonl": lines("a", "b", "c", "d")})


class Reader(User):
    def open(self, *specs: dict[str, Any], **env: str | None) -> list[dict[str, Any]]:
        self.hub.requests.clear()
        printed = self.python("-c", CODE, json.dumps([{"path": "owner/Texts", **spec} for spec in specs]), **env)
        return [json.loads(line.removeprefix("SOURCE ")) for line in printed.splitlines() if line.startswith("SOURCE ")]


@pytest.fixture(scope="module")
def hub() -> Hub:
    hub = Hub()
    hub.repositories = {
        NAME: OLD,
        "datasets/owner/two": Repository(
            {"README.md": CONFIGURED, "small.jsonl": lines("small"), "large.jsonl": lines("large", "larger")}
        ),
        "datasets/owner/script": Repository({"script.py": b"import os"}),
        "datasets/owner/broken": Repository({"data.jsonl": lines("a") + b'{"text": '}),
        "datasets/owner/private": Repository({"data.jsonl": lines("a")}, private=True),
    }
    return hub


@pytest.fixture
def reader(hub: Hub, tmp_path: Path) -> Iterator[Reader]:
    yield Reader(hub, tmp_path / "home")
    hub.repositories[NAME], hub.says = OLD, None


def test_a_revision_is_fetched_once_and_never_taken_for_another(reader):
    (first,) = reader.open({"revision": "v1"})
    assert first == {
        "name": f"owner/Texts (train) at {OLD.commit[:12]}",
        "unit": "row",
        "size": 3,
        "notes": [f"owner/Texts: downloaded 0.0 MB, revision {OLD.commit}, split 'train', 3 rows"],
        "revision": OLD.commit,
        "identity": f"hub:owner/Texts:default:train:{OLD.commit}",
        "texts": ["a", "b", "c"],
        "place": "owner/Texts row 1",
    }
    assert reader.hub.requests[-1] == f"GET /{NAME}/resolve/{OLD.commit}/data.jsonl"

    prepared = reader.home / "datasets/owner___texts/default"
    shutil.copytree(prepared, prepared.with_name("default-data_files=0a1b2c"))  # of a call with other arguments
    cached = {**first, "notes": [first["notes"][0].replace("downloaded 0.0 MB", "from the cache")]}
    revisions = [{"revision": "v1"}, {"revision": OLD.commit}, {}, {"revision": "v2"}, {"revision": NEW.commit}]
    *found, tag, commit = reader.open(*revisions, HF_HUB_OFFLINE="1")
    assert (found, reader.hub.requests) == ([cached] * 3, [])
    for answer, revision in ((tag, "v2"), (commit, NEW.commit)):
        assert (
            f"revision {revision}) is no file or folder here, and could not be loaded from the Hub" in answer["error"]
        )
        assert f"the cache has revision {OLD.commit}; HF_HUB_OFFLINE is set: fetch it" in answer["error"]
        assert f"the same HF_HOME ({reader.home})" in answer["error"]

    reader.hub.repositories[NAME] = NEW
    pinned, asked, gone = reader.open({"revision": OLD.commit}, {"revision": "main"}, {"revision": "v3"})
    assert pinned == cached
    assert (asked["revision"], asked["texts"]) == (NEW.commit, ["a", "b", "c", "d"])
    assert "DatasetNotFoundError: Revision 'v3' doesn't exist" in gone["error"]
    assert [request for request in reader.hub.requests if OLD.commit in request] == [], "what is pinned costs none"

    # Whether there is to be no hub or something else answers, each gets what it asked for, and nothing newer.
    for offline, says in (("1", None), (None, (200, "<html>Log in to the guest network.</html>"))):
        reader.hub.says = says
        asked = [{"revision": OLD.commit}, {"revision": "v1"}, {"revision": "main"}, {"revision": "v2"}]
        *found, unknown = reader.open(*asked, HF_HUB_OFFLINE=offline)
        assert [answer["texts"] for answer in found] == [["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c", "d"]]
        assert [answer["revision"] for answer in found] == [OLD.commit, OLD.commit, NEW.commit]
        assert "LookupError: the Hub does not give it, and the cache has revision" in unknown["error"]


def test_configurations_and_splits(reader):
    specs = [
        {"path": "owner/two", "name": name, "split": split}
        for name in ("small", "large")
        for split in ("train", "test")
    ]
    small, no_test, large, test = reader.open(*specs)
    assert [answer["texts"] for answer in (small, large, test)] == [["small"], ["large", "larger"], ["small"]]
    assert "(configuration small, split 'test', " in no_test["error"] and 'Unknown split "test"' in no_test["error"]
    assert test["name"].startswith("owner/two (test) at ")
    assert len({small["identity"], large["identity"], test["identity"]}) == 3
    pinned = {**specs[0], "revision": small["revision"]}
    small, again, unclear, other = reader.open(specs[0], pinned, {"path": "owner/two"}, {}, HF_HUB_OFFLINE="1")
    assert small["texts"] == again["texts"] == ["small"]
    assert "ConnectionError: Couldn't reach 'owner/Texts' on the Hub" in other["error"]
    assert "multiple 'owner/two' configurations in the cache: " in unclear["error"]


def test_what_cannot_be_loaded(reader):
    wrong = {
        "owner/nothing": "DatasetNotFoundError: Dataset 'owner/nothing' doesn't exist on the Hub or cannot be accessed",
        "owner/private": "DatasetNotFoundError: Dataset 'owner/private' doesn't exist on the Hub or cannot be accessed",
        "owner/script": "RuntimeError: Dataset scripts are no longer supported, but found script.py",
        "owner/broken": "DatasetGenerationError: JSON parse error",
        "owner/two": "Config name is missing.\nPlease pick one among the available configs: ['small', 'large']",
        "a b/c": "HFValidationError: Repo id must",
        "a/b/c": "FileNotFoundError: ",
    }
    specs = [{"path": path, "key": f"datasets[{at}]"} for at, path in enumerate(wrong)]
    for at, (answer, (path, why)) in enumerate(zip(reader.open(*specs), wrong.items(), strict=True)):
        assert answer["error"].startswith(
            f"datasets[{at}] '{path}' (configuration default, split 'train', revision main) is no file or folder here"
        )
        assert why in answer["error"] and answer["error"].endswith("; check path, name, split and revision")
    no_config, no_split = reader.open({"name": "x"}, {"split": "x"})
    assert "BuilderConfig 'x' not found. Available: ['default']" in no_config["error"]
    assert "Unknown split \"x\". Should be one of ['train']" in no_split["error"]
