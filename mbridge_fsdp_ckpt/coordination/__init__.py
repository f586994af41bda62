# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""Meetings of all ranks in the job's rendezvous store, and heartbeats."""
