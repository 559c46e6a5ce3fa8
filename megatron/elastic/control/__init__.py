"""Who is here: generations, the journal the agents agree through, heartbeats, suspicion (docs/design.md §4)."""
