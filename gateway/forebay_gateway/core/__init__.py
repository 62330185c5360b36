"""Pure rules: names on a tier, records, state tables, errors, policy. No I/O and no clock in here."""
