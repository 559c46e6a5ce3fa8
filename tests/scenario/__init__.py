"""One notation for what happens to a job, and three ways to run it: bounded model, in-process cluster, real job.

    scenario  the value and its text
    points    the table of kill points and the model's states
    named     the losing interleavings of the rules of the design, as scenarios
    replay    the three drivers

``python -m tests.scenario TEXT --as model|cluster|job`` runs one.
"""
