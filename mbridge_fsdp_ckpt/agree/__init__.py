"""Meetings of ranks, and what they bring."""
