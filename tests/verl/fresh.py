# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Programs in processes that have imported what VeRL imports, but neither VeRL nor this package.

`import verl` takes ten seconds of a core, of which its own modules are one.  The rest is imported here once, and a
process is forked for each program.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

THIRD_PARTY = ("torch", "numpy", "tensordict", "transformers", "ray", "hydra", "accelerate")
LIMIT_S = 300
REPOSITORY = Path(__file__).parents[2]


class Fresh:
    """Runs programs, one at a time; a context, at whose end the process ends that they are forked from."""

    def __enter__(self) -> Fresh:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment})`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([program, {**os.environ, **environment}]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process ended that programs are forked from"
        returncode, stdout, stderr = json.loads(answer)
        return subprocess.CompletedProcess(program, returncode, stdout, stderr)


def main() -> None:
    """Serve until the test run closes its end."""
    for module in THIRD_PARTY:
        importlib.import_module(module)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("verl", "mbridge_fsdp_ckpt", "megatron"))
    assert ours == [], ours
    for request in sys.stdin:
        print(json.dumps(_ran(*json.loads(request))), flush=True)


def _ran(program: str, environment: dict[str, str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            _become(program, environment)
        returncode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stdout.seek(0)
        stderr.seek(0)
        return returncode, stdout.read(), stderr.read()


def _become(program: str, environment: dict[str, str]) -> NoReturn:
    signal.alarm(LIMIT_S)
    os.environ.clear()
    os.environ.update(environment)
    names: dict[str, Any] = {"__name__": "__main__"}
    status = 0
    try:
        exec(program, names)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
