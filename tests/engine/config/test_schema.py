"""The JSON file: what is accepted, and one clear line for everything else."""

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import json_schema, load_config
from sdp.engine.config.named_params import check_named_params
from sdp.engine.config.removed import COMMANDS, KEYS, OPTIONS, VALUES
from sdp.engine.config.schema import Config
from sdp.engine.errors import ConfigError, SDPError
from sdp.tools.cli import main

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clipp1ng": 1.0}, "gradient_clipp1ng: unknown key, did you mean gradient_clipping?"),
    ({"sdp": {"group": 2}}, "sdp.group: unknown key, did you mean groups?"),
    ({"groups": 2}, "groups: unknown key, did you mean sdp.groups?"),
    ({"training": {"groups": 2}}, "training.groups: unknown key, did you mean sdp.groups?"),
    ({"sdp": {"bf16": {"enabled": True}}}, "sdp.bf16: unknown key, did you mean bf16?"),
    ({"training": {"evaluate_evry": 2}}, "training.evaluate_evry: unknown key, did you mean evaluate_every?"),
    ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge: unknown key, did you mean stage?"),
    ({"zero_optimization": {"overlap_com": True}},
        "zero_optimization.overlap_com: unknown key, did you mean overlap_comm?"),
    ({"checkpoint": {"tag_validatoin": "Warn"}},
        "checkpoint.tag_validatoin: unknown key, did you mean tag_validation?"),
    ({"sdp": {"groups": "4"}}, "sdp.groups: input should be a valid integer (found"),
    ({"sdp": {"groups": 0}}, "sdp.groups: input should be greater than 0 (found 0)"),
    ({"sdp": {"groups": True}}, "sdp.groups: input should be a valid integer (found true)"),
    ({"train_batch_size": -8}, "train_batch_size: input should be greater than 0 (found -8)"),
    ({"train_batch_size": 8.5}, "train_batch_size: input should be a valid integer"),
    ({"gradient_clipping": -1}, "gradient_clipping: input should be greater than or equal to 0 (found -1)"),
    ({"bf16": True}, "bf16: "),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: input should be 0, 1, 2 or 3 (found 4)"),
    ({"sdp": {"capacity": "half"}}, "sdp.capacity: input should be a valid number or input should be a valid list"),
    ({"sdp": {"placement": "cyclical"}},
        "sdp.placement: input should be 'cyclic', 'balanced', 'contiguous' or 'random' or "),
    ({"sdp": {"placement": {"layers.0": [-1]}}},
        "sdp.placement.layers.0.0: input should be greater than or equal to 0 (found -1)"),
    ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.type: this key is required"),
    ({"optimizer": "AdamW"}, "optimizer: "),
    ({"activation_checkpointing": {"mode": "some"}},
        "activation_checkpointing.mode: input should be 'none', 'full' or 'selective'"),
    # What this version cannot do.
    ({"sdp": {"masking": "both"}},
        "sdp.masking: input should be 'forward' or 'backward' or input should be a valid list (found \"both\")"),
    ({"training": {"compile": True}, "tensor_parallel": {"autotp_size": 2}},
        "training.compile: true is not available in this version together with tensor_parallel.autotp_size above 1; "
        "use false"),
    # DeepSpeed's semantics that cannot be honoured.
    ({"gradient_allreduce_op": "sum"},
        'gradient_allreduce_op: "sum" cannot be honoured by this engine: gradients are averaged; remove it or'),
    ({"data": {"path": "corpus", "sequence_length": 1}},
        "data.sequence_length: input should be greater than or equal to 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "message"), REFUSED, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else ""
)
def test_refused_in_one_line(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_neutral_values_and_hints_are_accepted() -> None:
    config = load_config(
        {
            "fp16": {"enabled": False, "loss_scale": 0},
            "prescale_gradients": False,
            "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"},
                "reduce_bucket_size": 5e8},
            "checkpoint": {"tag_validation": "Warn"},
            "zero_allow_untested_optimizer": True,
        }
    )  # fmt: skip
    assert config.zero_optimization.stage == 2
    assert config.hints == (
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_allow_untested_optimizer",
    )


