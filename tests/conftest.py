"""What more than one test needs: the real model, fetched once by the project's own fetcher, never skipped."""

import signal

import pytest

from regardant.lm.fetch import named_model
from regardant.lm.load import load

# A suite that a script started in the background is deaf to Ctrl-C, and so is every process that a test starts, of
# which some must hear it. What has a handler here begins with the system's own there.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf():
    """Path of SmolLM2's GGUF file. Processes that ask at the same time wait for the one that fetches."""
    return named_model("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    """SmolLM2-135M-Instruct in float32, whole."""
    return load(smollm2_gguf)
