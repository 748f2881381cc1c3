"""Train a run in child processes that are killed (SIGKILL) at random moments, until one comes to the end.

    python killed.py RUN TEXT SETTINGS_JSON SEED {moments|files}

"moments": the parent kills the child after a random time. "files": the child kills itself in front of a random one of
the operations on files below RUN (open, rename, link, make, delete), which is where a crash could hurt. Prints how
often it killed, and after how many steps.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from regardant.train import checkpoint, loop, run

WATCHED = {
    "open",
    "os.rename",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.copyfile",
}


def train(folder, text, settings):
    with run.locked(folder):
        training = run.open_run(folder, [text], None, None, settings, resume=True)
        loop.train(training, lambda: False, lambda _: None)


def kill_self_before(operation, below):
    left = operation

    def hook(event, arguments):
        nonlocal left
        if event in WATCHED and any(isinstance(a, str | os.PathLike) and below in str(a) for a in arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main():
    folder, text, settings, seed, mode = sys.argv[1:]
    torch.set_num_threads(1)
    rng, killed_at = random.Random(int(seed)), []  # noqa: S311
    while True:
        child = os.fork()
        if child == 0:
            try:
                if mode == "files" and len(killed_at) < 6:
                    kill_self_before(rng.randrange(1, 120), folder)
                train(Path(folder), text, json.loads(settings))
            except BaseException:  # noqa: BLE001 - said, and the child is gone
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        rng.random()  # the child drew from a copy
        rng.randrange(1, 120)
        if mode == "moments" and len(killed_at) < 6:
            time.sleep(rng.uniform(0.02, 0.8))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            print(json.dumps(killed_at))
            sys.exit(os.WEXITSTATUS(status))
        last = checkpoint.newest(Path(folder))  # raises if the newest is not whole
        killed_at.append(None if last is None else last.step)


if __name__ == "__main__":
    main()
