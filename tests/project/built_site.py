"""The documentation site, built once for all tests of a run, however many processes share them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds on the clock, while another process builds
PAGES = "pages.json"
BUILD = """
import json, pathlib, sys
from mkdocs.__main__ import cli
from tools.site.generated import generated
cli(["build", "--quiet", "--strict", "--site-dir", sys.argv[1]], standalone_mode=False)
pathlib.Path(sys.argv[2]).write_text(json.dumps(generated()), encoding="utf-8")
"""
"""`python -m mkdocs build`, which also writes down the pages that the build has generated."""


def built_site(factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of the site, and the seconds of one processor that it took to build it."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built_site"
    site, taken = place / "site", place / "seconds"
    try:
        place.mkdir()
    except FileExistsError:  # somebody builds it, or has
        deadline = time.monotonic() + PATIENCE
        while not taken.exists():
            assert time.monotonic() < deadline, "the build of the site failed in another process"
            time.sleep(0.2)
        return site, float(taken.read_text())
    before = processor_seconds()
    command = [sys.executable, "-c", BUILD, str(site), str(place / PAGES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = processor_seconds() - before
    unfinished = place / "unfinished"
    unfinished.write_text(str(seconds))
    unfinished.rename(taken)
    return site, seconds


def generated_pages(factory: pytest.TempPathFactory) -> dict[str, str]:
    """The Markdown of all generated pages by path, as the site was built from it."""
    site, _ = built_site(factory)
    pages: dict[str, str] = json.loads((site.parent / PAGES).read_text(encoding="utf-8"))
    return pages


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Where a folder is served, on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def processor_seconds() -> float:
    """What all finished child processes have taken."""
    return sum(os.times()[2:4])
