"""What a fleet would do: the drain's own scheduler on a simulated clock. No I/O."""
