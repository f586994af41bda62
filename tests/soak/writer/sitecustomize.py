"""Python runs this first in every process that has this folder in PYTHONPATH: a writer does what a test told it."""

import os
import sys

if "MBRIDGE_TEST_IN_WRITER" in os.environ and sys.orig_argv[1:3] == ["-m", "mbridge_fsdp_ckpt.saving.beside"]:
    from tests.soak.in_writer import begin

    begin()
