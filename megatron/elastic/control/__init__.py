"""Who is here: generations, the journal the agents agree through, heartbeats, suspicion (DESIGN §4)."""
