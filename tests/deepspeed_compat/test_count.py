"""The public DeepSpeed files that load, and those that are refused, as docs/deepspeed.md says."""

from __future__ import annotations

from pathlib import Path

from sdp.tests.deepspeed_compat.count import FILES, find_engines, find_missing_part, find_reason

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


def test_every_engine_that_the_page_counts() -> None:
    engines = [find_engines(settings) for settings in FILES.values()]
    counts = {engine: sum(engine in found for found in engines) for engine in ("fsdp2", "deepspeed")}
    missing = [find_missing_part(settings) for settings in FILES.values() if "fsdp2" in find_engines(settings)]
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    for line in (
        f'| load with `"fsdp2"` | {counts["fsdp2"]} |',
        f'| load with `"deepspeed"` | {counts["deepspeed"]} |',
        f'| of those with `"fsdp2"`, need more from the script | {sum(reason is not None for reason in missing)} |',
    ):
        assert line in page
