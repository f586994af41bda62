"""`python -m mbridge_fsdp_ckpt`."""

from mbridge_fsdp_ckpt.tools.command.app import main

main()
