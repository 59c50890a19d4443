"""The public scripts and files that docs/deepspeed.md counts, and why others are refused."""

from __future__ import annotations

from pathlib import Path

from lab.deepspeed_compat.count import (
    FILES,
    NAMES,
    describe_files,
    describe_names,
    find_engines,
    find_missing_names,
    find_reason,
)

# Why each of the other files is refused, by its path.
REFUSED = {
    "configs/autotuning_configs/tune.json": "pipe-parallel-size: this is a key of GPT-NeoX",
    "configs/autotuning_configs/tune_1-3B.json": "pipe-parallel-size: this is a key of GPT-NeoX",
    "configs/autotuning_configs/tune_6-7B.json": "pipe-parallel-size: this is a key of GPT-NeoX",
    "inference/sglang/ds_offload_nvme_aio.json": 'zero_optimization.offload_param.device: "nvme"',
    "inference/sglang/ds_offload_nvme_gds.json": 'zero_optimization.offload_param.device: "nvme"',
    "tests/model/BingBertSquad/deepspeed_bsz24_fp16_eigenvalue_quantize_config.json": "eigenvalue.enabled: true",
    "benchmarks/autosp/configs/autosp_config.json": "sequence_parallel_size: 2",
    "training/autotuning/hf/dsconfigs/ds_config_fp16_tune.json": "autotuning.enabled: true",
    "code/dsconfig/openllama_peft_stage_1.json": "bf16.enable: true cannot be honoured",
}


def test_70_of_79_files_load() -> None:
    refused = {
        name: str(find_reason(settings, "fsdp2")) for name, settings in FILES.items() if not find_engines(settings)
    }
    assert (len(FILES), len(refused)) == (79, len(REFUSED) == 9 and 9)
    for name, reason in refused.items():
        assert reason.startswith(REFUSED[name.partition(":")[2]]), name
        assert "\n" not in reason


def test_30_of_34_scripts_use_only_names_that_exist() -> None:
    first, *_ = describe_names()
    assert first == f"30 of {len(NAMES)} scripts use only names that exist"
    assert find_missing_names(["backward", "parameters", "train_batch", "no_such_name"]) == [
        "no_such_name", "train_batch",
    ]  # fmt: skip


def test_the_page_has_the_output_of_the_script() -> None:
    page = (Path(__file__).parents[3] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    output = "\n".join([*describe_names(), "", *describe_files(reasons=False)])
    assert f"```\n$ python -m lab.deepspeed_compat.count\n{output}\n```" in page
