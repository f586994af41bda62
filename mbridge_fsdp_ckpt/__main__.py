# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""`python -m mbridge_fsdp_ckpt`."""

from mbridge_fsdp_ckpt.tools.command.app import main

main()
