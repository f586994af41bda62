# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Fingerprints of plans and of replicas: every element is written once, and copies are alike."""
