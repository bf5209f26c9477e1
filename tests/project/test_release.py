"""A release by one command: what it refuses, how versions of the site lie beside each other, and a whole one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs pip install -e '.[docs]'")

from tests.project.built_site import ROOT, served
from tests.project.test_packaging import PROJECT
from tests.project.test_site_browser import CHROMIUM, OPTIONS
from tools import release

VERSION = PROJECT["project"]["version"]
ALONE = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
NAMED = ("-c", "user.name=bpk", "-c", "user.email=bpk@example.org", "-c", "commit.gpgsign=false")

if shutil.which("git") is None:
    pytest.skip("a release is made of a tag: it needs git", allow_module_level=True)


def git(folder: Path, *arguments: str) -> str:
    """A command of git, without settings of the user."""
    command = ["git", *NAMED, *arguments]
    return subprocess.run(command, cwd=folder, env=ALONE, check=True, capture_output=True, text=True).stdout


def committed(folder: Path) -> Path:
    """A repository with everything in a folder."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "all")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with a version."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "bpk"\nversion = "1.2.3"\n')
    return committed(tmp_path)


def test_a_commit_without_its_tag_is_refused(small: Path) -> None:
    with pytest.raises(SystemExit, match=r"must have the tag v1\.2\.3, and it has no tag"):
        release.tagged(small)
    git(small, "tag", "v1.2.2")
    with pytest.raises(SystemExit, match=r"must have the tag v1\.2\.3, and its tags are v1\.2\.2"):
        release.tagged(small)
    git(small, "tag", "v1.2.3")
    assert release.tagged(small) == "1.2.3"
    (small / "pyproject.toml").write_text("changed")
    with pytest.raises(SystemExit, match=r"not committed(.|\n)*pyproject\.toml"):
        release.tagged(small)


def site_of(folder: Path, *versions: str) -> Path:
    """Sites with one page, published in this order."""
    for version in versions:
        (folder / version).mkdir(parents=True, exist_ok=True)
        (folder / version / "index.html").write_text(f"bpk {version}")
        release.publish(folder, version)
    return folder


def test_the_newest_version_comes_first_whatever_was_published_last(tmp_path: Path) -> None:
    site = site_of(tmp_path, "0.9.0", "0.10.0", "0.9.1")
    listed = json.loads((site / "versions.json").read_text())
    assert [entry["version"] for entry in listed] == ["0.10.0", "0.9.1", "0.9.0"]
    assert [entry["aliases"] for entry in listed] == [["latest"], [], []]
    assert "url=0.10.0/" in (site / "index.html").read_text()


def test_published_versions_stay(tmp_path: Path) -> None:
    online, new = site_of(tmp_path / "online", "0.1.0", "0.2.0"), tmp_path / "new"
    with served(online) as address:
        release.bring(address, new)
    site_of(new, "0.3.0")
    assert [(new / v / "index.html").read_text() for v in ("0.1.0", "0.2.0")] == ["bpk 0.1.0", "bpk 0.2.0"]
    assert len(json.loads((new / "versions.json").read_text())) == 3
    with served(tmp_path) as address:  # there is no versions.json: nothing has been published
        release.bring(address, tmp_path / "first")
    assert list((tmp_path / "first").iterdir()) == []
    (online / "versions.json").write_text('[{"version": "../../secret"}]')
    with served(online) as address, pytest.raises(ValueError, match="Invalid version"):
        release.bring(address, new)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="needs build: pip install -e '.[dev]'")
def test_a_release_as_a_whole(tmp_path: Path) -> None:
    """Of the files of this checkout; then a second version beside it, and from one to the other in the browser."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    source, out = tmp_path / "source", tmp_path / "out"
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if name and ((ROOT / name).exists() or (ROOT / name).is_symlink()):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    git(committed(source), "tag", f"v{VERSION}")
    (source / "bpk" / "not_committed.py").write_text("")
    command = [sys.executable, "-m", "tools.release", "--root", str(source), "--out", str(out)]
    offline = ["--no-isolation"] if find_spec("setuptools") else []
    done = subprocess.run([*command, *offline], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    names = {file.name for file in (out / "dist").iterdir()}
    assert names == {f"bpk-{VERSION}.tar.gz", f"bpk-{VERSION}-py3-none-any.whl", "SHA256SUMS"}
    held = zipfile.ZipFile(out / "dist" / f"bpk-{VERSION}-py3-none-any.whl").namelist()
    assert "bpk/rules/linear.py" in held and "bpk/not_committed.py" not in held
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out / "dist", check=True)
    with tarfile.open(out / "site" / f"{VERSION}.tar.gz") as archive:
        assert f"{VERSION}/index.html" in archive.getnames()

    if CHROMIUM is None or find_spec("playwright") is None:
        return
    shutil.copytree(out / "site" / VERSION, out / "site" / "99.0.0")
    release.publish(out / "site", "99.0.0")
    from playwright.sync_api import sync_playwright

    with served(out / "site") as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page()
        page.goto(address)
        page.wait_for_url("**/99.0.0/")
        page.locator(".md-version__link").nth(1).wait_for(state="attached")
        assert page.locator(".md-version__link").all_text_contents() == ["99.0.0", VERSION]
        page.locator(".md-version__link", has_text=VERSION).press("Enter")
        page.wait_for_url(f"**/{VERSION}/")
        assert page.locator(".md-version__current").inner_text() == VERSION
        browser.close()
