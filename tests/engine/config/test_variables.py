"""The section ``env`` accepts settings of network libraries, and refuses what chooses code."""

import re
from pathlib import Path

import pytest
import sdp
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import ALLOWED, REFUSED
from sdp.engine.errors import ConfigError

ROOT = Path(sdp.__path__[0])
OF_EXAMPLES = {
    name
    for path in (ROOT / "configs" / "clusters").glob("*.sh")
    for name in re.findall(r"--env \"?(\w+)=", path.read_text())
}


def test_variables_of_the_network_libraries_are_allowed() -> None:
    for path in (ROOT / "configs").glob("*.json"):
        load_config(path)
    assert len(OF_EXAMPLES) > 8
    names = OF_EXAMPLES | {"NCCL_NET", "UCX_TLS", "FI_PROVIDER", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"}
    load_config({"env": dict.fromkeys(names, "x")})


@pytest.mark.parametrize(
    "name",
    (
        # a library, a program or a script that a rank, its compiler or a launcher would run
        "INTEL_LIBITTNOTIFY64 TORCH_INDUCTOR_INSTALL_GXX CONDA_EXE LD_PRELOAD PYTHONSTARTUP CXX CUDA_HOME "
        "TRITON_CACHE_DIR NCCL_NET_PLUGIN NCCL_CONF_FILE UCX_MODULE_DIR UCX_GDB_COMMAND FI_PROVIDER_PATH "
        "OMP_TOOL_LIBRARIES BASH_ENV GIT_SSH_COMMAND MPLBACKEND TORCH_LOGS HF_MODULES_CACHE "
        # files that are written, or read as a pickle
        "TMPDIR TORCHINDUCTOR_CACHE_DIR NCCL_DEBUG_FILE NCCL_TOPO_DUMP_FILE UCX_LOG_FILE "
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE "
        # what the launcher sets, and what a process reads before the configuration
        "RANK WORLD_SIZE MASTER_ADDR CUDA_VISIBLE_DEVICES SDP_SERVICE_TOKEN SLURM_PROCID PATH HOME MALLOC_ARENA_MAX"
    ).split(),
)
def test_other_variables_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be set here, because .*; set it where the processes are"):
        load_config({"env": {name: "x"}})


def test_the_docs_list_every_variable_that_is_allowed() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text().partition("| subject | variables |")[2].partition("## ")[0]
    for subject, patterns in {**ALLOWED, "never, even if a row above allows it": REFUSED}.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| {subject} |")]
        assert len(rows) == 1, subject
        assert re.findall(r"`([^`]+)`", rows[0]) == list(patterns)
