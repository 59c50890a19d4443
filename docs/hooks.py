"""MkDocs hooks: pages made of files outside docs/, and Sphinx roles shown as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add CONTRIBUTING.md and CHANGELOG.md, whose links start at the root of the repository."""
    for source, page in (("CONTRIBUTING.md", "contributing.md"), ("CHANGELOG.md", "changelog.md")):
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_links_from_docs(text)))
    return files


def _links_from_docs(text: str) -> str:
    text = re.sub(r"\]\(docs/", "](", text)
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = text.replace(f"]({name}.md", f"]({name.lower()}.md")
    return text.replace("](README.md", "](index.md")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show ``:class:`` and similar roles of docstrings as the bare name that they refer to."""
    return re.sub(r":(?:class|func|meth|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>", r"<code>\1</code>", html)
