"""What a rank computes: schedule tables, samples, buffers, transfers between stages, the vote, dropout.

Nothing here knows about generations, losses or recovery: an interrupted call raises, and the caller decides.
"""
