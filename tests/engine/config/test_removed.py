"""What earlier versions had ends with one line that says what to use instead."""

from __future__ import annotations

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.config.named_params import check_named_params
from sdp.engine.config.removed import COMMANDS, KEYS, OPTIONS, VALUES
from sdp.engine.errors import ConfigError
from sdp.tools.cli import main


def nested(path: str, value: object) -> dict[str, object]:
    """Return a configuration in which only the key ``path`` is set."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("path", "value"), [*((path, "") for path in KEYS), *VALUES])
def test_a_removed_key_or_value_says_what_to_use_instead(path: str, value: object) -> None:
    raw = nested(path, value)
    for section in {"optimizer", "scheduler"} & raw.keys():
        raw[section] = {"type": "Adam", **raw[section]}  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as caught:
        config = load_config(raw)
        check_named_params(config.optimizer, config.scheduler)
    advice = VALUES[path, value] if (path, value) in VALUES else KEYS[path]  # type: ignore[index]
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).endswith(f" removed; {advice}")


@pytest.mark.parametrize("words", [*((command,) for command in COMMANDS), *OPTIONS])
def test_a_removed_command_or_option_says_what_to_use_instead(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "my.json"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"sdp: error: sdp {' '.join(words)}: this ") and printed.count("\n") == 1
    assert (OPTIONS[words] if len(words) == 2 else COMMANDS[words[0]]) in printed  # type: ignore[index]
