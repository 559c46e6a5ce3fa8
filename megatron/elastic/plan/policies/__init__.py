"""Policies: what each system runs when cells are lost, at once and after migration."""
