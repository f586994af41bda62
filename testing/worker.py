# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The main loop of the process behind one rank of a `RankPool`.

Everything is said over a private pipe; what the code under test prints goes to the log that the pool set up as
standard output and error.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore, init_process_group

from testing import cleanup, fresh_memory
from testing.messages import Case, Cleaned, CleanUp, Raised, Returned


def serve(connection: Connection[Any, Any]) -> None:
    """Run one case after another, until the pool closes its end of the pipe."""
    environment, directory = dict(os.environ), Path.cwd()
    cleanup.seed()
    with contextlib.suppress(EOFError):
        while True:
            message: Case | CleanUp = connection.recv()
            if isinstance(message, Case):
                outcome = _outcome(message)
                cleanup.finish_removals()
                connection.send(outcome)
            else:
                connection.send(Cleaned(cleanup.forget_case(environment, directory)))


def _outcome(case: Case) -> Returned | Raised:
    try:
        sys.path[:] = case.sys_path
        function = case.function.find()
        args, kwargs = case.call_arguments()
        _join_world(case)
        if case.nan_memory:
            fresh_memory.fill_with_nan()
        return Returned(pickle.dumps(function(*args, **kwargs)))
    except BaseException:  # a SystemExit or KeyboardInterrupt of a case is its failure, not ours
        return Raised(traceback.format_exc())


def _join_world(case: Case) -> None:
    """Set the environment that torchrun would, and initialise the process group unless the case does so itself."""
    os.environ.update(
        RANK=str(case.rank),
        LOCAL_RANK=str(case.rank),
        WORLD_SIZE=str(case.world_size),
        LOCAL_WORLD_SIZE=str(case.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(case.store_port),
        # The pool runs the store, so no rank has to, and no port can be taken between being chosen and being used.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if not case.process_group:
        return
    timeout = datetime.timedelta(seconds=case.timeout_s)
    store = TCPStore("127.0.0.1", case.store_port, is_master=False, timeout=timeout)
    init_process_group("gloo", store=store, rank=case.rank, world_size=case.world_size, timeout=timeout)
