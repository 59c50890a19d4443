"""MkDocs hooks: pages of files outside docs/, and Sphinx roles shown as code."""

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
    for path in (ROOT / "lab").rglob("*"):
        if path.suffix in (".md", ".png", ".json", ".log"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Follow links between docs/, whose pages are at the top of the site, and lab/."""
    if page.file.src_uri.startswith("lab/"):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return markdown.replace("](../lab/", "](lab/")


def _links_from_docs(text: str) -> str:
    text = re.sub(r"\]\(docs/", "](", text)
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = text.replace(f"]({name}.md", f"]({name.lower()}.md")
    return text.replace("](README.md", "](index.md")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show ``:class:`` and similar roles of docstrings as the bare name that they refer to."""
    return re.sub(r":(?:class|func|meth|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>", r"<code>\1</code>", html)
