"""The agent of a node: rendezvous, journal, leases, rulings on hangs, and the messages to its workers and the user."""
