"""The HTML templates of this folder. Jinja2 escapes every value that they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def render(name: str, **values: Any) -> Markup:
    """Fill the template ``name``. A value that is already :class:`Markup` is not escaped again."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return Markup(environment.get_template(name).render(**values))
