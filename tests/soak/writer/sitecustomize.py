"""Python runs this first in every process that has this folder in PYTHONPATH: it makes a writer mortal."""

import os
import sys

if "MBRIDGE_TEST_DEATH" in os.environ and sys.orig_argv[1:3] == ["-m", "mbridge_fsdp_ckpt.saving.beside"]:
    from tests.soak.kill_beside import make_mortal

    make_mortal()
