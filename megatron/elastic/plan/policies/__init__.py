"""Policies: the plans of each system when cells are lost, at once and after migration."""
