"""The computation of one rank: schedule tables, samples, buffers, transfers between stages, the vote, dropout.

These modules do not depend on generations or recovery: an interrupted call raises, and the caller recovers.
"""