def test_defaults_and_round_trip() -> None:
    config = load_config({})
    assert (config.sdp.groups, config.sdp.capacity, config.sdp.engine, config.gradient_clipping) == (
        1, 1.0, "fsdp2", 0.0,
    )  # fmt: skip
    again = load_config(json.loads(config.model_dump_json()))
    assert again == config
    assert set(json_schema()["properties"]) == set(Config.model_fields)
    assert load_config({"sdp": {"capacity": 1, "groups": 2}}).sdp.capacity == 1.0


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(path)
    for text, message in (
        ('{"sdp": {', r"run.json:1:\d+: not valid JSON"),
        ("[1]", "a JSON object is expected, not list"),
        ('{"sdp": {"groups": 2, "groups": 4}}', "groups: one section has this key twice; remove one"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text('{"sdp": {"groups": 2}}')
    assert load_config(str(path)).sdp.groups == 2


def test_overrides() -> None:
    raw = {"sdp": {"groups": 2}}
    config = load_config(
        raw, ["sdp.groups=4", "sdp.masking=backward", "gradient_clipping=0.5", 'sdp.units=["layers.*"]']
    )
    assert (config.sdp.groups, config.sdp.masking, config.gradient_clipping, config.sdp.units) == (
        4, "backward", 0.5, ["layers.*"],
    )  # fmt: skip
    assert raw == {"sdp": {"groups": 2}}, "the caller's mapping is left alone"
    for override, message in (
        ("sdp.groups", "expected section.key=value"),
        ("=4", "expected section.key=value"),
        ("sdp.groups.x=4", "groups is not a section"),
        ("sdp.gruops=4", "sdp.gruops: unknown key, did you mean groups?"),
        ("sdp.groups=many", "sdp.groups: input should be a valid integer"),
    ):
        with pytest.raises(SDPError, match=message.replace("?", r"\?")):
            load_config(raw, [override])


@pytest.mark.parametrize("override", ["data.path=a\udcff", "a\udcff=1"])
def test_an_override_that_is_not_text_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set .*: it is not text in UTF-8"):
        load_config({"train_batch_size": 4}, [override])


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", float, "\ud800"])
def test_a_mapping_with_something_other_than_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="the configuration must consist of JSON values"):
        load_config({"train_batch_size": 4, "model": {"name": value}})


def test_env_section() -> None:
    assert load_config({"env": {"NCCL_IB_GID_INDEX": 3, "UCX_TLS": "rc,cuda"}}).env == {
        "NCCL_IB_GID_INDEX": 3,
        "UCX_TLS": "rc,cuda",
    }
    for name, value, message in (
        ("RANK", "1", "env.RANK: RANK cannot be set here, because it is not one of the listed variables"),
        ("A=B", "1", "cannot be the name of an environment variable"),
        ("NCCL_DEBUG", True, "env.NCCL_DEBUG: input should be a valid string"),
        ("NCCL_DEBUG", ["INFO"], "env.NCCL_DEBUG: input should be a valid string"),
        ("NCCL_DEBUG", "a\0b", "env.NCCL_DEBUG: string should match pattern"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config({"env": {name: value}})


def test_a_home_directory_in_a_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    raw = {"data": {"path": "~/corpus"}, "training": {"init_from": "~/model"}, "sdp": {"groups": 2}}
    config = load_config(raw)
    assert config.data.path == str(tmp_path / "corpus")
    assert config.training.init_from == str(tmp_path / "model")
    mixed = load_config({"data": {"sources": [{"path": "~/a", "weight": 1}]}})
    assert mixed.data.sources is not None and mixed.data.sources[0].path == str(tmp_path / "a")
    curves = load_config(
        {"tensorboard": {"enabled": True, "output_path": "~/curves"}, "data": {"tokenizer": "~/words"}}
    )
    assert curves.tensorboard.output_path == str(tmp_path / "curves")
    assert curves.data.tokenizer == str(tmp_path / "words")
    with pytest.raises(ConfigError, match=r"data\.path: .*no home directory for '~nobody-here/a'"):
        load_config({"data": {"path": "~nobody-here/a"}})


@pytest.mark.parametrize("weight", [1.7e308, 1e10, -1])
def test_weights_of_sources_have_bounds(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources"):
        load_config({"data": {"sources": [{"path": "a", "weight": weight}, {"path": "b", "weight": weight}]}})


@pytest.mark.parametrize("text", ["", " \n\t\n", "\ufeff", "# only a comment\n"])
def test_an_empty_file_is_one_line(tmp_path, text):
    path = tmp_path / "empty.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"empty\.json: is empty; write the settings as a JSON object, or \{\}"):
        load_config(path)
    path.write_text("{}")
    assert load_config(path) == load_config({})


def nested(path: str, value: object) -> dict[str, object]:
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
