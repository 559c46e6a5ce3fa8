"""Modules that are imported for what they change."""
