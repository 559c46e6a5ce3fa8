"""The agent of a node: rendezvous, journal, leases, judging hangs, and what it tells its workers and the user."""
