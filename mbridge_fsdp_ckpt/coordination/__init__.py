"""Meetings of all ranks in the job's rendezvous store, and heartbeats."""
