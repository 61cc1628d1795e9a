"""A stand-in for the hub, and users of it. Tests use no network: a local HTTP server answers the real client as the hub
does.

Its statuses and headers are those that huggingface_hub 2.4 maps to errors (`utils/_http.py`, `hf_raise_for_status`). A
token that it does not know is a 401 on everything, public models too (huggingface_hub#2847). A gated model shows its
list of files to all and refuses the files. To those who cannot see it, a private model does not exist.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.conftest import ROOT

# Tokens: of an account with access to everything, without the permission to use it, of another account, and of none.
MEMBER, NARROW, STRANGER, INVALID = "hf_secretOfAMember", "hf_secretNarrow", "hf_secretOfAStranger", "hf_secretOfNone"
CODE = """
import json, sys
from recipe.errors import UserError
from recipe.hub import resolve
name, revision, download = json.loads(sys.argv[1])
try:
    folder, warnings = resolve(name, revision, download)
    print(json.dumps({"folder": str(folder), "warnings": warnings, "error": None}))
except UserError as error:
    print(json.dumps({"folder": None, "warnings": [], "error": str(error)}))
"""


@dataclass
class Repository:
    """A model or data set on the stand-in. `sizes` is what its list says of files, where that is not their length."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join([*map(str.encode, self.files), *self.files.values()])).hexdigest()

    def has(self, revision: str) -> bool:
        return revision in ("main", "v1", self.commit)

    def size(self, path: str) -> int:
        return self.sizes.get(path, len(self.files[path]))


class Hub:
    """The server; `requests` is what it was asked, as 'METHOD path'. `says` answers everything, as (status, text).

    Data sets are `repositories` with 'datasets/' before their names, as in the hub's addresses.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.says: tuple[int, str] | None = None
        hub = self

        class Handler(_Handler):
            def answer(self) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                _answer(hub, self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def downloads(self) -> list[str]:
        return sorted(request.rsplit("/", 1)[1] for request in self.requests if request.startswith("GET /owner/"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        headers |= {"X_Error_Message": message, **({"X_Error_Code": code} if code else {})}
        self.send(status, json.dumps({"error": message}).encode(), Content_Type="application/json", **headers)

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), Content_Type="application/json")


def _answer(hub: Hub, to: _Handler) -> None:
    parts = [unquote(part) for part in urlsplit(to.path).path.strip("/").split("/")]
    api = parts[0] == "api"
    parts = parts[1:] if api else parts
    parts = parts[1:] if parts[0] == "models" else parts
    at = 3 if parts[0] == "datasets" else 2
    name, rest = "/".join(parts[:at]), parts[at:]
    token = to.headers.get("Authorization", "").removeprefix("Bearer ") or None
    if hub.says is not None:
        status, text = hub.says
        return to.send(200, text.encode(), Content_Type="text/html") if status == 200 else to.refuse(status, text)
    if token not in (None, MEMBER, NARROW, STRANGER):
        return to.refuse(401, "Invalid credentials in Authorization header")
    repository = hub.repositories.get(name)
    if repository is None or (repository.private and token != MEMBER):
        return to.refuse(401 if token is None else 404, "Repository not found", "RepoNotFound")
    if rest[:1] in (["revision"], ["tree"], ["resolve"]) and not repository.has(rest[1]):
        return to.refuse(404, f"Invalid rev id: {rest[1]}", "RevisionNotFound")
    if api:
        return to.send_json(_listing(repository, tree=rest[:1] == ["tree"], name=name))
    if repository.gated and token is None:
        return to.refuse(401, f"Access to model {name} is restricted. Please log in.", "GatedRepo")
    if repository.gated and token == NARROW:
        return to.refuse(403, "Please enable access to public gated repositories in your token's settings")
    if repository.gated and token != MEMBER:
        return to.refuse(403, f"Access to model {name} is restricted. Visit its page to ask for it.", "GatedRepo")
    path = "/".join(rest[2:])
    if path not in repository.files:
        return to.refuse(404, "Entry not found", "EntryNotFound", X_Repo_Commit=repository.commit)
    content = repository.files[path]
    to.send(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=repository.commit)


def _listing(repository: Repository, tree: bool, name: str) -> object:
    if tree:
        return [
            {"type": "file", "path": path, "size": repository.size(path), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in repository.files.items()
        ]
    siblings = [{"rfilename": path, "size": repository.size(path)} for path in repository.files]
    return {"id": name, "sha": repository.commit, "private": repository.private, "siblings": siblings, "tags": []}


@dataclass
class Answer:
    folder: Path | None
    warnings: list[str]
    error: str

    def files(self) -> list[str]:
        assert self.folder is not None, self.error
        return sorted(path.name for path in self.folder.iterdir())


@dataclass
class User:
    """Someone with a cache of their own, at the stand-in."""

    hub: Hub
    home: Path

    def python(self, *command: str, **env: str | None) -> str:
        """Run it and give its standard output; no token may be in anything that it prints."""
        values = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.home), "NO_PROXY": "127.0.0.1", **env}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        kept |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        kept |= {key: value for key, value in values.items() if value is not None}
        started = [sys.executable, *command]
        done = subprocess.run(started, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "hf_secret" not in done.stdout + done.stderr
        return done.stdout

    def resolve(self, name: str, revision: str | None = "main", download: bool = True, **env: str | None) -> Answer:
        found = json.loads(self.python("-c", CODE, json.dumps([name, revision, download]), **env).splitlines()[-1])
        return Answer(found["folder"] and Path(found["folder"]), found["warnings"], found["error"] or "")
