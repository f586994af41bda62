# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The command: options, questions and printing.

What a command does lies in `tools` and `tools.convert`, and is imported when it is done: to show a help takes no torch.
"""
