"""Dockerfile and .dockerignore: what hadolint does not see. No image is built here."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest) of each, comments left out and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage's instructions, its FROM first, by name and in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            found[rest.rpartition(" AS ")[2]] = []
        if found:
            found[next(reversed(found))].append((name, rest))
    return found


ARGS = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")


def test_gpu_is_what_a_build_without_a_target_makes() -> None:
    assert list(stages()) == ["flash-attn", "cpu", "gpu"]


@pytest.mark.parametrize("stage", stages())
def test_the_base_is_a_release_that_an_argument_names(stage: str) -> None:
    image = stages()[stage][0][1].rpartition(" AS ")[0]
    tag = image.partition(":")[2]
    arguments = re.findall(r"\$\{(\w+)\}", tag)
    assert arguments and not re.search(r"\d", re.sub(r"\$\{\w+\}", "", tag)), f"{image}: a version outside of an ARG"
    for argument in arguments:
        assert re.match(r"\d+\.\d+", ARGS[argument]), f"{argument}={ARGS[argument]}"


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_it_does_not_run_as_root(stage: str) -> None:
    # A number: Kubernetes' runAsNonRoot cannot know a name.
    assert int([rest for name, rest in stages()[stage] if name == "USER"][-1]) > 0


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_the_constraints_are_installed_before_any_code_is_there(stage: str) -> None:
    steps = [rest for name, rest in stages()[stage] if name in ("COPY", "RUN")]
    order = ["constraints.txt ./", "-r constraints.txt", "--chown=recipe . .", "launch/env.sh"]
    found = [next(i for i, step in enumerate(steps) if part in step) for part in order]
    assert found == sorted(found) and len(set(found)) == len(order)
    assert not [step for step in steps[: found[2]] if ". ." in step]


def test_the_versions_are_those_of_the_project() -> None:
    assert ARGS["TORCH_VERSION"] == PINS["torch"]
    named = re.findall(r"([\w-]+)==(\d[\w.]*)", (ROOT / "Dockerfile").read_text())
    assert {"packaging", "psutil", "setuptools"} <= {name for name, _ in named}
    assert [(name, version) for name, version in named if PINS.get(name, version) != version] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ARGS["FLASH_ATTN_VERSION"] in Requirement(project["optional-dependencies"]["gpu"][0]).specifier


def test_no_secret_goes_into_a_layer() -> None:
    words = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)
    assert [rest for name, rest in instructions() if name in ("ARG", "ENV") and words.search(rest)] == []


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out: one of its patterns is the file, or a folder that it is in."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(/.*)?", path):
                return True
    return False


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "runs/quickstart/run/export/model.safetensors",
        "logs/slurm-1.out",
        "slurm/logs/1.err",
        "llama70b-17.log",
        "slurm-17.out",
        "slurm/site.env",
        ".env",
        "configs/wandb.env",
        "hf_token",
        ".cache/huggingface/token",
        "token.txt",
        "key.pem",
        "recipe/__pycache__/cli.cpython-312.pyc",
        "fsdp_recipe.egg-info/PKG-INFO",
        "recipe.sqsh",
        "recipe.sif",
    ],
)
def test_it_stays_out_of_the_build(path: str) -> None:
    assert ignored(path)


def test_all_of_the_project_goes_into_the_build() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git, or no clone: the tracked files are not known")
    assert [path for path in listed.stdout.splitlines() if ignored(path)] == []
    assert not ignored("slurm/site.env.example")


def test_nothing_is_written_where_the_environment_is_in_place(tmp_path: Path) -> None:
    """An image is read-only under Slurm's container runtimes, and its user is whoever started the job."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/bin/true")
    stamp = f'cd "{ROOT}" && cat pyproject.toml constraints.txt | cksum >"{venv}/.installed"'
    subprocess.run(["bash", "-c", stamp], check=True)

    def state() -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for path in [venv, *venv.rglob("*")]}

    before = state()
    environment = os.environ | {"VENV": str(venv), "HOME": "/nonexistent"}
    subprocess.run(["bash", str(ROOT / "launch" / "env.sh")], env=environment, check=True, timeout=60)
    assert state() == before
