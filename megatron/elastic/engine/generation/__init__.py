"""What one generation is made of: launch topology, assignment, configuration, view, and the reports it is decided from.

Values here are immutable: a new generation replaces them, nothing edits them.
"""
