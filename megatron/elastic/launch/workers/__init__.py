"""The worker processes of a node: zygote, spawning, sockets, slots, log files and ends."""
