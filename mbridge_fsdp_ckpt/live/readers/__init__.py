# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""One file for each wrapper: what a wrapped model holds, and where it belongs."""
