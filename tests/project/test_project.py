"""What people need to carry the project on: workflows, forms, checklists and versions agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import bpk
from tests.project.test_packaging import PROJECT
from tests.project.test_recipes import CONTRIBUTING, RECIPES, ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML comes with mkdocs: pip install -e '.[docs]'")

VERSION = PROJECT["project"]["version"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
JOBS = [pytest.param(job, id=f"{file}-{name}") for file, w in WORKFLOWS.items() for name, job in w["jobs"].items()]


# ---- what CONTRIBUTING and the checklist name -------------------------------------------------------
def targets() -> set[str]:
    """What `make` can be asked for."""
    lines = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][\w-]*):", lines, re.MULTILINE))


def asked_of_make(text: str) -> set[str]:
    """The targets in commands: `make test ARGS=...`, `make lint doctest`, `make .venv/.has-test`."""
    words = [word for call in re.findall(r"\bmake ([\w./ -]+)", text) for word in call.split()]
    return {word for word in words if re.fullmatch(r"[a-z.][\w./-]*", word)}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git tells which files belong to the project")
def test_no_file_has_marks_of_a_merge() -> None:
    """They are seen in code at once, and in a page by readers first."""
    marks = ["git", "grep", "-nE", "^(<{7} |>{7} )"]
    found = subprocess.run(marks, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/releasing.md", ".github/pull_request_template.md"])
def test_commands_and_files_exist(page: str) -> None:
    text = re.sub(r"^```python\n.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    commands = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"^ *```\n(.*?)^ *```$", text, re.M | re.S))
    assert asked_of_make(commands) <= targets() and asked_of_make("make tset ARGS=1") == {"tset"}
    made = ("out/", "benchmarks/results/layers.json")
    for path in re.findall(r"(?<![\w/.])((?:[\w.]+/)+[\w.]+\.\w+|[A-Z]\w+\.md|\.ci/run)\b", commands):
        assert path in RECIPES or path.startswith(made) or (ROOT / path).exists(), path


def test_the_pull_request_asks_for_what_contributing_says() -> None:
    section = CONTRIBUTING.partition("## Before you open a pull request")[2].partition("\n## ")[0]
    points = re.findall(r"^- (.*)$", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", section), re.MULTILINE)
    template = (ROOT / ".github/pull_request_template.md").read_text()
    assert points and points == re.findall(r"^- \[ \] (.*)$", template, re.MULTILINE)


def test_issue_forms_ask_for_what_tells_most() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert set(forms) == {"config", "wrong_number", "unsupported_layer", "slow_or_memory", "feature"}
    forms.pop("config")
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids)
    assert "bpk.verify(" in str(forms["wrong_number"]) and "bpk.support(" in str(forms["unsupported_layer"])
    code = next(part for part in forms["wrong_number"]["body"] if part.get("id") == "code")["attributes"]["value"]
    exec(code, {})
    asked = {part["id"]: part for part in forms["wrong_number"]["body"] if "id" in part}
    command = asked["versions"]["attributes"]["description"]
    done = subprocess.run(command.replace("python", sys.executable, 1), shell=True, capture_output=True, text=True)
    assert done.stdout.split() == [sys.version.split()[0], torch.__version__, bpk.__version__], done.stderr


def test_the_map_of_the_code_is_complete() -> None:
    """docs/architecture.md names every module of `bpk/` that the contract of import-linter lists, and no other.

    Of the folders in which a backward pass runs, it names every file.
    """
    page = (ROOT / "docs/architecture.md").read_text()
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    listed = set(re.findall(r"\w+", " ".join(contract["layers"]))) - {"rules", "jacobians"}
    section = page.partition("## The folders of `bpk/`")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)(?:\.py|/)`", " ".join(rows))) == listed
    packages = [
        path.parent
        for name in ("fields", "plan", "recording", "sweeps")
        for path in (ROOT / "bpk" / name).rglob("__init__.py")
    ]
    for folder in [path.relative_to(ROOT / "bpk").as_posix() for path in packages]:
        inside = {path.name for path in (ROOT / "bpk" / folder).glob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"`(\w+\.py)`", rows[f"`{folder}/`"])) == inside
    files = {path.name for folder in ("bpk", "jacobians") for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", page)) <= files
    assert all((ROOT / path).exists() for path in re.findall(r"bpk/[\w/]+\.py", page))


# ---- workflows: they cannot run here, but what they name can be looked up ------------------------------
def commands_of(job: dict[str, Any]) -> str:
    """Everything that a job types."""
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("job", JOBS)
def test_jobs_name_what_exists(job: dict[str, Any]) -> None:
    commands = commands_of(job)
    extras = {f".venv/.has-{name}" for name in PROJECT["project"]["optional-dependencies"]}
    assert asked_of_make(commands) <= targets() | extras
    for path in re.findall(r"(?:^|\s)((?:\.ci|tools|tests)/[\w./]+)", commands):
        assert (ROOT / path).exists(), path
        assert not path.endswith((".sh", "run")) or os.access(ROOT / path, os.X_OK), f"{path} cannot be executed"


@pytest.mark.parametrize("job", JOBS)
def test_jobs_are_bounded_and_pinned(job: dict[str, Any]) -> None:
    assert job["timeout-minutes"] <= 90
    assert not job["runs-on"].endswith("latest")
    for step in job["steps"]:
        assert re.search(r"@v\d+\.\d+\.\d+$", step.get("uses", "@v1.0.0")), step
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", ""), "expressions in a script are pasted into it: pass them by env"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_may_only_read(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"} and "group" in workflow["concurrency"]
    more = {key: job["permissions"] for key, job in workflow["jobs"].items() if "permissions" in job}
    assert (
        more
        == {
            "ci.yml": {},
            "docs.yml": {"deploy": {"pages": "write", "id-token": "write"}},
            "release.yml": {"publish": {"id-token": "write"}},
        }[name]
    )


def test_the_workflow_runs_what_the_checkout_runs() -> None:
    jobs = WORKFLOWS["ci.yml"]["jobs"]
    assert commands_of(jobs["checks"]) == ".ci/run"
    steps = re.findall(r"^(?:make|tools/).*$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert {"make test", "make lint", "make doctest", "tools/check_wheel.sh"} <= set(steps)
    assert "make docs" in commands_of(jobs["docs"]) and "tests/project/test_site_browser.py" in commands_of(
        jobs["browser"]
    )
    on = {name: workflow[True] for name, workflow in WORKFLOWS.items()}  # YAML 1.1 reads `on` as true
    assert on["ci.yml"]["push"] == {"branches": ["main"]} and "pull_request" in on["ci.yml"]
    assert on["docs.yml"]["push"] == on["release.yml"]["push"] == {"tags": ["v*"]}


def test_versions_of_the_matrix_are_those_that_the_package_declares() -> None:
    jobs = WORKFLOWS["ci.yml"]["jobs"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert jobs["python"]["strategy"]["matrix"]["python"] == declared
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"
    [torch_versions] = [d for d in PROJECT["project"]["dependencies"] if d.startswith("torch")]
    found = re.fullmatch(r"torch>=(\d+\.\d+),<(\d+)", torch_versions)
    assert found is not None
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == [f"torch=={found[1]}.*", f"torch<{found[2]}"]


def test_a_release_is_checked_before_somebody_approves_it() -> None:
    jobs = WORKFLOWS["release.yml"]["jobs"]
    commands = commands_of(jobs["build"])
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["environment"] == "pypi"
    assert ".ci/run" in commands and "tools/check_wheel.sh" in commands and "make release" in commands
    assert "make release" in commands_of(WORKFLOWS["docs.yml"]["jobs"]["build"])
    [tag] = [step["run"] for step in jobs["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")]
    for name, status in ((f"v{VERSION}", 0), (VERSION, 1), (f"v{VERSION}.1", 1)):
        env = {**os.environ, "GITHUB_REF_NAME": name}
        assert subprocess.run(["bash", "-c", tag], cwd=ROOT, env=env).returncode == status, name


# ---- versions -----------------------------------------------------------------------------------------
def test_pre_commit_has_the_pinned_ruff() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    ruff, local = config["repos"]
    assert pinned is not None and ruff["rev"] == f"v{pinned[1]}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    [lint] = local["hooks"]
    assert asked_of_make(lint["entry"]) <= targets() and lint["stages"] == ["manual"]


def test_citation() -> None:
    """What the format asks for (CFF 1.2.0), this version, and the three papers."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cff["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= set(cff)
    assert str(cff["version"]) == VERSION and cff["license"] == PROJECT["project"]["license"]
    assert cff["authors"] == PROJECT["project"]["authors"]
    references = cff["references"]
    assert all({"type", "title", "authors"} <= set(reference) for reference in references)
    first = {(reference["authors"][0]["family-names"], reference["year"]) for reference in references}
    assert first == {("Dangel", 2020), ("Martens", 2015), ("Botev", 2017)}
