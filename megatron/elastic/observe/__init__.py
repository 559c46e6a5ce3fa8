"""Output of a run: events, one-line summaries, phase times.

Depends on no other room, so that every room may use it.
"""
