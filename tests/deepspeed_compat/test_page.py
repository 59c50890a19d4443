"""Every block of code of docs/deepspeed.md runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sdp.engine.config.load import load_config
from sdp.tests.deepspeed_compat.scripts import start_script

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
(SETTINGS,) = (code for language, code in BLOCKS if language == "json")
SCRIPTS = [code for language, code in BLOCKS if language == "python"]
# What must be true at the end, by a name that only one script has.
ENDS = {
    "sdp.initialize(": "assert engine.global_steps == 4 and isinstance(engine, sdp.SDPEngine)",
    "Trainer(": "assert trainer.state.global_step == 12 and isinstance(trainer.model_wrapped.engine, sdp.SDPEngine)",
    "Accelerator(": "assert model.global_steps == 4 and isinstance(model.engine, sdp.SDPEngine)",
}


def test_every_block_is_a_script_a_configuration_or_the_count() -> None:
    assert [language for language, _ in BLOCKS] == ["python", "json", "python", "python", ""]
    assert BLOCKS[-1][1].startswith("$ python -m lab.deepspeed_compat.count\n")
    assert [sum(name in script for name in ENDS) for script in SCRIPTS] == [1, 1, 1]


def test_the_configuration_loads() -> None:
    assert load_config(json.loads(SETTINGS)).sdp.groups == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_script_of_the_page_trains_and_ends_without_a_traceback(tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; the extra 'dev' has it")
    pytest.importorskip("deepspeed", reason="deepspeed is not installed; the extra 'dev' has it")
    (script,) = (script for script in SCRIPTS if name in script)
    done = start_script(tmp_path, f"{script}\n{ENDS[name]}\n", SETTINGS)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
