"""Who may put how much: space is reserved before data flows."""
