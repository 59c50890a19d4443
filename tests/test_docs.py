"""The documentation is complete and current: every key, every command, every link."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")]
)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["configuration.md", "commands.md", "changes.md"])
def test_a_generated_page_is_current(generate: ModuleType, page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == generate.PAGES[page](), f"docs/{page} is out of date; run: python docs/generate.py"


def test_every_key_has_a_meaning_and_every_meaning_a_key(generate: ModuleType) -> None:
    keys = {name: set(generate.keys_of(schema)) for name, schema in generate.config_sections()}
    assert {name: set(meanings) for name, meanings in generate.read_meanings().items()} == keys


def test_every_key_is_on_the_page(generate: ModuleType) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [key for _, schema in generate.config_sections() for key in schema.model_fields if f"`{key}`" not in page]
    assert not missing


def test_every_command_and_option_is_on_the_page(generate: ModuleType) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## sdp (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    parsers = generate.command_parsers()
    assert list(sections) == list(parsers)
    for name, parser in parsers.items():
        hidden = ("-h", "--help", "--hosts")
        options = [option for option in parser._option_string_actions if option not in hidden]
        assert [option for option in options if f"`{option}" not in sections[name]] == []


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings of ``page``, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_promises_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[^`]+)`", page))
    assert named and [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_contributing_names_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = [
        path.parent
        for top in ("engine", "data", "models", "launcher", "tools")
        for path in (ROOT / top).rglob("__init__.py")
    ]
    names = {folder.relative_to(ROOT).as_posix() for folder in folders}
    missing = [
        name for name in sorted(names) if f"`{name}/`" not in text and f"`{name.removeprefix('engine/')}/`" not in text
    ]
    assert not missing, f"CONTRIBUTING.md: add a line for {missing}"


def _answers() -> list[str]:
    """The code in the column of answers of docs/what_people_ask.md."""
    page = (ROOT / "docs" / "what_people_ask.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[-2] for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 2]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def test_what_people_ask_names_commands_and_options_that_exist(generate: ModuleType) -> None:
    commands = [shlex.split(answer) for answer in _answers() if answer.startswith("sdp ")]
    parsers = generate.command_parsers()
    assert len(commands) >= 10
    for _, name, *words in commands:
        options = [word for word in words if word.startswith("--")]
        known = {*parsers[name]._option_string_actions}
        known |= {*parsers["train"]._option_string_actions} if name == "launch" else set()
        assert [option for option in options if option not in known] == [], f"sdp {name}"


def test_what_people_ask_names_keys_that_exist(generate: ModuleType) -> None:
    sections = {name: set(generate.keys_of(schema)) for name, schema in generate.config_sections()}
    top = sections[generate.TOP_LEVEL]
    keys = [answer for answer in _answers() if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", answer)]
    keys = [key for key in keys if key not in ("input_ids", "labels", "mfu", "sdp.initialize")]
    assert len(keys) >= 15
    for key in keys:
        section, _, last = key.rpartition(".")
        known = key in sections or last in (sections.get(section, set()) if section else top)
        assert known or key == "optimizer.params.no_decay", key
