"""Output of a run: events, one-line summaries, phase times.

Depends on no other folder, so that every folder may use it.
"""
