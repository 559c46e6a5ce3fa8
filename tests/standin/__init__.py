"""A stand-in accelerator: a device of torch with memory of its own and late streams, on any machine.

Part of the tests alone. ``docs/standin.md`` says what it is for and what it finds.
"""
