"""Plug-ins: one package for each framework, and what they share."""
