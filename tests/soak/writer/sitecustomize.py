# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Python runs this first in every process that has this folder in PYTHONPATH: a writer does what a test told it."""

import os
import sys
import traceback

if "MBRIDGE_TEST_IN_WRITER" in os.environ and "mbridge_fsdp_ckpt.saving.background" in "".join(sys.orig_argv[3:4]):
    try:
        from tests.soak.in_writer import begin

        begin()
    except Exception:  # Python would say a word, and go on with a writer in which nothing happens
        traceback.print_exc()
        os._exit(1)
