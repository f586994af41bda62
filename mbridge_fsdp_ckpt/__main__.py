"""`python -m mbridge_fsdp_ckpt`."""

from mbridge_fsdp_ckpt.cli.app import main

main()
