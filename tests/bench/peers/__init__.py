"""Other programs that do a part of the same work. Each says in one sentence why it cannot run here."""
