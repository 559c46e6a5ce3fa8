"""The values of one generation: launch topology, assignment, configuration, view, and the reports of ranks.

All of them are immutable: a new generation replaces them.
"""
