"""The server from which tests fork processes. It has imported torch, so that they need not."""

import functools
import multiprocessing
from typing import Any

# None of them may start a thread. A process imports everything else when it needs it. What is not
# installed is left out.
PRELOADED = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sdp.engine.checkpoint.resume",
    "sdp.engine.checkpoint.settings",
    "sdp.engine.checkpoint.save",
    "sdp.engine.initialize",
    "sdp.models.llama",
    "sdp.models.registry",
    "sdp.tests.support.cases",
    "sdp.tests.support.forks.command",
    "sdp.tests.support.models",
    "sdp.tools.train.command",
    "sdp.tools.train.rank",
    "torch._dynamo",
    "torch._inductor.compile_fx",  # DeepSpeed compiles a function when it is imported
    "s3fs",
    "transformers.models.llama.modeling_llama",
)


@functools.cache
def fork_context() -> Any:
    """Return the multiprocessing context of the server, which starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
