"""The engine's transactions on a few ranks in one process, without sockets or waiting: a run takes tenths of a second.

    scheduler   one thread at a time, chosen by a seed; the clock
    fabric      links that are queues
    control     a journal, agents with the real state machine, the worker's half of the protocol
    model       a few linear layers
    cluster     a rank's program, a scenario, a run
    checks      what holds after every run

Everything else is the code that trains: engine, state, plan, control. A failing run is repeated by its scenario alone,
which the test prints.
"""
