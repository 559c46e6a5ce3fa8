"""The membership of a job: generations, the journal by which agents agree, leases, suspicions (docs/design.md §4)."""
