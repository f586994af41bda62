# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
