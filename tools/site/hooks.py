"""What mkdocs calls while it builds the site: generated pages become files, and get their place in the navigation."""

from __future__ import annotations

import os
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.generated import filled, generated, linked, navigation


def on_config(config: MkDocsConfig) -> None:
    """Add the generated pages to the sections of `nav` that bear their names.

    The header lists versions only where there are some beside this one (`tools/release.py`): elsewhere, browsers would
    look for a list that is not there.
    """
    if os.environ.get("BPK_SITE_LISTS_VERSIONS"):
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    generated.cache_clear()  # the pages are made anew while the site is served
    pages = navigation(generated())
    nav: list[Any] = config.nav or []
    for entry in nav:
        (title, content), *_ = entry.items()
        if isinstance(content, list) and title in pages:
            content.extend(path for path in pages[title] if path not in content)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown: str, page: Page, **others: Any) -> str:
    """Links to files of the repository lead to the pages that show them, and generated parts are put in."""
    return linked(filled(markdown), page.file.src_uri)
