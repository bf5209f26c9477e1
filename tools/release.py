"""Wheel and site of one tagged commit, by one command: `python -m tools.release` (`make release`).

    out/release/dist/   source distribution and wheel, and SHA256SUMS
    out/release/site/   a folder for each version, 0.1.0/, and the same as 0.1.0.tar.gz; versions.json, from which pages
                        list the others; index.html, which leads to the newest

Only what the tag holds is built, from an archive of it: nothing of the working tree gets in, and the same tag gives the
same wheel. `--published ADDRESS` brings in the versions of a site that is there, so that they stay.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from packaging.version import Version

from tools.site.links import Site

ROOT = Path(__file__).resolve().parents[1]
INDEX = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={version}/">
<link rel="canonical" href="{version}/">
<title>bpk</title>
<a href="{version}/">bpk {version}</a>
"""


def git(root: Path, *arguments: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def tagged(root: Path) -> str:
    """The version that the commit is tagged with; stops where there is none, or where it is not this one."""
    if changed := git(root, "status", "--porcelain", "--untracked-files=no"):
        sys.exit(f"not committed, and so not in the release:\n{changed}")
    lines = git(root, "show", "HEAD:pyproject.toml").splitlines()
    [version] = [line.split('"')[1] for line in lines if line.startswith("version = ")]
    tags = git(root, "tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        found = f"its tags are {', '.join(tags)}" if tags else "it has no tag"
        sys.exit(f"pyproject.toml says {version}, so this commit must have the tag v{version}, and {found}")
    return version


def unpack(root: Path, tag: str, folder: Path) -> None:
    """The files of a tag."""
    packed = subprocess.run(["git", "archive", tag], cwd=root, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="tar")


def distributions(source: Path, dist: Path, seconds: str, isolated: bool) -> None:
    """Source distribution and wheel, with the time of the commit on their files; the names in the wheel are checked."""
    shutil.rmtree(dist, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--outdir", str(dist), *["--no-isolation"] * (not isolated), "."]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    subprocess.run(build, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)
    files = sorted(dist.iterdir())
    [wheel] = [file for file in files if file.suffix == ".whl"]
    subprocess.run([sys.executable, "tools/check_wheel.py", "names", str(wheel)], cwd=source, check=True)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (dist / "SHA256SUMS").write_text("".join(sums))


def pages(source: Path, place: Path) -> None:
    """The site, with a list of versions in its header; every link of it is followed."""
    shutil.rmtree(place, ignore_errors=True)
    environment = {**os.environ, "BPK_SITE_LISTS_VERSIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)]
    subprocess.run(build, cwd=source, env=environment, check=True)
    site = Site(place)
    if wrong := [*site.broken(), *site.heavy()]:
        sys.exit("\n".join(wrong))


def publish(site: Path, version: str) -> list[str]:
    """Pack a version, and list all, the newest first."""
    with tarfile.open(site / f"{version}.tar.gz", "w:gz") as archive:
        archive.add(site / version, version)
    versions = sorted((file.name.removesuffix(".tar.gz") for file in site.glob("*.tar.gz")), key=Version, reverse=True)
    listed = [{"version": v, "title": v, "aliases": ["latest"] * (v == versions[0])} for v in versions]
    (site / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (site / "index.html").write_text(INDEX.format(version=versions[0]))
    return versions


def bring(address: str, site: Path) -> None:
    """The versions that are published at an address; none where nothing is yet."""
    try:
        with urlopen(f"{address.rstrip('/')}/versions.json") as found:
            versions = [entry["version"] for entry in json.load(found)]
    except HTTPError as error:
        if error.code != 404:
            raise
        versions = []
    site.mkdir(parents=True, exist_ok=True)
    for version in map(str, map(Version, versions)):  # so that it is a version, and no path
        with urlopen(f"{address.rstrip('/')}/{version}.tar.gz") as packed:
            (site / f"{version}.tar.gz").write_bytes(packed.read())
        with tarfile.open(site / f"{version}.tar.gz") as archive:
            archive.extractall(site, filter="data")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, check, and say where it lies."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Wheel and site of the tag on HEAD.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--out", type=Path, help="where they go (default: out/release)")
    parser.add_argument("--published", metavar="ADDRESS", help="a site whose versions stay")
    parser.add_argument("--no-isolation", action="store_true", help="build with the setuptools of this environment")
    given = parser.parse_args(arguments)
    out = (given.out or given.root / "out" / "release").resolve()
    version = tagged(given.root)
    if given.published:
        bring(given.published, out / "site")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        unpack(given.root, f"v{version}", source)
        distributions(source, out / "dist", git(given.root, "show", "-s", "--format=%ct"), not given.no_isolation)
        pages(source, out / "site" / version)
    versions = publish(out / "site", version)
    print(f"{out}: {version} as {', '.join(f.name for f in sorted((out / 'dist').iterdir()))}")
    print(f"the site has {', '.join(versions)}")


if __name__ == "__main__":
    main()
