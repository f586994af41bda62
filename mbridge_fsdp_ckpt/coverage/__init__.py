"""Fingerprints of plans and of replicas: every element is written once, and copies are alike."""
