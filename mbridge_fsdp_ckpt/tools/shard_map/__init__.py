# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The shard map of `inspect`: which rank holds which block of which key, as a page and as a picture."""
